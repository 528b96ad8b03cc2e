"""The recorded drafts, packed for the page's replay, and which kinds of tokens drafts bring."""

from __future__ import annotations

import unicodedata
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from specbench_ss.reports.html.page_parts import Cell, Column, Table
from specbench_ss.reports.html.palette import Style
from specbench_ss.reports.html.samples import Store
from specbench_ss.reports.html.visible_text import visible
from specbench_ss.results.text import percent, title
from specbench_ss.runs.records import Row, Run, Steps
from specbench_ss.runs.run_dir import Drafts, DraftStep, read_drafts

KINDS = ("begins a word", "goes on with a word", "digits", "punctuation", "white space", "other")
FEWEST = 20  # tokens of a kind that a share must rest on to be shown
DIGITS = 3  # significant ones of packed probabilities


def recorded(run: Run) -> list[Drafts]:
    """Return the answers whose drafts were recorded, those with steps alone."""
    return [one for one in read_drafts(run.path) if one.steps]


def replay(
    run: Run, drafts: Sequence[Drafts], styles: Mapping[str, Style], ranked: Sequence[str]
) -> dict[str, Any] | None:
    """Return the data of the replay as JSON-ready columns; None where no drafts were recorded.

    A step is [texts, parents, accepted path, text of the target's own token, pruned nodes, p, q], texts by their
    numbers in `texts`; docs/api.md says what these are. ends: milliseconds from the request to the end of each step, of
    the timed answer; tokens: of that answer, which may end within its last step. Both are None where it has other
    tokens than the recorded one.
    """
    tasks = {question.id: question.category for question in run.questions}
    timed = {row.key: row for row in run.rows}
    texts, prompts = Store(), Store()
    answers = [
        {
            "prompt": prompts((one.question_id, one.turn)),
            "method": ranked.index(one.method),
            "ends": _ends(timed.get(one.key), one, run.steps),
            "tokens": timed[one.key].tokens if one.same_answer and one.key in timed else None,
            "steps": [_step(step, texts) for step in one.steps],
        }
        for one in sorted(drafts, key=lambda one: ranked.index(one.method))
        if one.repeat == 0
    ]
    if not answers:
        return None
    looks = [styles[label] for label in ranked]
    return {
        "reference": ranked.index(run.baseline) if run.baseline in ranked else -1,
        "prompts": [[visible(f"{id}.{turn}"), visible(title(tasks.get(id, "")))] for id, turn in prompts.values()],
        "methods": [{"label": visible(one.label), "css": one.css, "symbol": one.symbol} for one in looks],
        "answers": answers,
        "texts": [visible(text) for text in texts.values()],
    }


def _step(step: DraftStep, texts: Store) -> list[Any]:
    probabilities = [None if x is None else _short(x) for x in step.p]
    drawn = None if step.q is None else [_short(x) for x in step.q]
    nodes = [texts(text) for text in step.text]
    return [nodes, step.parents, step.path, texts(step.next_text), step.pruned, probabilities, drawn]


def _short(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def _ends(row: Row | None, one: Drafts, steps: Steps) -> list[float] | None:
    """Return when each step of the timed answer ended, in milliseconds from the request; None for another answer."""
    took = steps.of(one.key).total_s
    if row is None or not one.same_answer or len(took) != len(one.steps):
        return None
    return [round(1000 * ((row.prefill_s or 0.0) + float(end)), 2) for end in took.cumsum()]


def kinds(drafts: Sequence[Drafts], styles: Mapping[str, Style], ranked: Sequence[str]) -> Table | None:
    """Return, for each method and kind of token, the share that drafts brought; None where no drafts were recorded."""
    brought: dict[str, Counter[str]] = defaultdict(Counter)
    all_of: dict[str, Counter[str]] = defaultdict(Counter)
    for one in drafts:
        for step in one.steps:
            accepted = Counter(kind(step.text[node]) for node in step.path[1:])
            brought[one.method] += accepted
            all_of[one.method] += accepted + Counter([kind(step.next_text)])
    found = [label for label in ranked if brought[label]]
    if not found:
        return None
    rows = [[styles[label].cell(), *(_share(brought[label][k], all_of[label][k]) for k in KINDS)] for label in found]
    columns = [
        Column("method", False),
        *(Column(name, help="Share of these tokens that a draft brought") for name in KINDS),
    ]
    return Table("kinds", columns, rows, "Tokens that drafts brought, by kind", notes=(NOTE,))


NOTE = (
    "Of the recorded answers alone. A token that no draft brought is the model's own, one a step. "
    f"Kinds with fewer than {FEWEST} tokens are left out."
)


def _share(brought: int, all_of: int) -> Cell:
    if all_of < FEWEST:
        return Cell(percent(None))
    share = brought / all_of
    return Cell(percent(share), share, tint="up", share=round(share, 2), note=f"{brought} of {all_of}")


def kind(text: str) -> str:
    """Return the kind of a token by its text."""
    inner = text.strip()
    if not inner:
        return "white space"
    groups = {unicodedata.category(c)[0] for c in inner}
    if groups <= {"L", "M"}:
        return "begins a word" if text[0].isspace() or inner[0].isupper() else "goes on with a word"
    if groups <= {"N"}:
        return "digits"
    return "punctuation" if groups <= {"P", "S"} else "other"
