"""Lookahead decoding: a Jacobi window collects n-grams; those that begin with the root are verified. Lossless.

Letters as in the paper: N = level, W = window, G = guesses. A column of the window is a row of guesses for tokens that
follow each other: level 0 is the oldest; its first token is the root. docs/methods/lookahead.md.
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
from specbench_ss.engine.target import FINAL, Output, Target
from specbench_ss.engine.tree import MOST_NODES, DraftTree, indices
from specbench_ss.engine.verify import VerifyResult
from specbench_ss.errors import UserError
from specbench_ss.options import Bounded, option, parse_options


@dataclass(frozen=True, slots=True)
class LookaheadOptions(Bounded):
    """Options of `lookahead`; defaults as published for models of 7B. Letters in brackets are the paper's.

    Raises UserError for values beyond their bounds, and for those that make a step of too many rows.
    """

    owner: ClassVar[str] = "lookahead"
    level: Annotated[int, Ge(2)] = option(5, "Tokens of an n-gram (N). All but the first are guessed.")
    window: Annotated[int, Ge(1)] = option(7, "Columns of the Jacobi window (W).")
    guesses: Annotated[int, Ge(1)] = option(
        7, "How many n-grams are kept for each first token and verified in a step (G)."
    )
    pool_from_prompt: bool = option(False, "Put the n-grams of the prompt into the pool as well.")

    def check_together(self) -> None:
        if self.most_rows() > MOST_NODES:
            raise UserError(
                f"lookahead: level={self.level}, window={self.window}, guesses={self.guesses} make steps of "
                f"{self.most_rows()} rows, more than {MOST_NODES}"
            )

    def most_rows(self) -> int:
        """Rows of the largest step: the root, whole guesses that share nothing, the rest of the window."""
        n, w = self.level, self.window
        window = max(levels * (w + n - 1 - levels) for levels in range(1, n))  # it narrows while it fills
        return window + self.guesses * (n - 1)


class Lookahead(Decoder):
    """Every step moves the window by one token and one level, whatever was accepted."""

    name = "lookahead"
    summary = "lookahead decoding: Jacobi window and n-gram pool, no training"
    paper = "Fu et al. 2024, arXiv:2402.02057"
    Options = LookaheadOptions
    node_options = ("guesses",)

    def __init__(self, target: Target, options: Any = None) -> None:
        super().__init__(target, options)
        self.pool = NGramPool(self.options.guesses)
        self.window = torch.empty(0)  # int64 [levels, columns] on the device; [0, 0] is the root

    @classmethod
    def with_nodes(cls, given: Mapping[str, str], nodes: int) -> dict[str, str]:
        """Return the options with as many whole n-grams as there is room for, and shorter ones where there is none."""
        level = min(parse_options(LookaheadOptions, given, cls.name).level, nodes + 1)
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
        rows: int = self.options.most_rows()
        return rows

    def extra_work(self) -> ExtraWork:
        """The whole window without its root in every layer, and its newest level in the LM head."""
        o = self.options
        return ExtraWork(step=((o.level - 1) * o.window - 1) * of_layers(self.target) + o.window * of_head(self.target))

    def on_prefill(self, state: DecodeState) -> None:
        """An empty pool; a window of one level, random tokens of the prompt, wide enough to fill N - 1 levels."""
        o, prompt = self.options, torch.tensor(state.ids[: state.prompt_tokens], device=self.target.device)
        columns = o.window + o.level - 2
        at = torch.randint(len(prompt), (1, columns), generator=state.rng, device=self.target.device)
        self._move(prompt[at], state.root)
        self.pool = NGramPool(o.guesses)
        if o.pool_from_prompt and len(state.ids) >= o.level:
            self.pool.add(torch.tensor(state.ids).unfold(0, o.level, 1).tolist())

    def propose(self, state: DecodeState) -> DraftTree:
        """The n-grams that begin with the root, common beginnings merged."""
        tokens, parents = merged(self.pool.following(state.ids[-1]))
        drafted = indices(tokens, self.target.device)
        return DraftTree.from_parents(torch.cat((state.root, drafted)), (-1, *parents))

    def forward(self, state: DecodeState, tree: DraftTree) -> Output:
        """One pass over [tree | window without the root]; extra: the next level, int64 [columns]."""
        target, past, n = self.target, state.cache.get_seq_length(), len(tree)
        window = window_shape(*self.window.shape, target.device)
        tokens = torch.cat((tree.tokens, self.window.flatten()[1:]))
        visible, depths = tree.visibility()
        # a step looks further than the context reaches: those rows are read by none that counts
        positions = (past + torch.cat((depths, window.ahead))).clamp_max(target.context_length - 1)[None]
        furthest = min(past + max(tree.topology.depth, window.furthest), target.context_length - 1)
        mask = target.block_mask(window.joined(visible), past)
        x = target.embed(tokens[None], positions)
        x = target.run(x, 0, target.n_layers, state.cache, mask, target.rotary(positions, furthest))
        newest = torch.cat((x[:, :1], x[:, n:]), 1)[:, -self.window.shape[1] :]  # the only level whose successor is new
        final = target.family.norm(torch.cat((x[:, :n], newest), 1))
        logits = target.logits(final)
        return Output(logits[:, :n], tree, {FINAL: final[:, :n]}, extra=logits[0, n:].argmax(-1))

    def update(self, state: DecodeState, verdict: VerifyResult, output: Output) -> None:
        """Columns that are N long go into the pool and lose their oldest level; until then the window is filled."""
        assert output.extra is not None
        grown = torch.cat((self.window, output.extra[None]))  # [levels + 1, columns]
        if len(grown) == self.options.level:
            self.pool.add(grown.T.tolist())
            self._move(grown[1:], state.root)
        else:
            self._move(grown[:, 1:], state.root)

    def _move(self, window: Tensor, root: Tensor) -> None:
        """The window [levels, columns], its first token the root."""
        window[0, 0] = root[0]
        self.window = window


@dataclass(frozen=True, slots=True)
class WindowShape:
    """Of the m = levels * columns - 1 rows after the root, level by level.

    sees: bool [m, m], among themselves. ahead: int64 [m], places after the root; furthest: the greatest of them.
    """

    sees: Tensor
    ahead: Tensor
    furthest: int

    def joined(self, tree: Tensor) -> Tensor:
        """Visibility of the rows [tree | window], bool [n + m, n + m]: of the tree the window sees the root."""
        n, m = len(tree), len(self.ahead)
        visible = tree.new_zeros(n + m, n + m)
        visible[:n, :n], visible[n:, 0], visible[n:, n:] = tree, True, self.sees
        return visible


@lru_cache(maxsize=256)
def window_shape(levels: int, columns: int, device: torch.device) -> WindowShape:
    """A token at level l of column j sees level 0 up to column j and levels 1 to l of column j; it is j + l ahead."""
    level = torch.arange(levels).repeat_interleave(columns)  # of every row, root included
    column = torch.arange(columns).repeat(levels)
    level_0 = (level == 0) & (column <= column[:, None])
    own = (column == column[:, None]) & (level <= level[:, None])
    sees = (level_0 | own)[1:, 1:]
    return WindowShape(sees.to(device), (level + column)[1:].to(device), levels + columns - 2)


class NGramPool:
    """For each token the last `most` different n-grams that begin with it."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.known: dict[int, dict[tuple[int, ...], None]] = {}  # the oldest first

    def add(self, grams: Iterable[Sequence[int]]) -> None:
        """These are now the newest, the last of them the most."""
        for first, *rest in grams:
            kept, gram = self.known.setdefault(first, {}), tuple(rest)
            kept.pop(gram, None)
            kept[gram] = None
            if len(kept) > self.most:
                del kept[next(iter(kept))]

    def following(self, token: int) -> list[tuple[int, ...]]:
        """What followed the token, the newest first."""
        return list(reversed(self.known.get(token, {})))


def merged(chains: Iterable[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Chains under a root as a tree: tokens and parents of the nodes 1.., the root being 0."""
    tokens: list[int] = []
    parents: list[int] = []
    known: dict[tuple[int, int], int] = {}
    for chain in chains:
        node = 0
        for token in chain:
            child = known.setdefault((node, token), len(tokens) + 1)
            if child > len(tokens):
                tokens.append(token)
                parents.append(node)
            node = child
    return tokens, parents
