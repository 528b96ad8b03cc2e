"""The matrix holds the last top-k of every verified token; the tree is the published shape, filled with token 0."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import torch

from specbench_ss.engine.decoder import DecodeState
from specbench_ss.engine.generate import StopParams, generate
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.target import Output, Target
from specbench_ss.engine.tree import DraftTree
from specbench_ss.engine.verify import VerifyResult
from specbench_ss.errors import UserError
from specbench_ss.methods.recycling import FILL, UNSEEN, Recycling, RecyclingOptions, bigrams, template
from specbench_ss.options import describe_options, for_device
from tests.tiny import tiny_model

PROMPT = [20, 4, 4, 30, 12, 9, 8, 50, 41] * 2


class Watched(Recycling):
    """Next to the matrix, a plain dict of rows, written node by node."""

    def on_prefill(self, state: DecodeState) -> None:
        super().on_prefill(state)
        self.rows: dict[int, list[int]] = {}
        self.twice = 0

    def propose(self, state: DecodeState) -> DraftTree:
        tree = super().propose(state)
        tokens = tree.tokens.tolist()
        self.twice += len(tokens) - len(set(tokens))
        for token, parent in list(zip(tokens, tree.topology.parents, strict=True))[1:]:
            assert token in self.rows[tokens[parent]][: self.options.k]
        assert len(tokens) == self.drawable(tokens[0], ())
        return tree

    def drawable(self, token: int, path: tuple[int, ...]) -> int:
        """Nodes of the template that have a token, from the dict alone."""
        below = [(*path, rank) for rank in range(len(self.rows.get(token, ()))) if (*path, rank) in TEMPLATE]
        return 1 + sum(self.drawable(self.rows[token][choice[-1]], choice) for choice in below)

    def update(self, state: DecodeState, result: VerifyResult, output: Output) -> None:
        super().update(state, result, output)
        assert output.tree is not None
        for token, logits in zip(output.tree.tokens.tolist(), output.logits[0], strict=True):
            self.rows[token] = logits.topk(self.width).indices.tolist()
        for token in range(self.target.vocab_size):
            assert self.successors[token].tolist() == self.rows.get(token, [UNSEEN] * self.options.k)


TEMPLATE = set(template())
PINNED = {  # seed of the model -> tokens kept by every step
    1: [1, 1, 3, 3, 3, 3, 2, 4],
    2: [1, 1, 5, 5, 7],
}


def published(target: Target, prompt: list[int], n: int) -> list[int]:
    """Tokens that every step keeps by the published algorithm, in plain Python, from fresh passes over each path."""
    rows: dict[int, list[int]] = defaultdict(lambda: [0] * 8)
    by_depth, kept = sorted(TEMPLATE, key=lambda choice: (len(choice), choice)), list[int]()
    ids = [*prompt, int(target.next_logits(prompt).argmax())]
    while len(ids) < len(prompt) + n:
        paths: dict[tuple[int, ...], tuple[int, ...]] = {(): ()}
        for choice in by_depth:
            above = paths[choice[:-1]]
            paths[choice] = (*above, rows[(above or ids)[-1]][choice[-1]])
        stated = {path: target.next_logits([*ids, *path]) for path in set(paths.values())}
        best: tuple[int, ...] = ()
        while (longer := (*best, int(stated[best].argmax()))) in stated:
            best = longer
        for path in paths.values():  # of nodes with one token the last one's
            rows[(path or ids)[-1]] = stated[path].topk(8).indices.tolist()
        ids += longer
        kept.append(len(longer))
    return kept


@pytest.mark.parametrize("seed", PINNED)
def test_the_steps_are_those_of_the_published_algorithm(seed: int) -> None:
    """Unknown successors are token 0, are verified, and what follows them is learnt."""
    target = Target(tiny_model("llama", seed))
    steps = generate(Recycling(target, RecyclingOptions(nodes=80)), PROMPT, StopParams(20), SamplingParams()).steps
    assert {s.draft_nodes for s in steps} == {80}
    own = [s.accepted_tokens + 1 for s in steps]
    assert own == PINNED[seed] == published(target, PROMPT, 20)


def test_a_cpu_has_a_smaller_tree_unless_nodes_are_given() -> None:
    target = Target(tiny_model("llama"))
    made = Recycling.load(target, RecyclingOptions())
    assert made.max_tokens_per_step() == 1 + made.metadata()["nodes"] == 4
    assert Recycling.load(target, RecyclingOptions(nodes=80)).max_tokens_per_step() == 81
    assert for_device(RecyclingOptions(), "cuda").nodes == 80
    listed = {option.name: option.default for option in describe_options(RecyclingOptions)}
    assert listed["nodes"] == "80; on a CPU 3"


def test_the_matrix_holds_the_last_top_k_and_fills_the_tree() -> None:
    decoder = Watched(Target(tiny_model("llama")), RecyclingOptions(nodes=80, known_only=True))
    steps = generate(decoder, PROMPT, StopParams(40), SamplingParams()).steps
    assert steps[0].draft_nodes == 0 and max(s.draft_nodes for s in steps) == 80 and decoder.twice > 100
    assert max(s.accepted_tokens for s in steps) > 3


def test_the_published_tree_has_the_published_counts() -> None:
    chosen = template()
    assert len(set(chosen)) == len(chosen) == 80
    assert Counter(map(len, chosen)) == dict(enumerate((8, 21, 25, 15, 8, 3), start=1))
    assert {(0, 0, 0, 1, 0, 0), (0, 0, 4, 0), (7, 0)} <= TEMPLATE and not {(1, 0, 2), (0, 1, 0, 1), (8,)} & TEMPLATE
    for n, choice in enumerate(chosen):
        assert len(choice) == 1 or choice[:-1] in chosen[:n], "any number of the first is a tree"


def test_a_vocabulary_smaller_than_k() -> None:
    decoder = Recycling(Target(tiny_model("llama", vocab=5, layers=2)), RecyclingOptions(nodes=80, known_only=True))
    assert generate(decoder, [3, 4, 3], StopParams(20), SamplingParams()).steps[-1].draft_nodes > 5


@pytest.mark.parametrize("keep", [False, True])
def test_what_is_kept_from_prompt_to_prompt(keep: bool) -> None:
    decoder = Recycling(Target(tiny_model("llama")), RecyclingOptions(keep=keep, known_only=True))
    assert decoder.stateful == keep
    first, again = (generate(decoder, PROMPT, StopParams(40), SamplingParams()) for _ in range(2))
    assert first.tokens == again.tokens
    assert (again.steps[0].draft_nodes > 0) == keep
    assert (len(again.steps) < len(first.steps)) == keep


def test_the_prompt_gives_successors_where_asked() -> None:
    assert bigrams([1, 2, 1, 3, 1, 2, 4], 2, UNSEEN) == ([1, 2, 3], [[2, 3], [4, 1], [1, UNSEEN]])
    assert bigrams([1, 2, 1, 3], 1, UNSEEN) == ([1, 2], [[3], [1]])
    for known_only, unknown in ((True, UNSEEN), (False, FILL)):
        decoder = Recycling(Target(tiny_model("llama")), RecyclingOptions(prompt=True, known_only=known_only))
        generate(decoder, PROMPT, StopParams(1), SamplingParams())
        assert decoder.successors[4].tolist() == [30, 4, *[unknown] * 6]


def test_a_tree_of_ones_own(tmp_path: Path) -> None:
    target = Target(tiny_model("llama"))
    file = tmp_path / "tree.json"
    file.write_text(json.dumps([[0], [1], [0, 0], [0, 3]]))
    own = Recycling(target, RecyclingOptions(tree=str(file)))
    assert own.tree.topology.parents == (-1, 0, 0, 1, 1) and own.max_tokens_per_step() == 5
    assert "nodes" not in own.search_space()
    for content, options, complaint in (
        ("[[0], [0, 3]]", RecyclingOptions(tree=str(file), k=3), "recycling: .*4 successors of a token, but k is 3"),
        ("{}", RecyclingOptions(tree=str(file)), "recycling: .*tree"),
        ("[[0, 0]]", RecyclingOptions(tree=str(file)), "recycling: .*no parent"),
        (None, RecyclingOptions(tree=str(tmp_path / "none")), "recycling: cannot read"),
    ):
        if content is not None:
            file.write_text(content)
        with pytest.raises(UserError, match=complaint):
            Recycling.check(options, target)


def test_described_reports_trees_apart() -> None:
    target = Target(tiny_model("llama"))
    hashes = {Recycling(target, RecyclingOptions(nodes=n)).metadata()["tree_hash"] for n in (5, 8, 80)}
    assert len(hashes) == 3


def test_rows_written_twice_are_the_last_node_s() -> None:
    target = Target(tiny_model("llama"))
    decoder = Recycling(target, RecyclingOptions(k=1))
    tree = DraftTree.from_parents(torch.tensor([5, 6, 5, 6, 5]), (-1, 0, 0, 1, 1))
    logits = torch.eye(target.vocab_size)[None, 10:15]
    decoder.update(None, None, Output(logits, tree))  # type: ignore[arg-type]
    assert decoder.successors[5].tolist() == [14] and decoder.successors[6].tolist() == [13]
