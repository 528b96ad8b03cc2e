"""The decoding loop and what it stands on: what an author of a method reads."""
