"""Figure 16: the pattern is that of training, and segments change memory, not what is learnt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specbench_ss.engine.target import Target
from specbench_ss.errors import UserError
from specbench_ss.reports.paper import training_cost_figures as segments
from specbench_ss.reports.paper.experiment import table
from specbench_ss.reports.paper.training_cost_figures import (
    COMPLETION,
    FORMS,
    NAIVE,
    PROMPT,
    STREAMS,
    WHOLE,
    Figure16,
    Pattern,
    pattern,
    pattern_plot,
)
from specbench_ss.results.report import Bench, Request, Result
from specbench_ss.training.loop import DrafterText
from tests.tiny import tiny_model

NEVER: Any = None


def pairs(found: Pattern) -> dict[tuple[str, str], str]:
    names = [place.name for place in found.places]
    return {
        (row, key): kind
        for row, kinds in zip(names, found.kinds, strict=True)
        for key, kind in zip(names, kinds, strict=True)
    }


def test_segments_keep_less_and_hide_nothing_that_was_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    cut = pairs(pattern())
    monkeypatch.setattr(segments, "SEGMENT", PROMPT + COMPLETION)
    whole = pairs(pattern())
    assert cut.keys() == whole.keys() and "absent" not in whole.values()
    absent = {pair for pair, kind in cut.items() if kind == "absent"}
    assert len(absent) > len(cut) / 4
    assert {whole[pair] for pair in absent} == {"masked"}
    assert all(cut[pair] == kind for pair, kind in whole.items() if pair not in absent)


def test_a_stream_sees_the_streams_of_its_position_and_main_rows_before() -> None:
    found = pattern()
    streams = [place for place in found.places if place.stream]
    assert {place.position for place in streams} == set(range(PROMPT - 1, PROMPT + COMPLETION - 1))
    assert len(streams) == STREAMS * COMPLETION, "the prompt has streams at its last position alone"
    for row, kinds in zip(found.places, found.kinds, strict=True):
        for key, kind in zip(found.places, kinds, strict=True):
            if row.stream and key.stream:
                assert (kind == "stream") == (row.position == key.position and key.stream <= row.stream)
            elif not key.stream:
                assert (kind == "main") == (key.position <= row.position)
            else:
                assert (kind == "stream") == (key.position == row.position), "eq. 3: a main row sees its streams"


def test_what_is_drawn_is_what_is_listed() -> None:
    found = pattern(attends=False)
    plot = pattern_plot(found)
    assert len(plot.data[0]["z"]) == len(found.places) == len(plot.grid.rows)
    signs = "".join(str(cell) for cell in plot.grid.rows[0][1:])
    assert len(signs) == len(found.places) and signs.startswith("■·") and "●" not in signs


def text(*_: Any) -> DrafterText:
    ids = np.random.default_rng(0).integers(3, 61, (6, _[4])).astype(np.int32)
    ids[:, -4:] = 0
    return DrafterText(ids, lambda row: (np.arange(len(row)) >= 40) & (row != 0), 2)


def test_segments_lower_the_peak_and_keep_the_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(tiny_model("llama"))
    for name, value in {"LENGTHS": (96, 10**6), "PIECES": (6, 2), "lab_text": text}.items():
        monkeypatch.setattr(segments, name, value)
    monkeypatch.setattr(segments, "special_ids", lambda tokenizer: {"pad": 0})
    result = Figure16().run(Bench(Request(limit=1), tmp_path, NEVER, lambda: target))
    rows = {row[1]: row for row in result.grids[0].rows}
    assert list(rows) == [NAIVE, WHOLE, "segments of 16", "segments of 48"], "one length: the other is too long"
    peaks: dict[Any, Any] = {name: row[2] for name, row in rows.items()}
    assert peaks["segments of 16"] < peaks["segments of 48"] < peaks[WHOLE] < peaks[NAIVE]
    claims = Figure16().claims(result)
    assert [claims[i].holds for i in (0, 1, 4)] == [True, True, True]
    assert all(row[6] and row[8] for name, row in rows.items() if "segments" in str(name)), "four steps: intervals"
    assert len(result.plots) == 3
    monkeypatch.setattr(segments, "measure", None)  # what an earlier session measured is not measured again
    again = Figure16().run(Bench(Request(limit=1), tmp_path, NEVER, lambda: target))
    assert again.grids == result.grids


def row(form: str, peak: float, time: str, alone: str, differs: float | None) -> tuple[Any, ...]:
    return (512, form, 100.0, peak, 1.0, 1.0, time, 1.0, alone, differs)


def test_claims_hold_by_intervals_and_by_counts() -> None:
    def held(*cut: tuple[Any, ...], whole: float = 0.6) -> list[bool | None]:
        grid = table("segments", FORMS, [row(NAIVE, 1, "", "", None), row(WHOLE, whole, "", "", None), *cut], "")
        return [claim.holds for claim in Figure16().claims(Result((grid,)))]

    good = row("segments of 64", 0.4, "0.5–0.6", "0.75–0.85", 1e-6)
    assert held(good) == [True, True, True, True, True]
    assert held(good, row("segments of 256", 0.7, "0.95–1.03", "1.1–1.3", 1e-3)) == [True, False, None, False, False]
    assert held(row("segments of 256", 0.5, "1.1–1.3", "1.1–1.3", 0.0), whole=1.1) == [False, True, False, False, True]
    assert held() == [True, None, None, None, None]


def test_it_needs_training_text(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="training steps needs training text for org/model"):
        Figure16().run(Bench(Request("org/model"), tmp_path, NEVER, NEVER))
