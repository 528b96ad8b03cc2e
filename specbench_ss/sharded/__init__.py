"""Runs whose samples several workers make: whole questions go out, results come into one run directory."""
