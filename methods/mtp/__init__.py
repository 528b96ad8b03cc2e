"""MTP: multi-token-prediction layers of the target's own checkpoint, or trained for it."""
