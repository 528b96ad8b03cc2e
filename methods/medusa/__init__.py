"""Medusa-1 and Medusa-2."""
