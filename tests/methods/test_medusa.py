"""Medusa: the published layouts load, numbers equal an independent computation, trees are what they should be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file, save_model

from specbench_ss.engine.generate import StopParams, generate
from specbench_ss.engine.layers.linear import PrepackedLinear
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.target import Target
from specbench_ss.engine.tree import MOST_NODES
from specbench_ss.errors import UserError
from specbench_ss.methods._shared.heads import MOST_FUSED, PUBLISHED, best_tree, read_tree, requested_tree, tree_of
from specbench_ss.methods.hydra.decode import Hydra
from specbench_ss.methods.medusa import decode
from specbench_ss.methods.medusa.decode import Medusa, MedusaOptions
from specbench_ss.methods.medusa.heads import heads_from_tensors
from tests.methods.decoders import medusa
from tests.tiny import tiny_model

H, V = 32, 61


def layout(heads: int = 3, layers: int = 2, own: bool = True, prefix: str = "") -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    tensors = {}
    for i in range(heads):
        for j in range(layers):
            tensors[f"{prefix}{i}.{j}.linear.weight"] = torch.randn(H, H) * 0.2
            tensors[f"{prefix}{i}.{j}.linear.bias"] = torch.randn(H) * 0.2
        if own:
            tensors[f"{prefix}{i}.{layers}.weight"] = torch.randn(V, H) * 0.2
    return tensors


@pytest.mark.parametrize(("own", "prefix"), [(True, ""), (False, ""), (True, "medusa_head.")])
def test_published_layouts_compute_what_their_definition_states(own: bool, prefix: str) -> None:
    tensors, x, shared = layout(own=own, prefix=prefix), torch.randn(5, H), torch.randn(V, H)
    logits = heads_from_tensors(tensors, H, V)(x, lambda states: F.linear(states, shared))
    for i in range(3):
        y = x
        for j in range(2):
            y = y + F.silu(
                F.linear(y, tensors[f"{prefix}{i}.{j}.linear.weight"], tensors[f"{prefix}{i}.{j}.linear.bias"])
            )
        expected = F.linear(y, tensors[f"{prefix}{i}.2.weight"] if own else shared)
        torch.testing.assert_close(logits[i], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("biases", [True, False])
def test_vllms_layout_computes_what_its_definition_states(biases: bool) -> None:
    """blocks.{i}.layers.{j}, lm_heads.{i}; linear layers may come without biases."""
    torch.manual_seed(0)
    tensors = {f"blocks.{i}.layers.{j}.weight": torch.randn(H, H) * 0.2 for i in range(3) for j in range(2)}
    if biases:
        tensors |= {f"blocks.{i}.layers.{j}.bias": torch.randn(H) * 0.2 for i in range(3) for j in range(2)}
    tensors |= {f"lm_heads.{i}.weight": torch.randn(V, H) * 0.2 for i in range(3)}
    x = torch.randn(5, H)
    logits = heads_from_tensors(tensors, H, V)(x, torch.zeros(V, H))
    for i in range(3):
        y = x
        for j in range(2):
            bias = tensors.get(f"blocks.{i}.layers.{j}.bias")
            y = y + F.silu(F.linear(y, tensors[f"blocks.{i}.layers.{j}.weight"], bias))
        torch.testing.assert_close(logits[i], F.linear(y, tensors[f"lm_heads.{i}.weight"]), atol=1e-5, rtol=1e-5)
    if biases:
        del tensors["blocks.1.layers.0.bias"]
        with pytest.raises(UserError, match=r"1\.0\.linear\.bias is missing"):
            heads_from_tensors(tensors, H, V)


def test_one_block_under_several_names_is_read_as_often_as_it_stands(tmp_path: Path) -> None:
    """`[block] * layers`: in a .pt file both names are there; in safetensors one, and the other in the header."""
    target = Target(tiny_model("llama"))
    tensors = layout()
    for i in range(3):
        for part in ("weight", "bias"):
            tensors[f"{i}.1.linear.{part}"] = tensors[f"{i}.0.linear.{part}"]
    tied = torch.nn.Module()
    for i in range(3):
        block = torch.nn.Module()
        block.linear = torch.nn.Linear(H, H)
        block.linear.load_state_dict({part: tensors[f"{i}.0.linear.{part}"] for part in ("weight", "bias")})
        unembed = torch.nn.Linear(H, V, bias=False)
        unembed.load_state_dict({"weight": tensors[f"{i}.2.weight"]})
        tied.add_module(str(i), torch.nn.ModuleList([block, block, unembed]))
    (tmp_path / "pt").mkdir()
    (tmp_path / "st").mkdir()
    torch.save(tied.state_dict(), tmp_path / "pt" / "medusa_lm_head.pt")
    save_model(tied, str(tmp_path / "st" / "medusa_lm_head.safetensors"))
    assert len(load_file(tmp_path / "st" / "medusa_lm_head.safetensors")) == 9
    for folder in ("pt", "st"):
        (tmp_path / folder / "config.json").write_text('{"medusa_num_heads": 2, "medusa_num_layers": 1}')  # a lie
        options = MedusaOptions(weights=str(tmp_path / folder))
        Medusa.check(options, target)
        heads = Medusa.load(target, options).drafter
        assert heads.weight.shape[:2] == (3, 2)
        torch.testing.assert_close(heads.weight, heads_from_tensors(tensors, H, V).weight)
    save_file(load_file(tmp_path / "st" / "medusa_lm_head.safetensors"), tmp_path / "st" / "medusa_lm_head.safetensors")
    with pytest.raises(
        UserError, match=r"tensor 0\.[01]\.linear\.weight is missing"
    ):  # nothing states what stood there
        Medusa.check(options, target)


def test_few_nodes_are_drafted_from_the_product_that_verifies(monkeypatch: pytest.MonkeyPatch) -> None:
    """One product of the LM head a step after the first, and the same drafts as with two."""
    target = Target(tiny_model("llama"))
    products: list[int] = []
    monkeypatch.setattr(target, "logits", lambda x: products.append(x.shape[-2]) or Target.logits(target, x))
    found = []
    for most in (MOST_FUSED, 0):
        monkeypatch.setattr(decode, "MOST_FUSED", most)
        decoder = Medusa.random(target, 2, own_unembed=False, options=MedusaOptions(nodes=2))
        products.clear()
        steps = generate(decoder, [5, 6, 7], StopParams(24), SamplingParams()).steps
        found.append([(step.draft_nodes, step.accepted_tokens, step.tokens) for step in steps])
        assert len(products) == (2 + len(steps) if most else 1 + 2 * len(steps))
    assert found[0] == found[1] and sum(accepted for _, accepted, _ in found[0])


@pytest.mark.parametrize("kind", [Medusa, Hydra])
def test_lm_heads_of_one_row_on_a_cpu_are_single_products(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(tiny_model("llama").to(torch.bfloat16))
    decoder, calls = kind.random(target, 2), list[torch.Size]()
    usual = PrepackedLinear.__call__
    monkeypatch.setattr(PrepackedLinear, "__call__", lambda own, x: calls.append(x.shape) or usual(own, x))
    x = torch.randn(1, target.hidden_size, dtype=torch.bfloat16)
    path = torch.randn(1, 1, target.hidden_size, dtype=torch.bfloat16)
    arguments = (0, x, path, target.logits) if kind is Hydra else (x, target.logits, 1)
    compute = decoder.drafter.logits if kind is Hydra else decoder.drafter
    usual_logits = compute(*arguments)
    assert not calls  # training and other modes use the modules
    with torch.inference_mode():
        logits = compute(*arguments)
    assert calls == [x.shape] and torch.allclose(logits, usual_logits, atol=0.05)


def test_accuracies_measured_elsewhere_make_the_tree(tmp_path: Path) -> None:
    """The file that `ssbench train medusa --measure` writes, for heads that came without any."""
    target = Target(tiny_model("llama"))
    torch.save(layout(), tmp_path / "heads.pt")
    file = tmp_path / "accuracies.json"
    file.write_text('{"accuracies": [[0.6, 0.2], [0.5, 0.4], [0.1, 0.05]], "nodes": 4}')
    options = MedusaOptions(weights=str(tmp_path / "heads.pt"), tree=str(file))
    Medusa.check(options, target)
    decoder = Medusa.load(target, options)
    assert decoder.tree == tree_of([(0,), (0, 0), (0, 1), (1,)])
    assert list(decoder.search_space()) == ["nodes", "heads"]
    assert len(decoder.with_options(replace(options, nodes=2)).tree.ranks) == 2
    file.write_text('{"accuracies": [[2.0]]}')
    with pytest.raises(UserError, match=f"{file}: .*accuracies"):
        Medusa.check(options, target)


@pytest.mark.parametrize(
    ("change", "stated"),
    [
        ({"9.weird": torch.zeros(1)}, "unknown tensor '9.weird'"),
        ({"0.0.linear.bias": None}, "0.0.linear.bias is missing"),
        ({"1.2.weight": None}, "head 1 has no vocabulary projection"),
        ({f"{i}.2.weight": torch.zeros(V + 1, H) for i in range(3)}, "unembed has shape"),
    ],
)
def test_wrong_tensors_are_named(change: dict[str, torch.Tensor | None], stated: str) -> None:
    tensors = {k: v for k, v in {**layout(), **change}.items() if v is not None}
    with pytest.raises(UserError, match=stated.replace(".", r"\.")):
        heads_from_tensors(tensors, H, V)


def test_a_torch_file_loads_and_a_truncated_one_is_one_line(tmp_path: Path) -> None:
    target = Target(tiny_model("llama"))
    path = tmp_path / "medusa_lm_head.pt"
    torch.save(layout(), path)
    medusa = Medusa.load(target, MedusaOptions(weights=str(path), tree="published"))
    assert medusa.depth == 3
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(UserError, match="cannot read weights"):
        Medusa.load(target, MedusaOptions(weights=str(path)))


@pytest.mark.parametrize("heads", [4])
def test_only_heads_that_are_there_can_be_asked_for(heads: int, tmp_path: Path) -> None:
    torch.save(layout(), tmp_path / "heads.pt")
    options = MedusaOptions(weights=str(tmp_path / "heads.pt"), heads=heads)
    with pytest.raises(UserError, match=f"heads must be 1 to 3, or 0 for all, not {heads}"):
        Medusa.load(Target(tiny_model("llama")), options)


@pytest.mark.parametrize(
    ("config", "stated"),
    [
        ({"accuracies": "high"}, "accuracies"),
        ({"accuracies": [0.5]}, "accuracies"),
        ({"accuracies": [[]]}, "accuracies"),
        ({"accuracies": [[0.5, "x"]]}, "accuracies"),
        ({"accuracies": [[1.5]]}, "accuracies"),
        ({"accuracies": [[0.5]], "nodes": "many"}, "nodes"),
        ({"accuracies": [[0.5]], "nodes": 0}, "nodes"),
        ({"accuracies": [[0.5]], "nodes": MOST_NODES + 1}, "nodes"),
    ],
)
def test_a_malformed_config_is_named(config: dict[str, Any], stated: str) -> None:
    with pytest.raises(UserError, match=f"config.json: .*{stated}"):
        requested_tree("auto", 0, config, 3, "medusa")


def test_it_describes_its_tree_and_reports_weights_apart() -> None:
    target = Target(tiny_model("llama"))
    one = medusa(target).metadata()
    assert (one["tree_nodes"], one["depth"]) == (len([c for c in PUBLISHED if len(c) <= 3]), 3)
    assert one == medusa(target).metadata()
    other = medusa(target)
    with torch.no_grad():
        other.drafter.weight.mul_(1.5)
    assert {k for k, v in other.metadata().items() if v != one[k]} == {"heads_hash"}


def test_no_weights_for_a_model_states_what_to_do() -> None:
    with pytest.raises(UserError, match="--set medusa.weights="):
        Medusa.load(Target(tiny_model("llama")), MedusaOptions())


def test_the_published_tree_has_63_nodes_and_depth_4() -> None:
    tree = tree_of(PUBLISHED)
    assert (len(tree.topology.parents), tree.topology.depth, tree.width) == (64, 4, 10)


def test_best_tree_is_greedy_by_product_of_accuracies() -> None:
    tree = best_tree([[0.6, 0.2, 0.1], [0.5, 0.3, 0.01]], 5)
    assert tree == [(0,), (0, 0), (1,), (0, 1), (2,)] or set(tree) == {(0,), (0, 0), (1,), (0, 1), (1, 0)}
    assert best_tree([[0.6, 0.2], [0.5, 0.4]], 4) == [(0,), (0, 0), (0, 1), (1,)]


def test_a_tree_deeper_than_the_heads_and_a_broken_tree_file(tmp_path: Path) -> None:
    target = Target(tiny_model("llama"))
    torch.save(layout(heads=2), tmp_path / "heads.pt")
    tree = tmp_path / "tree.json"
    tree.write_text("[[0], [0, 0], [0, 0, 0]]")
    with pytest.raises(UserError, match="3 deep, there are 2 heads"):
        Medusa.load(target, MedusaOptions(weights=str(tmp_path / "heads.pt"), tree=str(tree)))
    assert len(read_tree(tree, 3, "medusa")) == 3
    with pytest.raises(UserError, match="is 3 deep, there are 2 heads"):
        read_tree(tree, 2, "medusa")
    tree.write_text("[[0, 1]]")
    with pytest.raises(UserError, match="no parent"):
        tree_of(read_tree(tree, 2, "medusa"))
    with pytest.raises(UserError, match="cannot read tree"):
        read_tree(tmp_path / "none.json", 2, "medusa")


def test_a_tree_of_too_many_nodes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"nodes must be 0 to {MOST_NODES}, not {MOST_NODES + 1}"):
        MedusaOptions(nodes=MOST_NODES + 1)
    whole = requested_tree("auto", MOST_NODES, {"accuracies": [[0.5] * 10] * 4}, 4, "medusa")
    assert len(tree_of(whole).ranks) == MOST_NODES
    with pytest.raises(UserError, match=f"at most {MOST_NODES} nodes, not {MOST_NODES + 1}"):
        tree_of([(rank,) for rank in range(MOST_NODES + 1)])


@pytest.mark.parametrize("content", ["{}", "[1]", '[["0"]]', "[[0.5]]", "3"])
def test_a_tree_file_of_another_form_states_which_is_expected(content: str, tmp_path: Path) -> None:
    (tmp_path / "tree.json").write_text(content)
    with pytest.raises(UserError, match=r"each a list of ranks from 0, as in \[\[0\], \[0, 0\], \[1\]\]"):
        read_tree(tmp_path / "tree.json", 3, "medusa")


def test_heads_are_checked_without_their_numbers(tmp_path: Path) -> None:
    """As they are loaded: the same complaint about a torch file, and none about one that fits."""
    target, path = Target(tiny_model("llama")), tmp_path / "heads.pt"
    torch.save(layout(), path)
    Medusa.check(MedusaOptions(weights=str(path), tree="published"), target)
    torch.save({k: v.repeat(2, *[1] * (v.ndim - 1)) for k, v in layout().items()}, path)
    reported = []
    for ask in (lambda o: Medusa.check(o, target), lambda o: Medusa.load(target, o)):
        with pytest.raises(UserError) as refused:
            ask(MedusaOptions(weights=str(path)))
        reported.append(str(refused.value))
    assert reported[0] == reported[1] and str(path) in reported[0]
