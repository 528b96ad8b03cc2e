"""DSpark's training: the published loss, computed again place by place, on what decoding drafts from."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from specbench_ss.engine.decoder import DecodeState
from specbench_ss.engine.generate import StopParams, generate
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.target import Target
from specbench_ss.methods.ar import Autoregressive
from specbench_ss.methods.block_drafters.dspark import new_drafter, random_drafter
from specbench_ss.methods.block_drafters.dspark_decode import DSpark, DSparkOptions
from specbench_ss.methods.block_drafters.train import DSparkTrainer, DSparkTraining
from specbench_ss.training.batch import base_states
from specbench_ss.training.loop import Budget, DrafterLoop
from tests.methods.batches import batch_of, text_of
from tests.tiny import few, thorough, tiny_model

B = 4
SHAPES: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "gated": {"kind": "gated"},
    "rnn, fewer words": {"kind": "rnn", "draft_vocab": 40},
    "no Markov head": {"rank": 0},
}


def states_in_decoding(target: Target, trainer: DSparkTrainer, ids: Tensor, root: int) -> Tensor:
    """The block's states [B, h] when decoding has decided ids [1, root + 1]."""
    decoder = DSpark(target, DSparkOptions(), copy.deepcopy(trainer.module))
    with torch.inference_mode():
        state = DecodeState(
            ids[0, : root + 1].tolist(), root, ids[0, root : root + 1], target.new_cache(60), SamplingParams()
        )
        decoder.prefill(state, ids[:, :root])
        decoder.on_prefill(state)
        return decoder.block_states(state)


LOSSES = [
    *((shape, "published") for shape in SHAPES),
    ("vanilla", "kl"),
    ("rnn, fewer words", "ce"),
    ("vanilla", "tv"),
    ("rnn, fewer words", "kl"),
]


@few(4)
@pytest.mark.parametrize(("shape", "kind"), LOSSES)
@torch.no_grad()
def test_the_loss_is_the_published_one(shape: str, kind: Any) -> None:
    """0.1 CE + 0.9 L1 + BCE of the confidence, or another loss for the first two; weights exp(-k / 4)."""
    target = Target(tiny_model("llama"))
    trainer = DSparkTrainer(target, DSparkTraining(loss=kind), 1e-3, random_drafter(target, **SHAPES[shape]))
    ids = torch.randint(3, 61, (1, 12), generator=torch.Generator().manual_seed(3))
    anchors = [2, 6, 9]
    batch = batch_of(ids, torch.tensor([anchors]), ahead=B)
    states = base_states(target, ids, trainer.aux_hidden_state_layers, None, None)
    loss, right = trainer.loss(states, batch)
    drafter = trainer.module
    words = list(range(61)) if drafter.vocab_ids is None else drafter.vocab_ids.tolist()
    total = weight = 0.0
    hits: list[list[bool]] = [[] for _ in range(B)]
    for t in anchors:
        rows = states_in_decoding(target, trainer, ids, t + 1).clone()
        memory = drafter.correction.start(rows[:1])
        for k in range(min(B, 12 - t - 2)):
            before, label = ids[:, t + 1 + k], int(ids[0, t + 2 + k])
            unary = drafter.logits(rows[k : k + 1], target)
            logits, memory = drafter.correction.step(unary, rows[k : k + 1], before, memory)
            q = torch.zeros(61).index_put((torch.tensor(words),), logits[0].softmax(-1))
            p = target.logits(states.final[0, t + 1 + k]).softmax(-1)
            ce, l1 = -float(q[label].log()) if label in words else 0.0, float((p - q).abs().sum())
            kl = -float((p[words] / p[words].sum() * logits[0].log_softmax(-1)).sum()) if label in words else 0.0
            losses = {"published": 0.1 * ce + 0.9 * l1, "ce": ce, "tv": 0.5 * l1, "kl": kl}
            alpha = torch.tensor([1 - 0.5 * l1])
            bce = float(F.binary_cross_entropy_with_logits(drafter.confidence(rows[k : k + 1], before), alpha))
            total += math.exp(-k / 4) * (losses[kind] + bce)
            weight += math.exp(-k / 4)
            hits[k].append(words[int(logits.argmax())] == label)
    assert float(loss) == pytest.approx(total / weight, rel=1e-4)
    assert right.tolist() == pytest.approx([sum(h) / len(h) for h in hits])


def test_a_new_markov_head_changes_nothing_and_learns() -> None:
    target = Target(tiny_model("llama"))
    drafter = new_drafter(target, 1, B, rank=5)
    row, _ = drafter.correction.step(torch.ones(1, 61), torch.ones(1, 32), torch.tensor([4]), torch.zeros(1, 0))
    assert torch.equal(row, torch.ones(1, 61))
    trainer = DSparkTrainer(target, DSparkTraining(), 1e-3, drafter)
    ids = torch.randint(3, 61, (2, 12), generator=torch.Generator().manual_seed(3))
    batch = batch_of(ids, torch.tensor([[2, 6], [3, 8]]), ahead=B)
    loss, _ = trainer.loss(base_states(target, ids, trainer.aux_hidden_state_layers, None, None), batch)
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = {name: p.grad for name, p in drafter.named_parameters() if p.requires_grad}
    assert gradients["markov_head.markov_w2.weight"] is not None
    assert all(g is not None and (g.abs().sum() > 0) for n, g in gradients.items() if "markov_w1" not in n)


@thorough
def test_it_learns_and_what_is_saved_loads(tmp_path: Path) -> None:
    target = Target(tiny_model("llama"))
    torch.manual_seed(0)
    trainer = DSparkTrainer(target, DSparkTraining(loss="ce", markov_kind="gated"), 5e-3,
                            new_drafter(target, 1, B, rank=6, kind="gated"))  # fmt: skip
    loop = DrafterLoop(target, [trainer], text_of(target), Budget(40, 8, 16, B, warmup=3), tmp_path / "t")
    losses = []
    for _ in range(40):
        loop.advance()
        losses.append(loop.outcomes["dspark"].loss)
    assert np.mean(losses[-5:]) < 0.6 * np.mean(losses[:5])
    trainer.save(tmp_path, {})
    for options in ({}, {"mode": "tree", "nodes": 12, "k": 4}, {"confidence_threshold": 0.5}):
        decoder = DSpark.load(target, DSparkOptions(weights=str(tmp_path), **options))  # type: ignore[arg-type]
        runs = [generate(decoder, [i], StopParams(23), SamplingParams()) for i in range(3, 11)]
        assert [r.tokens for r in runs] == [
            generate(Autoregressive(target), [i], StopParams(23), SamplingParams()).tokens for i in range(3, 11)
        ]
        assert sum(len(r.tokens) - 1 for r in runs) / sum(len(r.steps) for r in runs) > 1.3
