"""Parity of a method in this process and the same drafter in a served engine: outputs, steps and accepted tokens.

A run of methods and of servers is a directory with two run directories, METHODS and SERVERS, and the file PARITY.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from specbench_ss.errors import UserError, did_you_mean, known_words
from specbench_ss.results.analysis import Results
from specbench_ss.runs.output_match import first_difference
from specbench_ss.runs.records import Run, SampleRecord
from specbench_ss.stats.intervals import Comparison
from specbench_ss.stats.pairs import tau_of
from specbench_ss.storage import write_json
from specbench_ss.user_files import decoder, read_bytes

METHODS, SERVERS, PARITY = "methods", "servers", "parity.json"
Pair = tuple[str, str]  # labels of a method and a server
PromptKey = tuple[str, int]  # question id, turn


@dataclass(frozen=True, slots=True)
class PromptParity:
    """One prompt on both sides. None: one of them has no such number. first_difference: index of the token."""

    question_id: str
    turn: int
    same_prompt: bool | None
    same_output: bool
    first_difference: int | None
    steps: tuple[int | None, int | None]
    accepted_tokens: tuple[int | None, int | None]

    @property
    def same_steps(self) -> bool:
        """Return True if the numbers of steps are known and equal."""
        return None not in self.steps and self.steps[0] == self.steps[1]

    @property
    def same_accepted(self) -> bool:
        """Return True if the numbers of accepted tokens are known and equal."""
        return None not in self.accepted_tokens and self.accepted_tokens[0] == self.accepted_tokens[1]

    @property
    def exact(self) -> bool:
        """Return True if outputs, steps and accepted tokens are equal and known."""
        return self.same_output and self.same_steps and self.same_accepted


@dataclass(frozen=True, slots=True)
class Parity:
    """A method and a server. tau: mean acceptance length of both, over the compared prompts.

    missing: prompts that only one side answered. sampled: outputs are sampled, so that only tau and speedup can be
    compared. speedup: of the method over `ar`, and of the server over the first one, over all prompts; comparison: by
    their intervals.
    """

    method: str
    server: str
    prompts: tuple[PromptParity, ...]
    tau: tuple[float | None, float | None]
    missing: int
    sampled: bool
    speedup: tuple[float | None, float | None] = (None, None)
    comparison: tuple[Comparison, Comparison] = ("insufficient data", "insufficient data")

    @property
    def exact(self) -> bool:
        """Return True if both answered the same prompts greedily, at least one, and each is exact."""
        compared = self.prompts and not self.missing and not self.sampled
        return bool(compared) and all(prompt.exact for prompt in self.prompts)

    @property
    def verdict(self) -> str:
        """Return `exact`, `differs`, or `not compared` for sampled outputs."""
        return "not compared" if self.sampled else "exact" if self.exact else "differs"

    def counts(self) -> dict[str, int | None]:
        """Return how many prompts there are, and how many are equal in what; None for sampled outputs."""
        prompts = len(self.prompts) + self.missing
        if self.sampled:
            return {"prompts": prompts, "same output": None, "same steps": None, "same accepted": None}
        return {
            "prompts": prompts,
            "same output": sum(one.same_output for one in self.prompts),
            "same steps": sum(one.same_steps for one in self.prompts),
            "same accepted": sum(one.same_accepted for one in self.prompts),
        }

    def as_dict(self) -> dict[str, Any]:
        """Return the comparison as JSON-ready data."""
        return asdict(self) | {"exact": self.exact, "verdict": self.verdict} | self.counts()


def parity(local: Run, served: Run, pairs: Sequence[Pair] = ()) -> list[Parity]:
    """Compare methods of a local run with servers of another run. pairs: empty for those with equal labels.

    Raise UserError for labels that a run lacks, sampled runs, other limits of tokens, or runs without a common prompt.
    """
    if _sampled(local) or _sampled(served):
        raise UserError("parity needs greedy runs: sampled outputs differ in every run")
    limits = [run.manifest["config"].get("max_new_tokens") for run in (local, served)]
    if limits[0] != limits[1]:
        raise UserError(f"the runs have --max-new-tokens {limits[0]} and {limits[1]}; use the same number")
    chosen = pairs or [(label, label) for label in local.labels if label in served.labels]
    if not chosen:
        raise UserError("the runs have no label in common; name pairs with --pair METHOD=SERVER")
    found = compare_pairs(local, served, chosen)
    for one in found:
        if not one.prompts:
            raise UserError(f"{one.method} and {one.server} have no prompt in common: use the same suite and --limit")
    return found


def _sampled(run: Run) -> bool:
    return bool(run.manifest["config"]["temperature"])


def compare_pairs(local: Run, served: Run, pairs: Sequence[Pair]) -> list[Parity]:
    """Compare methods with servers that were asked the same prompts. Raise UserError for labels that a run lacks."""
    for run, labels in zip((local, served), zip(*pairs, strict=True), strict=True):
        for label in labels:
            if label not in run.labels:
                hint = did_you_mean(label, run.labels)
                raise UserError(f"{run.path} has no {label!r}{hint}; it has {', '.join(run.labels)}")
    return [_parity(local, served, *pair) for pair in pairs]


def with_speedups(found: Sequence[Parity], local: Results, served: Results) -> list[Parity]:
    """Return comparisons of two runs with the speedups in these runs."""
    here, there = ({row.method: row for row in results.overall} for results in (local, served))
    rows = [(one, here[one.method], there[one.server]) for one in found]
    return [replace(one, speedup=(a.speedup, b.speedup), comparison=(a.comparison, b.comparison)) for one, a, b in rows]


def pairs_of(methods: Sequence[str], servers: Sequence[str], chosen: Mapping[str, str]) -> list[Pair]:
    """Return each server with its method, the chosen one or that with its label; a server may have none.

    chosen: label of a server -> label of its method. Raise UserError for an unknown method, or without a pair.
    """
    for server, method in chosen.items():
        if method not in methods:
            raise UserError(f"{server}: its method {method!r} is not in --methods{known_words(method, methods)}")
    pairs = [(method, server) for server in servers if (method := chosen.get(server, server)) in methods]
    if not pairs:
        raise UserError("no server is paired with a method; add `method: LABEL` to a server in the file of --servers")
    return pairs


class _StoredPair(msgspec.Struct):
    method: str
    server: str


class _Stored(msgspec.Struct):
    pairs: list[_StoredPair]


_read_stored = decoder(_Stored)


def store(out: Path, found: Sequence[Parity]) -> None:
    """Write the comparisons of a run of methods and of servers."""
    write_json(out / PARITY, {"pairs": [one.as_dict() for one in found]})


def both_runs(out: Path) -> tuple[Path, Path]:
    """Return the run directories of a run of methods and of servers. Raise UserError if it is none."""
    runs = out / METHODS, out / SERVERS
    if not all(run.is_dir() for run in runs):
        raise UserError(f"{out} is no run of methods and servers; give the directories of two runs")
    return runs


def stored_pairs(out: Path) -> list[Pair]:
    """Return the pairs of a run of methods and of servers. Raise UserError if it has none, or is unfinished."""
    file = out / PARITY
    if not file.exists():
        raise UserError(f"{out} has no {PARITY}; give the directories of two runs, or finish this one with --resume")
    try:
        found = [(pair.method, pair.server) for pair in _read_stored(read_bytes(file)).pairs]
    except ValueError as e:
        raise UserError(f"{file} is damaged: {e}") from None
    if not found:
        raise UserError(f"{file} has no pairs; name them with --pair METHOD=SERVER")
    return found


def _parity(local: Run, served: Run, method: str, server: str) -> Parity:
    mine, theirs = _first(local, method), _first(served, server)
    both = [key for key in mine if key in theirs]
    own, other = [mine[key] for key in both], [theirs[key] for key in both]
    prompts = tuple(_of_prompt(a, b) for a, b in zip(own, other, strict=True))
    missing, sampled = len(mine.keys() ^ theirs.keys()), _sampled(local) or _sampled(served)
    return Parity(method, server, prompts, (tau_of(own), tau_of(other)), missing, sampled)


def _first(run: Run, label: str) -> dict[PromptKey, SampleRecord]:
    """Return the first good sample of each prompt."""
    return {(row.question_id, row.turn): row for row in run.of(label) if row.ok and row.repeat == 0}


def _of_prompt(own: SampleRecord, other: SampleRecord) -> PromptParity:
    at = first_difference(own.token_ids, other.token_ids) if own.token_ids and other.token_ids else None
    compared = bool(own.token_ids and other.token_ids)
    lengths = own.prompt_tokens, other.prompt_tokens
    return PromptParity(
        own.question_id,
        own.turn,
        None if None in lengths else lengths[0] == lengths[1],
        at is None if compared else own.text == other.text,
        at,
        (own.steps, other.steps),
        (own.accepted_tokens, other.accepted_tokens),
    )


def differences(found: Parity) -> Iterator[str]:
    """Yield a line for each prompt that is not exact."""
    if found.sampled:
        return
    if found.missing:
        yield f"{found.missing} prompts were answered by only one side"
    for one in found.prompts:
        parts = [] if one.same_prompt in (None, True) else ["prompt lengths differ"]
        if not one.same_output:
            parts.append("outputs differ" + ("" if one.first_difference is None else f" at {one.first_difference}"))
        for name, (a, b) in (("steps", one.steps), ("accepted", one.accepted_tokens)):
            if a is None or b is None:
                parts.append(f"{name} not known")
            elif a != b:
                parts.append(f"{name} {a} and {b}")
        if parts:
            yield f"{one.question_id} turn {one.turn + 1}: {', '.join(parts)}"
