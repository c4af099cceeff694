"""Reading a loss from its gradient: terms, temperature, weights of slots, labels, denominator (README.md here)."""
