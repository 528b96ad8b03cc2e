"""Folders of drafters: parts and pickles, copies of the target's tensors, tables of bytes, rope by kind of layer."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from specbench_ss.engine.decoder import Decoder
from specbench_ss.engine.generate import StopParams, generate
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.target import FINAL, Target
from specbench_ss.errors import UserError
from specbench_ss.methods._shared.speculators import rope_of
from specbench_ss.methods.block_drafters.decode import DFlash, DFlashOptions, PEagle, PEagleOptions
from specbench_ss.methods.eagle.decode import DynamicOptions, Eagle, Eagle2, Eagle3, Eagle3Options, EagleOptions
from specbench_ss.methods.hydra.decode import Hydra, HydraOptions
from specbench_ss.methods.medusa.decode import Medusa, MedusaOptions
from specbench_ss.models.checkpoint import read_tensors
from tests.methods import test_dflash, test_hydra, test_peagle
from tests.methods.test_eagle import CONFIG, HD, WORDS, H, V, check_dynamic, eagle1, eagle3
from tests.tiny import few, tiny_model

LAYERS = 8
KINDS: dict[str, tuple[type[Decoder], type[Any], dict[str, Tensor], dict[str, Any]]] = {
    "eagle": (Eagle, EagleOptions, eagle1(), CONFIG),
    "eagle3": (Eagle3, Eagle3Options, eagle3(), CONFIG),
    "dflash": (DFlash, DFlashOptions, test_dflash.tensors(), test_dflash.speculators()),
    "peagle": (PEagle, PEagleOptions, test_peagle.tensors(), test_peagle.speculators()),
    "hydra": (Hydra, HydraOptions, test_hydra.published(2, plus=False), {}),
    "medusa": (Medusa, MedusaOptions, {"0.0.linear.weight": torch.ones(H, H), "0.0.linear.bias": torch.ones(H)}, {}),
}


def in_parts(path: Path, tensors: dict[str, Tensor], config: dict[str, Any], ending: str) -> None:
    """Write a folder in two parts with an index."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    stem = "model" if ending == "safetensors" else "pytorch_model"
    names, of = sorted(tensors), {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"{stem}-0000{number}-of-00002.{ending}"
        of |= dict.fromkeys(part, file)
        values = {name: tensors[name].clone().contiguous() for name in part}
        save_file(values, path / file) if ending == "safetensors" else torch.save(values, path / file)
    (path / f"{stem}.{ending}.index.json").write_text(json.dumps({"weight_map": of}))


@few(4)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("ending", ["safetensors", "bin"])
@pytest.mark.parametrize("name", KINDS)
def test_folders_in_parts_are_read_by_every_method(name: str, ending: str, tmp_path: Path) -> None:
    method, options, tensors, config = KINDS[name]
    in_parts(tmp_path / "e", tensors, config, ending)
    target = Target(tiny_model("llama", layers=4 if name in ("dflash", "peagle") else LAYERS))
    chosen = options(weights=str(tmp_path / "e"))
    method.check(chosen, target)
    generate(method.load(target, chosen), [5, 6, 7], StopParams(4), SamplingParams())
    assert read_tensors(tmp_path / "e").keys() == tensors.keys()
    first = next((tmp_path / "e").glob("*-00001-*"))
    first.write_bytes(first.read_bytes()[:-99])
    for keyword in ("cannot read weights", "no weight file"):
        with pytest.raises(UserError, match=keyword):
            method.load(target, chosen)
        first.unlink(missing_ok=True)
    index = next((tmp_path / "e").glob("*.index.json"))
    index.write_text(json.dumps({"weight_map": {"fc.weight": f"../e/{first.name}"}}))
    with pytest.raises(UserError, match="no file name in its folder"):
        method.check(chosen, target)


@few(4)
@pytest.mark.parametrize(
    ("method", "options", "tensors", "warned"),
    [
        (Eagle3, Eagle3Options, eagle3(embed=True), ("embed_tokens.weight", "embedding")),
        (Eagle, EagleOptions, eagle1(embed=True), ("embed_tokens.weight", "embedding")),
        (Eagle2, DynamicOptions, eagle1() | {"lm_head.weight": torch.randn(V, H)}, ("lm_head.weight", "LM head")),
        (Eagle3, Eagle3Options, eagle3(words=V), ()),  # its LM head is its own
    ],
)
@pytest.mark.parametrize("saved_base", [False, True])
def test_copies_that_are_not_the_targets_are_named(
    method: type[Decoder], options: type[Any], tensors: dict[str, Tensor], warned: tuple[str, ...], saved_base: bool,
    tmp_path: Path,
) -> None:  # fmt: skip
    target = Target(tiny_model("llama", layers=LAYERS))
    in_parts(tmp_path / "e", tensors, CONFIG, "safetensors")
    chosen = options(weights=str(tmp_path / "e"))
    if saved_base:  # without its weights, as `models check`
        target.model.save_pretrained(tmp_path / "base")
        outline = type(target).__mro__[1](target.config, None, "base", tmp_path / "base")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        method.check(chosen, outline if saved_base else target)
        decoder = method.load(target, chosen)
    texts = [str(w.message) for w in caught if "of its norm" in str(w.message)]
    assert len(texts) == 2 * bool(warned) and all(word in text for word in warned for text in texts)
    assert list(decoder.load_warnings) == texts[1:]
    own = {"embed_tokens.weight": target.model.get_input_embeddings().weight, "lm_head.weight": target.unembed}
    in_parts(
        tmp_path / "e", {n: own[n].half() if n in warned else t for n, t in tensors.items()}, CONFIG, "safetensors"
    )
    assert not method.load(target, chosen).load_warnings


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["llama", "gpt_neox", "gemma3_text"])
def test_the_state_after_the_last_layer_is_the_final_norms_input(kind: str) -> None:
    target = Target(tiny_model(kind))
    seen: list[Tensor] = []
    n = target.n_layers
    norm: Any = next(m for name, m in target.model.named_modules() if name.endswith((".norm", ".final_layer_norm")))
    with norm.register_forward_pre_hook(lambda _, args: seen.append(args[0])):
        target.model(torch.tensor([[5, 6, 7, 8]]))
    states = target.prefill(torch.tensor([[5, 6, 7, 8]]), target.new_cache(4), (n,), every=True).hidden_states
    torch.testing.assert_close(states[n], seen[-1], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(target.family.norm(states[n]), states[FINAL])


def test_drafters_read_the_state_after_the_last_layer(tmp_path: Path) -> None:
    target = Target(tiny_model("llama", layers=LAYERS))
    nested = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [4, 6, LAYERS]}}
    in_parts(tmp_path / "e", eagle3(), CONFIG | nested, "safetensors")
    decoder = Eagle3.load(target, Eagle3Options(weights=str(tmp_path / "e"), total_tokens=8, depth=1, top_k=3))
    check_dynamic(target, decoder, eagle3(), (4, 6, LAYERS), {})


def test_eagle_maps_a_reduced_vocabulary(tmp_path: Path) -> None:
    """Tokens of the tree are the target's, and sampled ones follow q over the target's vocabulary."""
    target, words = Target(tiny_model("llama")), torch.arange(V - WORDS, V)
    reduced = {"d2t": words - torch.arange(WORDS), "t2d": (torch.arange(V) >= V - WORDS).to(torch.uint8)}
    tensors = {**eagle1(), **reduced, "lm_head.weight": target.unembed[words].clone()}
    tensors["d2t"] = tensors["d2t"].to(torch.int32)
    in_parts(tmp_path / "e", tensors, CONFIG, "safetensors")
    for sample, temperature in (("off", 0.0), ("on", 1.0)):
        decoder = Eagle.load(target, EagleOptions(weights=str(tmp_path / "e"), sample=sample))
        trees = trees_of(decoder, SamplingParams(temperature))
        assert all(int(tree.tokens[1:].min()) >= V - WORDS for tree in trees)
        assert temperature == 0 or all(tree.draft_probs.shape[-1] == V for tree in trees)


def trees_of(decoder: Decoder, sampling: SamplingParams) -> list[Any]:
    """Return the trees drafted for one answer."""
    trees, propose = list[Any](), decoder.propose

    def spy(state: Any) -> Any:
        trees.append(propose(state))
        return trees[-1]

    decoder.propose = spy  # type: ignore[method-assign]
    generate(decoder, [5, 6, 7], StopParams(8), sampling)
    return trees


def test_norms_of_heads_and_rope_by_kind_of_layer(tmp_path: Path) -> None:
    target, norms = Target(tiny_model("llama", layers=LAYERS)), {}
    for name in ("q_norm", "k_norm"):
        norms[f"midlayer.self_attn.{name}.weight"] = torch.rand(HD) + 0.5
    by_kind = {"full_attention": {"rope_type": "default", "rope_theta": 5e4}, "sliding_attention": {"rope_theta": 1e4}}
    in_parts(tmp_path / "e", {**eagle3(), **norms}, CONFIG | {"rope_parameters": by_kind}, "safetensors")
    decoder = Eagle3.load(target, Eagle3Options(weights=str(tmp_path / "e"), total_tokens=8, depth=1, top_k=3))
    check_dynamic(target, decoder, {**eagle3(), **norms}, (2, 4, 5), {})
    assert decoder.drafter.config.rope_parameters["rope_theta"] == 5e4
    with pytest.raises(UserError, match="are not the same"):
        rope_of({"rope_parameters": by_kind, "layer_types": list(by_kind), "num_hidden_layers": 2})


@pytest.mark.filterwarnings("ignore")
def test_peagle_without_a_head_uses_the_targets(tmp_path: Path) -> None:
    tensors = {n: t for n, t in test_peagle.tensors(words=test_peagle.V).items() if n != "lm_head.weight"}
    in_parts(tmp_path / "p", tensors, test_peagle.speculators(draft_vocab_size=test_peagle.V), "safetensors")
    target = Target(tiny_model("llama", layers=4))
    decoder: Any = PEagle.load(target, PEagleOptions(weights=str(tmp_path / "p")))
    assert decoder.drafter.lm_head is None
    generate(decoder, [5, 6, 7], StopParams(6), SamplingParams())
