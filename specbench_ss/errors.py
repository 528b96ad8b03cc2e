"""The one exception that means "the user can mend this": printed as one line, exit code 2. What errors say."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A mistake in what the user gave: its text is one clear line, fit to be printed alone."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """' (did you mean X?)' for the closest known word, '' when none is close."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]}?)" if close else ""


def known_words(word: str, known: Iterable[str]) -> str:
    """' (did you mean X?); known: X, Y, Z': the end of a sentence about an unknown word."""
    listed = list(known)
    return f"{did_you_mean(word, listed)}; known: {', '.join(listed)}"


def os_reason(error: OSError) -> str:
    """Why the operating system refused, in lower case for the end of a sentence: 'no such file or directory'."""
    return (error.strerror or str(error)).lower()


def error_text(error: BaseException) -> str:
    """What any exception says: a UserError is its own text, others need their kind: 'RuntimeError: out of memory'."""
    text, kind = str(error).strip(), type(error).__name__
    if isinstance(error, UserError):
        return text
    return f"{kind}: {text}" if text else kind


def first_line(error: BaseException) -> str:
    """`error_text`, its first line only."""
    return error_text(error).partition("\n")[0]
