"""DFlash's training: a block in training is one in decoding, blocks and texts stand alone, what is saved loads."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specbench_ss.engine.decoder import DecodeState
from specbench_ss.engine.generate import StopParams, generate
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.target import Target
from specbench_ss.methods.ar import Autoregressive
from specbench_ss.methods.block_drafters import train
from specbench_ss.methods.block_drafters.decode import DFlash, DFlashOptions
from specbench_ss.methods.block_drafters.dflash import BlockAttention, config_of, new_drafter, random_drafter
from specbench_ss.methods.block_drafters.train import DFlashTrainer, DFlashTraining
from specbench_ss.methods.medusa.train import MedusaTrainer, MedusaTraining
from specbench_ss.models.checkpoint import write_checkpoint
from specbench_ss.training.batch import BaseStates, Batch, base_states
from specbench_ss.training.distributed import DistributedContext
from specbench_ss.training.loop import Budget, DrafterLoop
from specbench_ss.training.masks import Documents
from tests.methods.batches import batch_of, text_of
from tests.tiny import SOME, few, thorough, tiny_model

DRAFTS = 4
SHAPES: dict[str, dict[str, Any]] = {
    "whole": {},
    "windows": {"layer_masks": (BlockAttention(4, causal=True), BlockAttention(4, from_root=True))},
    "from the anchor, fewer words": {"from_anchor": True, "draft_vocab": 40},
}


def learning(soft: bool = True) -> DFlashTraining:
    return DFlashTraining(loss="kl" if soft else "ce")


def trainee_of(target: Target, soft: bool = True, **shape: Any) -> DFlashTrainer:
    return DFlashTrainer(target, learning(soft), 3e-3, random_drafter(target, **shape))


def states_of(target: Target, trainee: DFlashTrainer, batch: Batch) -> BaseStates:
    return base_states(target, batch.ids, trainee.aux_hidden_state_layers, None, batch.documents)


@few(3)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", SOME)
@torch.no_grad()
def test_training_sees_what_decoding_sees(kind: str, shape: str) -> None:
    """The block of anchor t is drafted by decoding where the root is the token at t + 1, in one go and step by step."""
    target = Target(tiny_model(kind))
    ids, t = torch.randint(3, 61, (1, 20), generator=torch.Generator().manual_seed(1)), 12
    trainee = trainee_of(target, **SHAPES[shape])
    batch = batch_of(ids, torch.tensor([[2, t, 19]]))
    wanted = trainee.module.logits(trainee.blocks(states_of(target, trainee, batch), batch)[0, 1], target)
    tokens = ids[0].tolist()
    for prompt in (t + 1, 5):
        decoder = DFlash(target, DFlashOptions(), copy.deepcopy(trainee.module))
        with torch.inference_mode():
            cache = target.new_cache(60)
            state = DecodeState(tokens[: prompt + 1], prompt, ids[0, prompt : prompt + 1], cache, SamplingParams())
            decoder.prefill(state, ids[:, :prompt])
            decoder.on_prefill(state)
            for end in range(prompt + 1, t + 2):  # a token at a time is accepted, its features join the context
                hidden_states = target.prefill(
                    ids[:, end - 1 : end], cache, decoder.aux_hidden_state_layers, every=True
                ).hidden_states
                decoder._extend([hidden_states[layer] for layer in decoder.drafter.shape.layers])
            state.ids, state.root = tokens[: t + 2], ids[0, t + 1 : t + 2]
            found = decoder.logits(state)
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
def test_blocks_and_texts_stand_alone(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "BLOCKS_PER_PASS", 2)
    target = Target(tiny_model("llama"))
    one, two = torch.randint(3, 61, (2, 12), generator=torch.Generator().manual_seed(2))
    numbers = torch.tensor([[0] * 12 + [1] * 12])
    places = torch.cat((torch.arange(12), torch.arange(12)))[None]
    trainee = trainee_of(target, **SHAPES[shape])
    packed = batch_of(torch.cat((one, two))[None], torch.tensor([[12 + 5, 3, 12 + 8]]), Documents(numbers, places))
    found = trainee.blocks(states_of(target, trainee, packed), packed)
    for n, at in ((0, 5), (2, 8)):
        alone = batch_of(two[None], torch.tensor([[at]]))
        wanted = trainee.blocks(states_of(target, trainee, alone), alone)
        torch.testing.assert_close(found[:, n], wanted[:, 0], atol=3e-5, rtol=1e-4)


@pytest.mark.parametrize("soft", [True, False])
@pytest.mark.parametrize("words", [61, 30])
@torch.no_grad()
def test_the_loss_is_the_weighted_cross_entropy(soft: bool, words: int) -> None:
    """Computed again place by place: exp(-(k - 1) / 4), means over the anchors that have a token so far ahead."""
    target = Target(tiny_model("llama"))
    trainee = trainee_of(target, soft, draft_vocab=words)
    ids = torch.randint(3, 61, (2, 12), generator=torch.Generator().manual_seed(3))
    batch = batch_of(ids, torch.tensor([[0, 4, 9], [2, 3, 8]]))
    states = states_of(target, trainee, batch)
    loss, right = trainee.loss(states, batch)
    known = list(range(61)) if trainee.module.vocab_ids is None else trainee.module.vocab_ids.tolist()
    out = trainee.blocks(states, batch)
    total, hits = 0.0, []
    for k in range(DRAFTS):
        terms, good = [], []
        for row in range(2):
            for n, t in enumerate(batch.anchors.at[row].tolist()):
                if t + 2 + k >= 12:
                    continue
                label = int(ids[row, t + 2 + k])
                log_q = trainee.module.logits(out[row, n, k], target).log_softmax(-1)
                p = target.logits(states.final[row, t + 1 + k])[known].softmax(-1)
                hard = -float(log_q[known.index(label)]) if label in known else 0.0
                terms.append((-float((p * log_q).sum()) if label in known else 0.0) if soft else hard)
                good.append(known[int(log_q.argmax())] == label)
        total += math.exp(-k / 4) * sum(terms) / len(terms)
        hits.append(sum(good) / len(good))
    assert float(loss) == pytest.approx(total, rel=1e-4)
    assert right.tolist() == pytest.approx(hits)


@pytest.mark.parametrize(("draft_vocab", "soft"), [(0, True), pytest.param(50, False, marks=thorough)])
def test_it_learns_what_is_saved_loads_and_a_cut_changes_nothing(draft_vocab: int, soft: bool, tmp_path: Path) -> None:
    target = Target(tiny_model("llama"))
    text, budget = text_of(target), Budget(40, 8, 16, DRAFTS, warmup=3)

    def fresh() -> DFlashTrainer:
        torch.manual_seed(0)
        return DFlashTrainer(target, learning(soft), 5e-3, new_drafter(target, 2, 1 + DRAFTS, draft_vocab))

    trainee, again = fresh(), fresh()
    machine = DistributedContext(target.device, exact=True)
    trainer = DrafterLoop(target, [trainee], text, budget, tmp_path / "t", machine)
    losses = []
    for step in range(budget.steps):
        trainer.advance()
        losses.append(trainer.outcomes["dflash"].loss)
        if step == 19:
            trainer.save()
    assert np.mean(losses[-5:]) < (0.95 if soft else 0.6) * np.mean(losses[:5])  # the distribution's own entropy stays
    other = DrafterLoop(target, [again], text, budget, tmp_path / "t", machine)
    assert other.resumed and other.step == 20
    while other.step < budget.steps:
        other.advance()
    for name, tensor in trainee.module.state_dict().items():
        torch.testing.assert_close(tensor, again.module.state_dict()[name], atol=1e-6, rtol=1e-5)
    if draft_vocab:
        words = trainee.module.vocab_ids
        assert words is not None and torch.equal(trainee.module.lm_head.weight, target.unembed[words])  # type: ignore[union-attr]
    write_checkpoint(tmp_path / "t", trainee.module, config_of(trainee.module, target))
    for options in ({}, {"mode": "tree", "nodes": 12, "k": 4}):
        decoder = DFlash.load(target, DFlashOptions(weights=str(tmp_path / "t"), **options))
        runs = [generate(decoder, [i], StopParams(23), SamplingParams()) for i in range(3, 11)]
        assert [r.tokens for r in runs] == [
            generate(Autoregressive(target), [i], StopParams(23), SamplingParams()).tokens for i in range(3, 11)
        ]
        assert sum(len(r.tokens) - 1 for r in runs) / sum(len(r.steps) for r in runs) > 1.3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_next_to_another_drafter_it_learns_what_it_would_alone(dtype: torch.dtype, tmp_path: Path) -> None:
    """By autocast to bfloat16, on labels that reach further than its block."""
    target = Target(tiny_model("llama", dtype=dtype))
    text, budget, states = text_of(target), Budget(3, 4, 8, DRAFTS + 2), []
    for others in (False, True):
        torch.manual_seed(0)
        trainee = DFlashTrainer(target, learning(), 5e-3, new_drafter(target, 2, 1 + DRAFTS))
        trainees = [trainee, MedusaTrainer(target, MedusaTraining(2))] if others else [trainee]
        trainer = DrafterLoop(target, trainees, text, budget, tmp_path / str(others))
        for _ in range(budget.steps):
            trainer.advance()
        states.append(trainee.module.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
