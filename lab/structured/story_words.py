# ruff: noqa: E501 - a template or a word list is one line
"""The word problems, in the notation of stories."""

from lab.example import load

STORIES = load("story_words.stories", str)
