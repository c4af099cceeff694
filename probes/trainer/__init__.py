"""Probes of a trainer: a training step is run, and only what moves counts."""
