"""Errors of users (one line, an exit code) and helpers for messages."""

from __future__ import annotations

import difflib
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


class UserError(Exception):
    """A mistake in what the user gave. Its text is one clear line that can be printed alone."""

    exit_code = 2


class RunStopped(UserError):  # noqa: N818
    """A run that could not go on after it began to measure. Its directory is intact, and --resume continues."""

    exit_code = 4


class PluginError(UserError):
    """An error of a plugin's own code. A run leaves that method out and goes on."""


class TimeIsOver(BaseException):  # noqa: N818
    """Raised by the alarm of a time limit. No Exception, so that code that catches those and continues still ends."""


@contextmanager
def plugin_code(what: str) -> Iterator[None]:
    """Turn anything that a plugin raises in the block into a PluginError, which begins with `what: `.

    A UserError stays as it is, and so do the ends that the user or a time limit sets.
    """
    try:
        yield
    except (UserError, KeyboardInterrupt, TimeIsOver):
        raise
    except BaseException as error:  # SystemExit, and whatever else a plugin may derive
        raise PluginError(f"{what}: {first_line(error)}{place_of(error)}") from error


@contextmanager
def prefixed(what: str) -> Iterator[None]:
    """Prefix every UserError raised in the block with `what: `."""
    try:
        yield
    except UserError as error:
        text = str(error)
        raise UserError(text if text.startswith(f"{what}: ") else f"{what}: {text}") from error


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


@contextmanager
def os_errors(what: str) -> Iterator[None]:
    """Turn an error of the operating system in the block into a UserError: 'WHAT: no such file or directory'."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{what}: {os_reason(error)}") from error


def error_text(error: BaseException) -> str:
    """Return the text of an exception, with its kind if it is no UserError.

    An example of the latter is 'RuntimeError: out of memory'.
    """
    text, kind = str(error).strip(), type(error).__name__
    if isinstance(error, UserError):
        return text
    return f"{kind}: {text}" if text else kind


def first_line(error: BaseException) -> str:
    """Return the first line of `error_text`, and, if that ends in a colon, the text behind it."""
    lines = [line.strip() for line in error_text(error).splitlines() if line.strip()]
    text = lines[0] if lines else ""
    for line in lines[1:]:
        if not text.endswith(":"):
            break
        text = f"{text} {line}"
    return text


def printable(text: str) -> str:
    """Return the text with control characters, line ends included, and lone surrogates escaped."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


CORE, METHODS = Path(__file__).parent, Path(__file__).parent / "methods"
STANDARD = Path(sysconfig.get_path("stdlib"))


def place_of(error: BaseException, of_any: bool = False) -> str:
    """Return ' (ways.py:12 in propose)', the innermost line outside the core and libraries; '' without one.

    of_any: then the innermost of all.
    """
    frames = list(traceback.extract_tb(error.__traceback__))
    own = [frame for frame in frames if _own(frame.filename)] or (frames if of_any else [])
    return f" ({Path(own[-1].filename).name}:{own[-1].lineno} in {own[-1].name})" if own else ""


def _own(filename: str) -> bool:
    folders = Path(filename).parents
    if filename.startswith("<frozen"):
        return False
    if CORE in folders:
        return METHODS in folders
    installed = "site-packages" in filename
    return "ssbench" in filename if installed else STANDARD not in folders


def failure_text(error: BaseException) -> str:
    """Return the text of an exception and, unless it is a UserError, the line of the plugin's code."""
    return error_text(error) if isinstance(error, UserError) else f"{error_text(error)}{place_of(error)}"


def expanded(path: str | Path) -> Path:
    """Return a path that a user gave, with ~ replaced by a home folder. Raises UserError where there is none."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise UserError(f"{path}: {error}".rstrip(".")) from error
