"""`ssbench export` and `import-specbench`: what goes out comes back, and files of others are scored symmetrically."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from specbench_ss import UserError, load_run
from specbench_ss.cli.main import main
from specbench_ss.results.exchange import RescoredRow, limitations, rescored
from specbench_ss.results.summary import OVERALL, summarise
from specbench_ss.results.text import table
from specbench_ss.runs.run_dir import read_run
from tests.cli import failing
from tests.conftest import MakeRun
from tests.tiny import few

Lines = list[dict[str, Any]]


@few(2)
@pytest.mark.parametrize("made", [{}, {"turns": 2}, {"repeats": 3, "questions": 5}])
def test_what_is_exported_comes_back_with_the_numbers_of_the_run(
    make_run: MakeRun, tmp_path: Path, made: dict[str, Any]
) -> None:
    run = make_run(**made)
    assert main(["export", str(run), "--form", "specbench"]) == 0
    back = {(row.task, row.method): row for row in rescored(sorted((run / "specbench").iterdir()))}
    summaries = summarise(read_run(run))
    assert len(back) == len(summaries)
    for row in summaries:
        again = back[row.task, row.method]
        for name in (
            "speedup",
            "speedup_geomean",
            "speedup_specbench",
            "mean_acceptance_length",
            "tokens_per_s",
            "n_prompts",
            "n_questions",
        ):
            assert getattr(again, name) == pytest.approx(getattr(row, name)), (name, row.method)
        assert (
            again.mean_accept_lengths == pytest.approx(row.mean_acceptance_length)
            and again.first_apart
            and not again.bonus_left_out
        )
        assert again.comparison == row.comparison
        low, high = row.speedup_interval or (0.0, 0.0)  # two files are two processes, each with its 1 %
        assert again.speedup_interval == (row.speedup_interval and pytest.approx((low / 1.01, high * 1.01)))


def test_a_line_has_the_form_of_spec_bench(
    make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, there = make_run(turns=2, repeats=2, failing=("ss",)), tmp_path / "there"
    assert main(["export", str(run), "--form", "specbench", "--out", str(there)]) == 0
    assert "ss: 8 answers with failed or missing turns are left out" in capsys.readouterr().err
    lines = [json.loads(line) for line in (there / "ss.jsonl").read_text().splitlines()]
    assert len(lines) == 20 and set(lines[0]) == {"question_id", "category", "model_id", "choices", "tstamp"}
    samples = load_run(run).samples.set_index(["method", "question_id", "turn", "repeat"])
    for line in lines:
        for choice in line["choices"]:
            own = [samples.loc[("ss", line["question_id"], turn, choice["index"])] for turn in range(2)]
            assert choice["new_tokens"] == [row.tokens for row in own] and choice["turns"] == [row.text for row in own]
            assert choice["wall_time"] == [row.wall_s for row in own]
            assert sum(choice["accept_lengths"]) == sum(choice["new_tokens"]) - 2  # first tokens are of no step
            assert len(choice["accept_lengths"]) == sum(choice["decoding_steps"])


def test_csv_and_parquet_hold_the_frames(make_run: MakeRun) -> None:
    run = make_run(questions=2)
    for form in ("csv", "parquet"):
        assert main(["export", str(run), "--form", form]) == 0
    kept = load_run(run)
    for name, frame in {"samples": kept.samples, "steps": kept.steps, "summary": kept.summary(all=True)}.items():
        reported = pd.read_csv(run / "csv" / f"{name}.csv")
        stored = pd.read_parquet(run / "parquet" / f"{name}.parquet")
        assert list(reported) == list(stored) == list(frame) and len(reported) == len(stored) == len(frame)
        for column in ("wall_s", "total_s", "speedup", "tokens"):
            if column in frame:
                assert reported[column].tolist() == stored[column].tolist() == pytest.approx(frame[column].tolist())
    assert json.loads(pd.read_csv(run / "csv" / "samples.csv")["token_ids"][0]) == kept.samples["token_ids"][0]


def test_markdown_is_a_table_of_the_summary(
    make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(labels=("ar", "ss[k=1]"))
    assert main(["export", str(run), "--form", "markdown"]) == 0
    reported = capsys.readouterr().out
    for _ in range(2):
        assert main(["export", str(run), "--form", "markdown", "--out", str(tmp_path / "table.md")]) == 0
        assert (tmp_path / "table.md").read_text() == reported
    lines = reported.splitlines()
    assert len(lines) == 2 + 2 * 5 and {line.count("|") for line in lines} == {11}
    assert "| all | ss[k=1] | " in reported and "×" in lines[3]
    assert main(["export", str(run), "--form", "latex"]) == 0
    assert "all & ss[k=1] & " in (latex := capsys.readouterr().out) and latex.isascii()
    assert table(("a",), [("x|y<b>",)], ()) == "| a |\n| ---: |\n| x\\|y&lt;b> |\n"


def called_rows(run: Path) -> Path:
    """The run, with its method `ss` called `rows`."""
    for file in run.iterdir():
        file.write_text(file.read_text().replace('"ss"', '"rows"'))
    return run


@few(2)
@pytest.mark.parametrize("form", ["specbench", "csv", "parquet", "profile", "markdown", "latex"])
def test_nothing_is_written_over_a_run(
    make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    """A method called `rows` has the answer file samples.jsonl."""
    run, link, other = called_rows(make_run(labels=("ar", "ss"), questions=1)), tmp_path / "link", make_run(questions=1)
    link.symlink_to(run)
    before = {file: file.read_bytes() for file in (*run.iterdir(), *other.iterdir())}
    for out in (run, link, run / "new", link / "samples.jsonl", other, other / "a" / "b"):
        assert "run directory" in failing(["export", str(run), "--form", form, "--out", str(out)], capsys)
    if form not in ("markdown", "latex"):
        (run / form).symlink_to(other)
        assert "run directory" in failing(["export", str(run), "--form", form], capsys)
        (run / form).unlink()
    assert {file: file.read_bytes() for file in (*run.iterdir(), *other.iterdir())} == before


def _line(question: int, tokens: list[int], accepted: list[int], **changes: Any) -> str:
    steps = changes.get("steps", [len(accepted)])
    texts = changes.get("texts", [f"answer to {question}"] * len(tokens))
    seconds = changes.get("seconds", [0.1 * n for n in tokens])
    choice = {"index": 0, "turns": texts, "decoding_steps": steps, "new_tokens": tokens, "wall_time": seconds}
    line = {"question_id": question, "category": "qa", "model_id": "m", "tstamp": 1.0}
    return json.dumps(line | {"answer_id": "x", "choices": [choice | {"accept_lengths": accepted}]})


def scored(folder: Path, **files: list[str]) -> dict[str, RescoredRow]:
    paths = []
    for name, lines in files.items():
        paths.append(folder / f"{name}.jsonl")
        paths[-1].write_text("".join(line + "\n" for line in lines))
    return {row.method: row for row in rescored(paths) if row.task == OVERALL}


def plain(questions: int, tokens: int = 12) -> list[str]:
    return [_line(q, [tokens], [1] * tokens) for q in range(questions)]


def test_turns_that_failed_count_on_neither_side(tmp_path: Path) -> None:
    """Spec-Bench records a failed turn with the numbers of the turn before it."""
    fast = [_line(q, [12], [3] * 4, seconds=[0.4]) for q in range(5)]
    broken = [*fast[:4], _line(4, [12], [3] * 4, seconds=[1e-6], texts=["ERROR"])]
    row = scored(tmp_path, vanilla=plain(5), quick=broken)["quick"]
    assert (row.n_questions, row.n_left_out) == (4, 1) and row.speedup == pytest.approx(3)
    baseline = [*plain(4), _line(4, [12], [1] * 12, seconds=[9.0], texts=["ERROR"])]
    row = scored(tmp_path, vanilla=baseline, quick=fast)["quick"]
    assert (row.n_questions, row.n_left_out) == (4, 1) and row.speedup == pytest.approx(3)


def test_tau_is_counted_the_same_way_whatever_a_file_counts_as_a_step(tmp_path: Path) -> None:
    """Twelve tokens in four steps, and the first one apart: with the bonus, without it, and with tokens cut off."""
    files = {
        "apart": [_line(q, [13], [3] * 4) for q in range(5)],
        "bonus": [_line(q, [13], [2] * 4) for q in range(5)],
        "over": [_line(q, [13], [3] * 4) for q in range(4)] + [_line(4, [13], [3, 3, 3, 6])],
        "inside": [_line(q, [12], [3] * 4) for q in range(5)],
    }
    rows = scored(tmp_path, ar=plain(5), **files)
    assert {name: row.mean_acceptance_length for name, row in rows.items()} == pytest.approx(
        dict.fromkeys(files, 3.0) | {"ar": 1.0}
    )
    assert rows["bonus"].mean_accept_lengths == 2 and rows["bonus"].bonus_left_out and not rows["apart"].bonus_left_out
    assert rows["over"].beyond == 3 and rows["over"].mean_accept_lengths == pytest.approx(63 / 20)
    assert [rows[name].first_apart for name in ("apart", "bonus", "over", "inside", "ar")] == [True] * 3 + [False] * 2
    reported = "\n".join(limitations(list(rows.values())))
    assert (
        "bonus: accept_lengths leave out the bonus token" in reported and "over: 3 tokens in accept_lengths" in reported
    )
    assert "The first token belongs to no step in apart, bonus, over" in reported
    assert "Longest answers, in tokens, which limits may have cut: ar 12, apart 13" in reported


def _with(lines: list[str], *without: str, **more: list[int]) -> list[str]:
    """The lines with other fields in their choices, and without a category."""
    made = [json.loads(line) for line in lines]
    for line in made:
        line["choices"] = [{k: v for k, v in one.items() if k not in without} | more for one in line["choices"]]
    return [json.dumps({key: value for key, value in line.items() if key != "category"}) for line in made]


def test_files_of_eagle_and_medusa_have_the_index_of_the_last_step(tmp_path: Path) -> None:
    """And files of scripts without counters have no τ, but a speedup."""
    lines, counters = [_line(q, [12], [], seconds=[0.6]) for q in range(5)], ("decoding_steps", "accept_lengths")
    files = {"ea": _with(lines, *counters, idxs=[3]), "silent": _with(lines, *counters)}
    rows = scored(tmp_path, baseline=_with(plain(5), *counters, idxs=[11]), **files)
    assert [row.mean_acceptance_length for row in rows.values()] == [1, 3, None]
    assert rows["ea"].speedup == rows["silent"].speedup == pytest.approx(2)
    notes = "\n".join(limitations(list(rows.values())))
    assert "silent: no τ" in notes and "bonus" not in notes and "belongs to no step" not in notes


@pytest.mark.parametrize(
    ("line", "stated"),
    [
        (_with(plain(1), "wall_time")[0], "no `wall_time`"),
        ('{"question_id": 1, "choices": [{"turns": [1]}]}', "turns"),
        ('{"question_id": 1', "not JSON"),
        ('{"question_id": 1}', "choices"),
    ],
)
def test_what_is_no_answer_file_is_refused_by_its_field(tmp_path: Path, line: str, stated: str) -> None:
    with pytest.raises(UserError, match=stated) as error:
        scored(tmp_path, ar=[line])
    assert "\n" not in str(error.value) and "Expected" not in str(error.value) and "$" not in str(error.value)


def test_texts_are_compared_and_other_counts_of_the_same_text_reported(tmp_path: Path) -> None:
    lines = [_line(q, [12], [3] * 4) for q in range(4)] + [
        _line(4, [15], [3] * 5),
        _line(5, [12], [3] * 4, texts=["?"]),
    ]
    row = scored(tmp_path, ar=plain(6), m=lines)["m"]
    assert (row.n_turns, row.n_same_text, row.n_other_count) == (6, 5, 1)


def test_the_last_line_of_a_question_counts_and_the_terminal_shows_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [_line(0, [12], [12], seconds=[99.0]), *(_line(q, [12], [3] * 4, seconds=[0.6]) for q in range(5))]
    assert scored(tmp_path, ar=plain(5), m=lines)["m"].speedup == pytest.approx(2)
    capsys.readouterr()
    files = [str(tmp_path / name) for name in ("ar.jsonl", "m.jsonl")]
    assert main(["import-specbench", *files]) == 0
    reported = capsys.readouterr().out
    assert "2.00×" in reported and "5 of 5" in reported and "The files do not contain" in reported
    assert main(["import-specbench", *files, "--baseline", "m.jsonl", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][1]["speedup"] == pytest.approx(0.5)


@pytest.mark.parametrize("form", ["specbench", "csv", "parquet"])
def test_links_in_the_folder_are_replaced_and_not_followed(make_run: MakeRun, tmp_path: Path, form: str) -> None:
    run, victim = make_run(labels=("ar", "ss"), questions=1), tmp_path / "victim"
    victim.write_text("mine")
    assert main(["export", str(run), "--form", form]) == 0
    files = [*(run / form).iterdir()]
    for file in files:
        file.unlink()
        for link in (file, file.with_name(f"{file.name}.tmp")):
            link.symlink_to(victim)
    assert main(["export", str(run), "--form", form]) == 0
    assert victim.read_text() == "mine" and not any(file.is_symlink() for file in files)
