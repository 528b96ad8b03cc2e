"""Several processes: each takes its share of every batch, and together they learn what one would of the whole."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from specbench_ss.cli.main import main
from specbench_ss.engine.target import Target
from specbench_ss.methods.block_drafters.train import (
    DFlashTrainer,
    DFlashTraining,
    DSparkTrainer,
    DSparkTraining,
    PEagleTrainer,
    PEagleTraining,
)
from specbench_ss.methods.eagle.train import Eagle3Trainer, Eagle3TrainOptions, EagleTrainer
from specbench_ss.methods.hydra.train import HydraTrainer, HydraTraining
from specbench_ss.methods.medusa.train import JointTraining, Medusa2Trainer, MedusaTrainer, MedusaTraining
from specbench_ss.methods.mtp.train import MTPTrainer
from specbench_ss.methods.sd.train import DraftOptions, DraftTrainer
from specbench_ss.methods.space.train import MaskOptions, SPACETrainer
from specbench_ss.methods.ss.config import StreamConfig
from specbench_ss.methods.ss.train import SharedTrainer, StreamsTrainer
from specbench_ss.methods.uno.train import UNOTrainer, UNOTraining
from specbench_ss.storage import cache_folder
from specbench_ss.training import losses
from specbench_ss.training.batch import Batch, base_states
from specbench_ss.training.data import TrainingRows
from specbench_ss.training.distributed import DistributedContext
from specbench_ss.training.loop import Budget, DrafterLoop, PackedText
from specbench_ss.training.trainer import DrafterTrainer
from tests.methods.decoders import randomise
from tests.methods.train.tokenizers_made import made_tokenizer
from tests.tiny import few, thorough, tiny_model

SHARED = StreamConfig(3, 2, adapter_rank=0, mode="shared", lora_rank=4, main_attends_streams=True)
TRAINERS: dict[str, Callable[[Target], DrafterTrainer]] = {
    "streams": lambda target: StreamsTrainer(target, StreamConfig(gamma=3, n_msa_layers=2)),
    "shared": lambda target: SharedTrainer(target, SHARED),
    "medusa": lambda target: MedusaTrainer(target, MedusaTraining(3)),
    "medusa2": lambda target: Medusa2Trainer(target, JointTraining(3, lora_rank=4, ramp=0)),
    "hydra": lambda target: HydraTrainer(target, HydraTraining(3, layers=1, prefix=False)),
    "hydra++": lambda target: HydraTrainer(target, HydraTraining(3, layers=1)),
    "dflash": lambda target: DFlashTrainer(target, DFlashTraining(layers=2, block_size=4)),
    "dspark": lambda target: DSparkTrainer(target, DSparkTraining(layers=1, block_size=3, markov_kind="rnn")),
    "uno": lambda target: UNOTrainer(target, UNOTraining(rank=2, block=3)),
    "eagle": lambda target: EagleTrainer(target, levels=3),
    "eagle3": lambda target: Eagle3Trainer(target, Eagle3TrainOptions(3, 61)),
    "mtp": lambda target: MTPTrainer(target),
    "peagle": lambda target: PEagleTrainer(target, PEagleTraining(depths=3, draft_vocab=50)),
    "space": lambda target: SPACETrainer(target, MaskOptions(3, 4)),
    "draft": lambda target: DraftTrainer(target, DraftOptions(1, 32, 2, gamma=3, distill=True, distill_share=0.5)),
}


def uneven() -> PackedText:
    """Four rows of one conversation each, with answers of 2 to 23 tokens."""
    lengths = (9, 30, 12, 28)
    ids = np.random.default_rng(0).integers(3, 61, (4, 32)).astype(np.int32)
    places = np.arange(32)[None].repeat(4, 0)
    inside = places < np.array(lengths)[:, None]
    mask = inside & (places >= np.array([7, 7, 7, 20])[:, None])
    assert 4 * mask[::2].sum() < mask[1::2].sum()
    return PackedText(TrainingRows(ids, mask, np.where(inside, 0, -1).astype(np.int32)))


def learnt(target: Target, trainee: DrafterTrainer, batch: Batch) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(loss and shares, gradients)."""
    trainee.module.zero_grad(set_to_none=True)
    states = base_states(target, batch.ids, trainee.aux_hidden_state_layers, trainee.kv_from, batch.documents)
    loss, right = trainee.loss(states, batch)
    loss.backward()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in trainee.module.parameters()]
    return [loss.detach(), right.float()], grads


@few(5)
@pytest.mark.parametrize("kind", TRAINERS)
def test_shares_of_a_batch_add_up_to_it(kind: str) -> None:
    target = Target(tiny_model("llama"))
    torch.manual_seed(0)
    trainee = TRAINERS[kind](target)
    if kind != "draft":
        randomise(trainee.module, 1)
    batch = uneven().chosen(np.arange(4), Budget(1, 4, 16, 3), np.random.default_rng(0))
    whole = learnt(target, trainee, batch)
    shares = [learnt(target, trainee, batch.rows(slice(i, None, 2))) for i in (0, 1)]
    assert max(g.abs().max() for g in whole[1]) > 1e-3
    for part in (0, 1):
        for name, one, a, b in zip(range(99), whole[part], shares[0][part], shares[1][part], strict=False):
            torch.testing.assert_close(a + b, one, atol=1e-5, rtol=1e-4, msg=f"{kind} {part} {name}")


@pytest.mark.parametrize("kind", ["dflash", "dspark", "eagle3", "peagle"])
def test_logits_that_are_computed_again_change_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(tiny_model("llama"))
    torch.manual_seed(0)
    trainee = TRAINERS[kind](target)
    randomise(trainee.module, 1)
    batch = uneven().chosen(np.arange(4), Budget(1, 4, 16, 3), np.random.default_rng(0))
    kept = learnt(target, trainee, batch)
    monkeypatch.setattr(losses, "MAX_LOGITS", 0)
    calls = []
    monkeypatch.setattr(losses, "checkpoint", lambda *given, **how: calls.append(1) or checkpoint(*given, **how))
    torch.testing.assert_close(learnt(target, trainee, batch), kept)
    assert calls


def test_kept_out_rows_count_by_their_tokens(tmp_path: Path) -> None:
    target, text, found = Target(tiny_model("llama")), uneven(), []
    machine = DistributedContext(target.device, exact=True)
    for rows in (1, 3, 4):  # however many are judged at a time
        torch.manual_seed(0)
        trainee, folder = TRAINERS["draft"](target), tmp_path / str(rows)
        loop = DrafterLoop(target, [trainee], text, Budget(1, rows, 16, 3), folder, machine, validation=text)
        (outcome,) = loop.evaluate().values()
        found.append([outcome.loss, *outcome.top1_accuracy])
    assert found[0] == pytest.approx(found[2], rel=1e-5) == found[1]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


COMMANDS = {
    "ss": ["ss", "--gamma", "2", "--n-msa-layers", "2"],
    "shared": ["ss", "--gamma", "2", "--n-msa-layers", "2", "--mode", "shared", "--lora-rank", "2"],
    "medusa": ["medusa", "--heads", "2"],
    "draft": ["draft", "--hidden", "32", "--layers", "1", "--distill"],
}


@thorough
@pytest.mark.slow
def test_two_processes_learn_what_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "native").symlink_to(cache_folder() / "native")  # else both compile the kernels
    monkeypatch.setenv("SSBENCH_CACHE", str(tmp_path / "cache"))
    tokenizer = made_tokenizer("gpt", "chatml")
    tiny_model("llama", vocab=len(tokenizer)).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    rows = [{"prompt": f"What is {i} and 3?", "completion": "It is " + "so " * (i % 7) ** 2 + "."} for i in range(24)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def command(kind: str, name: str, steps: int = 1) -> list[str]:
        common = ["--model", str(tmp_path / "model"), "--data", str(tmp_path / "chats.jsonl"), "--device", "cpu"]
        common += ["--length", "64", "--batch-size", "4", "--eval-fraction", "0.3", "--dtype", "float32"]
        return ["train", *COMMANDS[kind], *common, "--steps", str(steps), "--out", str(tmp_path / name)]

    launched = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    script = [sys.executable, str(Path(__file__).with_name("two_processes.py"))]
    plain, sharded = [command(kind, f"{kind}-2") for kind in COMMANDS], ("ss", "medusa")
    commands = [*plain, *(command(kind, f"{kind}-sharded") for kind in sharded), command("ss", "cut", 3)]
    done = subprocess.run(
        [*script, json.dumps(commands)],
        env=launched,
        capture_output=True,
        text=True,
        timeout=300,
        start_new_session=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("2 processes") == 7  # the first process alone speaks
    assert torch.load(tmp_path / "cut" / "checkpoint.pt", weights_only=True)["step"] == 1  # both stopped
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *_: None)
    for kind in COMMANDS:
        assert main(command(kind, f"{kind}-1")) == 0
        assert_alike(tmp_path / f"{kind}-2", tmp_path / f"{kind}-1")
    for kind in sharded:
        assert_alike(tmp_path / f"{kind}-sharded", tmp_path / f"{kind}-1")


def assert_alike(found: Path, expected: Path) -> None:
    """The step's line, and the gradients, which Adam's first moments are a tenth of."""
    two, one = (json.loads((out / "training.jsonl").read_text()) for out in (found, expected))
    for name in ("loss", "top1_accuracy", "validation_loss", "validation_accuracy"):
        assert two[name] == pytest.approx(one[name], rel=1e-4), (found.name, name)
    moments, wanted = (gradients(out / "checkpoint.pt") for out in (found, expected))
    for number, tensor in wanted.items():
        scale = float(tensor.abs().max())
        torch.testing.assert_close(moments[number], tensor, atol=1e-5 * scale, rtol=1e-3, msg=f"{found.name} {number}")


def gradients(checkpoint: Path) -> dict[int, torch.Tensor]:
    state: dict[int, Any] = torch.load(checkpoint, weights_only=True)["optimizers"][0]["state"]
    return {number: values["exp_avg"] for number, values in state.items()}
