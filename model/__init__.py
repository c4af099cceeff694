"""The trainer and its target: the reference against which others are judged. Knows no probe."""
