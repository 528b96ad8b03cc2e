"""MTP: every layout equals a computation written from the definitions, chains too; faults are refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specbench_ss import load_method
from specbench_ss.engine.decoder import DecodeState
from specbench_ss.engine.generate import StopParams, generate
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.target import FINAL, Target
from specbench_ss.engine.tree import DraftTree
from specbench_ss.methods._shared.drafter_network import Rotary
from specbench_ss.methods.ar import Autoregressive
from specbench_ss.methods.mtp.checkpoint import read_head
from specbench_ss.methods.mtp.decode import MTP, MTPOptions
from specbench_ss.methods.mtp.heads import MTPDrafter
from specbench_ss.models.checkpoint import read_shapes, read_tensors
from tests.methods.reference_drafter import refused
from tests.methods.reference_mtp import CONFIGS, NAMES, H, Reference, V, folder, model_of, weights_of
from tests.tiny import few

PROMPT = [5, 9, 3, 7, 11, 4, 8]
FIRST = CONFIGS["deepseek_v3"]["num_hidden_layers"]
COPIES = ("embed_tokens.weight", "shared_head.head.weight")


def head_of(path: Path) -> MTPDrafter:
    return read_head(path, (H, V), read_tensors)[0].eval().requires_grad_(False)


def outputs(head: MTPDrafter, embedded: Tensor, states: Tensor) -> Tensor:
    """Return the recycled states [n, h] of rows at positions 0, 1, .."""
    rotary = Rotary(head.config, torch.device("cpu"), head.rotary_embedding)
    return head(embedded[None], states[None], None, None, rotary(torch.arange(len(states))[None], torch.float32))[0]


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_layout_is_read_as_its_definition(kind: str, tmp_path: Path) -> None:
    w = weights_of(kind)
    copies = {f"model.layers.{FIRST}.{name}": torch.randn(V, H) for name in COPIES}
    others = {"model.norm.weight": torch.ones(H), **(copies if "model.layers" in NAMES[kind][0] else {})}
    path = folder(tmp_path, kind, {**w, **others}, shards=0 if kind == "qwen3" else 3)
    head, reference = head_of(path), Reference(w, kind)
    embedded, states, unembed = torch.randn(2 * 9 + V, H, generator=torch.Generator().manual_seed(1)).split((9, 9, V))
    u = reference.rows(embedded, states)
    recycled = u if kind == "glm4_moe" else reference.normed(u)
    torch.testing.assert_close(outputs(head, embedded, states), recycled, atol=1e-5, rtol=1e-4)
    target: Any = type("OneHead", (), {"logits": lambda self, x: x @ unembed.T})()
    logits = head.logits(outputs(head, embedded, states), target)
    torch.testing.assert_close(logits, reference.normed(u) @ unembed.T, atol=1e-4, rtol=1e-4)
    project = head.mtp_layers[0].input_proj.weight
    project.copy_(project.roll(H, 1))  # [g; e]
    assert (head.logits(outputs(head, embedded, states), target) - logits).abs().max() > 0.1
    with torch.device("meta"):
        assert read_head(path, (H, V), read_shapes)[0].shape == head.shape


def test_routers_keep_their_biases_in_float32(tmp_path: Path) -> None:
    head = head_of(folder(tmp_path, "deepseek_v3", weights_of("deepseek_v3"))).to(torch.bfloat16)
    router = head.mtp_layers[0].mlp.gate
    assert router.e_score_correction_bias.dtype == torch.float32 and router.weight.dtype == torch.bfloat16
    wanted = weights_of("deepseek_v3")[f"model.layers.{FIRST}.mlp.gate.e_score_correction_bias"]
    assert torch.equal(router.e_score_correction_bias, wanted)


# -- drafting ------------------------------------------------------------------------------------------------------


def target_of(kind: str, path: Path, layers: int = 1, **changes: Any) -> tuple[Target, list[Reference]]:
    """Return a model whose own folder has its MTP layers, and their references."""
    weights = [weights_of(kind, i, i) for i in range(layers)]
    folder(path, kind, {name: tensor for w in weights for name, tensor in w.items()}, 2, **changes)
    references = [Reference(w, kind, i) for i, w in enumerate(weights)]
    return Target(model_of(kind), None, f"tiny {kind}", None if kind == "qwen3" else path), references


def drafted(decoder: MTP, sampling: SamplingParams, tokens: int) -> Iterator[tuple[list[int], DraftTree]]:
    """Yield (ids, draft) of every step."""
    seen: list[tuple[list[int], DraftTree]] = []
    propose = decoder.propose

    def spy(state: DecodeState) -> DraftTree:
        seen.append((list(state.ids), propose(state)))
        return seen[-1][1]

    decoder.propose = spy  # type: ignore[method-assign]
    output = generate(decoder, PROMPT, StopParams(tokens), sampling).tokens
    decoder.propose = propose  # type: ignore[method-assign]
    if sampling.greedy:
        wanted = generate(Autoregressive(decoder.target), PROMPT, StopParams(tokens), SamplingParams()).tokens
        assert output == wanted
    yield from seen


def final_states(target: Target, ids: list[int]) -> Tensor:
    states = target.prefill(torch.tensor([ids]), target.new_cache(len(ids)), every=True).hidden_states
    return states[FINAL][0]


@few(1)
@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe", "qwen3"])
@torch.inference_mode()
def test_chains_are_those_of_the_reference(kind: str, tmp_path: Path) -> None:
    """64 greedy tokens of a model with its own layer, or in the layout of speculators; layouts recycle other states."""
    target, (reference,) = target_of(kind, tmp_path)
    options = {"weights": str(tmp_path)} if kind == "qwen3" else {"num_speculative_tokens": 3}
    decoder, table, differs = load_method("mtp", target, **options), target.model.get_input_embeddings().weight, 0
    assert decoder.metadata()["num_speculative_tokens"] == 3
    for ids, tree in drafted(decoder, SamplingParams(), 64):
        states, chain = final_states(target, ids[:-1]), tree.tokens.tolist()
        for depth, token in enumerate(chain[1:]):
            prefix = [*ids, *chain[1 : depth + 1]]
            normed, other = (
                int(target.logits(reference.normed(reference.recursion(table, prefix, states, way))).argmax())
                for way in (kind != "glm4_moe", kind == "glm4_moe")
            )
            assert token == normed, (len(ids), depth)
            differs += token != other
    assert differs


@few(1)
@pytest.mark.parametrize(("kind", "temperature"), [("deepseek_v3", 0.0), ("deepseek_v3", 1.0), ("glm4_moe", 0.0)])
@torch.inference_mode()
def test_layers_in_turn_are_those_of_the_reference(kind: str, temperature: float, tmp_path: Path) -> None:
    """Layer j reads the states of layer j - 1 at the same rows and the tokens 1 + j after them."""
    target, references = target_of(kind, tmp_path, 3, num_nextn_predict_layers=3)
    decoder, table = load_method("mtp", target), target.model.get_input_embeddings().weight
    for ids, tree in drafted(decoder, SamplingParams(temperature), 24):
        states, text = final_states(target, ids[:-1]), [*ids, *tree.tokens[1:].tolist()]
        rows = len(ids) - 1
        for j, reference in enumerate(references):
            u = reference.rows(table[text[1 + j : 1 + j + rows]], states)
            states = u if kind == "glm4_moe" else reference.normed(u)
            logits = target.logits(reference.normed(u)[-1])
            if temperature:
                assert tree.draft_probs is not None
                torch.testing.assert_close(tree.draft_probs[j], logits.softmax(-1), atol=1e-4, rtol=1e-3)
            else:
                assert text[len(ids) + j] == int(logits.argmax())


@torch.inference_mode()
def test_sampled_chains_have_the_distributions_they_are_sampled_from(tmp_path: Path) -> None:
    target, (reference,) = target_of("qwen3", tmp_path)
    decoder, table = load_method("mtp", target, weights=str(tmp_path)), target.model.get_input_embeddings().weight
    for ids, tree in drafted(decoder, SamplingParams(0.8), 16):
        states, chain = final_states(target, ids[:-1]), tree.tokens.tolist()
        assert tree.draft_probs is not None and len(tree.draft_probs) == 3
        for depth in range(3):
            u = reference.recursion(table, [*ids, *chain[1 : depth + 1]], states, True)
            q = (target.logits(reference.normed(u)) / 0.8).softmax(-1)
            torch.testing.assert_close(tree.draft_probs[depth], q, atol=1e-4, rtol=1e-3)


def test_a_tree_contains_the_chain(tmp_path: Path) -> None:
    target, _ = target_of("qwen3", tmp_path)
    chain = next(drafted(load_method("mtp", target, weights=str(tmp_path)), SamplingParams(), 4))[1]
    shape = {"mode": "tree", "top_k": 3, "nodes": 39 - 18}  # all nodes of three levels
    tree = next(drafted(load_method("mtp", target, weights=str(tmp_path), **shape), SamplingParams(), 4))[1]
    node, children, tokens = 0, tree.topology.children(), tree.tokens.tolist()
    for token in chain.tokens.tolist()[1:]:
        node = next(child for child in children[node] if tokens[child] == token)


# -- refusals ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(model_of("deepseek_v3"))


NAME = f"model.layers.{FIRST}."
FAULTS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {  # changed tensors (None: removed) and fields
    "none": ({NAME: None}, {}, "many re-uploads drop it"),
    "norm": ({NAME + "enorm": None}, {}, "lacks tensors: model.layers.3.enorm.weight"),
    "output norm": ({NAME + "shared_head.norm": None}, {}, "shared_head.norm.weight"),
    "expert": ({NAME + "mlp.experts.2.up_proj": None}, {}, "experts.2.up_proj.weight"),
    "quantized": ({NAME + "eh_proj.weight_scale_inv": torch.ones(1)}, {}, "is quantized"),
    "float8": ({NAME + "eh_proj.weight": torch.ones(H, 2 * H).to(torch.float8_e4m3fn)}, {}, "quantized weights"),
    "unknown": ({NAME + "third_norm.weight": torch.ones(H)}, {}, "has unknown tensors"),
    "shape": ({NAME + "eh_proj.weight": torch.ones(H, H)}, {}, "has shape (32, 32)"),
    "expert's shape": ({NAME + "mlp.experts.2.up_proj.weight": torch.ones(3, H)}, {}, "different shapes"),
    "two layers": ({}, {"num_nextn_predict_layers": 2}, "lacks tensors: model.layers.4."),
    "no layers": ({}, {"num_nextn_predict_layers": 0}, "states 0 MTP layers"),
    "other layout": ({NAME: None, "mtp.fc.weight": torch.ones(H, 2 * H)}, {}, "but mtp.*, another layout"),
    "other speculator": ({}, {"speculators_model_type": "eagle3"}, "type 'eagle3'"),
    "other model": ({}, {"hidden_size": 64}, "hidden size of 64"),
    "vocabulary": ({}, {"vocab_size": 99}, "vocabulary of 99"),
    "model type": ({}, {"model_type": "llama"}, "model type 'llama'"),
    "groups": ({}, {"n_group": 0.5}, "does not describe layers"),
    "size": ({}, {"num_hidden_layers": -1}, "num_hidden_layers"),
    "attention": ({}, {"num_attention_heads": "four"}, "num_attention_heads"),
}


def changed(path: Path, tensors: dict[str, Any], fields: dict[str, Any], kind: str = "deepseek_v3") -> str:
    w = weights_of(kind)
    for name, tensor in tensors.items():
        if tensor is None:
            w = {other: value for other, value in w.items() if not other.startswith(name)}
        else:
            w[name] = tensor
    return str(folder(path, kind, w or {"other": torch.ones(1)}, **fields))


@pytest.mark.parametrize("fault", FAULTS)
def test_faulty_checkpoints_are_refused(fault: str, target: Target, tmp_path: Path) -> None:
    tensors, fields, reported = FAULTS[fault]
    refused(MTP, MTPOptions(weights=changed(tmp_path, tensors, fields)), target, reported)


def test_faults_of_other_layouts_are_refused(target: Target, tmp_path: Path) -> None:
    several = changed(tmp_path / "a", {}, {"num_nextn_predict_layers": 2}, "qwen3")
    refused(MTP, MTPOptions(weights=several), target, "states 2 MTP layers")
    methods = [{"speculative_tokens": 999}]
    many = changed(tmp_path / "b", {}, {"speculators_config": {"proposal_methods": methods}}, "qwen3")
    refused(MTP, MTPOptions(weights=many), target, "speculative_tokens in config.json is 999")
    hybrid = changed(tmp_path / "c", {}, {"layer_types": ["linear_attention"] * 4}, "qwen3_next")
    refused(MTP, MTPOptions(weights=hybrid), target, "full attention")
    index = Path(changed(tmp_path / "d", {}, {})) / "model.safetensors.index.json"
    (tmp_path / "d" / "model.safetensors").rename(tmp_path / "d" / "part.safetensors")
    index.write_text(json.dumps({"weight_map": ["model.safetensors"]}))
    refused(MTP, MTPOptions(weights=str(tmp_path / "d")), target, "weight_map")


def test_what_several_layers_cannot_draft_is_refused(target: Target, tmp_path: Path) -> None:
    w = weights_of("deepseek_v3") | weights_of("deepseek_v3", 1)
    path = str(folder(tmp_path, "deepseek_v3", w, num_nextn_predict_layers=2))
    refused(MTP, MTPOptions(weights=path, mode="tree"), target, "mode=tree")
    refused(MTP, MTPOptions(weights=path, num_speculative_tokens=3), target, "there are 2 layers")
    assert load_method("mtp", target, weights=path, num_speculative_tokens=1).size.drafted == 1


def test_a_model_without_the_layer_is_refused(target: Target, tmp_path: Path) -> None:
    """Its own folder is the default; other model types need the option `weights`."""
    folder(tmp_path, "deepseek_v3", {"model.norm.weight": torch.ones(H)})
    own = Target(target.model, None, "bare", tmp_path)
    refused(MTP, MTPOptions(), own, "no MTP layer; many re-uploads drop it")
    refused(MTP, MTPOptions(), Target(model_of("qwen3"), None, "plain", tmp_path), "mtp.weights=PATH")


def test_damaged_numbers_are_refused(target: Target, tmp_path: Path) -> None:
    path = Path(changed(tmp_path, {}, {}))
    w = load_file(path / "model.safetensors")
    w[f"{NAME}eh_proj.weight"][0, 0] = torch.nan
    save_file(w, path / "model.safetensors")
    refused(MTP, MTPOptions(weights=str(path)), target, "NaN", only_load=True)
