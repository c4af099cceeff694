"""Finding noise: downstream of fc, and draws that are shared."""
