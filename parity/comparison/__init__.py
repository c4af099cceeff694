"""Comparing two traces: pairing requests and rows, errors of every token, tolerances, records."""
