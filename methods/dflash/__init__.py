"""DFlash: a small network that reads the target's features drafts a whole block in one pass."""
