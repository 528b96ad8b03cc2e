"""DFlash: published layouts load, drafts equal a computation written from the description alone, trees are the best."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specbench_ss.engine.decoder import DecodeState
from specbench_ss.engine.generate import StopParams, generate
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.target import Target
from specbench_ss.errors import UserError
from specbench_ss.methods._shared.draft_vocabulary import mask_token
from specbench_ss.methods.ar import Autoregressive
from specbench_ss.methods.block_drafters.decode import DFlash, DFlashOptions
from specbench_ss.methods.block_drafters.dflash import (
    BlockAttention,
    config_of,
    new_drafter,
    published_layers,
    random_drafter,
    read_drafter,
    speculators_config_of,
)
from specbench_ss.models.checkpoint import read_tensors, write_checkpoint
from specbench_ss.models.tiny import tiny_target
from tests.methods import oracles
from tests.methods.reference_drafter import Reference, draft_words, folder, layer_weights, refused, watching
from tests.methods.refused_runs import check_refused_run
from tests.tiny import few, thorough, tiny_model

H, V, HEADS, KV, HD, FFN, D, B, MASK, WORDS = 32, 61, 4, 2, 12, 40, 2, 5, 7, 40
EPS, THETA = 1e-5, 5e4
PROMPTS = ([5, 6, 7, 8, 9, 10, 11], [3], [20, 4, 4, 4, 30, 12, 9, 8, 50, 41, 33, 22, 17, 60, 9])
LAYER = {
    "model_type": "qwen3", "hidden_size": H, "intermediate_size": FFN, "num_hidden_layers": D, "vocab_size": V,
    "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": HD, "rms_norm_eps": EPS,
    "max_position_embeddings": 16, "rope_theta": THETA,
}  # fmt: skip
BIASES = [f"self_attn.{n}_proj" for n in "qkvo"]
IDS = [0, 2]  # of the layers whose outputs are features


# -- checkpoints as they are published, scaled down ----------------------------------------------------------------


def tensors(words: int = V, bias: bool = False, embed: bool = False, features: int = len(IDS)) -> dict[str, Tensor]:
    torch.manual_seed(1)
    made = {"fc.weight": torch.randn(H, features * H) * 0.2}
    for i in range(D):
        norms, biases = ("input_layernorm", "post_attention_layernorm"), BIASES if bias else ()
        made |= layer_weights(f"layers.{i}", H, FFN, HEADS, KV, HD, norms=norms, biases=biases, qk_norm=True)
    made |= {"norm.weight": torch.rand(H) + 0.5, "hidden_norm.weight": torch.rand(H) + 0.5}
    if words < V:
        made |= draft_words(words, V)
        made["lm_head.weight"] = torch.randn(words, H)
    if embed:
        made["embed_tokens.weight"] = torch.randn(V, H)
    return made


def zlab(**changed: Any) -> dict[str, Any]:
    """config.json as z-lab publishes it."""
    nested = {"target_layer_ids": IDS, "mask_token_id": MASK} | changed.pop("dflash_config", {})
    return {**LAYER, "block_size": B, "num_target_layers": 4, "dflash_config": nested, **changed}


def speculators(**changed: Any) -> dict[str, Any]:
    """config.json as speculators writes it; `layer` changes its layers' configuration."""
    layer = LAYER | changed.pop("layer", {})
    return {
        "architectures": ["DFlashDraftModel"], "speculators_model_type": "dflash", "transformer_layer_config": layer,
        "draft_vocab_size": V, "block_size": B, "aux_hidden_state_layer_ids": [i + 1 for i in IDS],
        "mask_token_id": MASK, "sample_from_anchor": False, "sliding_window_non_causal": False,
        "speculators_config": {"algorithm": "dflash"}, **changed,
    }  # fmt: skip


# -- the same, written from the description ------------------------------------------------------------------------

Watching = watching(DFlash)
SLIDING = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 4}
CHECKPOINTS: dict[str, tuple[dict[str, Tensor], dict[str, Any]]] = {
    "z-lab": (tensors(), zlab()),
    "z-lab, all in dflash_config": (
        tensors(), {k: v for k, v in zlab(dflash_config={"block_size": B}).items() if k != "block_size"}
    ),
    "z-lab, biases and windows": (
        tensors(bias=True), zlab(attention_bias=True, use_sliding_window=True, **SLIDING)
    ),
    "speculators": (tensors(), speculators()),
    "speculators, fewer words": (tensors(WORDS), speculators(draft_vocab_size=WORDS)),
    "speculators, own embedding, a Llama": (
        tensors(embed=True), speculators(layer={"model_type": "llama"}, num_target_layers=4)
    ),
    "speculators, windows": (tensors(), speculators(layer={"use_sliding_window": True, **SLIDING})),
    "speculators, windows and later places": (
        tensors(), speculators(layer={"use_sliding_window": True, **SLIDING}, sliding_window_non_causal=True)
    ),
    "speculators, windows that are switched off": (
        tensors(), speculators(layer={"use_sliding_window": False, **SLIDING})
    ),
    "speculators, from the anchor": (tensors(), speculators(sample_from_anchor=True)),
}  # fmt: skip


@few(4)
@pytest.mark.parametrize("name", CHECKPOINTS)
@torch.no_grad()
def test_drafts_are_what_the_description_states(name: str, tmp_path: Path) -> None:
    """At the first and the last step of an answer; features are transformers' own hidden states."""
    weights, config = CHECKPOINTS[name]
    model = tiny_model("llama")
    target = Target(model)
    options = DFlashOptions(weights=folder(tmp_path / "d", weights, config, pickled=name == "speculators"))
    Watching.check(options, target)
    decoder: Any = Watching.load(target, options)
    answer = generate(decoder, PROMPTS[2], StopParams(12), SamplingParams()).tokens
    assert answer == generate(Autoregressive(target), PROMPTS[2], StopParams(12), SamplingParams()).tokens
    first = 0 if config.get("sample_from_anchor") else 1
    words = weights["d2t"] + torch.arange(WORDS) if "d2t" in weights else torch.arange(V)
    assert decoder.vocabulary.token_ids(torch.arange(len(words))).tolist() == words.tolist()
    for ids, logits in (decoder.seen[0], decoder.seen[-1]):
        hidden = model(torch.tensor([ids[:-1]]), output_hidden_states=True).hidden_states
        features = torch.cat([hidden[i + 1][0] for i in IDS], -1)
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        reference = Reference(weights, config, embedding)
        wanted = reference.dflash([ids[-1]] + [MASK] * (B - 1), list(features), head)[first:]
        torch.testing.assert_close(logits, wanted, atol=3e-4, rtol=1e-4)
    assert len(decoder.seen) > 1


def test_the_last_layer_is_read_after_the_final_norm(tmp_path: Path) -> None:
    """As transformers gives it to z-lab's code; speculators' layout names inputs, so its last one is another layer."""
    target = Target(tiny_model("llama"))
    made = [
        read_drafter(Path(folder(tmp_path / str(i), tensors(), config)), target, read_tensors)[0].shape.layers
        for i, config in enumerate((
            zlab(dflash_config={"target_layer_ids": [1, 3]}), speculators(aux_hidden_state_layer_ids=[0, 3])
        ))
    ]  # fmt: skip
    assert made == [(2, -1), (0, 3)]


# -- the package that writes the other layout, where it is installed -----------------------------------------------


@thorough
@torch.no_grad()
def test_the_package_speculators_computes_the_same(tmp_path: Path) -> None:
    """Its own model, its own reading of a folder that is written here."""
    theirs = oracles.speculators("models.dflash")
    target = tiny_target("llama", V)
    decoder = Watching(target, DFlashOptions(), random_drafter(target))
    generate(decoder, PROMPTS[2], StopParams(8), SamplingParams())
    out = tmp_path / "d"
    write_checkpoint(out, decoder.drafter, speculators_config_of(decoder.drafter, target))
    config = theirs.DFlashSpeculatorConfig.from_pretrained(out)
    config.transformer_layer_config._attn_implementation = "eager"
    model = theirs.DFlashDraftModel(config)
    tensors = {k: v.float() for k, v in read_tensors(out / "model.safetensors").items()}
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected and all(name.startswith(("embed", "lm_head", "verifier")) for name in missing)
    again: Any = Watching(target, DFlashOptions(), read_drafter(out, target, read_tensors)[0])
    generate(again, PROMPTS[2], StopParams(8), SamplingParams())
    embedding = target.model.get_input_embeddings().weight
    for ids, logits in again.seen:
        s = len(ids) - 1
        hidden_states = target.prefill(
            torch.tensor([ids[:-1]]), target.new_cache(s), again.aux_hidden_state_layers, every=True
        ).hidden_states
        context = model.hidden_norm(model.fc(torch.cat([hidden_states[i] for i in again.aux_hidden_state_layers], -1)))
        block = torch.tensor([ids[-1]] + [again.drafter.shape.mask_token] * (config.block_size - 1))
        x, places = embedding[block][None], torch.arange(s + len(block))[None]
        rotary = model.rotary_emb(x, places)
        for layer in model.layers:
            x = layer(target_hidden=context, hidden_states=x, attention_mask=None, position_embeddings=rotary)
        torch.testing.assert_close(target.logits(model.norm(x))[0, 1:], logits, atol=1e-4, rtol=1e-4)


# -- what is written here is read again ----------------------------------------------------------------------------


ALL_SLIDE = (BlockAttention(4, from_root=True, causal=True),) * D
MIXED = (BlockAttention(), BlockAttention(4, from_root=True))


@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        (config_of, {}),
        (config_of, {"draft_vocab": 20, "from_anchor": True}),
        (speculators_config_of, {}),
        (speculators_config_of, {"draft_vocab": 20, "from_anchor": True}),
        (speculators_config_of, {"layer_masks": ALL_SLIDE}),
        (speculators_config_of, {"layer_masks": MIXED}),
    ],
)
def test_what_is_written_is_read_again(layout: Any, shape: dict[str, Any], tmp_path: Path) -> None:
    target = Target(tiny_model("llama"))
    drafter = random_drafter(target, **shape)
    write_checkpoint(tmp_path, drafter, layout(drafter, target))
    again, _ = read_drafter(tmp_path, target, read_tensors)
    assert again.shape == drafter.shape
    for name, tensor in drafter.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name].float(), tensor.float(), atol=1e-3, rtol=1e-3)
    one, two = (DFlash(target, DFlashOptions(), d) for d in (drafter, again))
    assert one.metadata()["layers"] == two.metadata()["layers"]


def vllm_causal(config: dict[str, Any]) -> list[bool]:
    """Return each layer's causality as vLLM 0.32 reads it: `update_dflash` and `_dflash_layer_causal`."""
    layers = config.get("transformer_layer_config")
    if layers is not None:
        return [not config.get("sliding_window_non_causal", True)] * layers["num_hidden_layers"]
    kinds = config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"]
    return [config["dflash_config"].get("causal", kind == "sliding_attention") for kind in kinds]


@pytest.mark.parametrize("layout", [config_of, speculators_config_of])
@pytest.mark.parametrize("layer_masks", [None, ALL_SLIDE, MIXED])
def test_what_is_written_is_served_as_it_drafts(
    layout: Any, layer_masks: Any, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    target = Target(tiny_model("llama"))
    drafter = random_drafter(target, layer_masks=layer_masks)
    if layout is config_of and layer_masks:
        with pytest.raises(UserError, match="sliding windows"):
            layout(drafter, target)
        return
    config = layout(drafter, target)
    assert vllm_causal(config) == [mask.causal for mask in drafter.shape.layer_masks]
    write_checkpoint(tmp_path, drafter, config)
    read_drafter(tmp_path, target, read_tensors)
    assert not recwarn.list


@pytest.mark.parametrize(
    ("layer_masks", "stated"),
    [
        ((BlockAttention(), BlockAttention(4, from_root=True, causal=True)), "sliding_window_non_causal"),
        ((BlockAttention(4, from_root=True), BlockAttention(4, from_root=True, causal=True)), "window"),
        ((BlockAttention(causal=True),) * D, "window"),
        ((BlockAttention(4),) * D, "window"),
        ((BlockAttention(4, from_root=True), BlockAttention(5, from_root=True)), "window"),
    ],
)
def test_layers_that_the_speculators_layout_cannot_describe_are_refused(layer_masks: Any, stated: str) -> None:
    target = Target(tiny_model("llama"))
    with pytest.raises(UserError, match=stated):
        speculators_config_of(random_drafter(target, layer_masks=layer_masks), target)


def test_the_anchor_is_stated_where_vllm_looks() -> None:
    """Next to the mask token in z-lab's layout: elsewhere vLLM serves such a drafter with all drafts one place off."""
    target = Target(tiny_model("llama"))
    drafter = random_drafter(target, from_anchor=True)
    assert config_of(drafter, target)["dflash_config"]["sample_from_anchor"] is True
    assert speculators_config_of(drafter, target)["sample_from_anchor"] is True


def test_an_export_warns_of_an_anchor_that_vllm_does_not_serve(tmp_path: Path) -> None:
    target = Target(tiny_model("llama"))
    decoder = DFlash(target, DFlashOptions(), random_drafter(target, from_anchor=True))
    with pytest.warns(UserWarning, match='dflash: vLLM does not serve "sample_from_anchor": true'):
        decoder.export(tmp_path)


def test_layers_and_mask_of_a_new_drafter() -> None:
    assert published_layers(5, 36) == (1, 9, 17, 25, 33)  # as published for Qwen3-8B
    assert published_layers(1, 30) == (15,)
    assert (
        published_layers(5, 8) == (1, 2, 3, 4, 5) and published_layers(3, 2) == (0,) and published_layers(2, 1) == (0,)
    )
    target = tiny_target("llama", V)
    assert mask_token(target, torch.ones(V, 2)) == V - 1
    assert mask_token(target, torch.ones(V, 2).index_fill(0, torch.tensor([V - 1]), 0)) == V - 2
    target.tokenizer.add_special_tokens({"mask_token": "<pad>"})
    assert mask_token(target, torch.ones(V, 2)) == 0


# -- trees ---------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def test_a_tree_has_the_best_nodes_of_all() -> None:
    target = Target(tiny_model("llama"))
    decoder = DFlash(target, DFlashOptions(mode="tree", nodes=12, k=3), random_drafter(target))
    logits = torch.randn(4, V, generator=torch.Generator().manual_seed(2)) * 2
    state = DecodeState([1, 2], 1, torch.tensor([2]), target.new_cache(9), SamplingParams())
    decoder.logits = lambda _: logits  # type: ignore[method-assign]
    tree = decoder.propose(state)
    log_p = logits.log_softmax(-1)
    best = log_p.topk(3).indices.tolist()
    every = [c for depth in range(1, 5) for c in itertools.product(*best[:depth])]
    scores = sorted((sum(float(log_p[i, t]) for i, t in enumerate(c)) for c in every), reverse=True)
    found, paths = [], {0: ()}
    for node in range(1, len(tree)):
        paths[node] = (*paths[tree.topology.parents[node]], int(tree.tokens[node]))
        found.append(sum(float(log_p[i, t]) for i, t in enumerate(paths[node])))
    assert len(set(paths.values())) == 13
    assert sorted(found, reverse=True) == pytest.approx(scores[:12], abs=1e-4)


def test_a_smaller_block_drafts_less(tmp_path: Path) -> None:
    target = Target(tiny_model("llama"))
    for size, depth in ((0, 4), (3, 2)):
        decoder = DFlash(target, DFlashOptions(block_size=size), random_drafter(target))
        steps = generate(decoder, PROMPTS[0], StopParams(9), SamplingParams()).steps
        assert {step.draft_depth for step in steps} == {depth} and decoder.max_tokens_per_step() == depth + 1
    with pytest.raises(UserError, match="block_size must be 2 to 5, as the drafter was trained, or 0, not 6"):
        DFlash(target, DFlashOptions(block_size=6), random_drafter(target))
    with pytest.raises(UserError, match="block_size must be 2 to 5"):
        DFlash(target, DFlashOptions(block_size=1), random_drafter(target))
    with pytest.raises(UserError, match="does not support mode=tree"):
        DFlashOptions(sample="on", mode="tree")


def test_the_context_is_what_was_accepted() -> None:
    """After every step the cache holds a row for each decided token but the root, whatever was drafted."""
    target = Target(tiny_model("llama"))

    class Counting(DFlash):
        def propose(self, state: DecodeState) -> Any:
            assert self.cache.lengths == [state.position] * 2
            tree = super().propose(state)
            assert self.cache.lengths == [state.position] * 2
            return tree

    for mode in ("chain", "tree"):
        decoder = Counting(target, DFlashOptions(mode=mode, nodes=20, k=5), random_drafter(target))
        answer = generate(decoder, PROMPTS[2], StopParams(30), SamplingParams())
        assert answer.num_draft_forwards == len(answer.steps)


# -- checkpoints that do not fit -----------------------------------------------------------------------------------

BAD: dict[str, tuple[dict[str, Tensor], dict[str, Any], str]] = {
    "mask token": (tensors(), zlab(dflash_config={"mask_token_id": V}), "mask_token_id in config.json is 61, the"),
    "mask token below 0": (tensors(), speculators(mask_token_id=-1), "mask_token_id in config.json is -1"),
    "no mask token": (tensors(), speculators(mask_token_id=None), "mask_token_id is not a whole number"),
    "layer ids": (
        tensors(), zlab(dflash_config={"target_layer_ids": [0, 4]}), "target_layer_ids in config.json names layer 4"
    ),
    "layer ids, inputs": (
        tensors(), speculators(aux_hidden_state_layer_ids=[-1, 2]), "layer_ids in config.json names layer -1"
    ),
    "no layer ids": (tensors(), speculators(aux_hidden_state_layer_ids=[]), "names no layer"),
    "layer ids are words": (tensors(), zlab(dflash_config={"target_layer_ids": ["a"]}), "not a whole number"),
    "more features than ids": (tensors(features=3), zlab(), "tensor fc.weight has shape (32, 96)"),
    "block size": (tensors(), zlab(block_size=1), "block_size in config.json is 1, it must be 2 to 128"),
    "a huge block": (tensors(), speculators(block_size=1000), "block_size in config.json is 1000"),
    "no block size": (tensors(), zlab(block_size="eight"), "block_size is"),
    "another vocabulary": (tensors(), zlab(vocab_size=99), "a model with a vocabulary of 99, the model has 61"),
    "another width": (tensors(), speculators(layer={"hidden_size": 64}), "a hidden size of 64, the model has 32"),
    "another depth": (tensors(), zlab(num_target_layers=36), "a number of layers of 36, the model has 4"),
    "draft vocabulary": (tensors(WORDS), speculators(draft_vocab_size=50), "the drafter has 50 words, lm_head"),
    "too many words": (tensors(), speculators(draft_vocab_size=99), "vocabulary has 99 words, the model's 61"),
    "no map": (
        {k: v for k, v in tensors(WORDS).items() if k not in ("d2t", "t2d")}, speculators(draft_vocab_size=WORDS),
        "the drafter has 40 words, the model 61, and it lacks tensors: d2t",
    ),
    "d2t points outside": (
        tensors(WORDS) | {"d2t": torch.full((WORDS,), 30)}, speculators(draft_vocab_size=WORDS), "d2t maps to token 69"
    ),
    "d2t points below": (
        tensors(WORDS) | {"d2t": torch.full((WORDS,), -3)}, speculators(draft_vocab_size=WORDS), "d2t maps to token -3"
    ),
    "d2t maps to one word twice": (
        {k: v for k, v in tensors(WORDS).items() if k != "t2d"} | {"d2t": 9 - torch.arange(WORDS)},
        speculators(draft_vocab_size=WORDS), "d2t maps to token 9 more than once",
    ),
    "d2t is not whole": (
        {k: v for k, v in tensors(WORDS).items() if k != "t2d"} | {"d2t": torch.full((WORDS,), 0.5)},
        speculators(draft_vocab_size=WORDS), "d2t contains numbers that are not integers",
    ),
    "t2d is another": (
        tensors(WORDS) | {"t2d": torch.ones(V, dtype=torch.bool)}, speculators(draft_vocab_size=WORDS),
        "d2t maps to other tokens than the 61 that t2d marks",
    ),
    "another type": (
        tensors(), speculators(speculators_model_type="eagle3"), "a speculator of the type 'eagle3', not 'dflash'"
    ),
    "an unknown type": (
        tensors(), speculators(speculators_model_type="xpress"), "of the type 'xpress', not 'dflash': supported types"
    ),
    "no drafter": (tensors(), LAYER, "config.json describes no DFlash drafter"),
    "unknown layers": (tensors(), speculators(layer={"model_type": "nope"}), "layers of the unknown type 'nope'"),
    "a strange rope": (
        tensors(), zlab(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}), "rope of type"
    ),
    "an unknown activation": (
        tensors(), speculators(layer={"hidden_act": "sillu"}),
        "hidden_act in config.json is 'sillu', which is not supported (did you mean silu?)",
    ),
    "no heads": (tensors(), zlab(num_attention_heads=0), "num_attention_heads in config.json is 0, it must be a whole"),
    "fewer than no heads": (tensors(), speculators(layer={"num_attention_heads": -1}), "num_attention_heads in config"),
    "no heads of keys": (tensors(), zlab(num_key_value_heads=0), "num_key_value_heads in config.json is 0"),
    "heads that do not divide": (tensors(), zlab(num_key_value_heads=3), "4 query heads and 3 key heads"),
    "heads of no size": (tensors(), speculators(layer={"head_dim": 0}), "head_dim in config.json is 0"),
    "heads of an odd size": (tensors(), zlab(head_dim=13), "RoPE requires an even rotary dimension"),
    "no inner size": (tensors(), speculators(layer={"intermediate_size": 0}), "intermediate_size in config.json is 0"),
    "no layers": (tensors(), zlab(num_hidden_layers=0), "num_hidden_layers in config.json is 0"),
    "a layer too many": (
        tensors(), speculators(layer={"num_hidden_layers": 3}), "is 3, the drafter has tensors of 2"
    ),
    "a million layers": (tensors(), zlab(num_hidden_layers=10**6), "is 1000000, it must be a whole number from 1 to"),
    "layers in words": (tensors(), zlab(num_hidden_layers="2"), "num_hidden_layers in config.json is '2'"),
    "positions in words": (
        tensors(), zlab(max_position_embeddings="many"), "'max_position_embeddings' expected int, got str"
    ),
    "an eps below 0": (tensors(), speculators(layer={"rms_norm_eps": -1.0}), "rms_norm_eps in config.json is -1.0"),
    "an endless eps": (tensors(), zlab(rms_norm_eps=math.inf), "rms_norm_eps in config.json is inf"),
    "no theta": (tensors(), zlab(rope_theta=0), "rope_theta in config.json is 0, it must be a finite number above 0"),
    "a theta below 0": (tensors(), speculators(layer={"rope_theta": -5.0}), "rope_theta in config.json is -5.0"),
    "endless angles": (
        tensors(), zlab(rope_parameters={"rope_type": "linear", "factor": 0.0, "rope_theta": 1e4}), "are not finite"
    ),
    "an endless scale": (
        tensors(), speculators(input_embedding_scale=math.inf), "input_embedding_scale in config.json is inf"
    ),
    "no window": (
        tensors(), speculators(layer={"use_sliding_window": True, **SLIDING, "sliding_window": 0}),
        "sliding_window in config.json is 0",
    ),
    "a window below 0": (tensors(), zlab(**SLIDING | {"sliding_window": -1}), "sliding_window in config.json is -1"),
    "strange attention": (tensors(), zlab(layer_types=["linear_attention"] * 2), "attention"),
    "its grandchild": (
        tensors() | {"layers.0.attention_conv.base_kernel": torch.ones(2)}, zlab(), "has unknown tensors: layers.0.att"
    ),
    "a tensor less": ({k: v for k, v in tensors().items() if k != "norm.weight"}, zlab(), "lacks tensors: norm.weight"),
    "a multiplier": (tensors(), zlab(output_multiplier=2.0), "output_multiplier, which is not supported"),
    "NaN": (tensors() | {"norm.weight": torch.full((H,), math.nan)}, zlab(), "tensor norm.weight has NaN"),
}  # fmt: skip
SEEN_LATER = ("NaN",)  # in numbers, of which `check` reads the map's alone


@few(18)
@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_one_line(name: str, tmp_path: Path) -> None:
    weights, config, reported = BAD[name]
    target = Target(tiny_model("llama"))
    options = DFlashOptions(weights=folder(tmp_path / "d", weights, config))
    refused(DFlash, options, target, reported, only_load=name in SEEN_LATER)


@pytest.mark.parametrize("name", ["mask token"])
def test_a_run_with_it_is_one_line(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights, config, reported = BAD[name]
    there = folder(tmp_path / "d", weights, config)
    check_refused_run(f"dflash[weights={there}]", reported, tmp_path, capsys)


@pytest.mark.parametrize("options", [{}, {"mode": "tree"}, {"sample": "on"}])
def test_a_drafter_that_gives_nan_is_named(options: dict[str, Any]) -> None:
    decoder = DFlash(tiny_target("llama", V), DFlashOptions(**options), random_drafter(tiny_target("llama", V)))
    with torch.inference_mode():
        for p in decoder.drafter.parameters():
            p.fill_(math.nan)
    with pytest.raises(UserError, match="dflash: the drafter's scores are not finite|draft's probabilities are not"):
        for seed in range(3):
            generate(decoder, PROMPTS[2], StopParams(9), SamplingParams(0.8, seed=seed))


def test_a_drafter_of_another_base_is_refused(tmp_path: Path) -> None:
    target = Target(tiny_model("llama"))
    target.weights_hash = "this"
    weights = folder(tmp_path / "d", tensors(), zlab(base_hash="that"))
    with pytest.raises(UserError, match="dflash was trained for another base"):
        DFlash.load(target, DFlashOptions(weights=weights))
    assert new_drafter(target, 2, 4).shape.block == 4
