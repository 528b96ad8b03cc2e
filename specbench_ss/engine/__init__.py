"""Decoding engine: target, draft trees, verification and the loop. Nothing else is on the timed path."""
