"""Measures configurations in blocks: one prompt, every configuration once, in a shuffled and balanced order.

Knows no method: what is measured is behind `Bench`, so that tests give known costs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import cycle
from typing import Protocol

from specbench_ss.benchmark.schedule import method_order
from specbench_ss.errors import UserError, error_text
from specbench_ss.method_spec import MethodSpec
from specbench_ss.tuning.measurements import Book, Cost


class Bench(Protocol):
    """Configurations of one method, and the reference, ready to answer prompts (numbers from 0)."""

    def options(self, at: MethodSpec) -> list[str]:
        """Names of the options that may be changed here, those that matter most first."""

    def around(self, at: MethodSpec, option: str) -> list[MethodSpec]:
        """The other configurations with another value of the option, the simplest first; the same twice for none."""

    def warm_up(self, spec: MethodSpec, prompt: int) -> None:
        """Answer a prompt without measuring. Raises whatever the method raises."""

    def measure(self, spec: MethodSpec, prompt: int) -> Cost:
        """Answer a prompt. Raises whatever the method raises."""

    def keep(self, labels: Collection[str]) -> None:
        """Other configurations than these will not be needed for now."""


class Watch(Protocol):
    """What tuning tells whoever watches it. Must be quick: called between samples."""

    def on_race(self, what: str, labels: Sequence[str]) -> None:
        """These configurations run against each other from now on."""

    def on_sample(self, label: str) -> None:
        """A configuration has answered a prompt."""

    def on_warning(self, text: str) -> None:
        """Something that the user should know; tuning goes on."""


class Blocks:
    """Blocks over some prompts, again and again from the first where they are used up.

    needed: labels that must not fail; another one that does is out. failed: label -> why.
    """

    def __init__(self, bench: Bench, prompts: Sequence[int], needed: Collection[str], seed: int, watch: Watch) -> None:
        self.bench, self.needed, self.seed, self.watch = bench, frozenset(needed), seed, watch
        self.book = Book()
        self.failed: dict[str, str] = {}
        self.prompts = tuple(prompts)
        self._next: Iterator[int] = cycle(self.prompts)

    def warm_up(self, specs: Sequence[MethodSpec]) -> list[MethodSpec]:
        """One unmeasured answer of each; returns those that gave one."""
        return [spec for spec in specs if self._done(spec, lambda s: self.bench.warm_up(s, self.prompts[0]))]

    def rehearse(self, spec: MethodSpec) -> None:
        """A whole answer that is not booked."""

        def answer(spec: MethodSpec) -> None:
            self.bench.measure(spec, self.prompts[0])

        self._done(spec, answer)

    def measure(self, specs: Sequence[MethodSpec]) -> list[MethodSpec]:
        """One block; returns the configurations that have not failed, in the order given."""
        prompt, by_label = next(self._next), {spec.label: spec for spec in specs}
        block = self.book.open_block(prompt)

        def sample(spec: MethodSpec) -> None:
            self.book.add(spec.label, block, self.bench.measure(spec, prompt))
            self.watch.on_sample(spec.label)

        good = {
            label for label in method_order(list(by_label), block, self.seed) if self._done(by_label[label], sample)
        }
        return [spec for spec in specs if spec.label in good]

    def _done(self, spec: MethodSpec, work: Callable[[MethodSpec], None]) -> bool:
        try:
            work(spec)
        except Exception as error:  # one configuration, say out of memory: the others are worth having
            if spec.label in self.needed:
                raise UserError(f"{spec.label} fails, so that nothing compares: {error_text(error)}") from error
            self.failed[spec.label] = error_text(error)
            self.watch.on_warning(f"{spec.label} is out, it failed: {self.failed[spec.label]}")
            return False
        return True
