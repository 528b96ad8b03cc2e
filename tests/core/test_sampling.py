"""The target's distribution: by hand, and against transformers' own filters."""

from __future__ import annotations

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from specbench_ss.engine.sampling import SamplingParams

P = [0.25, 0.5, 0.1, 0.15]
SQUARES = [0.0625 / 0.345, 0.25 / 0.345, 0.01 / 0.345, 0.0225 / 0.345]


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (SamplingParams(1.0), P),
        (SamplingParams(0.5), SQUARES),
        (SamplingParams(1.0, top_k=1), [0, 1, 0, 0]),
        (SamplingParams(1.0, top_k=2), [1 / 3, 2 / 3, 0, 0]),
        (SamplingParams(1.0, top_k=4), P),
        (SamplingParams(1.0, top_k=9), P),
        (SamplingParams(1.0, top_p=0.01), [0, 1, 0, 0]),
        (SamplingParams(1.0, top_p=0.49), [0, 1, 0, 0]),
        (SamplingParams(1.0, top_p=0.51), [1 / 3, 2 / 3, 0, 0]),  # the token that crosses stays
        (SamplingParams(1.0, top_p=0.74), [1 / 3, 2 / 3, 0, 0]),
        (SamplingParams(1.0, top_p=0.76), [0.25 / 0.9, 0.5 / 0.9, 0, 0.15 / 0.9]),
        (SamplingParams(1.0, top_p=0.99), P),
        # of the three that top-k leaves the first has 0.56 of the mass, of all four it has 0.5
        (SamplingParams(1.0, top_k=3, top_p=0.53), [0, 1, 0, 0]),
        # at T = 0.5 the first has 0.72 of the mass
        (SamplingParams(0.5, top_p=0.7), [0, 1, 0, 0]),
        (SamplingParams(0.5, top_k=2, top_p=0.81), [0.2, 0.8, 0, 0]),
    ],
)
def test_distributions_by_hand(sampling: SamplingParams, expected: list[float]) -> None:
    torch.testing.assert_close(sampling.probs(torch.tensor(P).log()), torch.tensor(expected, dtype=torch.float32))


def test_equal_tokens() -> None:
    """Top-k keeps all that are as good as the k-th; top-p only as many as it takes."""
    logits = torch.tensor([0.2, 0.4, 0.2, 0.2]).log()
    torch.testing.assert_close(SamplingParams(1.0, top_k=2).probs(logits), torch.tensor([0.2, 0.4, 0.2, 0.2]))
    found = SamplingParams(1.0, top_p=0.5).probs(logits)
    assert sorted(found.tolist()) == pytest.approx([0, 0, 1 / 3, 2 / 3])
    assert float(found[1]) == pytest.approx(2 / 3)


def test_half_precision_logits_give_a_single_precision_distribution() -> None:
    logits = torch.randn(2, 3, 1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = SamplingParams(0.7).probs(logits)
    assert found.dtype == torch.float32 and found.shape == logits.shape
    torch.testing.assert_close(found, SamplingParams(0.7).probs(logits.float()))


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [0, 1, 7, 50])
@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.5, 0.05])
def test_transformers_filters_give_the_same(temperature: float, top_k: int, top_p: float) -> None:
    logits = 3 * torch.randn(40, 50, generator=torch.Generator().manual_seed(1))
    scores = TemperatureLogitsWarper(temperature)(None, logits)
    scores = TopKLogitsWarper(top_k)(None, scores) if top_k else scores
    scores = TopPLogitsWarper(top_p)(None, scores) if top_p < 1 else scores
    torch.testing.assert_close(SamplingParams(temperature, top_p, top_k).probs(logits), scores.softmax(-1))
