"""Choosing a method's options by measurement, for the device at hand. docs/design/tune.md says why so."""
