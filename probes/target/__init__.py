"""Probes of a target: what workers captured is compared."""
