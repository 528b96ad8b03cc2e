"""Crash-safe files, files that a user gives, and the cache folder. This package knows no run and no model."""
