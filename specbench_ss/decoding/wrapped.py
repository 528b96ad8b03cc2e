"""A decoder around another one, for whoever watches or changes some of its calls. Knows no method."""

from __future__ import annotations

from torch import Tensor

from specbench_ss.decoding.decoder import Decoder, State
from specbench_ss.decoding.target import Output
from specbench_ss.decoding.tree import DraftTree
from specbench_ss.decoding.verify import Verdict


class Wrapped(Decoder):
    """Does all that the loop asks of it as `inner` does. A subclass overrides the calls that it watches."""

    def __init__(self, inner: Decoder) -> None:
        super().__init__(inner.target, inner.options)
        self.inner, self.taps = inner, inner.taps

    def max_rows(self) -> int | None:
        """As `inner`."""
        return self.inner.max_rows()

    def prefill(self, state: State, ids: Tensor) -> Output:
        """As `inner`."""
        return self.inner.prefill(state, ids)

    def begin(self, state: State) -> None:
        """As `inner`."""
        self.inner.begin(state)

    def propose(self, state: State) -> DraftTree:
        """As `inner`."""
        return self.inner.propose(state)

    def forward(self, state: State, tree: DraftTree) -> Output:
        """As `inner`."""
        return self.inner.forward(state, tree)

    def accept(self, state: State, tree: DraftTree, output: Output) -> Verdict:
        """As `inner`."""
        return self.inner.accept(state, tree, output)

    def observe(self, state: State, verdict: Verdict, output: Output) -> None:
        """As `inner`."""
        self.inner.observe(state, verdict, output)
