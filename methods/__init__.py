"""Decoding methods, one a file. They know the core; the core does not know them."""
