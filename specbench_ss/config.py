"""What one run is asked to do. Light: imports nothing heavy, so that `ssbench --help` stays fast."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from specbench_ss.errors import UserError
from specbench_ss.plugin_file import PluginFile
from specbench_ss.preset import Preset

REFERENCE = "ar"  # the method every other one is compared with

_SPEC = re.compile(r"^(?P<name>[A-Za-z0-9_.-]+)(?:\[(?P<options>[^\[\]]*)\])?$")


@dataclass(frozen=True, slots=True)
class MethodSpec:
    """A method with the options given for it: `ss`, `ss[k=1]`, `ss[k=1,prune=off]`. Values are still strings."""

    name: str
    options: dict[str, str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """How the variant is called in every table: the text it was asked for with."""
        inner = ",".join(f"{k}={v}" for k, v in self.options.items())
        return f"{self.name}[{inner}]" if inner else self.name

    @classmethod
    def parse(cls, text: str) -> MethodSpec:
        """Raises UserError for text that is not NAME or NAME[option=value,...]."""
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
    """'ss,medusa[tree=a,k=2]' -> ['ss', 'medusa[tree=a,k=2]']: commas inside brackets do not split."""
    return [part.strip() for part in re.split(r",(?![^\[]*\])", text) if part.strip()]


@dataclass(frozen=True, slots=True)
class RunConfig:
    """Everything that decides what a run measures; goes into its manifest."""

    methods: tuple[MethodSpec, ...]
    suite: str = "specbench"
    model: str = "lab"
    categories: tuple[str, ...] = ()
    limit: int | None = None
    repeats: int = 1
    warmup: int = 2
    max_new_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    dtype: str = "auto"
    device: str = "auto"
    data: str | None = None
    history: str = "reference"
    trust_remote_code: bool = False
    chat_template: str | None = None  # a name or a file; None = the tokenizer's own
    stop: tuple[str, ...] = ()  # texts that end an answer; they stay in it
    presets: tuple[Preset, ...] = ()  # files that some of the methods' options come from
    plugin: tuple[PluginFile, ...] = ()  # files that some of the methods are defined in

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        files = {"presets": self.presets, "plugin": self.plugin}
        return asdict(self) | {name: [file.as_dict() for file in given] for name, given in files.items()}  # type: ignore[attr-defined]

    @property
    def fingerprint(self) -> str:
        """sha256 of everything that decides what a run measures."""
        return hashlib.sha256(json.dumps(self.as_dict(), sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class TuneConfig:
    """Everything that decides what a tuning session measures. limit: None = what is usual for where prompts come from.

    budget: seconds of measuring.
    """

    method: MethodSpec
    suite: str = "specbench"
    model: str = "lab"
    categories: tuple[str, ...] = ()
    data: str | None = None
    limit: int | None = None
    budget: float = 120.0
    max_new_tokens: int = 128
    seed: int = 0
    dtype: str = "auto"
    device: str = "auto"
    trust_remote_code: bool = False
    chat_template: str | None = None
    plugin: tuple[PluginFile, ...] = ()


@dataclass(frozen=True, slots=True)
class RunTarget:
    """Where a run's results go, which is no part of what it measures.

    optional: labels of methods that are left out, with a word, where they cannot decode with the model.
    """

    out: Path
    resume: bool = False
    optional: frozenset[str] = frozenset()
