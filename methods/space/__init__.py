"""SPACE: mask tokens and parallel verification."""
