"""The Decoder interface: what a decoding method is to the core.

A method proposes a draft tree; the core owns the loop, the target's forward, verification, the cache, sampling,
stopping, cutting and every count. Knows no method by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from specbench_ss.decoding.cache import Cache
from specbench_ss.decoding.model_shape import read_by_a_pass
from specbench_ss.decoding.outline import Outline
from specbench_ss.decoding.own_work import OwnWork
from specbench_ss.decoding.sampling import Sampling
from specbench_ss.decoding.target import Output, Target
from specbench_ss.decoding.tree import DraftTree
from specbench_ss.decoding.verify import Verdict, verify
from specbench_ss.method_spec import REFERENCE, MethodSpec
from specbench_ss.options import NoOptions, option_values


@dataclass(slots=True)
class State:
    """What is known between two steps of one request.

    ids: prompt and answer so far, a list of S token ids; its last entry is the root: decided, not yet in the cache.
    root: that last token, int64 [1], on the device. taps: hidden states asked for by `Decoder.taps` at the
    position before the root, {layer: [1, 1, h]}; key -1 is the final, normed state (what the LM head reads).
    rng: of this request, on the target's device: for a method that draws its candidates.
    """

    ids: list[int]
    prompt_tokens: int
    root: Tensor
    cache: Cache
    sampling: Sampling
    taps: dict[int, Tensor] = field(default_factory=dict)
    rng: torch.Generator = field(default_factory=lambda: torch.Generator())
    draft_calls: int = 0  # forward passes of a draft model, counted by the method that makes them

    @property
    def position(self) -> int:
        """Position of the root: how many tokens the cache holds."""
        return len(self.ids) - 1


class Decoder(ABC):
    """One decoding method, bound to one target.

    Subclasses set `name`, `summary`, `paper`, `lossless`, and a frozen dataclass `Options` whose fields carry
    `metadata={"help": ...}`. One object serves many prompts; `begin` must forget the last one entirely.
    lossless: its output is that of the method that `reference_for` names; an object whose options give that up sets
    its own to False. autoregressive: each step is the root alone and keeps one token, which the loop enforces; only
    such a method may be a reference. remembers: earlier prompts may change its speed, never its output; reports say so.
    learnt: what is known of the training of its weights (`models.drafter_folder.learnt`), set where they are loaded;
    it goes into the manifest, and reports show it beside the speed. advised: options that are as the folder of the
    weights advises (`models.drafter_advice`), set where they are loaded; a run says so, and they go into the manifest.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    paper: ClassVar[str] = ""
    autoregressive: ClassVar[bool] = False
    lossless: bool = True
    remembers: bool = False
    learnt: Mapping[str, Any] = MappingProxyType({})
    advised: Mapping[str, Any] = MappingProxyType({})

    Options: ClassVar[type[Any]] = NoOptions
    taps: tuple[int, ...] = ()

    def __init__(self, target: Target, options: Any = None) -> None:
        self.target = target
        self.options: Any = self.Options() if options is None else options

    @classmethod  # noqa: B027 - optional hook
    def check(cls, options: Any, base: Outline) -> None:
        """Raises UserError for what can be found wrong before the target's weights are loaded, and nothing downloaded.

        That is in the options, and in the files, headers and configurations of the method's own weights.
        """

    @classmethod
    def load(cls, target: Target, options: Any) -> Decoder:
        """The method with its weights, for this target. Raises UserError where they are missing or do not fit."""
        return cls(target, options)

    @classmethod
    def examples(cls, target: Target) -> Mapping[str, Callable[[], Decoder]]:
        """The method in its various shapes for any target, by a label each: what `ssbench check` holds to the laws.

        One that needs weights gives itself random ones. The target may be tiny: two layers, seven words.
        """
        return {"default": lambda: cls.load(target, cls.Options())}

    @classmethod
    def reference_for(cls, options: Any) -> MethodSpec:
        """Return the method whose output a lossless one must equal; a run includes it.

        Another one than autoregressive decoding of the target only where the method changes the model itself: then an
        autoregressive method of that model (`references.check_reference`).
        """
        return MethodSpec(REFERENCE)

    def next_logits(self, prompt: Sequence[int], answer: Sequence[int], cache: Cache | None = None) -> Tensor:
        """float32 logits [V] of this method's model after prompt and answer, from a fresh pass; untimed.

        cache: an empty one to use, in which the keys and values of prompt and answer come first in every layer.
        """
        return self.target.next_logits([*prompt, *answer], cache)

    def answer_logits(self, prompt: Sequence[int], answer: Sequence[int]) -> Iterator[Tensor]:
        """Yield float32 logits [n, V] of this method's model at successive tokens of an answer; untimed.

        They come from a fresh pass, and may end before the answer does. Of a method that overrides `next_logits` and
        not this one, only a few positions are compared, with a pass each.
        """
        yield from self.target.answer_logits(prompt, answer)

    @property
    def one_position_per_pass(self) -> bool:
        """Return True if only `next_logits` gives the logits of this method's model."""
        own = type(self)
        return own.next_logits is not Decoder.next_logits and own.answer_logits is Decoder.answer_logits

    def described(self) -> dict[str, Any]:
        """What this object measures, JSON-ready: settings as resolved and, where it has weights, their hash.

        Goes into the manifest; a run is resumed only where it is the same.
        """
        return option_values(self.options)

    def tunable(self) -> Mapping[str, Sequence[Any]]:
        """Options whose best value depends on the device, each with the values worth trying, the simplest first.

        None of them may change the output of a lossless method. Options that matter most come first. `ssbench tune`
        asks every configuration that it stands at, so what makes no difference there may be left out. None of these
        may be needed to load the weights. Nothing = not tunable.
        """
        return {}

    def variant(self, options: Any) -> Decoder:
        """The same method and weights with other values of tunable options. Raises UserError where they do not fit.

        Loads once more; a method whose weights are large overrides it to share them.
        """
        return type(self).load(self.target, options)

    def beside(self) -> Decoder:
        """The same method with the same weights, for a request that is answered at the same time as this one's."""
        return self.variant(self.options)

    def max_rows(self) -> int | None:
        """The most rows that one step may put through the target, the root included; None where that is not known.

        The cache reserves as many as are stated, and a step that needs more ends the run with an error. Of a method
        that states none the cache grows when a step needs it to, which takes time within that step.
        """
        return None

    def drafter_weights(self) -> Iterable[Tensor] | None:
        """Weights that one call of the method's own drafter reads, for counting what a step costs; None: not known.

        Found without being asked for where they are modules that are attributes. One whose `draft_calls` are counted
        reads them once a call, any other once a step.
        """
        modules = [value for value in vars(self).values() if isinstance(value, torch.nn.Module)]
        return [weight for module in modules for weight in read_by_a_pass(module)]

    def own_work(self) -> OwnWork:
        """What rows of the method's own are multiplied by besides its nodes, for counting what a step costs."""
        return OwnWork()

    def prefill(self, state: State, ids: Tensor) -> Output:
        """Run the prompt ids [1, S] through the target; logits [1, 1, V] at the last position."""
        return self.target.prefill(ids, state.cache, self.taps)

    def begin(self, state: State) -> None:  # noqa: B027 - optional hook
        """A new prompt has been prefilled; forget the last one."""

    def forget(self) -> None:  # noqa: B027 - optional hook
        """Forget every earlier prompt, as after warm-up: what a method that `remembers` has to do there."""

    @abstractmethod
    def propose(self, state: State) -> DraftTree:
        """The draft for this step; `DraftTree.root_only(state.root)` = plain autoregressive."""

    def forward(self, state: State, tree: DraftTree) -> Output:
        """Verify the tree in one pass of the target: logits [1, n, V] for the n nodes of `Output.tree`."""
        return self.target.forward_tree(tree, state.cache, self.taps)

    def accept(self, state: State, tree: DraftTree, output: Output) -> Verdict:
        """What of the verified tree is accepted: exactly the target's distribution.

        Only a method that is not lossless may have another rule.
        """
        return verify(output.logits[0], tree, state.sampling, state.rng)

    def observe(self, state: State, verdict: Verdict, output: Output) -> None:  # noqa: B027 - optional hook
        """The step is committed: state.ids, state.root, state.taps and the cache are already the new ones."""
