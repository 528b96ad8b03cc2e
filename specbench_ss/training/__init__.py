"""Training of drafters: text, batches, losses, loop and checkpoints."""
