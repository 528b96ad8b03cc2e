"""Redaction of secrets in what is stored or printed: values of options, variables, headers, JSON and addresses."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

HIDDEN = "***"
SHORTEST = 8  # characters of a known secret that is looked for in answers of a server, whose text it would damage
SECRET = re.compile(  # names of secrets; not `num_key_value_heads`, `pass_config`, `--api-key-env`, `author`, `path`
    r"""^(?!.*_(?:env|file|path|dir)$).*(?:
        (?<!by)(?<!com)pass_?\d*$ | tokens?_?\d*$ | key(?!_?(?:value|word|board|error|cache)) | secret | passw | passph
      | pwd(?![a-z]) | credential | bearer | cookie | auth(?!or(?!iz)) | (?<![a-z])pat(?![a-z])
    )""",
    re.VERBOSE | re.DOTALL,
)
TOKENS = re.compile(  # tokens of text, or a number of them
    "(?:^|_)(?:eos|bos|pad|unk|mask|sep|cls|start|end|begin|stop|special|image|img|video|audio|vision|draft|think|tool|call"
    "|fim|prefix|suffix|max|min|new|num|total|batched|speculative|prompt|input|output|completion|extra)_tokens?$"
)
USER = re.compile(r"(\w://)[^/\s]+@")  # user and password of an address
BEARER = re.compile(r"\b(bearer\s+)[^\s\"']+", re.IGNORECASE)
HEADER = re.compile(r"\s*([\w-]+):\s+\S")
# NAME=, "name": [, --name
NAMED = re.compile(r"""(?<![\w.-])(?:(--?[\w.-]+)(?:\s*=|\s)|([\w.-]+)["']?\s*[=:])\s*[\[(]*""")
PROSE = re.compile(r"""\s*(?:tokens?|key):\s+(['"])(?![\w-]{16})[^'"]*\1\s+[a-z]""", re.IGNORECASE)  # "token: 'a' is"
VALUE = re.compile(r""""[^"]*"|'[^']*'|[^\s"'&,;\])}]+""")


def redacted(value: Any, name: str = "") -> Any:
    """Return JSON-ready data with everything hidden that is named like a secret. name: of the value."""
    if isinstance(value, Mapping):
        return {key: redacted(one, f"{name} {key}".strip()) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(one, name) for one in value]
    if _is_secret(name, value):
        return HIDDEN
    return redacted_text(value) if isinstance(value, str) else value


def _is_secret(name: str, value: Any) -> bool:
    """Return whether a value is a secret by its name or an outer one; numbers of tokens are none."""
    given = value is not None and value != "" and not isinstance(value, bool)
    numeric = re.fullmatch(r"[\d.]*[kKmMgG]?", str(value)) is not None
    words = (re.sub(r"(?<=[a-z])(?=[A-Z])|\W", "_", part).lower() for part in name.split())
    names = (re.sub("tokens?", "", part) if numeric or TOKENS.search(part) else part for part in words)
    return given and any(SECRET.search(part) for part in names)


def redacted_text(text: str) -> str:
    """Return a text with the secrets hidden that its own words name: an address, a header, JSON, a command line."""
    if text.startswith(("{", "[")):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            pass
        else:
            shown = redacted(value)
            return text if shown == value else json.dumps(shown)
    if (header := HEADER.match(text)) and not PROSE.match(text) and _is_secret(header[1], "x"):
        return f"{text[: header.end(1)]}: {HIDDEN}"
    text = BEARER.sub(rf"\1{HIDDEN}", USER.sub(rf"\1{HIDDEN}@", text))
    shown, at = "", 0
    while name := NAMED.search(text, at):
        shown, at = shown + text[at : name.end()], name.end()
        value = None if PROSE.match(text, name.start()) else VALUE.match(text, at)
        if value and _is_secret((name[1] or name[2]).strip("-"), value[0].strip("\"'")):
            shown, at = shown + HIDDEN, value.end()
    return shown + text[at:]


def redacted_words(words: Iterable[str]) -> list[str]:
    """Return the words of a command line with their secrets hidden, as `redacted` does."""
    shown, option = list[str](), ""  # option: whose value the next word may be
    for word in words:
        dashed, (name, equals, value) = word.startswith("-"), word.partition("=")
        shown.append(redacted_text(word) if dashed else redacted(word, option))
        if dashed and equals:
            shown[-1] = f"{name}={redacted(value, name.strip('-'))}"
        option = word.strip("-") if dashed and not equals else ""
    return shown


def without(text: str, secrets: Iterable[str]) -> str:
    """Return a text without known secrets."""
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    return text
