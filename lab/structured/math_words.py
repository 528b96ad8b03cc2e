# ruff: noqa: E501 - a template or a word list is one line
"""Short questions of school mathematics with a follow-up each, in the notation of stories."""

from lab.example import load

MATH = load("math_words.math", str)
