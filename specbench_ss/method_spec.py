"""A method as it was asked for: its name and options as text, and the file that may define it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from specbench_ss.errors import UserError

REFERENCE = "ar"  # the method every other one is compared with
_SPEC = re.compile(r"^(?P<name>[A-Za-z0-9_.-]+)(?:\[(?P<options>[^\[\]]*)\])?$")


@dataclass(frozen=True, slots=True)
class MethodSpec:
    """A method with the options given for it: `ss`, `ss[k=1]`, `ss[k=1,prune=off]`. Values are still text.

    copy: 2 for the reference that is asked for a second time, to be compared with itself: `ar#2`.
    """

    name: str
    options: dict[str, str] = field(default_factory=dict)
    copy: int = 1

    @property
    def label(self) -> str:
        """Return the name of this variant in every table: the text that it was asked for with."""
        inner = ",".join(f"{k}={v}" for k, v in self.options.items())
        return (f"{self.name}[{inner}]" if inner else self.name) + (f"#{self.copy}" if self.copy > 1 else "")

    def as_dict(self) -> dict[str, Any]:
        """Return what a manifest records of it."""
        asked = {"name": self.name, "options": dict(self.options)}
        return asked | ({"copy": self.copy} if self.copy > 1 else {})

    @classmethod
    def parse(cls, text: str) -> MethodSpec:
        """Read a method from text. Raises UserError for text that is not NAME or NAME[option=value,...]."""
        match = _SPEC.match(text.strip())
        if match is None:
            raise UserError(f"cannot read method {text!r}: expected NAME or NAME[option=value,...]")
        options = {}
        for part in filter(None, (match["options"] or "").split(",")):
            key, equals, value = part.partition("=")
            if not equals or not key.strip():
                raise UserError(f"cannot read option {part!r} of method {match['name']!r}: expected option=value")
            options[key.strip()] = value.strip()
        return cls(match["name"], options)


def split_methods(text: str) -> list[str]:
    """Split a list at its commas: 'ss,medusa[tree=a,k=2]' gives ['ss', 'medusa[tree=a,k=2]'].

    Commas inside brackets do not split.
    """
    return [part.strip() for part in re.split(r",(?![^\[]*\])", text) if part.strip()]


@dataclass(frozen=True, slots=True)
class PluginFile:
    """A plugin file as it was loaded. methods: names of the methods that it defines."""

    file: str
    sha256: str
    methods: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return what a manifest and a preset record of the file."""
        return {"file": self.file, "sha256": self.sha256, "methods": list(self.methods)}
