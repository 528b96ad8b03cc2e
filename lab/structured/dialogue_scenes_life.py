# ruff: noqa: E501 - a template or a word list is one line
"""Dialogues of friends, families, students and colleagues, in the notation of dialogue_scenes_service."""

from lab.example import load

LIFE = load("dialogue_scenes_life.life", str)
