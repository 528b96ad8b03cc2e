"""The one exception that means "the user can mend this": printed as one line, exit code 2."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A mistake in what the user gave: its text is one clear line, fit to be printed alone."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """' (did you mean X?)' for the closest known word, '' when none is close."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]}?)" if close else ""
