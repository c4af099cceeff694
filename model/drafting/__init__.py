"""Drafting and verifying, for any family of drafters: the loop, the target's session, the offline tau."""
