"""The questions: one file a probe, listed by hand in `table`. A probe gives findings and prints nothing."""
