"""Comparing a drafter with a reference of its own: hypotheses, receptive field, checkpoint readers (README.md here)."""
