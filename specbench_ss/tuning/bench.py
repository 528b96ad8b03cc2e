"""Configurations of a method as decoders on one target, timed as a run times them. No method is known by name."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Sequence
from dataclasses import replace

from specbench_ss import registry
from specbench_ss.benchmark.answering import tries
from specbench_ss.benchmark.quiet_timing import quiet_collector
from specbench_ss.decoding.decoder import Decoder
from specbench_ss.decoding.loop import Limits, generate
from specbench_ss.decoding.sampling import Sampling
from specbench_ss.errors import UserError
from specbench_ss.method_spec import REFERENCE, MethodSpec
from specbench_ss.options import value_text
from specbench_ss.tuning.measurements import Cost

WARM_TOKENS = 32
HEAVY_S = 0.05  # a variant that takes longer to load has weights of its own


class DecoderBench:
    """A `Bench` that decodes greedily.

    default: the configuration that the user gave; the options given there are never changed. prompts: token ids of
    each.

    Decoders are made when they are first measured. Where making one loads weights again, only one such decoder is kept
    besides the default's: it is loaded and warmed up again whenever its turn comes.
    """

    def __init__(
        self, default: MethodSpec, loaded: Decoder, reference: Decoder, prompts: Sequence[list[int]], limits: Limits
    ) -> None:
        self.default, self.prompts, self.limits = default, prompts, limits
        self._loaded = loaded
        self._kept = {default.label: loaded, REFERENCE: reference}
        self._same = {_identity(loaded): default}  # what a configuration comes down to -> the first that did
        self._heavy = False

    def options(self, at: MethodSpec) -> list[str]:
        """Return the options that the method declares tunable, except those that the user has settled."""
        return [name for name in self.decoder(at).tunable() if name not in self.default.options]

    def around(self, at: MethodSpec, option: str) -> list[MethodSpec]:
        """Return the configurations with another value of the option.

        Values that the method cannot take here are left out, and so are those that lead to the same settings as `at`.
        """
        given = {name: value for name, value in at.options.items() if name != option}
        found: dict[str, MethodSpec] = {}
        for value in self.decoder(at).tunable().get(option, ()):
            spec = self._first_alike(MethodSpec(at.name, {**given, option: value_text(value)}))
            if spec is not None and spec.label != at.label:
                found[spec.label] = spec
        return list(found.values())

    def warm_up(self, spec: MethodSpec, prompt: int) -> None:
        """Answer a prompt shortly, without measuring."""
        self._answer(spec, prompt, replace(self.limits, max_new_tokens=min(WARM_TOKENS, self.limits.max_new_tokens)))

    def measure(self, spec: MethodSpec, prompt: int) -> Cost:
        """Answer a prompt in full and return what it cost, once no pass is recorded meanwhile, to be replayed later."""
        if spec.label not in self._kept:
            self.warm_up(spec, prompt)
        for _ in tries(self.decoder(spec).target, self.decoder(spec).remembers):
            cost = self._answer(spec, prompt, self.limits)
        return cost

    def keep(self, labels: Collection[str]) -> None:
        """Forget the decoders of all other configurations, except the default's and the reference's."""
        wanted = {*labels, self.default.label, REFERENCE}
        self._kept = {label: decoder for label, decoder in self._kept.items() if label in wanted}

    def decoder(self, spec: MethodSpec) -> Decoder:
        """Return the decoder of a configuration. Raises UserError where the method cannot take it."""
        if spec.label not in self._kept:
            if self._heavy:
                self.keep(())
            self._kept[spec.label] = self._made(spec)
        return self._kept[spec.label]

    def _made(self, spec: MethodSpec) -> Decoder:
        started = time.perf_counter()
        made = self._loaded.variant(registry.method_options(spec))
        reloads = type(self._loaded).variant is Decoder.variant
        self._heavy |= reloads and time.perf_counter() - started > HEAVY_S
        return made

    def _answer(self, spec: MethodSpec, prompt: int, limits: Limits) -> Cost:
        decoder = self.decoder(spec)
        with quiet_collector():
            done = generate(decoder, self.prompts[prompt], limits, Sampling())
        return Cost(done.wall_s, len(done.tokens))

    def _first_alike(self, spec: MethodSpec) -> MethodSpec | None:
        try:
            return self._same.setdefault(_identity(self._kept.get(spec.label) or self._made(spec)), spec)
        except UserError:
            return None


def _identity(decoder: Decoder) -> str:
    return json.dumps(decoder.described(), sort_keys=True, default=str)
