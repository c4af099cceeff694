"""Naming the fault of a pair of traces that failed a comparison."""
