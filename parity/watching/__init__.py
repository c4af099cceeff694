"""Asking the probes while a training runs, and writing what they find beside its log."""
