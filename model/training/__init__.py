"""Training a drafter: data, states, loss, optimizer loop, checkpoints, ranks."""
