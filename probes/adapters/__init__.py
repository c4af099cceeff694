"""How trainers show their step to the probes: one file a trainer, all on `base.Adapter`."""
