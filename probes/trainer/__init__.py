"""Probes of a trainer: a training step is asked, and only what moves is believed."""
