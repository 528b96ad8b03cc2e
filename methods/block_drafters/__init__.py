"""DFlash and P-EAGLE: all draft tokens of a step in one pass of a small network."""
