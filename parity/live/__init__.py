"""Experiments with a loaded target, which decide what two traces alone cannot."""
