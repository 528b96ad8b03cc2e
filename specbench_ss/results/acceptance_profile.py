"""Acceptance of a run for other tools: NVIDIA's speculation profiles, InferenceX's golden acceptance lengths.

A profile has the acceptance by draft position under two conditions: that all earlier tokens of the draft were accepted
(`conditional_accept_rates`, for Dynamo's simulator), and under none (`marginal_accept_rates`, the probability that all
tokens up to this one are accepted, for vLLM's synthetic acceptance). Schema 1.0, of NVIDIA's Model-Optimizer (pull
request 2247). The golden lengths are a YAML file that maps model, thinking mode and draft length to the mean number of
tokens per step (`golden_al_distribution` of SemiAnalysisAI/InferenceX).

Positions are depths in the draft: of a tree they count along the accepted path, and the profile names the tree. Lengths
count accepted tokens before an answer is cut at its end, so they may exceed the run's τ a little.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import msgspec

from specbench_ss import user_files
from specbench_ss.engine.sampling import BLOCK
from specbench_ss.errors import UserError
from specbench_ss.results.analysis import Results
from specbench_ss.results.exchange import file_names
from specbench_ss.results.summary import Tally, tally
from specbench_ss.runs.records import Run, SampleRecord
from specbench_ss.storage import write_text
from specbench_ss.user_files import read_bytes

SCHEMA_VERSION = "1.0"
TOLERANCE = 0.02  # between the mean and the one that the marginal rates imply, as in the schema's own check
CHAIN_ANALYTIC = "chain_analytic"
THINKING = ("enable_thinking", "thinking")  # variables of chat templates


@dataclass(frozen=True)
class Acceptance:
    """Acceptance of a method: its samples, and the tally of their steps."""

    label: str
    rows: Sequence[SampleRecord]
    tally: Tally

    @cached_property
    def counts(self) -> list[int]:
        """Return the number of steps by accepted draft tokens: [0, 1, ..]."""
        return [int(count) for count in self.tally.reached.sum(0)]

    @property
    def draft_length(self) -> int:
        """Return the depth of the deepest draft."""
        return len(self.tally.reached) - 1

    @property
    def mean_length(self) -> float:
        """Return the mean number of tokens per step: accepted ones and the target's."""
        return 1 + sum(i * count for i, count in enumerate(self.counts)) / self.tally.steps

    def mean_length_of_requests(self, run: Run) -> float:
        """Return the mean over requests of each one's mean number of tokens per step."""
        places = run.steps.places(row.key for row in self.rows)
        return float(1 + (run.steps.totals.accepted_tokens[places] / run.steps.counts[places]).mean())

    @property
    def marginal(self) -> list[float]:
        """Return the share of all steps in which the draft is accepted up to each position."""
        return [sum(self.counts[p:]) / self.tally.steps for p in range(1, self.draft_length + 1)]

    @property
    def conditional(self) -> list[float]:
        """Return the marginal rates, each relative to that of the position before; 0 after a rate of 0."""
        rates = [1.0, *self.marginal]
        return [own / before if before else 0.0 for before, own in zip(rates, rates[1:], strict=False)]


def write_profiles(results: Results, folder: Path) -> list[str]:
    """Write a profile for each method that drafts, and golden lengths for all variants of each; return what is missing.

    Raises UserError for a run of served engines.
    """
    run = results.run
    if run.served:
        raise UserError("a profile needs the accepted tokens of every step, which servers do not report")
    notes, names = [], file_names(run.labels)
    of_method: dict[str, list[Acceptance]] = {}
    for label in run.labels:
        rows = [row for row in run.of(label) if row.ok]
        own = Acceptance(label, rows, tally(rows, run.steps))
        if own.draft_length < 1:
            notes += [] if label == run.baseline else [f"{label}: it drafted nothing, so it has no profile"]
            continue
        stem = names[label].removesuffix(".jsonl")
        text = json.dumps(profile(own, run), ensure_ascii=False, indent=2)
        write_text(folder / f"{stem}.speculation_profile.json", text + "\n")
        of_method.setdefault(run.entry(label)["name"], []).append(own)
    for method, variants in of_method.items():
        text, left_out = golden_lengths(method, variants, run)
        write_text(folder / f"{method}.golden_al.yaml", text)
        notes += left_out
    return notes


def profile(own: Acceptance, run: Run) -> dict[str, Any]:
    """Return the content of a method's speculation_profile.json."""
    length, mean = own.draft_length, round(own.mean_length, 6)
    whole = run.manifest["config"].get("verification") == BLOCK  # accepts a whole block or none of it
    options = run.entry(own.label).get("options", {})
    answers = {row.category: [other for other in own.rows if other.category == row.category] for row in own.rows}
    tallies = {task: Acceptance(own.label, rows, tally(rows, run.steps)) for task, rows in answers.items()}
    by_task = {task: one for task, one in tallies.items() if one.tally.steps}
    implied = 1 + sum(own.marginal)
    return {
        "schema_version": SCHEMA_VERSION,
        "measured": True,
        "method": run.entry(own.label)["name"],
        "draft_checkpoint": {"id": public_id(str(options.get("weights") or "")) or None},
        "target_model": {"id": public_id(run.manifest["model"]["name"])},
        "num_speculative_tokens": length,
        "block_size": None,
        "max_supported_k": length,
        "verification_method": "block" if whole else "longest_prefix",
        "conditional_accept_rates": None if whole else [round(rate, 6) for rate in own.conditional],
        "marginal_accept_rates": None if whole else [round(rate, 6) for rate in own.marginal],
        **({"vectors_unavailable_reason": "block verification has no longest-prefix distribution"} if whole else {}),
        "mean_accept_length": mean,
        "mean_accept_length_per_request": round(own.mean_length_of_requests(run), 6),
        "accept_length_model": "measured_per_k",
        "accept_length_by_k": {str(length): mean},
        "acceptance_length_histogram": {str(i + 1): count for i, count in enumerate(own.counts) if count},
        "per_category": {task: {"mean_accept_length": round(one.mean_length, 6)} for task, one in by_task.items()},
        "measurement_conditions": conditions(own, run),
        "validation": {
            "mean_consistency": {
                "implied_mean_accept_length": round(implied, 6),
                "reported_mean_accept_length": mean,
                "abs_delta": round(abs(implied - mean), 6),
                "tolerance": TOLERANCE,
                "passed": abs(implied - mean) <= TOLERANCE,
            },
            "marginal_monotonicity": {
                "passed": True,
                "violations": [],
            },  # shares of steps that got so far: by definition
        },
    }


def conditions(own: Acceptance, run: Run) -> dict[str, Any]:
    """Return what the rates depend on: questions, sampling, and the shape of the drafts."""
    config, suite, model = run.manifest["config"], run.manifest["suite"], run.manifest["model"]
    options = {name: _public(value) for name, value in run.entry(own.label).get("options", {}).items()}
    tree = own.tally.sums["draft_nodes"] > own.tally.sums["draft_depth"]
    return {
        "engine": f"ssbench {run.manifest['version']}",
        "dataset": suite["name"],
        "dataset_edition": suite.get("edition"),
        "dataset_sha256": suite.get("content_hash"),
        "num_samples": own.tally.samples,
        "num_steps": own.tally.steps,
        "osl": suite["max_new_tokens"],
        "temperature": config.get("temperature"),
        "top_p": config.get("top_p"),
        "concurrency": 1,
        "dtype": model["dtype"],
        "draft_shape": "tree" if tree else "chain",
        "draft_nodes_per_step": round(own.tally.sums["draft_nodes"] / own.tally.steps, 3),
        "options": options,
    }


def golden_lengths(method: str, variants: Sequence[Acceptance], run: Run) -> tuple[str, list[str]]:
    """Return mean tokens per step by draft length as YAML, and a note on each variant that has no place in it."""
    suite, config = run.manifest["suite"], run.manifest["config"]
    lengths: dict[int, Acceptance] = {}
    for one in variants:
        lengths.setdefault(one.draft_length, one)
    notes = [
        f"{one.label}: golden lengths have {lengths[one.draft_length].label} for {one.draft_length} draft tokens"
        for one in variants
        if lengths[one.draft_length] is not one
    ]
    lines = [
        "# Acceptance length (AL): tokens per step, the target's included",
        f"# dataset: {suite['name']} | temperature: {config.get('temperature')}"
        f" | output_len: {suite['max_new_tokens']}",
        f"# speculative-config: method={method} | measured with ssbench, key = draft length, value = AL",
        f"{json.dumps(public_id(run.manifest['model']['name']))}:",
        f"  {thinking_mode(config)}:",
        *(f"    {length}: {one.mean_length:.2f}" for length, one in sorted(lengths.items())),
    ]
    return "\n".join(lines) + "\n", notes


def thinking_mode(config: Mapping[str, Any]) -> str:
    """Return 'thinking_on' or 'thinking_off' as variables of the chat template state it, else 'default'."""
    variables = json.loads(config.get("chat_template_kwargs") or "{}")
    stated = next((variables[name] for name in THINKING if name in variables), None)
    return "default" if stated is None else f"thinking_{'on' if stated else 'off'}"


def _public(value: Any) -> Any:
    return public_id(value) if isinstance(value, str) and ("/" in value or "\\" in value) else value


def public_id(name: str) -> str:
    """Return a model's name or path without the folders of a machine: its last two parts, as of a hub id."""
    return "/".join(name.replace("\\", "/").strip("/").split("/")[-2:])


class Profile(msgspec.Struct):
    """The fields of a speculation profile that are read, from ssbench or another tool."""

    num_speculative_tokens: Annotated[int, msgspec.Meta(ge=1, le=1024)]
    mean_accept_length: Annotated[float, msgspec.Meta(ge=1, le=1025)]
    measured: bool = True
    method: str | None = None
    marginal_accept_rates: list[Annotated[float, msgspec.Meta(ge=0, le=1)]] | None = None
    accept_length_model: str = ""
    accept_length_by_k: dict[str, Annotated[float, msgspec.Meta(ge=1, le=1025)]] | None = None
    measurement_conditions: dict[str, Any] | None = None

    def about_length(self) -> str:
        """Return a sentence if a step drafts another number of tokens than the longest draft has; else ''."""
        lengths = self.mean_lengths()
        if len(lengths) > 1 or self.num_speculative_tokens in lengths:
            return ""
        nodes = next(iter(lengths))
        return f"drafts are up to {self.num_speculative_tokens} tokens deep and have {nodes} on average, which is timed"

    def mean_lengths(self) -> dict[int, float]:
        """Return the mean tokens per step by number of draft tokens, as far as the profile states it.

        A chain whose first tokens do not depend on its length (`chain_analytic`) has all lengths up to its own. Any
        other draft has the mean number of nodes that a step drafted, if it is stated, else the lengths that were
        measured.
        """
        rates = self.marginal_accept_rates
        if self.accept_length_model == CHAIN_ANALYTIC and rates:
            return {length: 1 + sum(rates[:length]) for length in range(1, len(rates) + 1)}
        stated = (self.measurement_conditions or {}).get("draft_nodes_per_step")
        if isinstance(stated, int | float) and stated >= 1:
            return {round(stated): self.mean_accept_length}
        by_length = {int(length): mean for length, mean in (self.accept_length_by_k or {}).items() if length.isdigit()}
        return by_length or {self.num_speculative_tokens: self.mean_accept_length}


def read_profile(path: Path) -> Profile:
    """Read a speculation_profile.json. Raises UserError for another file, and for rates that contradict each other."""
    try:
        found = user_files.decoder(Profile)(read_bytes(path))
    except ValueError as error:
        raise UserError(f"{path} is no speculation profile: {error}") from None
    rates = found.marginal_accept_rates
    if not found.measured:
        raise UserError(f"{path} is a profile of nothing: it states `measured: false`")
    if rates is not None and len(rates) != found.num_speculative_tokens:
        raise UserError(f"{path}: {len(rates)} marginal_accept_rates for {found.num_speculative_tokens} draft tokens")
    if rates is not None and any(later > before for before, later in pairwise(rates)):
        raise UserError(f"{path}: marginal_accept_rates increase, so they are no shares of steps accepted so far")
    return found
