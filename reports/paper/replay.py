"""Figures 22 and 23: decoding replayed pass by pass, with what each pass accepted and rejected (gamma = 4, k = 1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from specbench_ss import registry
from specbench_ss.engine.decoder import Decoder, State, Wrapped
from specbench_ss.engine.generate import Limits, generate
from specbench_ss.engine.sampling import Sampling
from specbench_ss.engine.target import Target
from specbench_ss.engine.tree import DraftTree
from specbench_ss.options import MethodSpec
from specbench_ss.reports.paper.figures import ACL, source
from specbench_ss.reports.paper.missing_parts import config_for, nothing_runs, of_method
from specbench_ss.reports.paper.prompts import first_turn, questions
from specbench_ss.results.report import Bench, Column, Experiment, Grid, Mark, Part, Request, Result, Span, Value
from specbench_ss.results.terminal import BRACKETS

CHAIN = "ss[mode=chain,n_draft=0,prune=off]"
LEGEND = (
    "each line is a pass: the answer before it, then the drafted tokens that it accepted (green), the model's own "
    "token (bold), and rejected drafts (struck out). Without colours, accepted drafts have no mark, the model's own "
    f"token stands in {'so'.join(BRACKETS['next'])} and rejected drafts in {'so'.join(BRACKETS['rejected'])}. "
    "gamma = 4, k = 1 as in the paper"
)


class Watched(Wrapped):
    """Wraps a decoder and writes its drafts down: drafts[i] are the tokens drafted for step i."""

    def __init__(self, inner: Decoder) -> None:
        super().__init__(inner)
        self.drafts: list[list[int]] = []

    def propose(self, state: State) -> DraftTree:
        """Delegates to the wrapped decoder, and writes the draft down."""
        tree = self.inner.propose(state)
        self.drafts.append(tree.tokens[1:].tolist())
        return tree


@dataclass(frozen=True, slots=True)
class Pass:
    """One verifying pass over a chain: the answer before and after it, the drafted tokens, how many were accepted."""

    before: list[int]
    drafted: list[int]
    accepted: int
    after: list[int]


def replay(decoder: Decoder, prompt: Sequence[int], limits: Limits) -> list[Pass]:
    """Return every pass of a greedy answer. The first begins after prefill's token.

    Accepted counts are after the cut.
    """
    watched = Watched(decoder)
    made = generate(watched, prompt, limits, Sampling())
    found, at = [], made.prefill_tokens
    for drafted, step in zip(watched.drafts, made.steps, strict=True):
        end = at + step.tokens
        found.append(Pass(made.tokens[:at], drafted, min(step.accepted, step.tokens), made.tokens[:end]))
        at = end
    return found


def line(target: Target, p: Pass) -> list[Span]:
    """Return the answer before the pass, what was accepted, the model's own token (unless cut), what was rejected."""
    n = len(p.before)
    kept = p.after[: n + p.accepted]
    parts: list[tuple[Mark, list[int], list[int]]] = [
        ("plain", [], p.before),
        ("accepted", p.before, kept[n:]),
        ("next", kept, p.after[len(kept) :]),
        ("rejected", kept, p.drafted[p.accepted :]),
    ]
    return [Span(_added(target, known, ids), mark) for mark, known, ids in parts if ids]


def _added(target: Target, known: Sequence[int], ids: Sequence[int]) -> str:
    """Return the text that these tokens add, with special tokens written out."""

    def text(ids: Sequence[int]) -> str:
        return str(target.tokenizer.decode(list(ids), skip_special_tokens=False))

    return text([*known, *ids])[len(text(known)) :]


class _Replay(Experiment):
    """One answer of the lab, pass by pass. --seed chooses the question."""

    uses = tuple(name for name in Experiment.uses if name != "limit")
    category: ClassVar[str]

    def parts(self, request: Request) -> Sequence[Part]:
        """Return a single row for the one answer."""
        return [Part(f"SS-Lossless on {request.model}", of_method(CHAIN, request))]

    def run(self, bench: Bench) -> Result:
        """Decode one prompt and mark what became of every drafted token."""
        parts = self.parts(bench.request)
        if parts[0].missing:
            raise nothing_runs(self.name, parts)
        target = bench.target()
        asked = questions(bench.request, "apps", self.category, 0)
        question = asked[bench.request.seed % len(asked)]
        decoder = registry.load_method(_spec(bench.request), target)
        passes = replay(decoder, first_turn(target, question), Limits(128, target.eos_ids))
        lines = [tuple(line(target, p)) for p in passes]
        rows = [_row(i, p, spans) for i, (p, spans) in enumerate(zip(passes, lines, strict=True), start=1)]
        grid = Grid("passes", _COLUMNS, tuple(rows), f"{question.id}: one row a pass")
        tokens, steps = sum(len(p.after) - len(p.before) for p in passes), len(rows)
        notes = (
            f"asked: {' '.join(question.turns[0].split())}",
            f"{tokens} tokens in {steps} passes after prefill: tau {tokens / max(1, steps):.2f} on this one answer",
            LEGEND,
        )
        return Result((grid,), (), tuple(lines), notes)


_COLUMNS = (
    Column("pass", "count"),
    Column("accepted", "text"),
    Column("own token", "text"),
    Column("rejected", "text"),
    Column("drafts accepted", "count"),
    Column("tokens", "count"),
)


def _row(number: int, p: Pass, spans: Sequence[Span]) -> tuple[Value, ...]:
    texts = [next((s.text for s in spans if s.mark == mark), "") for mark in ("accepted", "next", "rejected")]
    return (number, *texts, p.accepted, len(p.after) - len(p.before))


def _spec(request: Request) -> MethodSpec:
    return config_for(request, [CHAIN]).methods[1]


class Figure22(_Replay):
    """Figure 22: a query."""

    name, source = "figure-22", source(ACL, "figure", 22)
    title = "an SQL query, decoded pass by pass"
    category = "sql"


class Figure23(_Replay):
    """Figure 23: a summary."""

    name, source = "figure-23", source(ACL, "figure", 23)
    title = "a dialogue summary, decoded pass by pass"
    category = "dialogue_summary"
