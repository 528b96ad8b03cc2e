"""Draft vocabulary: the tokens that are drafted, exact output from part of them, files, refusals, costs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from specbench_ss import registry
from specbench_ss.engine.decoder import Decoder, DecoderWrapper, DecodeState
from specbench_ss.engine.generate import StopParams, generate
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.target import Output, Target
from specbench_ss.engine.tree import DraftTree
from specbench_ss.errors import UserError
from specbench_ss.methods._shared.draft_vocabulary import DraftVocabulary, draft_vocabulary
from specbench_ss.methods.eagle.decode import DynamicOptions, Eagle2, Eagle3, Eagle3Options
from specbench_ss.methods.eagle.drafter import random_eagle, random_eagle3
from specbench_ss.methods.medusa.decode import Medusa, MedusaOptions
from specbench_ss.methods.sd.decode import TwoModel, TwoModelOptions
from specbench_ss.methods.ss.config import SSOptions
from specbench_ss.methods.ss.decode import TWO_LAYERS, SpeculativeStreaming, random_streams
from specbench_ss.models.checkpoint import HEADER_ONLY
from specbench_ss.models.frequent_tokens import (
    FILE,
    TENSOR,
    read_frequent_tokens,
    read_token_ids,
    write_frequent_tokens,
)
from specbench_ss.models.tiny import tiny_target
from tests.methods.exactness import assert_greedy_same, p_value
from tests.methods.test_drafter_advice import folder
from tests.tiny import few, tiny_model

V = 61
METHODS = ("ss", "ss-shared", "medusa", "hydra", "eagle", "eagle2", "uno", "mtp", "sd")
PROMPT = [5, 6, 7, 8, 9, 10, 11]


class Recorder(DecoderWrapper):
    """Keeps the trees that a method proposes, and the tokens of those that it verifies, which may be pruned."""

    name, summary = "recorder", "keeps drafts"

    def __init__(self, inner: Decoder) -> None:
        super().__init__(inner)
        self.trees: list[DraftTree] = []
        self.verified: list[list[int]] = []

    def forward(self, state: DecodeState, tree: DraftTree) -> Output:
        output = self.inner.forward(state, tree)
        assert output.tree is not None
        self.verified.append(output.tree.tokens.tolist())
        return output

    def propose(self, state: DecodeState) -> DraftTree:
        tree = self.inner.propose(state)
        q = None if tree.draft_probs is None else tree.draft_probs.clone()
        self.trees.append(replace(tree, tokens=tree.tokens.clone(), draft_probs=q))
        return tree


def drafts(decoder: Decoder, temperature: float = 0.0) -> Recorder:
    recorder = Recorder(decoder)
    generate(recorder, PROMPT, StopParams(16), SamplingParams(temperature))
    return recorder


def restricted(name: str, target: Target) -> dict[str, Callable[[], Decoder]]:
    shapes = registry.method_class(name).test_instances(target)
    return {label: make for label, make in shapes.items() if label.startswith("draft voc") or "draft-voc" in label}


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model("llama"), name="tiny")


@few(4)
@pytest.mark.parametrize("name", METHODS)
def test_only_its_tokens_are_drafted_and_q_is_over_them(name: str, target: Target) -> None:
    shapes = restricted(name, target)
    assert shapes
    for label, make in shapes.items():
        decoder = make()
        size = decoder.metadata()["draft_vocab"]
        assert size == V * 3 // 4
        allowed = set(range(V - size, V))  # the list of test instances has the last ids first
        for temperature in (0.0, 0.9):
            trees = drafts(decoder, temperature).trees
            drafted = {token for tree in trees for token in tree.tokens[1:].tolist()}
            assert drafted and drafted <= allowed, label
            for q in (tree.draft_probs for tree in trees if tree.draft_probs is not None):
                assert q.shape[-1] == V and not q[:, : V - size].any(), label
                sums = q.sum(-1)
                assert ((sums - 1).abs() < 1e-5).logical_or(sums == 0).all(), label


@few(4)
@pytest.mark.parametrize("name", METHODS)
def test_all_tokens_in_another_order_are_drafted_as_without(name: str, target: Target) -> None:
    for label, make in restricted(name, target).items():
        decoder = make()
        whole, permuted = (
            decoder.with_options(replace(decoder.options, draft_vocab=given)) for given in ("all", str(V))
        )
        assert "draft_vocab" not in whole.metadata() and permuted.metadata()["draft_vocab"] == V
        a, b = drafts(whole), drafts(permuted)
        assert a.verified == b.verified, label
        for one, other in zip(a.trees, b.trees, strict=True):
            assert one.tokens.tolist() == other.tokens.tolist(), label
            assert one.parents().tolist() == other.parents().tolist(), label


@few(1)
@pytest.mark.parametrize("name", ["uno", "sd", "eagle"])
def test_sampled_output_has_the_distribution_of_the_target(name: str) -> None:
    small = tiny_target("llama", 11)
    make = list(restricted(name, small).values())[-1 if name == "eagle" else 0]
    assert p_value(make(), [3, 1, 4], SamplingParams(temperature=0.9), n=300) > 1e-4


# -- files ---------------------------------------------------------------------------------------------------------

IDS = [40, 3, 60, 17, 22, 5, 9, 31]


def written(path: Path, content: Any) -> Path:
    if path.suffix == ".json":
        path.write_text(json.dumps(content))
    elif path.suffix == ".safetensors":
        save_file({"ids": content}, path)
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    return path


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", IDS), ("a.safetensors", torch.tensor(IDS, dtype=torch.int32)), ("freq_8.pt", torch.tensor(IDS)),
        ("freq_8.pt", IDS),
    ],
)  # fmt: skip
def test_a_file_of_ids_is_the_draft_vocabulary(name: str, content: Any, tmp_path: Path, target: Target) -> None:
    file = written(tmp_path / name, content)
    assert read_token_ids(file, V).tolist() == IDS
    decoder = Eagle2(target, DynamicOptions(total_tokens=8, draft_vocab=str(file)), random_eagle(target), {})
    assert decoder.metadata()["draft_vocab"] == len(IDS)
    assert {token for tree in drafts(decoder).trees for token in tree.tokens[1:].tolist()} <= set(IDS)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.json", [1, 2, 61], "outside the vocabulary of 61"), ("a.json", [1, -2], "outside"),
        ("a.json", [10**30], "outside"), ("a.json", [4, 5, 4], "token id 4 more than once"),
        ("a.json", [1.0], "not integers"), ("a.json", [True], "not integers"), ("a.json", {"a": 1}, "no list"),
        ("a.json", [], "no list"), ("a.safetensors", torch.tensor([1.5]), "not integers"),
        ("a.safetensors", torch.tensor([[1]]), "no list"), ("a.pt", {"a": torch.tensor([1])}, "no list"),
        ("a.pt", torch.tensor([3, 3]), "token id 3 more than once"), ("a.pt", b"PK\x03\x04 cut", "cannot read"),
        ("a.pt", torch.nn.Linear(1, 1), "may run code"), ("missing.json", None, "no file"),
    ],
)  # fmt: skip
def test_a_file_that_lists_no_tokens_is_one_line(name: str, content: Any, words: str, tmp_path: Path) -> None:
    file = tmp_path / name
    if content is not None:
        written(file, content)
    with pytest.raises(UserError, match=rf"^medusa: [^\n]*{words}[^\n]*$"):
        draft_vocabulary(str(file), V, "medusa")


def test_a_folder_lists_the_tokens_of_its_training_text_and_the_others_follow(tmp_path: Path) -> None:
    write_frequent_tokens(tmp_path, np.array([0, 3, 1, 3, 0, 9]))
    assert load_file(tmp_path / FILE)[TENSOR].tolist() == [5, 1, 3, 2]
    for path in (tmp_path, tmp_path / FILE):
        listed = read_frequent_tokens(path, 7)
        assert listed is not None and listed.tolist() == [5, 1, 3, 2, 0, 4, 6]
    save_file({TENSOR: torch.zeros(4, dtype=torch.int32)}, tmp_path / FILE, {HEADER_ONLY: "yes"})  # as of the hub
    listed = read_frequent_tokens(tmp_path, 7)
    assert draft_vocabulary("5", 7, "ss", frequent=listed).size == 5
    (tmp_path / FILE).write_bytes(b"no header")
    with pytest.raises(UserError, match="cannot read"):
        read_frequent_tokens(tmp_path, 7)
    assert read_frequent_tokens(tmp_path / "none", 7) is None


# -- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "words"),
    [("62", "1 to 61"), ("0", "1 to 61"), ("20", f"requires {FILE}"), ("-3", "no file"), ("some.pt", "no file")],
)
def test_a_value_that_cannot_be_is_one_line(given: str, words: str) -> None:
    with pytest.raises(UserError, match=f"eagle: .*{words}"):
        draft_vocabulary(given, V, "eagle")


def test_fewer_tokens_than_candidates_are_refused(tmp_path: Path, target: Target) -> None:
    file, streams = str(written(tmp_path / "a.json", [4, 5])), random_streams(target, TWO_LAYERS)
    with pytest.raises(UserError, match="ss: draft_vocab has 2 tokens, a node has 3 candidates"):
        SpeculativeStreaming(target, SSOptions(k=3, draft_vocab=file), streams)
    with pytest.raises(UserError, match="sd: draft_vocab has 2 tokens, a node has 3 candidates"):
        TwoModel(target, TwoModelOptions(form="tree", k=3, draft_vocab=file), target)
    with pytest.raises(UserError, match="medusa: the tree needs .* candidates, the draft vocabulary has 2"):
        Medusa.random(target, options=MedusaOptions(tree="published", draft_vocab=file))
    assert Eagle2(target, DynamicOptions(draft_vocab=file), random_eagle(target), {}).size.top_k == 2


def test_a_drafter_with_its_own_draft_vocabulary_refuses_another(target: Target) -> None:
    drafter, config, layers = random_eagle3(target)
    with pytest.raises(UserError, match="eagle3: the drafter has its own draft vocabulary of 45 tokens"):
        Eagle3(target, Eagle3Options(draft_vocab="20"), drafter, config, layers)
    own = Eagle3(target, Eagle3Options(draft_vocab="all"), drafter, config, layers)
    assert own.vocabulary.size == 45 and not own.head_rows


def test_an_lm_head_with_a_soft_cap_is_refused(tmp_path: Path) -> None:
    capped = Target(tiny_model("llama"), name="capped")
    capped.family.head = torch.nn.Sequential(capped.family.head, torch.nn.Tanh())
    options = MedusaOptions(nodes=2, draft_vocab=str(written(tmp_path / "a.json", list(range(20)))))
    with pytest.raises(UserError, match="medusa: draft_vocab is not supported, since the LM head of 'capped'"):
        Medusa.random(capped, own_unembed=False, options=options)


# -- costs and folders ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("own", [True, False])
def test_clones_share_the_rows_and_the_cost_counts_them(own: bool, target: Target) -> None:
    decoder = Medusa.random(target, 2, own, MedusaOptions(nodes=3, draft_vocab="20"))
    rows = decoder.head_rows
    assert [row.weight.shape for row in rows] == [(20, target.hidden_size)] * (2 if own else 1)
    assert all(a is b for a, b in zip(decoder.clone().head_rows, rows, strict=True))
    source = decoder.drafter.unembed[0] if own else target.unembed
    assert torch.equal(rows[0].weight, source[decoder.vocabulary.ids])
    weights = list(decoder.drafter_weights() or ())
    assert (decoder.drafter.unembed is not None) == own == any(weight is rows[0].weight for weight in weights)
    assert not any(weight.shape[-2:] == (V, target.hidden_size) for weight in weights if weight.ndim > 1)


def test_a_folder_may_advise_it_also_with_a_node_budget(tmp_path: Path, lab: Target) -> None:
    weights = folder(tmp_path / "ss", {"gamma": 2, "cpu": {"draft_vocab": 50}})
    with pytest.raises(UserError, match=f"ss: draft_vocab=50 requires {FILE}"):
        SpeculativeStreaming.check(SSOptions(weights=str(weights)), lab)
    write_frequent_tokens(weights, np.arange(lab.vocab_size)[::-1].copy())
    advised = SpeculativeStreaming.load(lab, SSOptions(weights=str(weights), nodes=4))
    assert advised.advised == {"draft_vocab": "50"} and advised.metadata()["draft_vocab"] == 50
    assert advised.search_space()["draft_vocab"] == ["all", "256", "512", "1024", "2048"]
    whole = SpeculativeStreaming.load(lab, SSOptions(weights=str(weights), draft_vocab="all"))
    assert "draft_vocab" not in whole.metadata()
    assert_greedy_same(advised, registry.method_class("ar")(lab, None), 12)


def test_a_distribution_over_part_of_the_tokens_keeps_its_numbers() -> None:
    vocabulary, q = DraftVocabulary(6, torch.tensor([4, 1, 5])), torch.tensor([[0.2, 0.5, 0.3]])
    assert vocabulary.target_probs(q).tolist() == [[0, 0.5, 0, 0, pytest.approx(0.2), pytest.approx(0.3)]]
    assert vocabulary.columns[vocabulary.ids].tolist() == [0, 1, 2]
    tree = vocabulary.target_tree(DraftTree.chain(torch.tensor([0]), torch.tensor([2, 0]), q))
    assert tree.tokens.tolist() == [0, 5, 4] and vocabulary.draft_columns(tree).tokens[1:].tolist() == [2, 0]
