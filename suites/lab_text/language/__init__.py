"""Generators of the lab's language tasks."""
