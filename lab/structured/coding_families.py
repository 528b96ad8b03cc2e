# ruff: noqa: E501 - a template or a word list is one line
"""Families of small Python functions: what each does, its code, and a variant that a follow-up asks for.

A family starts with `# kind | names | description`. `kind` says what the parameter holds and {p} is the
parameter, {n} a number, {i} the loop variable. Then come the code, `> ` with a change that can be asked
for, and the changed code. {f} is the name of the function.
"""

from lab.example import load

FAMILIES = load("coding_families.families", str)
