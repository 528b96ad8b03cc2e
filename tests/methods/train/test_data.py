"""Rows from a user's conversations: nothing lost unreported, nothing seen twice, made once, whole or not at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lab.training import completion_mask, special_ids
from specbench_ss.conversations import read_conversation
from specbench_ss.errors import UserError
from specbench_ss.training import data as loading
from specbench_ss.training.chat_format import Rendered, Renderer
from specbench_ss.training.data import (
    TrainingRows,
    TrainingText,
    load_rows,
    pack_documents,
    plan_rows,
    positions,
)
from tests.methods.train.tokenizers_made import made_tokenizer
from tests.tiny import thorough

PUBLIC = Path(__file__).parents[4] / "shared" / "data"


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def simple(count: int) -> list[dict[str, str]]:
    return [{"prompt": f"What is {i} and {i}?", "completion": f"It is {2 * i}. " * (1 + i % 4)} for i in range(count)]


def load(tmp_path: Path, rows: list[Any], length: int = 96, **how: Any) -> TrainingText:
    stated: list[str] = how.pop("stated", [])
    file = write(tmp_path / "data.jsonl", rows)
    return load_rows(file, made_tokenizer("lab", ""), length, cache=tmp_path / "cache", log=stated.append, **how)


def documents(rows: TrainingRows) -> list[tuple[tuple[int, ...], tuple[bool, ...]]]:
    """Every document's ids and mask."""
    found = []
    for ids, mask, numbers in zip(rows.ids, rows.mask, rows.documents, strict=True):
        for number in range(numbers.max() + 1):
            mine = numbers == number
            found.append((tuple(ids[mine].tolist()), tuple(mask[mine].tolist())))
    return found


# -- rows ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 3, 64])
def test_a_plan_has_every_document_that_fits_once_and_no_row_overflows(window: int) -> None:
    lengths = np.random.default_rng(0).integers(1, 24, 300).tolist()
    plan = plan_rows(lengths, 16, window)
    assert sorted(i for row in plan for i in row) == [i for i, n in enumerate(lengths) if n <= 16]
    assert all(sum(lengths[i] for i in row) <= 16 for row in plan)
    firsts = [row[0] for row in plan]
    assert firsts == sorted(firsts)  # the oldest that waits opens a row


def test_the_plan_is_the_one_that_the_lab_was_trained_with() -> None:
    assert plan_rows([5, 12, 3, 9, 4, 16, 8, 17, 1, 7], 16) == [[0, 3, 8], [1, 4], [2, 6], [5], [9]]
    assert plan_rows([5, 12, 3, 9, 4, 16, 8, 17, 1, 7], 16, window=2) == [[0, 2], [1, 4], [3], [5], [6, 9, 8]]


def test_packing_fills_rows_better_than_laying_out_in_order() -> None:
    lengths = np.random.default_rng(0).integers(10, 60, 400).tolist()
    in_order = len(plan_rows(lengths, 64, window=1))
    assert len(plan_rows(lengths, 64)) < 0.8 * in_order
    assert plan_rows([], 16) == plan_rows([17], 16) == []


def test_documents_have_their_own_positions() -> None:
    numbers = np.array([[0, 0, 0, 1, 1, -1, -1], [0, 0, 0, 0, 0, 0, 0]], np.int32)
    assert positions(numbers).tolist() == [[0, 1, 2, 0, 1, 0, 1], [0, 1, 2, 3, 4, 5, 6]]


def test_ids_masks_and_numbers_are_laid_out_alike() -> None:
    rng = np.random.default_rng(0)
    made = []
    for _ in range(60):
        n = int(rng.integers(4, 20))
        made.append(Rendered(rng.integers(1, 99, n).astype(np.int32), ((1, 2), (3, n))))
    rows = pack_documents(made, 24, pad=0)
    assert sorted(documents(rows)) == sorted((tuple(d.ids.tolist()), tuple(d.mask.tolist())) for d in made)
    assert not rows.mask[rows.documents < 0].any() and not rows.ids[rows.documents < 0].any()


# -- from data to rows --------------------------------------------------------------------------------------------


def test_every_conversation_is_in_one_row_of_one_side(tmp_path: Path) -> None:
    stated: list[str] = []
    given = simple(300)
    text = load(tmp_path, given, eval_fraction=0.1, stated=stated)
    renderer = Renderer(made_tokenizer("lab", ""))
    for kept_out, rows in ((False, text.train), (True, text.validation)):
        talks = [read_conversation("", row) for row in given]
        expected = [renderer.render(t.messages) for t in talks if t.in_validation(0.1) is kept_out]
        assert sorted(documents(rows)) == sorted((tuple(d.ids.tolist()), tuple(d.mask.tolist())) for d in expected)
        assert rows.counts.documents == rows.counts.conversations == len(expected) > 10
        assert rows.counts.tokens == sum(len(d.ids) for d in expected)
        assert rows.counts.completion_tokens == sum(int(d.mask.sum()) for d in expected)
        assert (rows.ids.dtype, rows.mask.dtype) == (np.int32, np.bool_)
    assert len(stated) == 1 and f"text: {text.train.counts.documents} conversations" in stated[0]


def test_a_stored_mask_has_gaps_between_completions_of_neighbours(tmp_path: Path) -> None:
    text = load(tmp_path, simple(60))
    special = special_ids(made_tokenizer("lab", ""))
    for ids, mask in zip(text.train.ids, text.train.mask, strict=True):
        assert np.array_equal(mask, completion_mask(ids, special))
        ends = np.flatnonzero(mask[:-1] & (ids[:-1] == special["eos"]))
        assert not mask[ends + 1].any()


def test_what_does_not_fit_is_cut_or_dropped_and_counted(tmp_path: Path) -> None:
    short = {"prompt": "Hi?", "completion": "Hello."}
    turns = [short["prompt"], short["completion"], "And then?", "word " * 200]
    long_talk = {"messages": [{"role": ("user", "assistant")[i % 2], "content": t} for i, t in enumerate(turns)]}
    given = [
        short,
        long_talk,  # ends behind its first answer
        {"prompt": "Hi?", "completion": "word " * 200},  # cut inside the only answer
        {"prompt": "word " * 200, "completion": "Hello."},  # no answer within a row
        {"messages": [{"role": "user", "content": "Hi?"}]},
        {"messages": [{"role": "assistant", "content": "So."}, *long_talk["messages"][:2]]},
    ]
    stated: list[str] = []
    rows = load(tmp_path, given, length=48, eval_fraction=0.0, stated=stated).train
    counts = rows.counts
    assert (counts.conversations, counts.documents) == (6, 4)
    assert (counts.cut, counts.too_long, counts.unanswered, counts.out_of_order) == (2, 1, 1, 1)
    for part in ("4 of 6 conversations", "2 cut to a row", "1 dropped as too long", "1 dropped without an answer",
                 "1 with turns out of order"):  # fmt: skip
        assert part in stated[0]
    assert "\n" not in stated[0]
    found = documents(rows)
    whole = Renderer(made_tokenizer("lab", "")).render(long_talk["messages"][:2])
    assert found.count((tuple(whole.ids.tolist()), tuple(whole.mask.tolist()))) == 3
    assert max(len(ids) for ids, _ in found) == 48


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([], "data.jsonl: no conversations"),
        ([{"messages": [{"role": "user", "content": "a"}]}], "data.jsonl: no completion"),
        ([{"prompt": "word " * 200, "completion": "a"}], "no conversation is left for training: .*1 dropped as too"),
        (
            [{"prompt": "a", "completion": "b"}, *[{"prompt": "a"}] * 2],
            "jsonl:2: .*no column 'completion'.*; 2 of 3",
        ),
    ],
)
def test_data_of_no_use_is_one_line(rows: list[Any], problem: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=problem):
        load(tmp_path, rows, eval_fraction=0.0)
    assert not [p for p in (tmp_path / "cache").iterdir() if not p.name.endswith((".lock", ".work"))]


# -- kept on disk -------------------------------------------------------------------------------------------------


def test_rows_are_made_once_and_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load(tmp_path, simple(40), eval_fraction=0.0)
    monkeypatch.setattr(loading, "_build", lambda *_: pytest.fail("made again"))
    again = load(tmp_path, simple(40), eval_fraction=0.0)
    assert isinstance(again.train.ids, np.memmap)
    assert np.array_equal(first.train.ids, again.train.ids) and first.train.counts == again.train.counts
    assert again.validation.ids.shape == (0, 96)


def test_whatever_matters_makes_other_rows(tmp_path: Path) -> None:
    def keys() -> set[str]:
        return {p.name for p in (tmp_path / "cache").iterdir() if p.is_dir()}

    known: set[str] = set()
    changes: list[dict[str, Any]] = [
        {}, {"rows": simple(41)}, {"length": 64}, {"seed": 1}, {"eval_fraction": 0.5},
        {"columns": {"prompt": "prompt"}},
    ]  # fmt: skip
    for change in changes:
        load(tmp_path, **{"rows": simple(40), **change})
        assert len(keys() - known) == 1, change
        known = keys()
    tokenizers = [made_tokenizer("gpt", "vicuna"), made_tokenizer("gpt", "llama-2"), made_tokenizer("llama", "vicuna")]
    for tokenizer in tokenizers:
        load_rows(tmp_path / "data.jsonl", tokenizer, 256, cache=tmp_path / "cache", log=lambda _: None)
        assert len(keys() - known) == 1
        known = keys()
    load(tmp_path, simple(40))
    assert keys() == known


def test_the_seed_orders_and_changes_nothing_else(tmp_path: Path) -> None:
    one, two = (load(tmp_path, simple(80), seed=seed).train for seed in (0, 1))
    assert not np.array_equal(one.ids, two.ids)
    assert sorted(documents(one)) == sorted(documents(two))


def test_damaged_rows_are_one_line(tmp_path: Path) -> None:
    load(tmp_path, simple(40))
    (file,) = (tmp_path / "cache").glob("*/train-ids.npy")
    for size in (file.stat().st_size // 2, 0):
        os.truncate(file, size)
        with pytest.raises(UserError, match="the training rows in .* are damaged .*; remove that folder"):
            load(tmp_path, simple(40))


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(UserError, match="cannot store training rows in"):
        load(tmp_path, simple(4))


KILLED = """
import os, signal, sys
from pathlib import Path
import numpy as np
from specbench_ss.training.data import load_rows
from tests.methods.train.tokenizers_made import made_tokenizer
for argument in sys.argv[1:]:
    folder = Path(argument)
    if not os.fork():
        break
    assert os.waitstatus_to_exitcode(os.wait()[1]) == -signal.SIGKILL
else:
    sys.exit()
writes = int(folder.name)
save, count = np.save, 0
def half(file, array):
    global count
    save(file, array)
    count += 1
    if count == writes:
        file.truncate(file.tell() // 2)
        os.kill(os.getpid(), signal.SIGKILL)
np.save = half
load_rows(folder / "data.jsonl", made_tokenizer("lab", ""), 96, cache=folder / "cache")
"""


@thorough
def test_killed_in_the_middle_of_writing_nothing_is_there_and_the_next_one_makes_it(tmp_path: Path) -> None:
    """In the middle of the first file, and of the sixth: of two processes that share what they import."""
    folders = [tmp_path / writes for writes in ("1", "6")]
    for folder in (*folders, tmp_path / "whole"):
        folder.mkdir()
        write(folder / "data.jsonl", simple(40))
    command = [sys.executable, "-c", KILLED, *map(str, folders)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(command, env=environment, capture_output=True, cwd=Path(__file__).parents[3])
    assert ended.returncode == 0, ended.stderr.decode()
    whole = load(tmp_path / "whole", simple(40)).train.ids
    for folder in folders:
        assert {p.suffix for p in (folder / "cache").iterdir()} == {".lock", ".tmp", ".work"}
        assert np.array_equal(load(folder, simple(40)).train.ids, whole)
        assert {p.suffix for p in (folder / "cache").iterdir()} == {".lock", ""}


# -- public data --------------------------------------------------------------------------------------------------


def public(name: str) -> Path:
    path = PUBLIC / name
    if not path.exists():
        pytest.skip(f"no public data at {path}")
    return path


def test_gsm8k_by_its_own_column_names(tmp_path: Path) -> None:
    path = public("gsm8k/train.jsonl")
    columns = {"prompt": "question", "completion": "answer"}
    few = write(tmp_path / "few.jsonl", [json.loads(line) for line in path.read_text().split("\n")[:400]])
    tokenizer = made_tokenizer("gpt", "vicuna")
    text = load_rows(few, tokenizer, 2048, columns=columns, cache=tmp_path, eval_fraction=0.1, log=lambda _: None)
    assert text.train.counts.documents + text.validation.counts.documents == 400
    asked = {json.loads(line)["answer"] for line in few.read_text().splitlines()}
    for rows in (text.train, text.validation):
        for ids, mask in documents(rows):
            stated = tokenizer.decode([i for i, inside in zip(ids, mask, strict=True) if inside])
            assert stated.removesuffix("</s>").removeprefix(" ") in asked


def test_dialogsum_and_mt_bench_as_they_are(tmp_path: Path) -> None:
    columns = {"prompt": "dialogue", "completion": "summary"}
    tokenizer, how = made_tokenizer("gpt", "chatml"), {"cache": tmp_path, "log": lambda _: None}
    text = load_rows(public("dialogsum/dialogsum.dev.jsonl"), tokenizer, 2048, columns=columns, **how)
    assert text.train.counts.documents + text.validation.counts.documents == 500
    with pytest.raises(UserError, match=r"question\.jsonl:1: 'turns' has no answers"):
        load_rows(public("mt_bench/question.jsonl"), tokenizer, 2048, **how)


def test_tokens_of_completions_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "COUNTED_ROWS", 2)
    ids, mask = np.array([[1, 2, 2], [2, 4, 0], [4, 4, 4]], np.int32), np.array([[0, 1, 1], [1, 1, 0], [0, 0, 1]], bool)
    assert TrainingRows(ids, mask, np.zeros_like(ids)).completion_counts(6).tolist() == [0, 0, 3, 0, 2, 0]
