"""Which layers of a model EAGLE-3 reads its features from. Knows numbers of layers, no model."""

from __future__ import annotations

from specbench_ss.decoding.target import FINAL


def published_levels(n_layers: int) -> tuple[int, ...]:
    """The layers whose inputs EAGLE-3 reads: 2, N/2, N - 3; in a shallow model outputs of the first, middle and last.

    FINAL stands for the last one's, normed.
    """
    if n_layers >= 7:  # fewer, and two would be the same
        return 2, n_layers // 2, n_layers - 3
    outputs = (*range(1, n_layers), FINAL)
    return tuple(outputs[i] for i in sorted({0, len(outputs) // 2, len(outputs) - 1}))
