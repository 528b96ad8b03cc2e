"""Generators of the lab's text and the training of its models, run as `python -m lab` in a checkout."""
