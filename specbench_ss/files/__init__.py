"""Crash-safe files, files that a user gives, the cache folder. Knows no run and no model."""
