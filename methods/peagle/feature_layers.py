"""Which layers of a model a P-EAGLE drafter reads its features from. Knows numbers of layers, no model."""

from __future__ import annotations


def feature_layers(n_layers: int) -> tuple[int, ...]:
    """The layers whose inputs are read: 2, N/2, N - 3 as EAGLE-3's; in a shallow model the second, middle and last."""
    if n_layers >= 7:  # fewer, and two would be the same
        return 2, n_layers // 2, n_layers - 3
    return tuple(sorted({min(1, n_layers - 1), n_layers // 2, n_layers - 1}))
