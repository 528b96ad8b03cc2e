"""EAGLE's training: what it unrolls is what decoding does, texts in a row stand alone, what is saved loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from scipy.stats import kstest
from torch import Tensor

from specbench_ss.engine.decoder import DecodeState
from specbench_ss.engine.forward import EagerPass
from specbench_ss.engine.generate import StopParams, generate
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.target import Target
from specbench_ss.methods.ar import Autoregressive
from specbench_ss.methods.eagle.decode import DynamicOptions, Eagle, Eagle2, Eagle3, Eagle3Options, EagleOptions
from specbench_ss.methods.eagle.train import (
    Eagle3Trainer,
    Eagle3TrainOptions,
    EagleTrainer,
    EagleTrainOptions,
    UnrolledTrainer,
)
from specbench_ss.models.checkpoint import write_checkpoint
from specbench_ss.models.tiny import randomise
from specbench_ss.training.batch import BaseStates, Batch, base_states
from specbench_ss.training.distributed import DistributedContext
from specbench_ss.training.loop import Budget, DrafterLoop
from specbench_ss.training.masks import Documents
from tests.methods.batches import batch_of, plain_text, text_of
from tests.tiny import SOME, thorough, tiny_model

LEVELS = 3


def trainees(target: Target) -> list[UnrolledTrainer]:
    torch.manual_seed(0)
    made: list[UnrolledTrainer] = [
        EagleTrainer(target, None, 3e-3, LEVELS), Eagle3Trainer(target, Eagle3TrainOptions(LEVELS, 40), 3e-3)
    ]  # fmt: skip
    return made


def states_of(target: Target, trainee: UnrolledTrainer, batch: Batch) -> BaseStates:
    return base_states(target, batch.ids, trainee.aux_hidden_state_layers, None, batch.documents)


@pytest.mark.parametrize("kind", SOME)
@torch.inference_mode()
def test_what_is_unrolled_is_what_decoding_computes(kind: str) -> None:
    """Level j of anchor t: the state of the j-th node of a chain of the text's own tokens, drafted at t + 1."""
    target = Target(tiny_model(kind))
    ids, t = torch.randint(3, 61, (1, 14), generator=torch.Generator().manual_seed(1)), 8
    for trainee, method in zip(trainees(target), (Eagle2, Eagle3), strict=True):
        randomise(trainee.module, 3, 0.15)
        batch = batch_of(ids, torch.tensor([[2, t]]))
        states = states_of(target, trainee, batch)
        unrolled = [s[0, 1] for s in trainee.unrolled(trainee.features(states), batch, LEVELS)]
        options = method.Options(total_tokens=8, depth=LEVELS, top_k=1)
        decoder: Any = method(target, options, trainee.module, trainee.config, trainee.layers)
        tokens = ids[0].tolist()
        state = DecodeState(tokens[: t + 1], t + 1, ids[0, t + 1 : t + 2], target.new_cache(40), SamplingParams())
        decoder.prefill(state, ids[:, : t + 1])
        state.ids = tokens[: t + 2]
        decoder.on_prefill(state)
        within = EagerPass(target, decoder.slots.cache, 0)
        found, rotary = [decoder.slots.newest[0, 0]], decoder.slots.rotary_ahead(within, LEVELS)
        for j in range(1, LEVELS):
            visible = torch.ones(1, j, dtype=torch.bool)
            token, last = ids[0, t + 1 + j : t + 2 + j], found[-1][None, None]
            out = decoder.slots.descend(within, token, last, visible, rotary, j - 1)
            found.append(out[0, 0])
        for ours, theirs in zip(unrolled, found, strict=True):
            torch.testing.assert_close(ours, theirs, atol=3e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "opt", "mistral-window"])
@torch.no_grad()
def test_texts_in_a_row_stand_alone(kind: str) -> None:
    target = Target(tiny_model(kind))
    one, two = torch.randint(3, 61, (2, 12), generator=torch.Generator().manual_seed(2))
    numbers = torch.tensor([[0] * 12 + [1] * 12])
    places = torch.cat((torch.arange(12), torch.arange(12)))[None]
    for trainee in trainees(target):
        randomise(trainee.module, 3, 0.15)
        packed = batch_of(torch.cat((one, two))[None], torch.tensor([[12 + 5, 3, 12 + 8]]), Documents(numbers, places))
        alone = batch_of(two[None], torch.tensor([[5, 8]]))
        found, wanted = (
            list(trainee.unrolled(trainee.features(states_of(target, trainee, b)), b, LEVELS)) for b in (packed, alone)
        )
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours[:, [0, 2]], theirs, atol=3e-5, rtol=1e-4)


@thorough
def test_the_loss_falls_what_is_saved_loads_and_a_cut_changes_nothing(tmp_path: Path) -> None:
    target = Target(tiny_model("llama"))
    text, budget = text_of(target), Budget(30, 8, 16, LEVELS, warmup=3)
    taus = {}
    for trainee, fresh in zip(trainees(target), trainees(target), strict=True):
        first, last = [], []
        machine = DistributedContext(target.device, exact=True)
        trainer = DrafterLoop(target, [trainee], text, budget, tmp_path / trainee.name, machine)
        for step in range(budget.steps):
            trainer.advance()
            if trainer.step == 15:
                trainer.save()
            (first if step < 5 else last).append(trainer.outcomes[trainee.name].loss)
        assert np.mean(last[-5:]) < 0.92 * np.mean(first), trainee.name
        again = DrafterLoop(target, [fresh], text, budget, tmp_path / trainee.name, machine)
        assert again.resumed and again.step == 15
        while again.step < budget.steps:
            again.advance()
        for name, tensor in trainee.module.state_dict().items():
            torch.testing.assert_close(tensor, fresh.module.state_dict()[name], atol=1e-6, rtol=1e-5)
        write_checkpoint(tmp_path / trainee.name, trainee.module, trainee.config)
        taus[trainee.name] = tau(target, tmp_path / trainee.name, trainee.name)
    assert min(taus.values()) > 1.1, taus


class Noted(EagleTrainer):
    """Keeps the noise on the features of every step that learns: [B, T, h]."""

    def __init__(self, target: Target, levels: int = 5, **options: Any) -> None:
        super().__init__(target, EagleTrainOptions(**options), levels=levels)
        self.noises: list[Tensor] = []

    def loss(self, states: BaseStates, batch: Batch) -> tuple[Tensor, Tensor]:
        self.final = states.final
        return super().loss(states, batch)

    def unrolled(self, features: list[Tensor], batch: Batch, levels: int) -> Any:
        if torch.is_grad_enabled():
            self.noises.append(features[0] - self.final)
        return super().unrolled(features, batch, levels)


@pytest.mark.parametrize("length", [32, 64])
def test_features_have_the_published_noise(length: int) -> None:
    """EAGLE's: uniform, +-(0.5 * 0.2 * 512 / row length), at every place of every row, of each row its own."""
    target = Target(tiny_model("llama"))
    ids = torch.randint(3, 61, (4, length), generator=torch.Generator().manual_seed(4))
    batch = batch_of(ids, torch.tensor([[0, 4, 10], [2, 3, 9], [1, 2, 3], [5, 6, 20]]))
    for given, width in (({}, 0.2), ({"noise": 0.05}, 0.05)):
        trainee = Noted(target, **given)
        states = states_of(target, trainee, batch)
        trainee.loss(states, batch)[0].backward()
        (noise,) = trainee.noises
        assert noise.shape == states.final.shape == (4, length, 32)
        shares = noise / (width * 512 / length) + 0.5
        assert shares.min() > -1e-4 and shares.max() < 1 + 1e-4
        for row in shares:
            assert kstest(row.flatten().clamp(0, 1), "uniform").pvalue > 0.01
        for places in shares.transpose(0, 1), shares.permute(2, 0, 1):  # by place of a row, by number of a feature
            of_each = places.flatten(1)
            assert of_each.mean(1).sub(0.5).abs().max() < 6 / (12 * of_each.shape[1]) ** 0.5
        for other in (shares[[1, 2, 3, 0]], shares.roll(1, 1), shares.roll(1, 2)):  # of rows, places, features
            related = ((shares - 0.5) * (other - 0.5)).mean() * 12
            assert related.abs() < 5 / shares.numel() ** 0.5


def test_noise_is_off_at_zero_and_where_nothing_is_learnt() -> None:
    target = Target(tiny_model("llama"))
    ids = torch.randint(3, 61, (2, 16), generator=torch.Generator().manual_seed(5))
    batch = batch_of(ids, torch.tensor([[0, 4, 10], [2, 3, 9]]))
    plain, noisy = Noted(target, levels=LEVELS, noise=0), Noted(target, levels=LEVELS)
    noisy.module.load_state_dict(plain.module.state_dict())
    states = states_of(target, plain, batch)
    learnt, _ = plain.loss(states, batch)
    assert not plain.noises[0].any()
    assert noisy.loss(states, batch)[0] != learnt
    with torch.no_grad():
        assert noisy.loss(states, batch)[0] == plain.loss(states, batch)[0] == learnt


@pytest.mark.parametrize("anchors", [6, 24])
def test_a_resumed_training_has_the_same_noise(anchors: int, tmp_path: Path) -> None:
    """Independent of other random draws, and another one whenever a row is repeated."""
    target = Target(tiny_model("llama"))
    rows = np.random.default_rng(6).integers(3, 61, (4, 24), np.int32)
    text = plain_text(rows, np.arange(24) > 9, 1)
    machine = DistributedContext(target.device, exact=True)
    budget = Budget(6, 4, anchors, LEVELS, warmup=3)  # every step has all rows
    whole = Noted(target)
    trainer = DrafterLoop(target, [whole], text, budget, tmp_path, machine)
    while trainer.step < budget.steps:
        trainer.advance()
        if trainer.step == 3:
            trainer.save()
    torch.manual_seed(7)
    cut = Noted(target)
    again = DrafterLoop(target, [cut], text, budget, tmp_path, machine)
    assert again.resumed and again.step == 3
    while again.step < budget.steps:
        again.advance()
    assert len(whole.noises) == 6 and len(cut.noises) == 3
    for one, two in zip(whole.noises[3:], cut.noises, strict=True):
        torch.testing.assert_close(one, two, atol=0, rtol=0)
    noises = torch.cat(whole.noises).flatten(1)  # [6 steps of 4 rows, T * h]
    assert len(noises) == 24 and torch.pdist(noises).min() > 1


def tau(target: Target, folder: Path, name: str) -> float:
    """Of every method that reads the folder, the least: on prompts that were trained on."""
    size = {"weights": str(folder), "total_tokens": 16, "depth": 3, "top_k": 4}
    if name == "eagle3":
        decoders: list[Any] = [Eagle3.load(target, Eagle3Options(**size))]
    else:
        decoders = [
            Eagle.load(target, EagleOptions(weights=str(folder))), Eagle2.load(target, DynamicOptions(**size))
        ]  # fmt: skip
    found = []
    for decoder in decoders:
        runs = [generate(decoder, [i], StopParams(23), SamplingParams()) for i in range(3, 11)]
        reference = [
            generate(Autoregressive(target), [i], StopParams(23), SamplingParams()).tokens for i in range(3, 11)
        ]
        assert [r.tokens for r in runs] == reference
        found.append(sum(len(r.tokens) - 1 for r in runs) / sum(len(r.steps) for r in runs))
    return min(found)


def test_the_draft_vocabulary_is_what_answers_state_most(tmp_path: Path) -> None:
    target = Target(tiny_model("llama"))
    trainee = Eagle3Trainer(target, Eagle3TrainOptions(LEVELS, 3))
    ids = torch.tensor([[9, 9, 50, 50, 50, 4, 4, 30, 30, 30, 30, 8]])
    batch = batch_of(ids, torch.tensor([[0]]))
    batch.labels[:, 8:] = -100  # what is no answer does not count: 30 once as 50 three times, 4 twice, 9 once
    trainee.scan([batch, batch])
    words = trainee.module.vocabulary(target.vocab_size).token_ids(torch.arange(3)).tolist()
    assert words == [4, 30, 50]
    assert trainee.module.t2d.nonzero()[:, 0].tolist() == words
    assert torch.equal(trainee.module.lm_head.weight, target.unembed[words])
    write_checkpoint(tmp_path, trainee.module, trainee.config)
    saved = load_file(tmp_path / "model.safetensors")
    assert saved["d2t"].dtype == torch.long and saved["t2d"].dtype == torch.bool
    assert saved["fc.weight"].dtype == torch.float16


@torch.no_grad()
def test_the_loss_of_eagle_3_is_the_cross_entropy_over_its_words() -> None:
    """Computed again position by position: soft targets over the words drafted, 0.8^j, others left out."""
    target = Target(tiny_model("llama"))
    trainee = Eagle3Trainer(target, Eagle3TrainOptions(LEVELS, 30))
    randomise(trainee.module, 3, 0.15)
    ids = torch.randint(3, 61, (2, 12), generator=torch.Generator().manual_seed(3))
    batch = batch_of(ids, torch.tensor([[0, 4, 10], [2, 3, 9]]))
    states = states_of(target, trainee, batch)
    loss, right = trainee.loss(states, batch)
    words = trainee.module.vocabulary(target.vocab_size).token_ids(torch.arange(30))
    total, hits = 0.0, []
    for j, state in enumerate(trainee.unrolled(trainee.features(states), batch, LEVELS)):
        terms, good = [], []
        for row in range(2):
            for n, t in enumerate(batch.anchors.at[row].tolist()):
                if t + 2 + j >= 12:
                    continue
                log_q = trainee.module.logits(state[row, n], target).log_softmax(-1)
                p = target.logits(states.final[row, t + 1 + j])[words].softmax(-1)
                label = int(ids[row, t + 2 + j])
                terms.append(-float((p * log_q).sum()) if label in words.tolist() else 0.0)
                good.append(int(words[log_q.argmax()]) == label)
        total += 0.8**j * sum(terms) / len(terms)
        hits.append(sum(good) / len(good))
    assert float(loss) == pytest.approx(total, rel=1e-4)
    assert right.tolist() == pytest.approx(hits)
