"""`--loss`: every drafter can learn the base's distribution or the text's tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from specbench_ss.engine.target import Target
from specbench_ss.methods.block_drafters.dflash import random_drafter
from specbench_ss.methods.block_drafters.train import DFlashTrainer, DFlashTraining
from specbench_ss.methods.eagle.train import Eagle3Trainer, Eagle3TrainOptions, EagleTrainer, EagleTrainOptions
from specbench_ss.methods.hydra.train import HydraTrainer, HydraTraining
from specbench_ss.methods.medusa.train import MedusaTrainer, MedusaTraining
from specbench_ss.methods.ss.config import StreamConfig
from specbench_ss.methods.ss.train import StreamsTrainer
from specbench_ss.training.batch import Anchors, Batch, base_states
from specbench_ss.training.losses import LossKind, distribution_losses, head_sums
from specbench_ss.training.trainer import DrafterTrainer
from tests.methods.batches import answers_of
from tests.tiny import few, tiny_model

AHEAD = 3


class Unpruned(StreamsTrainer):
    prune_weight = 0.0


MADE: dict[str, Callable[[Target, Any], DrafterTrainer]] = {
    "ss": lambda target, t: Unpruned(target, StreamConfig(gamma=3, n_msa_layers=2), loss_kind=t),
    "medusa": lambda target, t: MedusaTrainer(target, MedusaTraining(3, loss=t)),
    "hydra": lambda target, t: HydraTrainer(target, HydraTraining(3, layers=1, prefix=False, loss=t)),
    "eagle": lambda target, t: EagleTrainer(target, EagleTrainOptions(feature_weight=0, noise=0, loss=t), levels=3),
    "eagle3": lambda target, t: Eagle3Trainer(target, Eagle3TrainOptions(3, 61, loss=t)),
    "dflash": lambda target, t: DFlashTrainer(target, DFlashTraining(loss=t), drafter=random_drafter(target)),
}


def loss_of(trainee: DrafterTrainer, target: Target, batch: Batch) -> torch.Tensor:
    torch.manual_seed(0)
    loss, _ = trainee.loss(base_states(target, batch.ids, trainee.aux_hidden_state_layers, trainee.kv_from), batch)
    return loss


def pair(name: str, target: Target, batch: Batch, *losses: str) -> list[DrafterTrainer]:
    made = []
    for loss in losses:
        torch.manual_seed(1)
        trainee = MADE[name](target, loss)
        trainee.scan([batch])
        made.append(trainee)
    return made


@pytest.mark.parametrize("name", MADE)
def test_a_base_that_is_sure_teaches_the_tokens_that_it_would_state(name: str) -> None:
    model = tiny_model("llama")
    model.lm_head.weight.data.mul_(1000)
    target = Target(model)
    batch = answers_of(torch.randint(3, 61, (2, 20), generator=torch.Generator().manual_seed(5)), 4, 5)
    stated = target.logits(base_states(target, batch.ids, (), None).final).argmax(-1)  # [2, 20], behind each position
    at = batch.anchors.at
    labels = torch.stack([stated.gather(1, (at + j).clamp_max(19)) for j in range(6)], -1)
    labels[batch.anchors.labels == -100] = -100
    batch = Batch(batch.ids, batch.labels, Anchors(at, labels))
    tokens, distribution = (loss_of(trainee, target, batch) for trainee in pair(name, target, batch, "ce", "kl"))
    assert tokens.item() > 1 and torch.allclose(tokens, distribution, rtol=1e-4)


@few(8)
@pytest.mark.parametrize("loss", ["kl", "tv", "lk_alpha", "lk_lambda"])
@pytest.mark.parametrize("name", MADE)
def test_an_unsure_base_teaches_something_else(name: str, loss: str) -> None:
    model = tiny_model("llama")
    model.lm_head.weight.data.mul_(5)  # unsure, and not of everything alike
    target = Target(model)
    batch = answers_of(torch.randint(3, 61, (2, 20), generator=torch.Generator().manual_seed(5)), 4, 5)
    trainees = pair(name, target, batch, "ce", loss)
    losses = [loss_of(trainee, target, batch) for trainee in trainees]
    assert not torch.allclose(*losses, rtol=1e-3)
    for loss, trainee in zip(losses, trainees, strict=True):
        loss.backward()
        learnt = [p.grad for p in trainee.module.parameters() if p.grad is not None]
        assert learnt and all(bool(grad.isfinite().all()) for grad in learnt)


def test_where_there_is_no_label_nothing_is_learnt() -> None:
    logits, teacher = torch.randn(4, 2, 9), torch.randn(4, 2, 9)
    labels = torch.tensor([[1, -100], [2, 3], [-100, -100], [4, 5]])
    sums, _ = head_sums(logits, labels, teacher)
    each = -(teacher.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    assert torch.allclose(sums, torch.stack((each[[0, 1, 3], 0].sum(), each[[1, 3], 1].sum())))


@pytest.fixture
def p_and_logits() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return (2 * torch.randn(5, 11)).softmax(-1), (2 * torch.randn(5, 11)).requires_grad_()


def gradient(logits: torch.Tensor, p: torch.Tensor, kind: LossKind) -> torch.Tensor:
    return torch.autograd.grad(distribution_losses(logits.log_softmax(-1), p, kind).sum(), logits)[0]


def test_total_variation_and_its_gradient(p_and_logits: tuple[torch.Tensor, torch.Tensor]) -> None:
    """d TV / d logit_y = q_y (the mass of q where q < p, less 1 if y is there)."""
    p, logits = p_and_logits
    q = logits.detach().softmax(-1)
    losses = distribution_losses(logits.log_softmax(-1), p, "tv")
    assert torch.allclose(losses, 0.5 * (p - q).abs().sum(-1))
    below = (q < p).float()
    wanted = q * ((q * below).sum(-1, keepdim=True) - below)
    assert torch.allclose(gradient(logits, p, "tv"), wanted, atol=1e-6)


def test_losses_of_acceptance_are_made_of_total_variation(p_and_logits: tuple[torch.Tensor, torch.Tensor]) -> None:
    p, logits = p_and_logits
    alpha = 1 - distribution_losses(logits.log_softmax(-1), p, "tv").detach()[:, None]
    tv, kl = gradient(logits, p, "tv"), gradient(logits, p, "kl")
    assert torch.allclose(gradient(logits, p, "lk_alpha"), tv / alpha, atol=1e-6)
    share = torch.exp(-3 * alpha)
    assert torch.allclose(gradient(logits, p, "lk_lambda"), share * kl + (1 - share) * tv, atol=1e-6)
    tokens = torch.arange(5)
    one_hot = distribution_losses(logits.log_softmax(-1), F.one_hot(tokens, 11).float(), "lk_alpha")
    assert torch.allclose(one_hot, F.cross_entropy(logits, tokens, reduction="none"))
    for kind in ("tv", "lk_alpha", "lk_lambda"):
        perfect = distribution_losses(p.log(), p, kind)  # type: ignore[arg-type]
        assert torch.allclose(perfect, torch.zeros(5), atol=1e-5)


def test_what_cannot_be_drafted_is_never_accepted() -> None:
    """EAGLE-3 with a reduced vocabulary: alpha is at most p's mass on it, also where the label lies outside."""
    model = tiny_model("llama")
    model.lm_head.weight.data.mul_(0.01)  # p is nearly uniform
    target = Target(model)
    batch = answers_of(torch.randint(3, 61, (2, 20), generator=torch.Generator().manual_seed(5)), 4, 5)
    trainee = Eagle3Trainer(target, Eagle3TrainOptions(1, 30, loss="tv"))
    trainee.scan([batch])
    states = torch.zeros(4, target.hidden_size)
    outside = next(i for i in range(target.vocab_size) if not bool(trainee.module.t2d[i]))
    total, _ = trainee._sums(states, states, torch.tensor([outside] * 4))
    mass = target.logits(states).softmax(-1)[0, trainee.module.vocab_ids].sum()
    assert total.item() == pytest.approx(4 * (1 - float(mass)), rel=0.02) and float(mass) < 0.6
