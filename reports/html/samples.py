"""Samples and replay: every prompt with its outputs, and recorded drafts, packed for the page's scripts."""

from __future__ import annotations

import unicodedata
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specbench_ss.reports.html.page_parts import Cell, Column, Table, View
from specbench_ss.results import ranking
from specbench_ss.results.summary import SummaryRow
from specbench_ss.results.text import percent, title, visible
from specbench_ss.runs.records import OutputMatch, Run, SampleRecord, Steps
from specbench_ss.runs.run_dir import Drafts, DraftStep, read_drafts

VERDICTS = {  # output match -> kind of pill
    "identical": "good",
    "numerical tie": "note",
    "length differs": "note",
    "mismatch": "bad",
    "text differs": "note",
    "sampled": "",
    "not compared": "",
}
BASELINE_PILL = ("baseline", "")
DIGITS = 5  # significant ones of packed numbers
MOST = 60_000  # characters of a text that are packed

Prompt = tuple[str, int]  # question id, turn from 0


class Store:
    """Distinct values, each replaced by its number."""

    def __init__(self) -> None:
        self._places: dict[Any, int] = {}

    def __call__(self, value: Any) -> int:
        """Return the number of a value."""
        return self._places.setdefault(value, len(self._places))

    def values(self) -> list[Any]:
        """Return all values by their numbers."""
        return list(self._places)


@dataclass(frozen=True, slots=True)
class _Mean:
    """A method's samples of one prompt: the first repeat, and means over the good ones. ms: per token.

    noisy: whether one of them is noisy.
    """

    first: SampleRecord
    ms: float | None
    tau: float | None
    noisy: bool


def samples(view: View) -> dict[str, Any]:
    """Return the data of the page as JSON-ready columns: prompts, and a column of each method's samples of them."""
    run, ranked = view.run, list(view.look)
    texts, verdicts, finishes = Store(), Store(), Store()
    of = _means(run.rows)
    prompts = _prompts(run, of)
    judged = {verdict.key: verdict for verdict in run.output_match}
    asked = {question.id: question for question in run.questions}

    def column(label: str) -> dict[str, list[Any]]:
        found = [of.get((*prompt, label)) for prompt in prompts]
        rows = [mean.first if mean else None for mean in found]
        pills = [row and pill(row, judged.get(row.key), view.overall[label], run.manifest["config"]) for row in rows]
        return {
            "text": [-1 if row is None else texts(_shown(row.text if row.ok else row.error)) for row in rows],
            "verdict": [-1 if pill is None else verdicts(pill) for pill in pills],
            "tokens": [row and row.tokens for row in rows],
            "finish": [-1 if row is None or not row.finish else finishes(row.finish) for row in rows],
            "quality": [row and _short(row.quality) for row in rows],
            "tau": [mean and _short(mean.tau) for mean in found],
            "ms": [mean and _short(mean.ms) for mean in found],
            "noisy": [i for i, mean in enumerate(found) if mean and mean.noisy],
        }

    return {
        "baseline": ranked.index(run.baseline) if run.baseline in ranked else -1,
        "methods": [
            {
                "label": visible(label),
                "name": style.name,
                "css": style.css,
                "symbol": style.symbol,
                "colour": style.colour,
                "invalid": view.overall[label].comparison == "invalid",
                **column(label),
            }
            for label, style in view.look.items()
        ],
        "prompts": {
            "id": [visible(id) for id, _ in prompts],
            "turn": [turn for _, turn in prompts],
            "task": [visible(title(_category(of, prompt, ranked))) for prompt in prompts],
            "asked": [texts(_shown(_asked(asked, prompt))) for prompt in prompts],
            "expected": [texts(_shown(_expected(asked, prompt))) for prompt in prompts],
        },
        "repeats": run.repeats,
        "verdicts": verdicts.values(),
        "finishes": [visible(one) for one in finishes.values()],
        "texts": texts.values(),
    }


def _means(rows: Sequence[SampleRecord]) -> dict[tuple[str, int, str], _Mean]:
    grouped: dict[tuple[str, int, str], list[SampleRecord]] = defaultdict(list)
    for row in rows:
        grouped[row.question_id, row.turn, row.method].append(row)
    return {key: _mean(sorted(samples, key=lambda row: row.repeat)) for key, samples in grouped.items()}


def _mean(rows: Sequence[SampleRecord]) -> _Mean:
    good = [row for row in rows if row.ok and row.tokens]
    seconds, tokens = sum(row.wall_s or 0.0 for row in good), sum(row.tokens or 0 for row in good)
    steps = sum(row.steps or 0 for row in good)
    in_steps = tokens - sum(row.prefill_tokens or 0 for row in good)
    noisy = any(row.noise_reason for row in rows)
    return _Mean(rows[0], 1000 * seconds / tokens if tokens else None, in_steps / steps if steps else None, noisy)


def _prompts(run: Run, of: Mapping[tuple[str, int, str], _Mean]) -> list[Prompt]:
    """Return the prompts that have a sample, in the order of the suite; those of unknown questions come last."""
    sampled = dict.fromkeys((id, turn) for id, turn, _ in of)
    known = [(q.id, turn) for q in run.questions for turn in range(len(q.turns)) if (q.id, turn) in sampled]
    return list(dict.fromkeys([*known, *sampled]))


def _category(of: Mapping[tuple[str, int, str], _Mean], prompt: Prompt, labels: Sequence[str]) -> str:
    return next(of[(*prompt, label)].first.category for label in labels if (*prompt, label) in of)


def _turn(asked: Mapping[str, Any], prompt: Prompt, name: str) -> str:
    id, turn = prompt
    values = getattr(asked[id], name) if id in asked else ()
    return values[turn] if turn < len(values) else ""


def _asked(asked: Mapping[str, Any], prompt: Prompt) -> str:
    """Return the text of a turn; the first turn includes earlier messages with their roles."""
    id, turn = prompt
    text = _turn(asked, prompt, "turns")
    history = asked[id].history if id in asked and turn == 0 else ()
    lines = [f"{message.role}: {message.text}" for message in history]
    return "\n\n".join([*lines, f"user: {text}"]) if lines else text


def _expected(asked: Mapping[str, Any], prompt: Prompt) -> str:
    """Return the expected answers of a turn: a text, or several."""
    found = _turn(asked, prompt, "references")
    return found if isinstance(found, str) else "\n".join(found)


def _shown(text: str | None) -> str:
    """Return a text for the page: hidden characters made visible, cut at MOST characters."""
    text = text or ""
    rest = len(text) - MOST
    return visible(text[:MOST]) + (f"\n⟨{rest:,} more characters are in the run directory⟩" if rest > 0 else "")


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{DIGITS}g}")


def pill(
    row: SampleRecord, verdict: OutputMatch | None, summary: SummaryRow, config: Mapping[str, Any]
) -> tuple[str, str] | None:
    """Return the output match of a sample as (text, kind of pill); None if it is unknown.

    The text names the AR baseline of the method's own model.
    """
    if not row.ok:
        return ("failed", "bad")
    if summary.comparison == "baseline":
        return BASELINE_PILL
    if verdict is None:
        return None
    if verdict.verdict == ranking.NOT_COMPARED:
        sampled = summary.lossless and config["temperature"]
        named = ranking.output(summary, config) if summary.reference_of else ranking.NOT_COMPARED
        return (ranking.SAMPLED if sampled else named, "")
    text, kind = verdict.verdict, VERDICTS[verdict.verdict]
    if summary.reference == summary.baseline:
        return (text, kind)
    return (f"{text} {'to' if text == 'identical' else 'against'} {summary.reference}", kind)


KINDS = ("start of a word", "inside a word", "digits", "punctuation", "white space", "other")
FEWEST = 20  # tokens of a kind below which no share is shown
PROBABILITY_DIGITS = 3  # significant ones of packed probabilities


def recorded(run: Run) -> list[Drafts]:
    """Return the outputs with recorded drafts that have steps."""
    return [one for one in read_drafts(run.path) if one.steps]


def replay(view: View, drafts: Sequence[Drafts]) -> dict[str, Any] | None:
    """Return the data of the replay as JSON-ready columns; None without recorded drafts.

    A step is [texts, parents, accepted path, text of the target's own token, pruned nodes, p, q], texts by their
    numbers in `texts`; docs/api.md defines them. ends: milliseconds from the request to the end of each step of
    the timed output; tokens: its length. Both are None if the timed output has other tokens than the recorded one.
    """
    run, ranked = view.run, list(view.look)
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
    return {
        "baseline": ranked.index(run.baseline) if run.baseline in ranked else -1,
        "prompts": [[visible(f"{id}.{turn}"), visible(title(tasks.get(id, "")))] for id, turn in prompts.values()],
        "methods": [
            {"label": visible(one.label), "name": one.name, "css": one.css, "symbol": one.symbol}
            for one in view.look.values()
        ],
        "answers": answers,
        "texts": [visible(text) for text in texts.values()],
    }


def _step(step: DraftStep, texts: Store) -> list[Any]:
    probabilities = [None if x is None else _short_probability(x) for x in step.p]
    drawn = None if step.q is None else [_short_probability(x) for x in step.q]
    nodes = [texts(text) for text in step.text]
    return [nodes, step.parents, step.path, texts(step.next_text), step.pruned, probabilities, drawn]


def _short_probability(value: float) -> float:
    return float(f"{value:.{PROBABILITY_DIGITS}g}")


def _ends(row: SampleRecord | None, one: Drafts, steps: Steps) -> list[float] | None:
    """Return the end of each step of the timed output, in ms from the request; None if its tokens differ."""
    took = steps.of(one.key).total_s
    if row is None or not one.same_answer or len(took) != len(one.steps):
        return None
    return [round(1000 * ((row.prefill_s or 0.0) + float(end)), 2) for end in took.cumsum()]


def kinds(view: View, drafts: Sequence[Drafts]) -> Table | None:
    """Return the share of accepted draft tokens by method and kind of token; None without recorded drafts."""
    accepted_of: dict[str, Counter[str]] = defaultdict(Counter)
    all_of: dict[str, Counter[str]] = defaultdict(Counter)
    for one in drafts:
        for step in one.steps:
            accepted = Counter(kind(step.text[node]) for node in step.path[1:])
            accepted_of[one.method] += accepted
            all_of[one.method] += accepted + Counter([kind(step.next_text)])
    found = [label for label in view.look if accepted_of[label]]
    columns = [
        view.method(),
        *(
            Column(name, name, "Share of the output tokens of this kind that are accepted draft tokens")
            for name in KINDS
        ),
    ]
    rows = [{"method": label, **{k: _share(accepted_of[label][k], all_of[label][k]) for k in KINDS}} for label in found]
    title = "Accepted draft tokens by kind of text"
    return Table.of("kinds", columns, rows, title, notes=(NOTE,)) if found else None


NOTE = (
    "From the outputs with recorded drafts. The other tokens are the target's own, one per step. "
    f"Kinds with fewer than {FEWEST} tokens are left out."
)


def _share(accepted: int, all_of: int) -> Cell:
    if all_of < FEWEST:
        return Cell(percent(None))
    share = accepted / all_of
    return Cell(percent(share), share, tint="up", share=round(share, 2), note=f"{accepted} of {all_of}")


def kind(text: str) -> str:
    """Return the kind of a token by its text."""
    inner = text.strip()
    if not inner:
        return "white space"
    groups = {unicodedata.category(c)[0] for c in inner}
    if groups <= {"L", "M"}:
        return "start of a word" if text[0].isspace() or inner[0].isupper() else "inside a word"
    if groups <= {"N"}:
        return "digits"
    return "punctuation" if groups <= {"P", "S"} else "other"
