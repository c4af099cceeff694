"""The training config: its keys, its checks, its presets."""
