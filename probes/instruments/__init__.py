"""What the trainer probes measure with."""
