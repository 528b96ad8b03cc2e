"""Several processes: each takes its share of every batch, and all learn what one would of the mean of their losses."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from specbench_ss.cli import main
from specbench_ss.methods.together import Machine
from specbench_ss.methods.train.processes import Processes
from specbench_ss.methods.training import Batch
from tests.methods.train.tokenizers_made import made_tokenizer
from tests.tiny import tiny_model


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@pytest.mark.slow
def test_two_processes_and_a_shared_out_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSBENCH_CACHE", str(tmp_path / "cache"))
    tokenizer = made_tokenizer("gpt", "chatml")
    tiny_model("llama", vocab=len(tokenizer)).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    rows = [{"prompt": f"What is the sum of {i} and 3?", "completion": f"The answer is {i + 3}."} for i in range(24)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["train", "ss", "--model", str(tmp_path / "model"), "--data", str(tmp_path / "chats.jsonl")]
    command += ["--length", "64", "--batch-size", "4", "--steps", "2", "--gamma", "2", "--n-msa-layers", "2"]
    command += ["--device", "cpu", "--eval-fraction", "0"]
    outs = [str(tmp_path / name) for name in ("plain", "sharded")]
    script = str(Path(__file__).with_name("two_processes.py"))
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(free_port())]
    done = subprocess.run([*launch, script, *outs, *command], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("2 processes") == 2  # the first process alone speaks
    plain, sharded = (torch.load(Path(out) / "checkpoint.pt", weights_only=True)["modules"][0] for out in outs)
    for name, tensor in plain.items():
        torch.testing.assert_close(sharded[name], tensor, atol=1e-6, rtol=1e-5, msg=name)
    losses = []
    for i in (0, 1):  # the shares by hand: at the first step the weights are still the same

        def share(self: Machine, batch: Batch, i: int = i) -> Batch:
            return batch.rows(slice(i, None, 2))

        with monkeypatch.context() as patch:
            patch.setattr(Processes, "share", share)
            assert main([*command, "--out", str(tmp_path / f"share-{i}")]) == 0
        losses.append(first_loss(tmp_path / f"share-{i}"))
    assert losses[0] != losses[1]
    assert first_loss(tmp_path / "plain") == pytest.approx(sum(losses) / 2, rel=1e-5)


def first_loss(out: Path) -> float:
    return float(json.loads((out / "training.jsonl").read_text().splitlines()[0])["loss"])
