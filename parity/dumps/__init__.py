"""Reading hidden states that other programs dumped, as traces."""
