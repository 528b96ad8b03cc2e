"""Tuning of a method's options by measurement on the device (docs/design/tune.md)."""
