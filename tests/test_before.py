"""What earlier versions wrote still loads: tests/before has a run directory, a preset, a checkpoint and weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from specbench_ss.cli import main
from specbench_ss.decoding.loop import Limits, generate
from specbench_ss.decoding.sampling import Sampling
from specbench_ss.methods.ar import Autoregressive
from specbench_ss.methods.ss.decoding import SpeculativeStreaming
from specbench_ss.methods.ss.options import SSOptions
from specbench_ss.models.loading import load_target
from specbench_ss.results.summary import summarise
from specbench_ss.runs.preset import read_preset
from specbench_ss.runs.run_directory import ROWS, SAMENESS, STEPS, read_run

BEFORE = Path(__file__).parent / "before"
RUN = ["run", "--methods", "pld,ss", "--suite", "specbench", "--categories", "translation,qa", "--limit", "1"]
TRAIN = [
    "train",
    "ss",
    "--length",
    "96",
    "--batch-size",
    "2",
    "--anchors",
    "16",
    "--eval-fraction",
    "0.2",
    "--device",
    "cpu",
]


def test_a_run_directory_is_read_and_reported(tmp_path: Path) -> None:
    run = read_run(BEFORE / "run")
    assert (len(run.rows), len(run.steps), len(run.sameness)) == (6, 52, 4)
    assert all(row.ok for row in run.rows) and run.manifest["status"] == "complete"
    assert {row.method: round(row.tau or 0, 2) for row in summarise(run)[:3]} == {"ar": 1.0, "pld": 1.16, "ss": 2.0}
    assert main(["report", str(BEFORE / "run"), "--out", str(tmp_path / "report.html")]) == 0
    assert (tmp_path / "report.html").stat().st_size


def test_an_unfinished_run_is_resumed(tmp_path: Path) -> None:
    out = shutil.copytree(BEFORE / "run", tmp_path / "run")
    lines = (out / ROWS).read_text().splitlines(keepends=True)
    last = {name: json.loads(lines[-1])[name] for name in ("question_id", "turn", "method", "repeat")}
    (out / ROWS).write_text("".join(lines[:-1]))
    (out / SAMENESS).write_text("")
    begun = read_run(out)
    assert main([*RUN, "--max-new-tokens", "12", "--warmup", "1", "--out", str(out), "--resume"]) == 0
    done = read_run(out)
    assert [row.as_dict() for row in done.rows[:5]] == [row.as_dict() for row in begun.rows]
    made_again = {name: done.rows[5].as_dict()[name] for name in last}
    assert made_again == last and done.rows[5].token_ids == json.loads(lines[-1])["token_ids"]
    assert (out / STEPS).stat().st_size and len(done.sameness) == 4


def test_a_preset_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    file = BEFORE / "pld-lab-cpu.yaml"
    assert read_preset(file).method == "pld"
    assert main(["run", "--methods", "pld", "--preset", str(file), "--limit", "1", "--dry-run"]) == 0
    assert "preset     " in capsys.readouterr().out


def test_a_training_goes_on_from_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSBENCH_CACHE", str(tmp_path / "cache"))
    for name in ("base", "training"):
        shutil.copytree(BEFORE / name, tmp_path / name)
    shutil.copy(BEFORE / "chats.jsonl", tmp_path)
    monkeypatch.chdir(tmp_path)  # the checkpoint is of a training on `base` and `chats.jsonl`
    how = ["--steps", "6", "--save-every", "3", "--gamma", "2", "--n-msa-layers", "1"]
    assert main([*TRAIN, *how, "--model", "base", "--data", "chats.jsonl", "--out", "training"]) == 0
    steps = [json.loads(line)["step"] for line in (tmp_path / "training" / "training.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5, 6]
    assert (
        (tmp_path / "training" / "training.jsonl")
        .read_text()
        .startswith((BEFORE / "training" / "training.jsonl").read_text())
    )
    whole, resumed = (load_file(f / "model.safetensors") for f in (BEFORE / "streams", tmp_path / "training"))
    for name, tensor in whole.items():  # another processor may round otherwise
        torch.testing.assert_close(resumed[name], tensor, rtol=1e-2, atol=1e-3)


def test_weights_decode() -> None:
    target = load_target(str(BEFORE / "base"), dtype="float32", device="cpu")
    decoder = SpeculativeStreaming.load(target, SSOptions(weights=str(BEFORE / "streams")))
    answers = [generate(d, [5, 6, 7, 8], Limits(24), Sampling()).tokens for d in (decoder, Autoregressive(target))]
    assert answers[0] == answers[1]
