"""Lookahead decoding: a Jacobi window collects n-grams; those that begin with the root are verified. Lossless.

Letters as in the paper: N = level, W = window, G = guesses. Level 0 of the window is the oldest; its first token is the
root. docs/methods/lookahead.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge
from torch import Tensor

from specbench_ss.engine.costs import ExtraWork, of_head, of_layers
from specbench_ss.engine.decoder import Decoder, DecodeState
from specbench_ss.engine.forward import ForwardPass
from specbench_ss.engine.target import FINAL, Output, Target
from specbench_ss.engine.tree import MOST_NODES, DraftTree, indices
from specbench_ss.engine.verify import VerifyResult
from specbench_ss.errors import UserError
from specbench_ss.options import Bounded, for_device, option, parse_options

LEVEL, WINDOW, GUESSES = 5, 7, 7  # as published


@dataclass(frozen=True, slots=True)
class LookaheadOptions(Bounded):
    """Options of `lookahead`; defaults as published for models of 7B on a GPU. Letters in brackets are the paper's.

    Raise UserError if a step would have too many tokens.
    """

    owner: ClassVar[str] = "lookahead"
    level: Annotated[int, Ge(2)] | None = option(LEVEL, "Length of the n-grams (N).", cpu=3)
    window: Annotated[int, Ge(1)] | None = option(WINDOW, "Columns of the Jacobi window (W).", cpu=2)
    guesses: Annotated[int, Ge(1)] | None = option(
        GUESSES,
        "Number of n-grams stored for each first token and verified in a step (G). nodes=N sets the largest number "
        "of whole n-grams, of level - 1 nodes each, with at most N nodes.",
        cpu=2,
    )
    pool_from_prompt: bool | None = option(False, "Add the n-grams of the prompt to the pool.", cpu=True)

    def check_together(self) -> None:
        if self.most_tokens() > MOST_NODES:
            raise UserError(
                f"lookahead: a step would have {self.most_tokens()} tokens, more than {MOST_NODES}; "
                "reduce level, window or guesses"
            )

    def most_tokens(self) -> int:
        """Return the tokens of the largest step: root, guesses without common prefixes, rest of the window."""
        n, w, g = self.level or LEVEL, self.window or WINDOW, self.guesses or GUESSES  # defaults of a CPU are smaller
        window = max(levels * (w + n - 1 - levels) for levels in range(1, n))  # the window narrows while it fills
        return window + g * (n - 1)


class Lookahead(Decoder):
    """Lookahead decoder; every step moves the window by one token and one level."""

    name = "lookahead"
    summary = "lookahead decoding: Jacobi window and n-gram pool, no training"
    paper = "Fu et al. 2024, arXiv:2402.02057"
    Options = LookaheadOptions
    node_options = ("guesses",)

    def __init__(self, target: Target, options: Any = None) -> None:
        super().__init__(target, for_device(options or LookaheadOptions(), target.device_type))
        self.pool = NGramPool(self.options.guesses)
        self.window = torch.empty(0)  # int64 [levels, columns] on the device; [0, 0] is the root

    @classmethod
    def with_nodes(cls, given: Mapping[str, str], nodes: int) -> dict[str, str]:
        """Return the options with as many whole n-grams as there is room for, and shorter ones where there is none."""
        level = min(parse_options(LookaheadOptions, given, cls.name).level or LEVEL, nodes + 1)
        return super().with_nodes({**given, "level": str(level)}, nodes // (level - 1))

    @classmethod
    def test_instances(cls, target: Target) -> Mapping[str, Callable[[], Decoder]]:
        shapes = {
            "default": LookaheadOptions(),
            "prompt": LookaheadOptions(3, 5, 4, pool_from_prompt=True),
            "bigrams": LookaheadOptions(2, 6, 4, pool_from_prompt=True),
            "smallest": LookaheadOptions(2, 1, 1),
        }
        return {label: partial(cls, target, options) for label, options in shapes.items()}

    def search_space(self) -> Mapping[str, Sequence[Any]]:
        return {
            "window": (1, 2, 3, 5, 7, 10, 15),
            "guesses": (1, 2, 3, 5, 7, 10, 15),
            "level": (2, 3, 4, 5, 7),
            "pool_from_prompt": (False, True),
        }

    def max_tokens_per_step(self) -> int:
        return int(self.options.most_tokens())

    def extra_work(self) -> ExtraWork:
        """Return the FLOPs of the window without its root, and of its newest level in the LM head."""
        o = self.options
        return ExtraWork(step=((o.level - 1) * o.window - 1) * of_layers(self.target) + o.window * of_head(self.target))

    def on_prefill(self, state: DecodeState) -> None:
        """Reset the pool; start a window of one level with random prompt tokens, wide enough for N - 1 levels."""
        o, prompt = self.options, torch.tensor(state.ids[: state.prompt_tokens], device=self.target.device)
        columns = o.window + o.level - 2
        at = torch.randint(len(prompt), (1, columns), generator=state.rng, device=self.target.device)
        self._move(prompt[at], state.root)
        self.pool = NGramPool(o.guesses)
        if o.pool_from_prompt and len(state.ids) >= o.level:
            self.pool.add(torch.tensor(state.ids).unfold(0, o.level, 1).tolist())

    def propose(self, state: DecodeState) -> DraftTree:
        """Return the tree of the n-grams that begin with the root."""
        tokens, parents = prefix_tree(self.pool.following(state.ids[-1]))
        drafted = indices(tokens, self.target.device)
        return DraftTree.from_parents(torch.cat((state.root, drafted)), (-1, *parents))

    def forward(self, state: DecodeState, tree: DraftTree) -> Output:
        """Run one pass over [tree | window without the root]; extra: the next level, int64 [columns]."""
        target, past, n = self.target, state.cache.get_seq_length(), len(tree)
        window = window_shape(*self.window.shape, target.device)
        tokens = torch.cat((tree.tokens, self.window.flatten()[1:]))
        visible, depths = tree.visibility()
        inputs = (tokens, window.joined(visible), torch.cat((depths, window.offsets)))
        furthest = min(past + max(tree.topology.depth, window.max_offset), target.context_length - 1)
        dims = ((0,), (0, 1), (0,))
        (x,) = target.run_pass((self.name,), self._pass, state.cache, inputs, dims, len(tokens), furthest)
        newest = torch.cat((x[:, :1], x[:, n:]), 1)[:, -self.window.shape[1] :]  # the only level whose successor is new
        final = target.family.norm(torch.cat((x[:, :n], newest), 1))
        logits = target.logits(final)
        return Output(logits[:, :n], tree, {FINAL: final[:, :n]}, extra=logits[0, n:].argmax(-1))

    def _pass(self, current: ForwardPass, tokens: Tensor, visible: Tensor, depths: Tensor) -> tuple[Tensor]:
        """Return the last layer's output [1, n, h] at all tokens [n] of tree and window."""
        # window positions beyond the context affect no verified token
        positions = current.positions(depths).clamp_max(self.target.context_length - 1)
        x, mask = self.target.embed(tokens[None], positions), current.mask(visible)
        (x,) = current.run(x, 0, self.target.n_layers, mask, current.rotary(positions))
        return (x,)

    def update(self, state: DecodeState, result: VerifyResult, output: Output) -> None:
        """Append the new level; add columns of length N to the pool and drop their oldest level."""
        assert output.extra is not None
        extended = torch.cat((self.window, output.extra[None]))  # [levels + 1, columns]
        if len(extended) == self.options.level:
            self.pool.add(extended.T.tolist())
            self._move(extended[1:], state.root)
        else:
            self._move(extended[:, 1:], state.root)

    def _move(self, window: Tensor, root: Tensor) -> None:
        """Set the window [levels, columns] with the root as its first token."""
        window[0, 0] = root[0]
        self.window = window


@dataclass(frozen=True, slots=True)
class WindowShape:
    """Mask and positions of the m = levels * columns - 1 window tokens after the root, level by level."""

    visible: Tensor  # bool [m, m], within the window
    offsets: Tensor  # int64 [m], positions relative to the root
    max_offset: int

    def joined(self, tree: Tensor) -> Tensor:
        """Return the mask of [tree | window], bool [n + m, n + m]; of the tree, the window attends to the root."""
        n, m = len(tree), len(self.offsets)
        visible = tree.new_zeros(n + m, n + m)
        visible[:n, :n], visible[n:, 0], visible[n:, n:] = tree, True, self.visible
        return visible


@lru_cache(maxsize=256)
def window_shape(levels: int, columns: int, device: torch.device) -> WindowShape:
    """Return the shape of a window.

    The token at level l of column j attends to level 0 up to column j and to levels 1 to l of column j. Its position is
    j + l after the root.
    """
    level = torch.arange(levels).repeat_interleave(columns)  # of every token, root included
    column = torch.arange(columns).repeat(levels)
    level_0 = (level == 0) & (column <= column[:, None])
    same_column = (column == column[:, None]) & (level <= level[:, None])
    visible = (level_0 | same_column)[1:, 1:]
    return WindowShape(visible.to(device), (level + column)[1:].to(device), levels + columns - 2)


class NGramPool:
    """The last `most` different n-grams of each first token."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.grams: dict[int, dict[tuple[int, ...], None]] = {}  # by first token, the oldest first

    def add(self, grams: Iterable[Sequence[int]]) -> None:
        """Add n-grams, the newest last."""
        for first, *rest in grams:
            known, gram = self.grams.setdefault(first, {}), tuple(rest)
            known.pop(gram, None)
            known[gram] = None
            if len(known) > self.most:
                del known[next(iter(known))]

    def following(self, token: int) -> list[tuple[int, ...]]:
        """Return the continuations of a token, the newest first."""
        return list(reversed(self.grams.get(token, {})))


def prefix_tree(chains: Iterable[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Merge chains under a root into a tree; return tokens and parents of the nodes 1.. (0 = root)."""
    tokens: list[int] = []
    parents: list[int] = []
    children: dict[tuple[int, int], int] = {}
    for chain in chains:
        node = 0
        for token in chain:
            child = children.setdefault((node, token), len(tokens) + 1)
            if child > len(tokens):
                tokens.append(token)
                parents.append(node)
            node = child
    return tokens, parents
