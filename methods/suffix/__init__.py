"""Drafts from a suffix automaton."""
