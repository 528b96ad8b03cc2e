"""Comparison of every lossless method with autoregressive decoding on this device, and of engines with each other.

    PYTHONPATH=. python benchmarks/gpu/output_match.py [--device cuda] [--dtypes float32 bfloat16]
        [--engines graph eager] [--methods "medusa;ss[k=1]"] [--out output_match.jsonl]

Of each number format, engine and method: number of answers identical to the reference, different at a numerical tie, or
otherwise different; the same against the answers of the engine before it; number of replayed, captured and declined
passes, with the reasons, of the method's model and of its draft. Each result is appended to OUT as a line of JSON;
existing lines are not measured again. `called` is the engine of machines without a GPU: passes over the same buffers as
under `graph`, run eagerly.

Exit code 1 if anything differs for another reason than a numerical tie, if a method failed, or if a method had no
replayed pass under `graph` or `called`. Numerical ties are counted per number format at the end: in float32 they are
rare.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
import transformers

from lab.text import SPECBENCH_CATEGORIES, questions
from specbench_ss import registry, storage, user_files
from specbench_ss.engine import decoder as decoder_module
from specbench_ss.engine.cuda_graphs import CudaGraphRunner, Pass, Replay, run_eagerly
from specbench_ss.engine.decoder import Decoder
from specbench_ss.engine.engines import EAGER, GRAPH, enable_cuda_graphs
from specbench_ss.engine.generate import StopParams, generate
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.target import Target
from specbench_ss.errors import UserError, error_text
from specbench_ss.models.load import load_target
from specbench_ss.options import MethodSpec
from specbench_ss.registry import load_method
from specbench_ss.runs.output_match import judge
from specbench_ss.runs.records import SampleRecord
from specbench_ss.suite import Question

CALLED = "called"
DTYPES = ("float32", "bfloat16")
HARMLESS = {"identical", "numerical tie"}  # in float32 numerical ties are rare, and counted
FIRST = ("ar", "ss", "sd", "medusa", "ss-shared", "eagle")  # most important first
METHODS = (  # all by name: `all` of a run leaves out names that are given with options
    *dict.fromkeys((*FIRST, *registry.names(registry.METHODS))),
    *("ss[prune=off]", "ss[mode=chain]", "ss[parent=on]", "sd[form=tree]"),
)


@dataclass(slots=True)
class Line:
    """Result of one method. verdicts: against its reference. other: against the same method by engine `compared_with`.

    replays: including those of checks. kept: graphs of each of its models. answers: token ids of each.
    """

    device: str
    torch: str
    transformers: str
    engine: str
    dtype: str
    method: str
    asked: list[str]
    new: int
    verdicts: dict[str, int] = field(default_factory=dict)
    compared_with: str = ""
    other: dict[str, int] = field(default_factory=dict)
    largest_drop: float | None = None
    steps: int = 0
    replays: int = 0
    recorded: int = 0
    fallbacks: dict[str, int] = field(default_factory=dict)
    kept: dict[str, int | None] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    seconds: float = 0.0
    answers: list[list[int]] = field(default_factory=list)

    @property
    def identity(self) -> tuple[Any, ...]:
        """Return the identity of the measurement."""
        return (*self.conditions, self.engine)

    @property
    def conditions(self) -> tuple[Any, ...]:
        """Return the identity without the engine."""
        return (self.device, self.torch, self.transformers, self.dtype, self.method, tuple(self.asked), self.new)

    @property
    def bad(self) -> bool:
        """Return True for an unexpected difference, or without any replay under a graph engine."""
        verdicts = Counter(self.verdicts) + Counter(self.other)
        return bool(set(verdicts) - HARMLESS) or (self.engine != EAGER and not self.replays)

    def __str__(self) -> str:
        """Return a readable line."""
        parts = [f"{self.dtype} {self.engine:<6} {self.method:<16} {_counts_text(self.verdicts)}"]
        if self.largest_drop is not None:
            parts.append(f"at most {self.largest_drop:.2g} below the best logit")
        if self.other:
            parts.append(f"against {self.compared_with}: {_counts_text(self.other)}")
        if self.engine != EAGER:
            parts.append(f"{self.replays} replays in {self.steps} steps, {self.recorded} recorded")
            parts.append(f"declined: {_counts_text(self.fallbacks) or 'none'}")
            parts += [f"its {name} has no CUDA graphs" for name, count in self.kept.items() if count is None]
            parts += [f"refused: {reason}" for reason in self.refused]
        return ("BAD  " if self.bad else "ok   ") + "; ".join(parts)


class Counted:
    """A replay function that counts its replays."""

    def __init__(self, replay: Replay) -> None:
        self.replay, self.times = replay, 0

    def __call__(self, one: Pass) -> Pass:
        """Return the counted replay of a pass."""
        replayed = self.replay(one)

        def counted() -> tuple[torch.Tensor, ...]:
            self.times += 1
            return replayed()

        return counted


class Bench:
    """A loaded target and the answers of the references. counted: its replays; None under `eager`."""

    def __init__(self, arguments: argparse.Namespace, dtype: str, engine: str, chosen: Sequence[Question]) -> None:
        self.arguments, self.dtype, self.engine, self.questions = arguments, dtype, engine, chosen
        loaded = EAGER if engine == CALLED else engine
        self.target = load_target("lab", dtype=dtype, device=arguments.device, engine=loaded)
        if engine == CALLED:
            enable_cuda_graphs(self.target, run_eagerly, "calls")
        self.counted: Counted | None = None
        if (passes := self.target.graphs) is not None:
            passes.replay = self.counted = Counted(passes.replay)
            passes.evict()  # captured when it was loaded, and not counted
        self.prompts = [self.target.encode_chat([{"role": "user", "content": q.turns[0]}]) for q in chosen]
        self.references: dict[str, tuple[Decoder, list[SampleRecord]]] = {}

    def answers(self, decoder: Decoder) -> list[SampleRecord]:
        """Return the greedy answers to all first turns."""
        return [self._answer(decoder, q, p) for q, p in zip(self.questions, self.prompts, strict=True)]

    def _answer(self, decoder: Decoder, question: Question, prompt: list[int]) -> SampleRecord:
        row = SampleRecord(question.id, 0, decoder.name, 0, question.category, 0, 0, 0, "lab", "", "ok")
        row.fill(generate(decoder, prompt, StopParams(self.arguments.new, decoder.target.eos_ids), SamplingParams()))
        return row

    def reference(self, method: Decoder) -> tuple[Decoder, list[SampleRecord]]:
        """Return the decoder and answers of a method's reference."""
        spec = method.baseline_for(method.options)
        if spec.label not in self.references:
            decoder = load_method(spec, self.target)
            self.references[spec.label] = decoder, self.answers(decoder)
        return self.references[spec.label]

    def measure(self, line: Line, method: Decoder, other: Line | None) -> None:
        """Fill a line."""
        passes = _passes([self.target, *models_of(method).values()])
        captures = sum(p.n_captures for p in passes)  # captures by its reference are the method's as well
        reference, expected = self.reference(method)
        replays = self.counted.times if self.counted else 0
        fallbacks = sum((Counter(p.fallbacks) for p in passes), Counter[str]())
        began = time.perf_counter()
        rows = self.answers(method)
        line.seconds = round(time.perf_counter() - began, 3)
        line.recorded = sum(p.n_captures for p in passes) - captures
        line.replays = (self.counted.times if self.counted else 0) - replays
        line.fallbacks = dict(sum((Counter(p.fallbacks) for p in passes), Counter[str]()) - fallbacks)
        line.steps, line.answers = sum(row.steps or 0 for row in rows), [list(row.token_ids or ()) for row in rows]
        if self.counted:
            models = models_of(method)
            line.kept = {name: None if m.graphs is None else len(m.graphs.graphs) for name, m in models.items()}
            line.refused = sorted({reason for p in passes for reason in p.failed_captures.values()})
        line.verdicts, line.largest_drop = self._verdicts(reference, expected, rows)
        if other is not None:
            theirs = [replace(row, token_ids=ids) for row, ids in zip(rows, other.answers, strict=True)]
            line.compared_with, line.other = other.engine, self._verdicts(reference, theirs, rows)[0]

    def _verdicts(
        self, decoder: Decoder, expected: Sequence[SampleRecord], rows: Sequence[SampleRecord]
    ) -> tuple[dict[str, int], float | None]:
        """Return the counts of verdicts, and the largest drop of a logit among different answers."""
        verdicts = [judge(decoder, p, *pair) for p, *pair in zip(self.prompts, expected, rows, strict=True)]
        drops = [verdict.drop for verdict in verdicts if verdict.drop is not None]
        return dict(Counter(verdict.verdict for verdict in verdicts)), max(drops, default=None)


def models_of(decoder: Decoder) -> dict[str, Target]:
    """Return the model that a method decodes with, and the one that drafts for it, by name."""
    return dict(zip(("model", "draft"), decoder_module.models_of([decoder]), strict=False))


def _passes(models: Sequence[Target]) -> list[CudaGraphRunner]:
    """Return the graph runners with distinct counts: a draft shares its target's."""
    existing = [model.graphs for model in models if isinstance(model.graphs, CudaGraphRunner)]
    return list({id(passes.counts): passes for passes in existing}.values())


def read(file: Path | None) -> list[Line]:
    """Return the existing lines without an incomplete last one. Raise UserError for a malformed line."""
    return [] if file is None else storage.cut(file, user_files.decoder(Line))


def write(line: Line, file: Path | None) -> None:
    """Append a line."""
    if file is None:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab", buffering=0) as out:
        storage.append(out, [asdict(line)])


def arguments_of(given: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--engines", nargs="+", choices=(GRAPH, EAGER, CALLED), default=[GRAPH, EAGER])
    parser.add_argument("--prompts", type=int, default=2, help="per category")
    parser.add_argument("--tasks", type=int, default=len(SPECBENCH_CATEGORIES), help="number of Spec-Bench's tasks")
    parser.add_argument("--new", type=int, default=192, help="tokens of an answer at most")
    parser.add_argument("--methods", default="", help="separated by semicolons; default: all that are registered")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(given)


def measured(arguments: argparse.Namespace, existing: Sequence[Line], failed: list[str]) -> Iterator[Line]:
    """Yield every line, including existing ones. failed: receives a text for each failed method."""
    methods = [text for text in arguments.methods.split(";") if text] or list(METHODS)
    chosen = questions(SPECBENCH_CATEGORIES[: arguments.tasks], "eval", arguments.prompts)
    device = torch.cuda.get_device_name(arguments.device) if arguments.device.startswith("cuda") else arguments.device
    lines_by_id = {line.identity: line for line in existing}
    for engine, dtype in product(arguments.engines, arguments.dtypes):
        names = (device, torch.__version__, transformers.__version__, engine, dtype)
        lines = [Line(*names, text, [question.id for question in chosen], arguments.new) for text in methods]
        yield from (lines_by_id[line.identity] for line in lines if line.identity in lines_by_id)
        todo = [line for line in lines if line.identity not in lines_by_id]
        try:
            bench = Bench(arguments, dtype, engine, chosen) if todo else None
        except Exception as error:  # an engine whose checks fail: the others are measured anyway
            failed.append(f"{dtype} {engine}: {error_text(error)}")
            print(f"FAILED {failed[-1]}", flush=True)
            continue
        for line in todo:
            assert bench is not None
            others = [other for other in lines_by_id.values() if other.conditions == line.conditions]
            try:
                method = load_method(MethodSpec.parse(line.method), bench.target)
                if not method.lossless:
                    raise UserError("its answers may differ from the reference's")
                bench.measure(line, method, others[0] if others else None)
            except UserError as error:
                print(f"left out: {dtype} {engine} {line.method}: {error}", flush=True)
                continue
            except Exception as error:  # of one method, or of the device: the others are measured anyway
                failed.append(f"{dtype} {engine} {line.method}: {error_text(error)}")
                print(f"FAILED {failed[-1]}", flush=True)
                continue
            lines_by_id[line.identity] = line
            write(line, arguments.out)
            yield line


def main(given: Sequence[str] | None = None) -> int:
    """Measure and print."""
    arguments = arguments_of(given)
    bad, failed, ties = 0, list[str](), Counter[str]()
    try:
        existing = read(arguments.out)
    except UserError as error:
        sys.exit(f"output_match.py: {error}")
    for line in measured(arguments, existing, failed):
        print(line, flush=True)
        bad += line.bad
        ties[line.dtype] += (Counter(line.verdicts) + Counter(line.other))["numerical tie"]
    counted = ", ".join(f"{count} numerical ties in {dtype}" for dtype, count in ties.items())
    print(f"{bad} bad, {len(failed)} failed{counted and '; ' + counted}")
    return int(bool(bad or failed))


def _counts_text(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items())


if __name__ == "__main__":
    sys.exit(main())
