"""Predictions of `ssbench plan` for the methods of a finished run, and their errors.

Predicted speedup while decoding: τ of the run / step in steps of `ar`, measured now with forced acceptance. A step is
measured with the method itself and, where there is one, with the untrained kind of drafter that stands for it. Where
the number of draft tokens varies, steps are measured at means of equal parts of the run's steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import combinations, groupby
from pathlib import Path
from typing import Any

import numpy as np

from specbench_ss import registry
from specbench_ss.bench.timed_sample import memory_given_back
from specbench_ss.engine.decoder import Decoder
from specbench_ss.engine.engines import EAGER
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.target import Target
from specbench_ss.errors import UserError, plugin_code
from specbench_ss.methods._plan.step_cost import (
    KIND_OF,
    LEAST_CONTEXT,
    SD,
    StepCost,
    growth,
    node_groups,
    step_cost,
    untrained,
)
from specbench_ss.models.load import load_target
from specbench_ss.options import MethodSpec
from specbench_ss.results.analysis import Results, load_run
from specbench_ss.results.cost_model import PairedCost
from specbench_ss.runs.environment import changed_since, environment
from specbench_ss.runs.manifest import engine_of, plain
from specbench_ss.runs.records import Run
from specbench_ss.stats.pairs import Pairs

SAME_NODES = 0.5  # draft tokens of a step on average, by which measured steps may differ from the run's
SAMPLING = ("temperature", "top_p", "top_k", "seed", "verification")
LOADING = ("device", "quantize", "generation_config")
NEEDED = frozenset({*SAMPLING, *LOADING, "model", "methods"})  # of the run's configuration


@dataclass(slots=True)
class Prediction:
    """One method of the run at one batch size.

    tau, nodes: of the run, per step. measured: speedup while decoding. ratio: step in steps of `ar`. kind: untrained
    drafter that stands for the method; None if there is none. kind_ratio: of its step; None if it is not measured.
    """

    method: str
    batch_size: int
    tau: float
    nodes: float
    measured: float
    ratio: float
    kind: str | None
    kind_ratio: float | None

    @property
    def predicted(self) -> float:
        """Return the predicted speedup."""
        return self.tau / self.ratio

    @property
    def kind_predicted(self) -> float | None:
        """Return the speedup that the untrained kind predicts."""
        return None if self.kind_ratio is None else self.tau / self.kind_ratio

    def error(self, predicted: float | None) -> float | None:
        """Return the error of a predicted speedup as a share of the measured one."""
        return None if predicted is None else predicted / self.measured - 1

    def as_dict(self) -> dict[str, Any]:
        """Return the prediction as JSON-ready data."""
        own, kind = self.predicted, self.kind_predicted
        errors = {"predicted": own, "error": self.error(own), "kind_predicted": kind, "kind_error": self.error(kind)}
        return asdict(self) | errors


@dataclass(frozen=True, slots=True)
class PredictedRun:
    """Predictions after `context` tokens.

    left_out: reasons, by what could not be predicted. without_kind: methods that no untrained kind of drafter stands
    for. ar_rows: time of a step of `ar` in each measurement, as `print_noise` takes it. changed: what differs now.
    """

    path: Path
    context: int
    predictions: list[Prediction]
    left_out: dict[str, str]
    without_kind: list[str]
    ar_rows: list[dict[str, Any]]
    changed: list[str]

    def pairs(self) -> Iterator[tuple[bool, str]]:
        """Yield pairs of methods at one batch size, `ar` among them: whether the order is as measured, and text."""
        for batch_size in sorted({one.batch_size for one in self.predictions}):
            own = [one for one in self.predictions if one.batch_size == batch_size]
            known = [("ar", 1.0, 1.0), *((one.method, one.predicted, one.measured) for one in own)]
            for (a, x, u), (b, y, v) in combinations(known, 2):
                text = f"{a} and {b} ({x:.2f}× and {y:.2f}×, measured {u:.2f}× and {v:.2f}×)"
                yield (x - y) * (u - v) >= 0, f"{text}, batch size {batch_size}" if batch_size > 1 else text

    def as_dict(self) -> dict[str, Any]:
        """Return the predictions as JSON-ready data."""
        rows, wrong = [one.as_dict() for one in self.predictions], [text for right, text in self.pairs() if not right]
        about = {"run": str(self.path), "context": self.context, "rows": rows, "reversed": wrong}
        return about | {"left_out": self.left_out, "without_kind": self.without_kind, "changed": self.changed}


def predicted_run(path: Path, steps: int, trust_remote_code: bool) -> PredictedRun:
    """Load the model and the methods of a run, measure their steps, and predict the run's speedups.

    Raises UserError for a run of servers, one without samples of a baseline, and one of another model.
    """
    results = load_run(path)
    pairs = _pairs(results)
    target = _target(results.run, trust_remote_code)
    conditions = _conditions(results.run, target, steps)
    predictions, left_out = list[Prediction](), dict[str, str]()
    for pair in pairs:
        with _reasons(left_out, pair.method.label):
            predictions += _predictions(results, pair, target, conditions, left_out)
    labels = [pair.method.label for pair in pairs]
    unknown = [label for label in labels if results.run.entry(label)["name"] not in KIND_OF]
    changed = changed_since(results.manifest, environment())
    return PredictedRun(path, conditions.context, predictions, left_out, unknown, conditions.ar_rows, changed)


@contextmanager
def _reasons(left_out: dict[str, str], what: str) -> Iterator[None]:
    """Keep the reason of an error within the block."""
    try:
        with plugin_code("it raised"):
            yield
    except UserError as error:
        left_out[what] = str(error)


def _pairs(results: Results) -> list[PairedCost]:
    """Return the samples of methods that draft or failed, with the baseline's. Raises UserError if there are none."""
    run, config = results.run, results.manifest["config"]
    if run.served:
        raise UserError(f"--against {run.path}: a run of servers, whose steps cannot be measured here")
    if missing := sorted(NEEDED - config.keys()):
        raise UserError(f"--against {run.path}: its manifest does not state {missing[0]}; make the run again")
    if run.baseline not in run.labels or not any(row.ok and row.steps for row in run.of(run.baseline)):
        raise UserError(f"--against {run.path}: it has no samples of its baseline {run.baseline!r} to compare with")
    pairs = [pair for pair in results.pairs if pair.method.tally.sums["draft_nodes"] or not pair.method.rows]
    if not pairs:
        raise UserError(f"--against {run.path}: it has no method that drafts")
    return pairs


def _target(run: Run, trust_remote_code: bool) -> Target:
    """Load the model of a run as the run did. Raises UserError for another model."""
    config, model = run.manifest["config"], run.manifest["model"]
    given = {name: config[name] for name in LOADING} | {"engine": engine_of(run.manifest) or EAGER}
    target = load_target(config["model"], dtype=model["dtype"], trust_remote_code=trust_remote_code, **given)
    if target.weights_hash != model["hash"]:
        raise UserError(f"--against {run.path}: {config['model']!r} has other weights now than in the run")
    return target


@dataclass(frozen=True, slots=True)
class _Conditions:
    """Conditions of the measured steps: text of prompts and outputs, context, sampling. ar_rows: see `PredictedRun`."""

    text: list[int]
    context: int
    sampling: SamplingParams
    steps: int
    ar_rows: list[dict[str, Any]] = field(default_factory=list)

    def cost(self, decoder: Decoder, nodes: int | None, batch_size: int) -> StepCost:
        """Measure a step that verifies at most so many draft tokens of each request."""
        at = (self.context, self.steps, batch_size)
        with memory_given_back(decoder):
            cost = step_cost(decoder, *at, nodes=nodes, text=self.text, sampling=self.sampling)
        if decoder.target.graphs is not None:
            decoder.target.graphs.evict()  # a recording needs the cache that it was made over
        self.ar_rows.append({"context": self.context, "batch_size": batch_size, "ar_ms": cost.ar_ms})
        return cost


def _conditions(run: Run, target: Target, steps: int) -> _Conditions:
    """Return the mean context of the baseline's steps, and the run's sampling and outputs.

    The measured steps lie around the mean context. Their text is the baseline's outputs, twice, so that methods that
    copy find a match.
    """
    config, rows = run.manifest["config"], [row for row in run.of(run.baseline) if row.ok and row.steps]
    weights = [row.steps or 0 for row in rows]
    middle = np.average([(row.prompt_tokens or 0) + (row.tokens or 0) / 2 for row in rows], weights=weights)
    context = max(LEAST_CONTEXT, round(float(middle)) - growth(steps) // 2)
    if context + growth(steps) > target.context_length:
        raise UserError(f"--steps {steps} needs more than the context of {target.name!r} ({target.context_length:,})")
    outputs = [token for row in rows for token in row.token_ids or ()]
    sampling = SamplingParams(**{name: config[name] for name in SAMPLING})
    return _Conditions(outputs[: max(LEAST_CONTEXT, context // 2)], context, sampling, steps)


def _predictions(
    results: Results, pair: PairedCost, target: Target, conditions: _Conditions, left_out: dict[str, str]
) -> list[Prediction]:
    """Measure the steps of a method and of its kind at each batch size of the run.

    left_out: gets the reasons of batch sizes, and of kinds, that cannot be measured. Raises UserError for a method that
    cannot be loaded or has no speedup.
    """
    run, label = results.run, pair.method.label
    drafted = run.steps.together(row.key for row in pair.method.rows).draft_nodes
    decoder, groups = _decoder(run, label, target), node_groups(drafted)
    kind = KIND_OF.get(decoder.name)
    made = list[Prediction]()
    for batch_size, tau, measured in _measured(results, pair):
        what = f"{label} with batch size {batch_size}" if batch_size > 1 else label
        with _reasons(left_out, what):
            limits = [(None if len(groups) == 1 else n, n, share) for n, share in groups]
            ratio = _ratio([(conditions.cost(decoder, limit, batch_size), n, share) for limit, n, share in limits])
            made.append(Prediction(label, batch_size, tau, float(np.mean(drafted)), measured, ratio, kind, None))
            if kind == SD:  # `ssbench plan --draft` measures the method itself
                made[-1].kind_ratio = ratio
            elif kind is not None:
                with _reasons(left_out, f"{what} by an untrained drafter"):
                    costs = [
                        (_untrained_cost(conditions, kind, target, n, batch_size), n, share) for n, share in groups
                    ]
                    made[-1].kind_ratio = _ratio(costs)
    return made


def _untrained_cost(conditions: _Conditions, kind: str, target: Target, nodes: int, batch_size: int) -> StepCost:
    return conditions.cost(untrained(kind, target, max(1, nodes)), nodes, batch_size)


def _measured(results: Results, pair: PairedCost) -> Iterator[tuple[int, float, float]]:
    """Yield batch size, τ and measured speedup while decoding of a method at each batch size of the run.

    Of several requests at a time, decoding begins with each one's first token and includes waiting for others.
    """
    run, label, tau = results.run, pair.method.label, pair.method.tally.tau
    speedup = next(row.decode_speedup for row in results.machine_rows if row.method == label)
    if speedup is None or tau is None:
        raise UserError("the run has no valid speedup of it")
    yield 1, tau, speedup
    for batch_size in run.manifest["config"].get("concurrency", ()):
        rows = [row for row in run.requests if row.concurrency == batch_size]
        both = Pairs(*([row for row in rows if row.method == one] for one in (label, run.baseline)), levels=True)
        tokens, baseline_tokens = (sum(row.later for row in of) for of in (both.own, both.other))
        seconds, baseline_s = (sum(row.decode_s or 0.0 for row in of) for of in (both.own, both.other))
        if tokens and baseline_tokens and seconds:
            steps = sum(row.steps or 0 for row in both.own)
            yield batch_size, tokens / steps, baseline_s / baseline_tokens * tokens / seconds


def _ratio(costs: Sequence[tuple[StepCost, int, float]]) -> float:
    """Return the mean of steps in steps of `ar`. costs: with the draft tokens that each should have, and its share.

    Raises UserError if the measured steps draft other numbers of tokens on average.
    """
    more = sum(share * (cost.nodes - nodes) for cost, nodes, share in costs)
    if abs(more) > SAME_NODES:
        raise UserError(f"with forced acceptance its steps draft {more:+.1f} tokens, compared with the run")
    return sum(share * cost.ratio for cost, _, share in costs)


def _decoder(run: Run, label: str, target: Target) -> Decoder:
    """Load a method as the run did. Raises UserError if it is not installed, or another one now."""
    asked = (MethodSpec(one["name"], one["options"], one.get("copy", 1)) for one in run.manifest["config"]["methods"])
    spec = next(spec for spec in asked if spec.label == label)
    if spec.name not in registry.names(registry.METHODS):
        raise UserError(f"there is no method {spec.name!r} here")
    decoder = registry.load_method(spec, target)
    if plain(decoder.metadata()) != run.entry(label)["resolved"]:
        raise UserError("its weights or options differ from the run's")
    return decoder


def print_predictions(made: PredictedRun) -> None:
    """Print the table, the order, and what is not predicted."""
    from specbench_ss.cli.printing import print_table
    from specbench_ss.results.table import Column
    from specbench_ss.results.text import format_number, format_speedup

    def signed(value: float | None) -> str:
        return "-" if value is None else f"{value:+.0%}"

    columns = [
        Column("method", "method", lambda row: row.method, left=True),
        Column("batch_size", "batch", lambda row: str(row.batch_size)),
        Column("tau", "τ", lambda row: format_number(row.tau)),
        Column("nodes", "nodes", lambda row: format_number(row.nodes, 1)),
        Column("ratio", "step", lambda row: format_number(row.ratio)),
        Column("predicted", "predicted", lambda row: format_speedup(row.predicted)),
        Column("measured", "measured", lambda row: format_speedup(row.measured)),
        Column("error", "error", lambda row: signed(row.error(row.predicted))),
        Column("kind", "untrained", lambda row: row.kind or "-"),
        Column("kind_predicted", "predicted", lambda row: format_speedup(row.kind_predicted)),
        Column("kind_error", "error", lambda row: signed(row.error(row.kind_predicted))),
    ]
    print(f"{made.path}: speedups while decoding, without prefill; steps after {made.context:,} tokens of context")
    print("predicted: τ of the run / step in steps of ar, measured now; untrained: with this kind of drafter instead")
    if made.predictions:
        print_table(columns, [list(own) for _, own in groupby(made.predictions, key=lambda row: row.method)])
        pairs = list(made.pairs())
        wrong = [text for as_measured, text in pairs if not as_measured]
        n_right = len(pairs) - len(wrong)
        print(f"order of these speedups, and of ar: {n_right} of {len(pairs)} pairs are as measured")
        print(*(f"reversed: {text}\n" for text in wrong), sep="", end="")
    if made.without_kind:
        print(f"no kind of drafter stands for: {', '.join(made.without_kind)}")
    for label, why in made.left_out.items():
        print(f"not predicted: {label}: {why}")
    if made.changed:
        print(f"changed since the run, which its times may depend on: {', '.join(made.changed)}")
