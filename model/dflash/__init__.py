"""The DFlash drafter: configuration, network, masks, training step, drafting, checkpoint layouts."""
