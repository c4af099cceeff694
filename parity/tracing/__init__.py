"""The trace: a folder of hidden states with a manifest, written safely and read lazily."""
