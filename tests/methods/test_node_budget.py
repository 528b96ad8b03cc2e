"""Node budget: under nodes=N no step of any method verifies more than N drafted nodes."""

from __future__ import annotations

import dataclasses

import pytest

from specbench_ss import api, registry
from specbench_ss.bench.build_config import method_specs
from specbench_ss.cli.check import instances_of
from specbench_ss.engine.decoder import Decoder, DecodeState
from specbench_ss.engine.generate import StopParams, generate
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.tree import DraftTree
from specbench_ss.errors import UserError
from specbench_ss.methods._shared.heads import PUBLISHED, requested_tree, tree_of
from specbench_ss.methods.eagle.decode import Eagle2
from specbench_ss.methods.eagle.drafter import random_eagle
from specbench_ss.models.tiny import tiny_target
from specbench_ss.options import MethodSpec, describe_options
from specbench_ss.runs.preset import Preset
from tests.tiny import few

LIMITED = [name for name, kind in registry.load_all(registry.METHODS).items() if kind.node_options]
TREES = ("eagle", "eagle2", "eagle3", "hydra", "medusa", "medusa2", "recycling", "rest", "ss", "ss-shared")
PROMPT = [3, 4, 5, 3, 4, 6, 3, 4, 5, 3, 4] * 2


def most_verified(method: str) -> int:
    target = tiny_target("llama", 32)
    (make,) = instances_of(MethodSpec.parse(method))(target).values()
    steps = generate(make(), PROMPT, StopParams(20), SamplingParams(0.0)).steps
    return max(step.verified_nodes for step in steps)


@few(6)
@pytest.mark.parametrize("name", LIMITED)
def test_no_step_verifies_more_nodes_than_the_budget(name: str) -> None:
    most = most_verified(f"{name}[nodes=4]")
    assert most == 4 if name in TREES else 0 < most <= 4


@pytest.mark.parametrize(
    "method",
    ["dflash[mode=tree,nodes=4]", "sd[form=tree,nodes=4]", "ss[mode=chain,nodes=2]", "lookahead[nodes=2]",
     "space[k=3,nodes=2]"],
)  # fmt: skip
def test_the_budget_holds_for_the_other_forms_of_a_draft(method: str) -> None:
    limit = int(method.partition("nodes=")[2].rstrip("]"))
    assert 0 < most_verified(method) <= limit


def test_every_method_that_drafts_has_a_node_budget() -> None:
    kinds = registry.load_all(registry.METHODS)
    assert {name for name, kind in kinds.items() if not kind.node_options} == {
        name for name, kind in kinds.items() if kind.autoregressive
    }
    for kind in kinds.values():
        assert {*kind.node_options} <= {option.name for option in describe_options(kind.Options)}


def test_a_published_tree_is_cut_to_its_likeliest_nodes() -> None:
    choices = requested_tree("auto", 6, {}, 4, "medusa")
    assert len(choices) == len(tree_of(choices).ranks) == 6 and (0, 0) in choices
    assert requested_tree("published", 6, {}, 4, "medusa") == list(PUBLISHED)


def test_a_budget_for_all_methods_is_set_where_none_is_given() -> None:
    specs = method_specs(
        "ss,pld[length=3],medusa[tree=published],suffix[nodes=9],sd[gamma=2],sd[form=tree,gamma=3]", ["ss.k=2"], nodes=8
    )
    labels = [spec.label for spec in specs]
    assert labels == [
        "ar", "ss[nodes=8,k=2]", "pld[length=3]", "medusa[tree=published]", "suffix[nodes=9]", "sd[gamma=2]",
        "sd[nodes=8,form=tree,gamma=3]",
    ]  # fmt: skip
    assert registry.method_options(specs[1]).nodes == 8


def test_a_budget_leaves_aside_the_shape_that_a_folder_advises() -> None:
    """None of the values is the default, which advice replaces."""
    options = registry.method_options(MethodSpec("eagle2", {"nodes": "8"}))
    assert (options.total_tokens, options.depth, options.top_k) == (9, 5, 8)


@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_no_more_levels_and_candidates_than_nodes_changes_no_draft(nodes: int) -> None:
    target = tiny_target("llama")
    drafter = random_eagle(target)
    outputs = []
    for given in ({"nodes": str(nodes)}, {"total_tokens": str(nodes + 1), "depth": "5", "top_k": "10"}):
        decoder = Eagle2(target, registry.method_options(MethodSpec("eagle2", given)), drafter, {})
        outputs.append(generate(decoder, [5, 6, 7], StopParams(20), SamplingParams()))
    assert outputs[0].tokens == outputs[1].tokens
    counts = [[(s.draft_nodes, s.draft_depth, s.accepted_tokens) for s in output.steps] for output in outputs]
    assert counts[0] == counts[1]


def test_a_budget_replaces_that_of_a_preset() -> None:
    preset = Preset("p.json", "0" * 64, "pld", {"length": "4", "ngram": "2"})
    assert method_specs("pld", (), [preset])[1].options == {"length": "4", "ngram": "2"}
    assert method_specs("pld", (), [preset], 8)[1].options == {"nodes": "8", "ngram": "2"}


@pytest.mark.parametrize(
    ("method", "words"),
    [("pld[nodes=4,length=3]", "same limit"), ("pld[nodes=x]", "at least 1"), ("ar[nodes=4]", "no option 'nodes'"),
     ("sd[nodes=4,schedule=heuristic]", "no limit"), ("eagle2[nodes=0]", "at least 1"),
     ("recycling[nodes=81]", "recycling.* 80, not 81")],
)  # fmt: skip
def test_a_budget_that_cannot_be_is_refused(method: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        registry.method_options(MethodSpec.parse(method))


@pytest.mark.parametrize("level", [2, 3, 4, 5])
@pytest.mark.parametrize("nodes", [1, 3, 8, 13])
def test_lookahead_verifies_the_most_whole_n_grams_that_a_budget_allows(level: int, nodes: int) -> None:
    options = registry.method_options(MethodSpec("lookahead", {"nodes": str(nodes), "level": str(level)}))
    used, gram = options.guesses * (options.level - 1), options.level - 1
    assert nodes - gram < used <= nodes and options.level == min(level, nodes + 1)


def test_python_takes_the_budget_too() -> None:
    assert api.load_method("pld", tiny_target("llama"), nodes=4).options.length == 4


def test_a_method_without_a_budget_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(Decoder):
        """A plugin's method that drafts and states no limit."""

        name, summary = "silent", "drafts nothing"

        def propose(self, state: DecodeState) -> DraftTree:
            return DraftTree.root_only(state.root)

    monkeypatch.setattr(registry, "method_class", lambda name: Silent)
    with pytest.warns(UserWarning, match="silent"):
        method_specs("silent", (), nodes=8)
    assert dataclasses.is_dataclass(Silent.Options)
