"""Measure configurations in blocks: in one prompt's block each configuration answers once, in shuffled, balanced order.

This module knows no method: what is measured is behind `Bench`, so that tests can give known costs.
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
    """Configurations of one method, and the reference, ready to answer prompts, which are numbered from 0."""

    def options(self, at: MethodSpec) -> list[str]:
        """Return the names of the options that may be changed here, those that matter most first."""

    def around(self, at: MethodSpec, option: str) -> list[MethodSpec]:
        """Return the configurations with another value of the option, the simplest first.

        Of values that lead to the same settings, only one is returned.
        """

    def warm_up(self, spec: MethodSpec, prompt: int) -> None:
        """Answer a prompt without measuring. Raises whatever the method raises."""

    def measure(self, spec: MethodSpec, prompt: int) -> Cost:
        """Answer a prompt and return what it cost. Raises whatever the method raises."""

    def keep(self, labels: Collection[str]) -> None:
        """Take note that configurations other than these will not be needed for now."""


class Watch(Protocol):
    """What tuning tells whoever watches it. Its methods must be quick, since they are called between samples."""

    def on_race(self, what: str, labels: Sequence[str]) -> None:
        """Learn that these configurations run against each other from now on. what: the option whose values differ."""

    def on_sample(self, label: str) -> None:
        """Learn that a configuration has answered a prompt."""

    def on_warning(self, text: str) -> None:
        """Learn something that the user should know. Tuning goes on."""


class Blocks:
    """Blocks over some prompts, which start again from the first prompt when all are used up.

    needed: labels that must not fail; any other configuration that fails is left out. failed: {label: why it failed}.
    """

    def __init__(self, bench: Bench, prompts: Sequence[int], needed: Collection[str], seed: int, watch: Watch) -> None:
        self.bench, self.needed, self.seed, self.watch = bench, frozenset(needed), seed, watch
        self.book = Book()
        self.failed: dict[str, str] = {}
        self.prompts = tuple(prompts)
        self._next: Iterator[int] = cycle(self.prompts)

    def warm_up(self, specs: Sequence[MethodSpec]) -> list[MethodSpec]:
        """Have each configuration give one unmeasured answer; return those that gave one."""
        return [spec for spec in specs if self._done(spec, lambda s: self.bench.warm_up(s, self.prompts[0]))]

    def rehearse(self, spec: MethodSpec) -> None:
        """Give a whole answer that is not recorded."""

        def answer(spec: MethodSpec) -> None:
            self.bench.measure(spec, self.prompts[0])

        self._done(spec, answer)

    def measure(self, specs: Sequence[MethodSpec]) -> list[MethodSpec]:
        """Measure one block; return the configurations that have not failed, in the order given."""
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
