"""Text as it can be seen: characters that show nothing, or that turn the text around them, stand by their names."""

from __future__ import annotations

import re
import unicodedata
from typing import Any

C0 = [
    "NUL", "SOH", "STX", "ETX", "EOT", "ENQ", "ACK", "BEL", "BS", "HT", "LF", "VT", "FF", "CR", "SO", "SI",
    "DLE", "DC1", "DC2", "DC3", "DC4", "NAK", "SYN", "ETB", "CAN", "EM", "SUB", "ESC", "FS", "GS", "RS", "US",
]  # fmt: skip
NAMES = {**{chr(i): name for i, name in enumerate(C0)}, "\x7f": "DEL"}
# Control characters but tab and line feed; marks, embeddings and isolates of direction; spaces without width (those
# that join emoji and letters stay); halves of surrogate pairs; tags and interlinear marks.
HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)


def visible(text: str) -> str:
    """Return the text with every hidden character by its name: '⟨RIGHT-TO-LEFT OVERRIDE⟩', '⟨ESC⟩', '⟨U+D800⟩'."""
    return HIDDEN.sub(_name, text.replace("\r\n", "\n"))


def finalize(value: Any) -> Any:
    """Return a value of a template with its text made visible; markup stays as it is."""
    return visible(value) if type(value) is str else value


def _name(found: re.Match[str]) -> str:
    character = found[0]
    return f"⟨{NAMES.get(character) or unicodedata.name(character, f'U+{ord(character):04X}')}⟩"
