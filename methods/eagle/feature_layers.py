"""Which layers of a model EAGLE-3 reads its features from. Knows numbers of layers, no model."""

from __future__ import annotations

from specbench_ss.engine.target import FINAL


def published_levels(n_layers: int) -> tuple[int, ...]:
    """The layers whose inputs EAGLE-3 reads: 2, N/2, N - 3; in a shallow model outputs of the first, middle and last.

    FINAL stands for the last one's, normed.
    """
    if n_layers >= 7:  # fewer, and two would be the same
        return 2, n_layers // 2, n_layers - 3
    return _first_middle_last((*range(1, n_layers), FINAL))


def input_levels(n_layers: int) -> tuple[int, ...]:
    """The same without the final state, for layouts that name inputs of layers alone; of one layer its input, 0."""
    return published_levels(n_layers) if n_layers >= 7 else _first_middle_last((*range(1, n_layers),) or (0,))


def _first_middle_last(states: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(states[i] for i in sorted({0, len(states) // 2, len(states) - 1}))
