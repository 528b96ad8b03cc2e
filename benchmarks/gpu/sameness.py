"""Every lossless method against autoregressive decoding on this device, and what is replayed against what is not.

    PYTHONPATH=. python benchmarks/gpu/sameness.py [--device cuda] [--dtypes float32 bfloat16] [--engines graph eager]
        [--methods "medusa;ss[k=1]"] [--out output_match.jsonl]

Of each number format, engine and method: how many answers are the reference's, part from it at a numerical tie, or are
others; the same beside what the engine before it answered; how many passes were replayed, how many of them recorded,
and how many were declined, with the reasons, of the method's own model and of its draft too. One line of JSON each goes
to OUT as it is measured; what is there is not measured again. `called` is the engine of machines without a GPU: passes
over the same buffers as under `graph`, run eagerly.

Exit code 1 if anything differs for another reason than a numerical tie, if a method failed, or if nothing was
replayed of a
method under `graph` or `called`. Numerical ties are counted for each number format at the end: in float32 they are
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
from specbench_ss.engine import decoder as held
from specbench_ss.engine.cuda_graphs import CudaGraphRunner, Pass, Replay, run_eagerly
from specbench_ss.engine.decoder import Decoder
from specbench_ss.engine.engines import EAGER, GRAPH, replay_steps
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
FIRST = ("ar", "ss", "sd", "medusa", "ss-shared", "eagle")  # what is wanted most
METHODS = (  # every one by its name: `all` of a run leaves out names that stand there with options
    *dict.fromkeys((*FIRST, *registry.names(registry.METHODS))),
    *("ss[prune=off]", "ss[mode=chain]", "ss[parent=on]", "sd[form=tree]"),
)


@dataclass(slots=True)
class Line:
    """What was found of one method. verdicts: beside its reference. other: beside the same method by `beside`.

    replays: proofs among them. kept: recordings of each of its models. answers: token ids of each.
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
    beside: str = ""
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
    def place(self) -> tuple[Any, ...]:
        """What has to be the same for two lines to be of the same measurement."""
        return (*self.conditions, self.engine)

    @property
    def conditions(self) -> tuple[Any, ...]:
        """Return the same, by any engine."""
        return (self.device, self.torch, self.transformers, self.dtype, self.method, tuple(self.asked), self.new)

    @property
    def bad(self) -> bool:
        """Return True if something differs that must not, or nothing was replayed of what should have been."""
        verdicts = Counter(self.verdicts) + Counter(self.other)
        return bool(set(verdicts) - HARMLESS) or (self.engine != EAGER and not self.replays)

    def __str__(self) -> str:
        """Return a line for people."""
        said = [f"{self.dtype} {self.engine:<6} {self.method:<16} {_told(self.verdicts)}"]
        if self.largest_drop is not None:
            said.append(f"at most {self.largest_drop:.2g} below the best logit")
        if self.other:
            said.append(f"beside {self.beside}: {_told(self.other)}")
        if self.engine != EAGER:
            said.append(f"{self.replays} replays in {self.steps} steps, {self.recorded} recorded")
            said.append(f"declined: {_told(self.fallbacks) or 'none'}")
            said += [f"its {name} is not replayed" for name, count in self.kept.items() if count is None]
            said += [f"refused: {why}" for why in self.refused]
        return ("BAD  " if self.bad else "ok   ") + "; ".join(said)


class Counted:
    """A way to replay passes that counts how often it does."""

    def __init__(self, replay: Replay) -> None:
        self.replay, self.times = replay, 0

    def __call__(self, one: Pass) -> Pass:
        """Return the pass as it is replayed."""
        replayed = self.replay(one)

        def counted() -> tuple[torch.Tensor, ...]:
            self.times += 1
            return replayed()

        return counted


class Bench:
    """A loaded target and the answers of the references. counted: its replays; None under `eager`."""

    def __init__(self, arguments: argparse.Namespace, dtype: str, engine: str, asked: Sequence[Question]) -> None:
        self.arguments, self.dtype, self.engine, self.asked = arguments, dtype, engine, asked
        loaded = EAGER if engine == CALLED else engine
        self.target = load_target("lab", dtype=dtype, device=arguments.device, engine=loaded)
        if engine == CALLED:
            replay_steps(self.target, run_eagerly, "calls")
        self.counted: Counted | None = None
        if (passes := self.target.graphs) is not None:
            passes.replay = self.counted = Counted(passes.replay)
            passes.evict()  # recorded when it was loaded, and not counted
        self.prompts = [self.target.encode_chat([{"role": "user", "content": q.turns[0]}]) for q in asked]
        self.references: dict[str, tuple[Decoder, list[SampleRecord]]] = {}

    def answers(self, decoder: Decoder) -> list[SampleRecord]:
        """Return the greedy answers to all first turns."""
        return [self._answer(decoder, q, p) for q, p in zip(self.asked, self.prompts, strict=True)]

    def _answer(self, decoder: Decoder, question: Question, prompt: list[int]) -> SampleRecord:
        row = SampleRecord(question.id, 0, decoder.name, 0, question.category, 0, 0, 0, "lab", "", "ok")
        row.fill(generate(decoder, prompt, StopParams(self.arguments.new, decoder.target.eos_ids), SamplingParams()))
        return row

    def reference(self, method: Decoder) -> tuple[Decoder, list[SampleRecord]]:
        """What a method's answers must be, with the decoder that made it."""
        spec = method.baseline_for(method.options)
        if spec.label not in self.references:
            decoder = load_method(spec, self.target)
            self.references[spec.label] = decoder, self.answers(decoder)
        return self.references[spec.label]

    def measure(self, line: Line, method: Decoder, other: Line | None) -> None:
        """Fill a line."""
        passes = _passes([self.target, *models_of(method).values()])
        made = sum(p.n_captures for p in passes)  # what its reference is the first to record is the method's as well
        reference, expected = self.reference(method)
        replays = self.counted.times if self.counted else 0
        fallbacks = sum((Counter(p.fallbacks) for p in passes), Counter[str]())
        began = time.perf_counter()
        rows = self.answers(method)
        line.seconds = round(time.perf_counter() - began, 3)
        line.recorded = sum(p.n_captures for p in passes) - made
        line.replays = (self.counted.times if self.counted else 0) - replays
        line.fallbacks = dict(sum((Counter(p.fallbacks) for p in passes), Counter[str]()) - fallbacks)
        line.steps, line.answers = sum(row.steps or 0 for row in rows), [list(row.token_ids or ()) for row in rows]
        if self.counted:
            models = models_of(method)
            line.kept = {name: None if m.graphs is None else len(m.graphs.kept) for name, m in models.items()}
            line.refused = sorted({why for p in passes for why in p.failed_captures.values()})
        line.verdicts, line.largest_drop = self._judged(reference, expected, rows)
        if other is not None:
            theirs = [replace(row, token_ids=ids) for row, ids in zip(rows, other.answers, strict=True)]
            line.beside, line.other = other.engine, self._judged(reference, theirs, rows)[0]

    def _judged(
        self, decoder: Decoder, expected: Sequence[SampleRecord], rows: Sequence[SampleRecord]
    ) -> tuple[dict[str, int], float | None]:
        """How many answers have which verdict, and the largest drop of a logit among those that part."""
        found = [judge(decoder, p, *pair) for p, *pair in zip(self.prompts, expected, rows, strict=True)]
        drops = [verdict.drop for verdict in found if verdict.drop is not None]
        return dict(Counter(verdict.verdict for verdict in found)), max(drops, default=None)


def models_of(decoder: Decoder) -> dict[str, Target]:
    """Return the model that a method decodes with, and the one that drafts for it, by name."""
    return dict(zip(("model", "draft"), held.models_of([decoder]), strict=False))


def _passes(models: Sequence[Target]) -> list[CudaGraphRunner]:
    """Return those with counts of their own: a draft's are its target's."""
    there = [model.graphs for model in models if isinstance(model.graphs, CudaGraphRunner)]
    return list({id(passes.counts): passes for passes in there}.values())


def read(file: Path | None) -> list[Line]:
    """Return the lines that are there. One that was cut off is removed. Raises UserError for one of another form."""
    return [] if file is None else storage.cut(file, user_files.decoder(Line))


def write(line: Line, file: Path | None) -> None:
    """Append a line."""
    if file is None:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab", buffering=0) as out:
        storage.append(out, [asdict(line)])


def arguments_of(given: Sequence[str] | None) -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--engines", nargs="+", choices=(GRAPH, EAGER, CALLED), default=[GRAPH, EAGER])
    parser.add_argument("--prompts", type=int, default=2, help="per category")
    parser.add_argument("--categories", type=int, default=len(SPECBENCH_CATEGORIES), help="how many of Spec-Bench's")
    parser.add_argument("--new", type=int, default=192, help="tokens of an answer at most")
    parser.add_argument("--methods", default="", help="separated by semicolons; default: all that are registered")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(given)


def measured(arguments: argparse.Namespace, there: Sequence[Line], failed: list[str]) -> Iterator[Line]:
    """Yield every line, those that are there already included. failed: gets a text for each method that ended otherwise."""
    methods = [text for text in arguments.methods.split(";") if text] or list(METHODS)
    asked = questions(SPECBENCH_CATEGORIES[: arguments.categories], "eval", arguments.prompts)
    device = torch.cuda.get_device_name(arguments.device) if arguments.device.startswith("cuda") else arguments.device
    made = {line.place: line for line in there}
    for engine, dtype in product(arguments.engines, arguments.dtypes):
        names = (device, torch.__version__, transformers.__version__, engine, dtype)
        lines = [Line(*names, text, [question.id for question in asked], arguments.new) for text in methods]
        yield from (made[line.place] for line in lines if line.place in made)
        todo = [line for line in lines if line.place not in made]
        try:
            bench = Bench(arguments, dtype, engine, asked) if todo else None
        except Exception as error:  # an engine that does not prove itself: the others are measured all the same
            failed.append(f"{dtype} {engine}: {error_text(error)}")
            print(f"FAILED {failed[-1]}", flush=True)
            continue
        for line in todo:
            assert bench is not None
            others = [other for other in made.values() if other.conditions == line.conditions]
            try:
                method = load_method(MethodSpec.parse(line.method), bench.target)
                if not method.lossless:
                    raise UserError("its answers need not be the reference's")
                bench.measure(line, method, others[0] if others else None)
            except UserError as error:
                print(f"left out: {dtype} {engine} {line.method}: {error}", flush=True)
                continue
            except Exception as error:  # of one method, or of the device: the others are measured all the same
                failed.append(f"{dtype} {engine} {line.method}: {error_text(error)}")
                print(f"FAILED {failed[-1]}", flush=True)
                continue
            made[line.place] = line
            write(line, arguments.out)
            yield line


def main(given: Sequence[str] | None = None) -> int:
    """Measure and print."""
    arguments = arguments_of(given)
    bad, failed, ties = 0, list[str](), Counter[str]()
    try:
        there = read(arguments.out)
    except UserError as error:
        sys.exit(f"sameness.py: {error}")
    for line in measured(arguments, there, failed):
        print(line, flush=True)
        bad += line.bad
        ties[line.dtype] += (Counter(line.verdicts) + Counter(line.other))["numerical tie"]
    counted = ", ".join(f"{count} numerical ties in {dtype}" for dtype, count in ties.items())
    print(f"{bad} bad, {len(failed)} failed{counted and '; ' + counted}")
    return int(bool(bad or failed))


def _told(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {what}" for what, count in counts.items())


if __name__ == "__main__":
    sys.exit(main())
