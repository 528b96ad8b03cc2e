"""A plugin that answers repeats from memory: its steps differ, so its numbers are invalid, with a word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specbench_ss import run
from specbench_ss.results.ranking import speedup
from specbench_ss.results.sample_checks import cross_request_memory, order_memory
from specbench_ss.results.summary import OVERALL, summarise
from specbench_ss.runs.records import Run
from specbench_ss.runs.run_dir import read_run
from tests.core.test_stats import make, step
from tests.tiny import few, thorough

PLUGIN = """
import torch
from specbench_ss import Decoder, DecodeState, DraftTree

class Cribs(Decoder):
    name, summary = "cribs", "drafts what it answered the last time"
    stateful = {remembers}

    def __init__(self, target, options=None):
        super().__init__(target, options)
        self.known = {{}}

    def on_prefill(self, state):
        self.prompt = tuple(state.ids[:-1])

    def propose(self, state: DecodeState) -> DraftTree:
        known, at = self.known.get(self.prompt, []), len(state.ids)
        if len(known) < at:
            self.known[self.prompt] = list(state.ids)
        drafted = known[at : at + 5]
        return DraftTree.chain(state.root, torch.tensor(drafted)) if drafted else DraftTree.root_only(state.root)
"""


def asked(counts: dict[tuple[str, int], list[Any]], remembers: bool | None = False, **manifest: Any) -> Run:
    made = make([(question, "m", steps, 0.1, None, 0, repeat) for (question, repeat), steps in counts.items()])
    made.manifest |= {"config": {"temperature": 0.0, "history": "reference"}} | manifest
    if remembers is not None:
        made.manifest["methods"][1]["stateful"] = remembers
    return made


def reported(made: Run) -> list[str]:
    return cross_request_memory(made, "m")


SLOW, FAST = [step(0.01)] * 9, [step(0.01, 2, 2)] * 3
HALF: dict[str, Any] = {"model": {"dtype": "bfloat16"}}


def test_steps_that_differ_between_repeats_are_reported() -> None:
    (line,) = reported(asked({("a", 0): SLOW, ("a", 1): FAST, ("b", 0): SLOW, ("b", 1): SLOW}))
    assert line.startswith("the steps of 1 of 2 prompts differ between repeats with the same output (first a")


@pytest.mark.parametrize(
    "made",
    [
        asked({("a", 0): SLOW, ("a", 1): SLOW}),
        asked({("a", 0): SLOW, ("b", 0): FAST}),  # other prompts
        asked({("a", 0): SLOW, ("a", 1): [step(0.01)] * 8}),  # another answer
        asked({("a", 0): SLOW, ("a", 1): FAST}, remembers=True),
        asked({("a", 0): SLOW, ("a", 1): FAST}, config={"temperature": 1.0, "history": "reference"}),
        asked({("a", 0): FAST, ("a", 1): SLOW}, **HALF),  # not what memory does
        asked({("a", 0): [*SLOW, *FAST], ("a", 1): [*SLOW[:8], step(0.01, 2, 0), *FAST]}, **HALF),  # a tie
    ],
)
def test_nothing_else_is_reported(made: Run) -> None:
    assert reported(made) == []


def test_in_half_precision_steps_must_be_saved() -> None:
    assert reported(asked({("a", 0): SLOW, ("a", 1): FAST}, **HALF))


def test_a_sample_that_was_made_again_states_nothing() -> None:
    made = asked({("a", 0): SLOW, ("a", 1): FAST, ("b", 0): SLOW, ("b", 1): SLOW})
    assert reported(made)
    next(row for row in made.rows if (row.question_id, row.repeat) == ("a", 1)).n_reruns = 1
    assert reported(made) == []


@few(2)
@pytest.mark.parametrize(("remembers", "warmup"), [(False, 0), (True, 0), (False, 4)])
def test_a_plugin_that_remembers_makes_its_numbers_invalid(remembers: bool, warmup: int, tmp_path: Path) -> None:
    """Also where the warm-up is longer than the run, which must not teach it the run's questions."""
    plugin = tmp_path / "cribs.py"
    plugin.write_text(PLUGIN.format(remembers=remembers))
    given: dict[str, Any] = {"tasks": "qa", "limit": 1, "repeats": 2, "max_new_tokens": 12}
    run("cribs", plugin=plugin, warmup=warmup, out=tmp_path / "run", **given)
    row = next(r for r in summarise(read_run(tmp_path / "run")) if (r.task, r.method) == (OVERALL, "cribs"))
    assert any(str(one).startswith("invalid: the steps of") for one in row.health) is not remembers
    assert (row.comparison == "invalid", speedup(row) == "invalid") == (not remembers, not remembers)


@pytest.mark.parametrize(
    ("questions", "after", "found"),
    [(24, FAST, True), (24, SLOW, False), (12, FAST, False)],
    ids=["leaks", "steady", "few"],
)
def test_a_method_that_drafts_better_after_the_baseline_uses_its_outputs(
    questions: int, after: list[Any], found: bool
) -> None:
    """Repeats that are all fast, and few questions, state nothing."""
    first = {f"q{i}": bool(i % 2) for i in range(questions)}  # whether the baseline comes first
    made = make(
        [(q, "ar", SLOW, 0.1, None, 0, 0) for q in first]
        + [(q, "m", after if first[q] else SLOW, 0.1, None, 0, 0) for q in first]
        + [(q, "m", FAST, 0.1, None, 0, 1) for q in first]
    )
    for row in made.rows:
        row.position = int(first[row.question_id] == (row.method == "m"))
    lines = order_memory(made, "m")
    assert bool(lines) is found and not order_memory(made, "ar")
    assert not found or lines[0].startswith("τ is 3.00 on prompts that ar answered before it and 1.00 on others")


PEEKS = """
import json
from pathlib import Path
from specbench_ss import Decoder, DraftTree

class Peeks(Decoder):
    name, summary = "peeks", "reads what the run directory and the cache hold of the prompts"

    def on_prefill(self, state):
        run = Path({out!r})
        assert not any(q["references"] for q in json.loads((run / "questions.json").read_text()))
        assert not state.cache.keys[0][0, :, state.position :].any(), "rows of the request before"

    def propose(self, state):
        return DraftTree.root_only(state.root)
"""


@thorough
def test_neither_references_nor_rows_of_other_requests_are_there_while_methods_run(tmp_path: Path) -> None:
    plugin, asked = tmp_path / "peeks.py", tmp_path / "asked.jsonl"
    plugin.write_text(PEEKS.format(out=str(tmp_path / "run")))
    asked.write_text("".join(f'{{"prompt": "Word {i}", "reference": ["answer"]}}\n' for i in range(3)))
    given: dict[str, Any] = {"max_new_tokens": 8, "plugin": plugin, "warmup": 1}
    run("peeks", suite=f"jsonl:{asked}", out=tmp_path / "run", **given)
    done = read_run(tmp_path / "run")
    assert [row.error for row in done.rows if not row.ok] == []
    assert all(question.references for question in done.questions)
