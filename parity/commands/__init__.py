"""What a command does, as functions that return records: `check`, `compare`, `train`, `evaluate`, `convert`."""
