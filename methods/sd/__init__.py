"""Two-model speculative decoding."""
