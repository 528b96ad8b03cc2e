"""The one exception for mistakes that the user can mend (one line, exit code 2), and helpers for messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class UserError(Exception):
    """A mistake in what the user gave. Its text is one clear line that can be printed alone."""


@contextmanager
def told_of(what: str) -> Iterator[None]:
    """Within: every UserError begins with what it is about, `what: `."""
    try:
        yield
    except UserError as error:
        said = str(error)
        raise UserError(said if said.startswith(f"{what}: ") else f"{what}: {said}") from error


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ' (did you mean X?)' for the closest known word, or '' when none is close."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]}?)" if close else ""


def known_words(word: str, known: Iterable[str]) -> str:
    """Return ' (did you mean X?); known: X, Y, Z', the end of a sentence about an unknown word."""
    listed = list(known)
    return f"{did_you_mean(word, listed)}; known: {', '.join(listed)}"


def os_reason(error: OSError) -> str:
    """Return why the operating system refused, in lower case to end a sentence: 'no such file or directory'."""
    return (error.strerror or str(error)).lower()


def error_text(error: BaseException) -> str:
    """Return what an exception says: the text of a UserError, and of others also their kind.

    An example of the latter is 'RuntimeError: out of memory'.
    """
    text, kind = str(error).strip(), type(error).__name__
    if isinstance(error, UserError):
        return text
    return f"{kind}: {text}" if text else kind


def first_line(error: BaseException) -> str:
    """Return the first line of `error_text`, and, where that ends in a colon, what stands behind it."""
    lines = [line.strip() for line in error_text(error).splitlines() if line.strip()]
    said = lines[0] if lines else ""
    for line in lines[1:]:
        if not said.endswith(":"):
            break
        said = f"{said} {line}"
    return said
