"""Decoding methods, one per file or folder."""
