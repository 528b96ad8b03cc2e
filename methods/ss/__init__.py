"""Speculative Streaming, lossless and shared."""
