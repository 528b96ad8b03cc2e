"""P-EAGLE's training: a depth in training is one in decoding, anchors stand alone, deep places are dropped."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specbench_ss.engine.decoder import DecodeState
from specbench_ss.engine.generate import StopParams, generate
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.target import Target
from specbench_ss.methods.ar import Autoregressive
from specbench_ss.methods.block_drafters.decode import PEagle, PEagleOptions
from specbench_ss.methods.block_drafters.peagle import config_of, new_drafter, random_drafter
from specbench_ss.methods.block_drafters.train import PEagleTrainer, PEagleTraining
from specbench_ss.models.checkpoint import write_checkpoint
from specbench_ss.training.batch import BaseStates, Batch, base_states
from specbench_ss.training.distributed import DistributedContext
from specbench_ss.training.loop import Budget, DrafterLoop
from specbench_ss.training.masks import Documents
from tests.methods.batches import batch_of, text_of
from tests.tiny import SOME, thorough, tiny_model

DEPTHS = 5
FORMS: dict[str, dict[str, Any]] = {
    "two layers": {},
    "windows": {"windows": (6, None)},
    "one layer, fewer words": {"layers": 1, "draft_vocab": 40},
}


def learning(soft: bool, keep: float) -> PEagleTraining:
    return PEagleTraining(keep=keep, loss="kl" if soft else "ce")


def trainee_of(target: Target, soft: bool = True, keep: float = 1.0, **form: Any) -> PEagleTrainer:
    return PEagleTrainer(target, learning(soft, keep), 3e-3, random_drafter(target, **form))


def states_of(target: Target, trainee: PEagleTrainer, batch: Batch) -> BaseStates:
    return base_states(target, batch.ids, trainee.aux_hidden_state_layers, None, batch.documents)


def deep(trainee: PEagleTrainer, target: Target, batch: Batch) -> Tensor:
    """[depths, B, A, h] where nothing is dropped."""
    return torch.stack(trainee.states(states_of(target, trainee, batch), batch))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", SOME)
@torch.no_grad()
def test_training_sees_what_decoding_sees(kind: str, form: str) -> None:
    """The depths of anchor t are drafted by decoding where the root is the token at t + 1, at once and step by step."""
    target = Target(tiny_model(kind))
    ids, t = torch.randint(3, 61, (1, 20), generator=torch.Generator().manual_seed(1)), 12
    trainee = trainee_of(target, **FORMS[form])
    wanted = trainee.module.logits(deep(trainee, target, batch_of(ids, torch.tensor([[2, t, 19]])))[:, 0, 1], target)
    tokens = ids[0].tolist()
    for prompt in (t + 1, 5):
        decoder = PEagle(target, PEagleOptions(), copy.deepcopy(trainee.module))
        with torch.inference_mode():
            cache = target.new_cache(60)
            state = DecodeState(tokens[: prompt + 1], prompt, ids[0, prompt : prompt + 1], cache, SamplingParams())
            decoder.prefill(state, ids[:, :prompt])
            decoder.on_prefill(state)
            for end in range(prompt + 1, t + 2):  # a token at a time is accepted
                decoder.logits(state)
                hidden_states = target.prefill(
                    ids[:, end - 1 : end], cache, decoder.aux_hidden_state_layers, every=True
                ).hidden_states
                decoder._features = [hidden_states[layer] for layer in decoder.drafter.shape.layers]
                decoder._tokens = ids[0, end : end + 1]
            found = decoder.logits(state)
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_anchors_and_texts_stand_alone(form: str) -> None:
    target = Target(tiny_model("llama"))
    one, two = torch.randint(3, 61, (2, 12), generator=torch.Generator().manual_seed(2))
    numbers = torch.tensor([[0] * 12 + [1] * 12])
    places = torch.cat((torch.arange(12), torch.arange(12)))[None]
    trainee = trainee_of(target, **FORMS[form])
    packed = batch_of(torch.cat((one, two))[None], torch.tensor([[12 + 5, 3, 12 + 8]]), Documents(numbers, places))
    found = deep(trainee, target, packed)
    for n, at in ((0, 5), (2, 8)):
        wanted = deep(trainee, target, batch_of(two[None], torch.tensor([[at]])))
        torch.testing.assert_close(found[:, :, n], wanted[:, :, 0], atol=3e-5, rtol=1e-4)


@torch.no_grad()
def test_what_is_dropped_changes_nothing_of_what_is_kept() -> None:
    target = Target(tiny_model("llama"))
    ids = torch.randint(3, 61, (1, 20), generator=torch.Generator().manual_seed(4))
    batch = batch_of(ids, torch.tensor([[7, 2, 12, 4, 9, 3, 11, 1, 5, 6]]), ahead=DEPTHS)
    whole, dropping = trainee_of(target), trainee_of(target, keep=0.7)
    assert dropping.shares == pytest.approx([1, 0.7, 0.49, 0.343, 0.2401])
    every, kept = deep(whole, target, batch), dropping.states(states_of(target, dropping, batch), batch)
    assert [k.shape[1] for k in kept] == [10, 7, 5, 4, 3]
    for d, state in enumerate(kept):
        torch.testing.assert_close(state, every[d, :, : state.shape[1]], atol=1e-5, rtol=1e-5)
    labels = dropping.labels(batch)
    assert (labels != -100).sum(1).tolist() == [[10, 7, 5, 4, 3]]  # nested: a place is kept where the one before it is
    assert labels[0, :3, 4].tolist() == [int(ids[0, t + 6]) for t in (7, 2, 12)]
    assert trainee_of(target, keep=0.1).shares == [1.0, 0.2, 0.2, 0.2, 0.2]


@torch.no_grad()
def test_a_row_with_few_anchors_keeps_as_small_a_share() -> None:
    """Six of its ten anchors are of no use; they come last."""
    target = Target(tiny_model("llama"))
    batch = batch_of(torch.randint(3, 61, (1, 30), generator=torch.Generator().manual_seed(4)), torch.arange(10)[None])
    batch.anchors.labels[:, 4:] = -100
    assert (trainee_of(target, keep=0.7).labels(batch) != -100).sum(1).tolist() == [[4, 3, 2, 2, 1]]


@pytest.mark.parametrize("soft", [True, False])
@pytest.mark.parametrize("words", [0, 30])
@torch.no_grad()
def test_the_loss_is_the_mean_over_kept_places(soft: bool, words: int) -> None:
    """Computed again place by place."""
    target = Target(tiny_model("llama"))
    trainee = trainee_of(target, soft, 0.7, draft_vocab=words)
    ids = torch.randint(3, 61, (2, 12), generator=torch.Generator().manual_seed(3))
    batch = batch_of(ids, torch.tensor([[0, 4, 8], [2, 3, 7]]), ahead=DEPTHS)
    states = states_of(target, trainee, batch)
    loss, right = trainee.loss(states, batch)
    known = list(range(61)) if trainee.module.vocab_ids is None else trainee.module.vocab_ids.tolist()
    out = trainee.states(states, batch)
    terms, hits = [], []
    for d in range(DEPTHS):
        good = []
        for row in range(2):
            for n, t in enumerate(batch.anchors.at[row].tolist()):
                if t + 2 + d >= 12 or n >= math.ceil(3 * 0.7**d):
                    continue
                label = int(ids[row, t + 2 + d])
                log_q = trainee.module.logits(out[d][row, n], target).log_softmax(-1)
                p = target.logits(states.final[row, t + 1 + d])[known].softmax(-1)
                hard = -float(log_q[known.index(label)]) if label in known else 0.0
                terms.append((-float((p * log_q).sum()) if label in known else 0.0) if soft else hard)
                good.append(known[int(log_q.argmax())] == label)
        hits.append(sum(good) / len(good))
    assert float(loss) == pytest.approx(sum(terms) / len(terms), rel=1e-4)
    assert right.tolist() == pytest.approx(hits)


@pytest.mark.parametrize(
    ("draft_vocab", "own", "soft"), [(0, True, True), pytest.param(50, False, False, marks=thorough)]
)
def test_it_learns_what_is_saved_loads_and_a_cut_changes_nothing(
    draft_vocab: int, own: bool, soft: bool, tmp_path: Path
) -> None:
    target = Target(tiny_model("llama"))
    text, budget = text_of(target), Budget(40, 8, 16, 4, warmup=3)
    table = target.model.get_input_embeddings().weight.clone()

    def fresh() -> PEagleTrainer:
        torch.manual_seed(0)
        return PEagleTrainer(target, learning(soft, 0.7), 5e-3, new_drafter(target, 4, 1, draft_vocab, None, own))

    trainee, again = fresh(), fresh()
    before = trainee.module.mask_hidden.detach().clone()
    machine = DistributedContext(target.device, exact=True)
    trainer = DrafterLoop(target, [trainee], text, budget, tmp_path / "t", machine)
    losses = []
    for step in range(budget.steps):
        trainer.advance()
        losses.append(trainer.outcomes["peagle"].loss)
        if step == 19:
            trainer.save()
    assert np.mean(losses[-5:]) < (0.95 if soft else 0.6) * np.mean(losses[:5])  # the distribution's own entropy stays
    other = DrafterLoop(target, [again], text, budget, tmp_path / "t", machine)
    assert other.resumed and other.step == 20
    while other.step < budget.steps:
        other.advance()
    for name, tensor in trainee.module.state_dict().items():
        torch.testing.assert_close(tensor, again.module.state_dict()[name], atol=1e-6, rtol=1e-5)
    assert not torch.equal(trainee.module.mask_hidden, before)
    assert torch.equal(target.model.get_input_embeddings().weight, table)
    mask = trainee.module.shape.mask_token
    if own:
        assert not torch.equal(trainee.module.embed_tokens.weight[mask], table[mask])  # type: ignore[union-attr]
    words = trainee.module.vocab_ids
    rows = target.unembed if words is None else target.unembed[words]
    assert torch.equal(trainee.module.lm_head.weight, rows)  # type: ignore[union-attr]
    write_checkpoint(tmp_path / "t", trainee.module, config_of(trainee.module, target))
    for options in ({}, {"mode": "tree", "nodes": 12, "k": 4}):
        decoder = PEagle.load(target, PEagleOptions(weights=str(tmp_path / "t"), **options))
        runs = [generate(decoder, [i], StopParams(23), SamplingParams()) for i in range(3, 11)]
        assert [r.tokens for r in runs] == [
            generate(Autoregressive(target), [i], StopParams(23), SamplingParams()).tokens for i in range(3, 11)
        ]
        assert sum(len(r.tokens) - 1 for r in runs) / sum(len(r.steps) for r in runs) > 1.3
