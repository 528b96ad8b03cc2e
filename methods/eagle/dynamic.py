"""EAGLE-2 and EAGLE-3: trees whose form follows the draft's probabilities. Li et al. 2024 (EMNLP), sec. 4."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from annotated_types import Ge, Le

from specbench_ss import user_files
from specbench_ss.engine.architectures import Outline
from specbench_ss.engine.decoder import Decoder, State
from specbench_ss.engine.target import FINAL, Target
from specbench_ss.engine.tree import MOST_NODES, DraftTree
from specbench_ss.errors import UserError
from specbench_ss.methods._shared.tree_growth import best, grow
from specbench_ss.methods.eagle.common import FeatureDrafting
from specbench_ss.methods.eagle.feature_layers import published_levels
from specbench_ss.methods.eagle.trees import MOST_DEPTH
from specbench_ss.options import Bounded

if TYPE_CHECKING:
    from torch import Tensor

    from specbench_ss.methods.eagle.drafter import Drafter

TOTALS = (4, 6, 8, 12, 16, 24, 32, 48, 60)  # worth trying
BEAMS = (1, 2, 3, 4, 6, 10)
DEPTHS = (0, 1, 2, 3, 4, 5, 7)


@dataclass(frozen=True, slots=True)
class DynamicOptions(Bounded):
    """Options of `eagle2`. Raises UserError for impossible values."""

    owner: ClassVar[str] = "eagle2"
    weights: str = field(
        default="", metadata={"help": "Folder or file with the drafter. Empty: the one that came with the model."}
    )
    total_tokens: Annotated[int, Ge(0), Le(MOST_NODES)] = field(
        default=0,
        metadata={"help": "How many nodes are verified, the root included. 0: as the folder advises, else 60."},
    )
    depth: Annotated[int, Ge(-1), Le(MOST_DEPTH)] = field(
        default=-1,
        metadata={"help": "How many levels are drafted after the first. -1: as the folder advises, else as published."},
    )
    top_k: Annotated[int, Ge(0), Le(64)] = field(
        default=0,
        metadata={"help": "Beams of a level, and candidates of each. 0: as the folder advises, else 10."},
    )

    def check_together(self) -> None:
        """A tree of more than its root."""
        if self.total_tokens == 1:
            raise UserError(f"{self.owner}: total_tokens counts the root: it must be at least 2")


@dataclass(frozen=True, slots=True)
class Eagle3Options(DynamicOptions):
    """Options of `eagle3`."""

    owner: ClassVar[str] = "eagle3"
    layers: str = field(
        default="auto",
        metadata={
            "help": "Layers of the target whose inputs the drafter reads, as in 2:16:29; -1 is the final state. "
            "auto: as the checkpoint's configuration says."
        },
    )


@dataclass(frozen=True, slots=True)
class Size:
    """A dynamic tree as it is drafted. drafted: nodes kept, without the root; levels: depth + 1."""

    drafted: int
    depth: int
    top_k: int


class Eagle2(FeatureDrafting):
    """EAGLE's drafter; every level keeps the top_k beams of the greatest path probability, the tree the best nodes."""

    name = "eagle2"
    companion = "eagle"
    summary = "EAGLE-2: EAGLE's drafter, dynamic tree"
    paper = "Li et al. 2024, arXiv:2406.16858"
    Options = DynamicOptions
    advisable = ("total_tokens", "depth", "top_k")
    published_depth: ClassVar[int] = 5

    def __init__(
        self,
        target: Target,
        options: DynamicOptions,
        drafter: Drafter,
        config: dict[str, Any],
        layers: Sequence[int] = (FINAL,),
    ) -> None:
        self.size = self.settle(options, config, drafter.draft_vocab or target.vocab_size)
        super().__init__(target, options, drafter, config, layers)

    @classmethod
    def settle(cls, options: DynamicOptions, config: dict[str, Any], vocab: int) -> Size:
        """The tree's size, no wider than the vocabulary."""
        depth = cls.published_depth if options.depth < 0 else options.depth
        k = min(options.top_k or 10, vocab)
        total = options.total_tokens or 60
        return Size(min(total - 1, k + depth * k * k), depth, k)

    @classmethod
    def examples(cls, target: Target) -> Mapping[str, Callable[[], Decoder]]:
        """Random weights, trees of several forms."""
        from specbench_ss.methods.eagle.new_weights import random_eagle

        def make(**options: Any) -> Callable[[], Decoder]:
            return lambda: cls(target, DynamicOptions(**options), random_eagle(target), {})

        return {
            "published": make(),
            "small": make(total_tokens=7, depth=2, top_k=3),
            "chain": make(total_tokens=5, depth=4, top_k=1),
            "one level": make(depth=0, top_k=4),
        }

    def described(self) -> dict[str, Any]:
        """The tree's size as resolved, and the drafter."""
        s = self.size
        return super().described() | {"total_tokens": s.drafted + 1, "depth": s.depth, "top_k": s.top_k}

    def tunable(self) -> Mapping[str, Sequence[Any]]:
        """All of the tree's size."""
        s, vocab = self.size, self.drafter.draft_vocab or self.target.vocab_size
        most = s.top_k + s.depth * s.top_k**2
        return {
            "total_tokens": [n for n in TOTALS if n <= most + 1],
            "depth": DEPTHS,
            "top_k": [k for k in BEAMS if k <= vocab],
        }

    def max_rows(self) -> int:
        """The tree, root included."""
        return 1 + self.size.drafted

    @property
    def drafted_rows(self) -> int:
        """Beams of all levels."""
        return self.size.depth * self.size.top_k

    def propose(self, state: State) -> DraftTree:
        """Beams by path probability, level by level (EAGLE-2 sec. 4.1); of all nodes the best (sec. 4.2)."""
        size, first = self.size, self.newest
        rotary = self.rotary_ahead(state, max(1, size.depth))
        states = first  # [1, rows, h] of the last level's beams, before any the root's

        def expand(tokens: Tensor, visible: Tensor, above: Tensor, level: int) -> Tensor:
            nonlocal states
            states = self.descend(state, tokens, states[:, above], visible, rotary, level - 1)
            return self.drafter.logits(states, self.target)[0]

        root_logits = self.drafter.logits(first, self.target)[0, 0]
        tree = grow(state.root, root_logits, self._choose, expand, size.depth + 1, size.drafted)
        self.forget_drafted(state)
        return tree

    def _choose(self, logits: Tensor) -> tuple[Tensor, Tensor, None]:
        """The best tokens of each row, by the target's ids."""
        drafted, log_p, _ = best(self.size.top_k)(logits)
        return self.drafter.token_ids(drafted), log_p, None


class Eagle3(Eagle2):
    """EAGLE-2's tree; a drafter that reads several levels of the target and has its own head (NeurIPS 2025)."""

    name = "eagle3"
    companion = "eagle3"
    summary = "EAGLE-3: features of three levels, training-time test, dynamic tree"
    paper = "Li et al. 2025, arXiv:2503.01840"
    Options = Eagle3Options
    published_depth = 7

    @classmethod
    def layers_asked(cls, options: Any, base: Outline) -> tuple[int, ...] | None:
        """As the option of that name lists them."""
        return None if options.layers == "auto" else _checked(_numbers(options.layers), base, "layers")

    @classmethod
    def layers_of(cls, config: dict[str, Any], base: Outline) -> Sequence[tuple[int, ...]]:
        """As our config says, or as published; else as the checkpoint lists them, by either convention.

        Some list layers whose inputs are read, some those whose outputs are.
        """
        if "speculators_model_type" in config:
            return (_stated(config, base),)
        if "feature_layers" in config:
            return (_checked(config["feature_layers"], base, "feature_layers in config.json"),)
        key = "eagle_aux_hidden_state_layer_ids"
        nested = config.get("eagle_config")
        listed = config.get(key) or (nested.get(key) if isinstance(nested, dict) else None)
        if not listed:
            return (published_levels(base.n_layers),)
        inputs = _checked(listed, base, f"{key} in config.json")
        outputs = tuple(FINAL if i + 1 == base.n_layers else i + 1 for i in inputs)
        return inputs, outputs

    @classmethod
    def levels(cls, layers: Sequence[int]) -> int:
        """A feature a layer."""
        return len(layers)

    @classmethod
    def examples(cls, target: Target) -> Mapping[str, Callable[[], Decoder]]:
        """Random weights, a reduced vocabulary and a whole one."""
        from specbench_ss.methods.eagle.new_weights import random_eagle3

        def make(reduced: bool, **options: Any) -> Callable[[], Decoder]:
            def build() -> Decoder:
                drafter, config, layers = random_eagle3(target, reduced)
                return cls(target, Eagle3Options(**options), drafter, config, layers)

            return build

        return {
            "published": make(True),
            "small": make(False, total_tokens=7, depth=2, top_k=3),
            "chain": make(True, total_tokens=5, depth=4, top_k=1),
        }


def _stated(config: dict[str, Any], base: Outline) -> tuple[int, ...]:
    """In the layout of speculators, where there is one way to read the list."""
    from specbench_ss.methods.eagle.speculators_files import check_layers

    try:
        return check_layers(config, base)
    except UserError as error:
        raise UserError(f"eagle3: {error}") from None


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(":")]
    except ValueError:
        raise UserError(f"eagle3: layers must be numbers as in 2:16:29, or auto, not {text!r}") from None


def _checked(layers: Any, base: Outline, what: str) -> tuple[int, ...]:
    """Raises UserError for layers that the model does not have."""
    try:
        named = user_files.convert(layers, list[int])
    except ValueError:
        named = []
    if not named:
        raise UserError(f"eagle3: {what} must be a list of layers, not {layers!r}")
    for layer in named:
        if not FINAL <= layer < base.n_layers:
            raise UserError(f"eagle3: {what} names layer {layer}, the model has layers 0 to {base.n_layers - 1}")
    return tuple(named)
