# ruff: noqa: E501 - a template or a word list is one line
"""Dialogues of customers, patients and travellers with those who serve them.

A scene starts with `# name | slots`; `A:` and `B:` are lines, `?` marks a line that may be left out, and
each `=` is one way to sum the scene up. {hisA}, {himA} are pronouns that fit without verb agreement.
"""

from lab.example import load

SERVICE = load("dialogue_scenes_service.service", str)
