"""Losses of drafters, their weights and targets.

Papers differ: heads and streams are published with the token, Hydra and EAGLE's drafters with the distribution. The
loss is an option of all trainers but SPACE's (of draft models: `--distill-loss`), so that a comparison of drafters does
not mix two effects. Three more losses train acceptance itself: alpha = sum_x min(p(x), q(x)) is the probability that
one sampled draft token is accepted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from specbench_ss.options import option
from specbench_ss.training.batch import Anchors


def weighted_loss(logits: Tensor, labels: Tensor, weights: Tensor, whole: Tensor | None = None) -> Tensor:
    """Return the cross-entropy of logits [B, T, V] against labels [B, T], averaged with per-token weights [B, T].

    whole: the weights of the whole batch, if these are only a share of it.
    """
    loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="none")
    return (loss * weights.flatten()).sum() / (weights if whole is None else whole).sum().clamp_min(1e-6)


LossKind = Literal["kl", "ce", "tv", "lk_alpha", "lk_lambda"]
LOSS_HELP = (
    "kl: match the base's distribution at every drafted position. ce: predict the token of the text. tv: total "
    "variation, 1 - alpha, of one drafted token's acceptance probability alpha at temperature 1. lk_alpha: -log alpha. "
    "lk_lambda: from KL divergence to tv as alpha grows."
)
LEAST_ALPHA = 1e-8  # keeps a gradient where nothing is accepted yet
LAMBDA_DECAY = 3.0  # eta of LK_lambda


def loss_option(published: LossKind) -> Any:
    """Return the field of a trainer's options. published: the loss of the published drafter, the default."""
    return option(published, LOSS_HELP)


def distribution_losses(log_q: Tensor, p: Tensor, kind: LossKind) -> Tensor:
    """Return the loss [n] of draft distributions log_q [n, V] against the base's p [n, V], in float32.

    kl: the cross-entropy, whose gradient is that of KL(p : q). tv: 1 - alpha. lk_alpha: -log alpha. lk_lambda: l KL +
    (1 - l) tv with l = exp(-3 alpha), through which no gradient flows. p may sum to less than 1, where some tokens
    cannot be drafted. Raises ValueError for ce, which has no p.
    """
    if kind == "kl":
        return -(p * log_q).sum(-1)
    alpha = torch.minimum(p, log_q.exp()).sum(-1)
    if kind == "tv":
        return 1 - alpha
    if kind == "lk_alpha":
        return -(alpha + LEAST_ALPHA).log()
    if kind == "lk_lambda":
        share = torch.exp(-LAMBDA_DECAY * alpha.detach())
        return share * (torch.xlogy(p, p) - p * log_q).sum(-1) + (1 - share) * (1 - alpha)
    raise ValueError(f"the loss {kind} has no distribution")


def head_sums(
    logits: Tensor, labels: Tensor, teacher: Tensor | None = None, kind: LossKind = "kl"
) -> tuple[Tensor, Tensor]:
    """Return sums of losses [ahead] and of correct top-1 predictions [ahead].

    logits: [.., ahead, V]; labels: [.., ahead]. teacher: the base's logits [.., ahead, V] for the same tokens, whose
    distributions replace the labels, with the loss `kind`; positions without a label do not count.
    """
    ahead, vocab = logits.shape[-2:]
    flat, rows = labels.reshape(-1, ahead), logits.reshape(-1, vocab)
    if teacher is None:
        losses = F.cross_entropy(rows.float(), flat.flatten(), ignore_index=-100, reduction="none")
    else:
        p = teacher.reshape(-1, vocab).softmax(-1, dtype=torch.float32)
        losses = distribution_losses(rows.log_softmax(-1, dtype=torch.float32), p, kind)
        losses = losses * (flat.flatten() != -100)
    correct = logits.detach().argmax(-1).reshape(-1, ahead) == flat
    return losses.view(-1, ahead).sum(0), correct.sum(0)


def mean_loss(sums: tuple[Tensor, Tensor], labels: Tensor, weights: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Return (weighted sum of mean losses, top-1 accuracies [ahead]) from sums of `head_sums`.

    labels: [.., ahead], those of the sums, or those of the whole batch if the sums are of a share.
    """
    n_labels = (labels.reshape(-1, labels.shape[-1]) != -100).sum(0).clamp_min(1)
    total = (sums[0] / n_labels * torch.tensor(weights, device=n_labels.device)).sum()
    return total, sums[1] / n_labels


def head_loss(
    logits: Tensor,
    labels: Tensor,
    weights: Sequence[float],
    whole: Tensor | None = None,
    teacher: Tensor | None = None,
    kind: LossKind = "kl",
) -> tuple[Tensor, Tensor]:
    """Return (weighted sum of mean losses, top-1 accuracies [ahead]).

    logits: [.., ahead, V]; labels: [.., ahead]. whole: the labels of the whole batch, if these are only a share of it.
    teacher, kind: as in `head_sums`.
    """
    return mean_loss(head_sums(logits, labels, teacher, kind), labels if whole is None else whole, weights)


Out = TypeVar("Out")
MAX_LOGITS = 1 << 25  # of one loss at once: 128 MiB in float32, and as much for each of their distributions


def checkpoint_if_large(function: Callable[..., Out], n_logits: int, *inputs: Tensor) -> Out:
    """Return function(*inputs); the backward pass recomputes it if the whole loss has more than MAX_LOGITS logits."""
    if n_logits <= MAX_LOGITS:
        return function(*inputs)
    out: Out = checkpoint(function, *inputs, use_reentrant=False)
    return out


class LossWarmup(nn.Module):
    """sin(pi/2 * t / steps), then 1; t is saved with the weights (Medusa sec. 2.2.2)."""

    updates: Tensor

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.register_buffer("updates", torch.zeros((), dtype=torch.long))

    def forward(self) -> float:
        """Return the factor of the next update; 1 without gradients, so that validation losses are comparable."""
        if not torch.is_grad_enabled():
            return 1.0
        t = int(self.updates)
        self.updates += 1
        return math.sin(math.pi / 2 * min(1.0, t / self.steps)) if self.steps else 1.0


TOP = 10  # ranked predictions of a level


def topk_predictions(predictions: Tensor, anchors: Anchors) -> tuple[Tensor, Tensor]:
    """Compare predictions [levels, B*A, top] with the tokens after the next one.

    Return (hits [levels, top], positions [levels]).
    """
    labels = anchors.labels[..., 1 : len(predictions) + 1].flatten(0, 1).T  # [levels, B*A]
    return (predictions == labels[..., None]).sum(1), (labels != -100).sum(1)
