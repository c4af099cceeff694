"""The questions: one file a probe, listed by hand in `table`. A probe takes evidence and gives findings; it prints nothing."""
