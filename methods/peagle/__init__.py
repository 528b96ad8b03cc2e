"""P-EAGLE: EAGLE-3's layer, all depths in one pass."""
