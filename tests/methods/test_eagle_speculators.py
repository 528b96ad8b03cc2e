"""EAGLE-3 in speculators' layout: its variants equal a computation from the format's definition and the package's own.

What is written here is read again; what cannot be computed, or does not fit, is one line.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from specbench_ss.engine.decoder import DecodeState
from specbench_ss.engine.forward import EagerPass
from specbench_ss.engine.generate import StopParams, generate
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.target import Target
from specbench_ss.methods._shared.drafter_network import input_levels
from specbench_ss.methods.ar import Autoregressive
from specbench_ss.methods.block_drafters.decode import DFlash, DFlashOptions
from specbench_ss.methods.eagle import checkpoint
from specbench_ss.methods.eagle.decode import DynamicOptions, Eagle2, Eagle3, Eagle3Options
from specbench_ss.methods.eagle.train import Eagle3Trainer, Eagle3TrainOptions
from specbench_ss.models.checkpoint import read_tensors, write_checkpoint
from specbench_ss.models.tiny import randomise
from tests.methods import oracles
from tests.methods.reference_drafter import Reference, draft_words, folder, layer_weights, refused
from tests.methods.refused_runs import check_refused_run
from tests.tiny import few, tiny_model

H, V, HEADS, KV, HD, FFN, WORDS = 32, 61, 4, 2, 12, 40, 45
N, IDS, PROMPT = 8, [1, 4, 6], [20, 4, 4, 4, 30, 12, 9, 8, 50, 41]
EPS, THETA = 1e-5, 5e4
LAYER = {
    "model_type": "llama", "hidden_size": H, "intermediate_size": FFN, "num_hidden_layers": 1, "vocab_size": V,
    "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": HD, "rms_norm_eps": EPS,
    "max_position_embeddings": 16, "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
}  # fmt: skip


def config_of(**changed: Any) -> dict[str, Any]:
    """config.json as speculators writes it; `layer` changes its layer's configuration, None leaves a field out."""
    layer = LAYER | changed.pop("layer", {})
    made = {
        "architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3",
        "transformer_layer_config": {k: v for k, v in layer.items() if v is not None},
        "draft_vocab_size": WORDS, "norm_before_residual": False, "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": IDS, "norm_before_fc": False, "fc_norm": False, "norm_output": False,
        "embed_requires_grad": False,
        "speculators_config": {
            "algorithm": "eagle3", "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "default_proposal_method": "greedy", "verifier": {"name_or_path": None, "architectures": []},
        },
    }  # fmt: skip
    return made | changed


def tensors_of(config: dict[str, Any], embed: bool = False) -> dict[str, Tensor]:
    """The tensors that such a configuration asks for."""
    torch.manual_seed(3)
    layer, p = config["transformer_layer_config"], "layers.0"
    h, words = layer.get("hidden_size", H), config["draft_vocab_size"]
    features = len(config["eagle_aux_hidden_state_layer_ids"] or (0, 0, 0))
    norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    biased = [f"self_attn.{n}_proj" for n in "qkvo"] if layer.get("attention_bias") else []
    biased += [f"mlp.{n}_proj" for n in ("gate", "up", "down")] if layer.get("mlp_bias") else []
    qk_norm = layer.get("model_type", "qwen3") == "qwen3"
    made = layer_weights(p, h, FFN, HEADS, KV, HD, width=2 * h, norms=norms, biases=biased, qk_norm=qk_norm)
    made |= {"fc.weight": torch.randn(h, features * H) * 0.25, "lm_head.weight": torch.randn(words, h) * 0.25}
    sizes = {"norm": h} | ({"input_norm": features * H} if config["norm_before_fc"] else {})
    sizes |= {f"fc_norm.{i}": H for i in range(features)} if config["fc_norm"] else {}
    made |= {f"{name}.weight": torch.rand(n) + 0.5 for name, n in sizes.items()} | draft_words(words, V)
    if embed:
        made["embed_tokens.weight"] = torch.randn(V, h)
    return made


VARIANTS: dict[str, tuple[dict[str, Any], bool]] = {  # config.json, and whether an embedding comes along
    "plain": (config_of(), False),
    "normed residual, own embedding": (config_of(norm_before_residual=True), True),
    "one norm before fc": (config_of(norm_before_fc=True), False),
    "a norm a feature, normed output": (config_of(fc_norm=True, norm_output=True), False),
    "Qwen3's layer": (config_of(layer={"model_type": "qwen3"}), False),
    "biases": (config_of(layer={"attention_bias": True, "mlp_bias": True}), False),
    "all words": (config_of(draft_vocab_size=V), False),
    "two features": (config_of(eagle_aux_hidden_state_layer_ids=[0, 7]), False),
    "the usual layers": (config_of(eagle_aux_hidden_state_layer_ids=None), False),
    "another width": (config_of(layer={"hidden_size": 48}, target_hidden_size=H), True),
    "its type's defaults": (
        config_of(layer={"model_type": None, "rms_norm_eps": None, "rope_parameters": None}), False
    ),
}  # fmt: skip
NOT_THEIRS = "another width"  # vLLM reads target_hidden_size, the package's own model has one width


# -- the same, from the format's definition, one slot at a time ----------------------------------------------------


@pytest.fixture(scope="module")
def target() -> Target:
    """Of eight layers."""
    return Target(tiny_model("llama", layers=N))


def read(target: Target, weights: str, **size: Any) -> Any:
    options = Eagle3Options(weights=weights, **{"total_tokens": 5, "depth": 3, "top_k": 1} | size)
    Eagle3.check(options, target)
    return Eagle3.load(target, options)


def watched(decoder: Any, prompt: list[int], tokens: int = 8) -> list[tuple[list[int], Any, list[Tensor]]]:
    """(ids before the step, tree, logits of its passes) of every step, greedy."""
    seen: list[tuple[list[int], Any, list[Tensor]]] = []
    propose, logits, found = decoder.propose, decoder.drafter.logits, []

    def note_logits(*args: Any) -> Tensor:
        found.append(logits(*args))
        return found[-1]

    def note(state: DecodeState) -> Any:
        found.clear()
        tree = propose(state)
        seen.append((list(state.ids), tree, list(found)))
        return tree

    decoder.propose, decoder.drafter.logits = note, note_logits
    answer = generate(decoder, prompt, StopParams(tokens), SamplingParams()).tokens
    decoder.propose, decoder.drafter.logits = propose, logits
    assert answer == generate(Autoregressive(decoder.target), prompt, StopParams(tokens), SamplingParams()).tokens
    return seen


@few(3)
@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_drafts_are_what_the_format_states(name: str, target: Target, tmp_path: Path) -> None:
    """Features are transformers' own hidden states: number i is what layer i reads."""
    config, embed = VARIANTS[name]
    w, model = tensors_of(config, embed), target.model
    decoder = read(target, folder(tmp_path / "e", w, config))
    layers = config["eagle_aux_hidden_state_layer_ids"] or [2, N // 2, N - 3]
    assert decoder.layers == tuple(layers)
    assert checkpoint.layers_of(decoder.config, target)[0] == (tuple(layers),)  # nothing to try out
    words = (torch.arange(WORDS) + w["d2t"] if "d2t" in w else torch.arange(V)).tolist()
    steps = watched(decoder, PROMPT)
    for ids, tree, logits in (steps[0], steps[-1]):
        hidden = model(torch.tensor([ids[:-1]]), output_hidden_states=True).hidden_states
        slots = Reference(w, config, model.get_input_embeddings().weight)
        features = list(torch.cat([hidden[i][0] for i in layers], -1))
        drafted = tree.tokens.tolist()[1:]
        assert len(logits) == 4 and len(drafted) == 4
        for level, found in enumerate(logits):
            wanted = slots.eagle3_logits(slots.eagle(ids[1:] + drafted[:level], features)[-1])
            torch.testing.assert_close(found.flatten(), wanted, atol=2e-4, rtol=1e-4)
            assert drafted[level] == words[int(wanted.argmax())]


# -- the package that defines the format, where it is installed ----------------------------------------------------


def their_model(path: Path, embedding: Tensor) -> Any:
    """The package's own reading of a folder, in float32."""
    theirs = oracles.speculators("models.eagle3")
    config = theirs.Eagle3SpeculatorConfig.from_pretrained(path)
    config.transformer_layer_config._attn_implementation = "eager"
    model = theirs.Eagle3DraftModel(config)
    given = {k: v.float() if v.is_floating_point() else v for k, v in load_file(path / "model.safetensors").items()}
    missing, unexpected = model.load_state_dict(given, strict=False)
    assert not unexpected and all(name.startswith(("embed", "verifier")) for name in missing)
    if "embed_tokens.weight" in missing:
        model.embed_tokens.weight.copy_(embedding)
    return model.eval()


def their_logits(model: Any, features: Tensor, ids: Tensor, steps: int) -> list[Tensor]:
    """Logits [slots, words] a training-time step; features [slots, wide] next to the tokens after them, ids [slots]."""
    found: list[Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda _module, _given, out: found.append(out[0]))
    model(features[None], ids[None], torch.zeros_like(ids)[None], ttt_steps=steps)
    hook.remove()
    return found


@torch.no_grad()
def check_against_theirs(target: Target, decoder: Any, path: Path) -> None:
    """All slots of a text in one pass, and two passes more by the text's own tokens at one of its slots."""
    model = their_model(path, target.model.get_input_embeddings().weight)
    ids, t = torch.tensor([[*PROMPT, 33, 22, 17, 60, 9]]), 8
    tapped = target.prefill(ids[:, :-1], target.new_cache(40), decoder.layers, every=True).hidden_states
    features = [tapped[i] for i in decoder.layers]
    wanted = their_logits(model, torch.cat(features, -1)[0], ids[0, 1:], 3)
    d, n = decoder.drafter, ids.shape[1] - 1
    fused = d.fuse(features)
    out = d(d.embed(ids[:, 1:], target), fused, None, None, decoder.rotary(torch.arange(n)[None], fused.dtype))
    torch.testing.assert_close(d.logits(out, target)[0], wanted[0], atol=2e-4, rtol=1e-4)
    with torch.inference_mode():
        state = DecodeState(
            ids[0, : t + 1].tolist(), t + 1, ids[0, t + 1 : t + 2], target.new_cache(40), SamplingParams()
        )
        decoder.prefill(state, ids[:, : t + 1])
        state.ids = ids[0, : t + 2].tolist()
        decoder.on_prefill(state)
        within = EagerPass(target, decoder.slots.cache, 0)
        found, rotary = decoder.slots.newest, decoder.slots.rotary_ahead(within, 3)
        for j in range(3):
            torch.testing.assert_close(d.logits(found, target)[0, 0], wanted[j][t], atol=2e-4, rtol=1e-4)
            seen = torch.ones(1, j + 1, dtype=torch.bool)
            found = decoder.slots.descend(within, ids[0, t + 2 + j : t + 3 + j], found, seen, rotary, j)


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != NOT_THEIRS])
def test_the_package_speculators_computes_the_same(name: str, target: Target, tmp_path: Path) -> None:
    config, embed = VARIANTS[name]
    decoder = read(target, folder(tmp_path / "e", tensors_of(config, embed), config))
    check_against_theirs(target, decoder, tmp_path / "e")


# -- what is written here is read again ----------------------------------------------------------------------------


def saved(target: Target, path: Path, layout: str, words: int) -> Eagle3Trainer:
    """Write what `ssbench train eagle3 --format LAYOUT` writes at its end, of random weights."""
    options = Eagle3TrainOptions(levels=4, draft_vocab=words, format=layout)  # type: ignore[arg-type]
    trainer = Eagle3Trainer(target, options)
    randomise(trainer.module, 3, 0.15)
    about = {"base": "tiny", "base_hash": target.weights_hash, "base_dtype": str(target.dtype), "trained": {"steps": 1}}
    trainer.save(path, about)
    return trainer


@pytest.mark.parametrize("words", [WORDS, V])
def test_both_layouts_draft_the_same(words: int, target: Target, tmp_path: Path) -> None:
    """Trees of every step, for a model of so many layers that both read the same ones."""
    trees = []
    for layout in ("published", "speculators"):
        saved(target, tmp_path / layout, layout, words)
        decoder = read(target, str(tmp_path / layout), total_tokens=9, depth=3, top_k=3)
        trees.append([(ids, t.tokens.tolist(), t.topology.parents) for ids, t, _ in watched(decoder, PROMPT, 12)])
    assert len(trees[0]) > 1 and trees[0] == trees[1]
    names = load_file(tmp_path / "speculators" / "model.safetensors")
    assert "layers.0.hidden_norm.weight" in names and not any(name.startswith("midlayer") for name in names)


@pytest.mark.parametrize("name", VARIANTS)
def test_what_was_read_is_written_again(name: str, target: Target, tmp_path: Path) -> None:
    config, embed = VARIANTS[name]
    one = read(target, folder(tmp_path / "one", tensors_of(config, embed), config))
    made = checkpoint.config_of(one.drafter, one.layers, 3, target)
    write_checkpoint(tmp_path / "two", one.drafter, made, called=checkpoint.published_name)
    two = read(target, str(tmp_path / "two"))
    assert two.drafter.shape == one.drafter.shape and two.layers == one.layers
    assert torch.equal(two.rotary.frequencies, one.rotary.frequencies)
    assert two.drafter.norm.variance_epsilon == one.drafter.norm.variance_epsilon
    for key, tensor in one.drafter.state_dict().items():
        torch.testing.assert_close(two.drafter.state_dict()[key], tensor, atol=1e-3, rtol=1e-3)
    assert made["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3


@pytest.mark.parametrize("layers", range(1, 10))
def test_layers_of_shallow_models_are_named_by_inputs(layers: int, tmp_path: Path) -> None:
    levels = input_levels(layers)
    assert len(set(levels)) == len(levels) >= 1 and all(0 <= i < layers for i in levels)
    target = Target(tiny_model("llama", layers=layers))
    trainee = saved(target, tmp_path, "speculators", WORDS)
    assert read(target, str(tmp_path)).layers == trainee.layers == levels


def test_what_is_written_is_read_by_the_package(tmp_path: Path) -> None:
    """Its own `from_pretrained`, with the target's folder as verifier, and the numbers of the written folder."""
    theirs = oracles.speculators("models.eagle3")
    model = tiny_model("llama", layers=N)
    model.save_pretrained(tmp_path / "target")
    target = Target(model, name=str(tmp_path / "target"))
    trainee = saved(target, tmp_path / "e", "speculators", WORDS)
    made = theirs.Eagle3DraftModel.from_pretrained(tmp_path / "e")
    assert made.config.speculators_config.proposal_methods[0].speculative_tokens == 4
    assert made.target_layer_ids == list(trainee.layers)
    assert torch.equal(made.d2t, trainee.module.d2t) and made.config.norm_before_residual is False
    check_against_theirs(target, read(target, str(tmp_path / "e")), tmp_path / "e")


# -- what a user may get wrong -------------------------------------------------------------------------------------


def without(*names: str) -> dict[str, Tensor | None]:
    return dict.fromkeys(names)


P = "layers.0"
WRONG: dict[str, tuple[dict[str, Any], dict[str, Tensor | None], str]] = {  # config, tensors, message
    "an unknown type": (
        {"speculators_model_type": "xpress"}, {}, "of the type 'xpress', not 'eagle3': supported types are eagle3"
    ),
    "a type that is no text": ({"speculators_model_type": [3]}, {}, "of the type [3], not 'eagle3'"),
    "another method's type": (
        {"speculators_model_type": "dflash"}, {}, "of the type 'dflash', not 'eagle3': use the method dflash"
    ),
    "unknown layers": ({"layer": {"model_type": "nope"}}, {}, "layers of the type 'nope', not llama or qwen3"),
    "two layers": ({"layer": {"num_hidden_layers": 2}}, {}, "num_hidden_layers in config.json is 2"),
    "no heads": ({"layer": {"num_attention_heads": 0}}, {}, "num_attention_heads in config.json is 0, it must be a"),
    "a map that leads out": ({}, {"d2t": torch.full((WORDS,), V)}, f"maps to token {V + WORDS - 1}, the model has a"),
    "a window": (
        {"layer": {"model_type": "qwen3", "layer_types": ["sliding_attention"], "sliding_window": 4}}, {},
        "layer_types in config.json has 'sliding_attention'",
    ),
    "part of the heads turned": ({"layer": {"partial_rotary_factor": 0.5}}, {}, "sets partial_rotary_factor"),
    "rope by length": (
        {"layer": {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}}, {},
        "rope of type 'dynamic'",
    ),
    "both norms": ({"norm_before_fc": True, "fc_norm": True}, {}, "norm_before_fc and fc_norm"),
    "a layer beyond": ({"eagle_aux_hidden_state_layer_ids": [1, 4, 9]}, {}, "layer_ids in config.json names layer 9"),
    "no layers": ({"eagle_aux_hidden_state_layer_ids": []}, {}, "names no layer"),
    "fewer layers": ({"eagle_aux_hidden_state_layer_ids": [1, 4]}, {}, f"fc.weight reads {3 * H} numbers, not 2"),
    "a model of another width": (
        {"target_hidden_size": 64}, {}, f"for a model with a hidden size of 64, the model has {H}"
    ),
    "another width": ({"layer": {"hidden_size": 64}}, {}, f"for a model with a hidden size of 64, the model has {H}"),
    "other heads": ({"layer": {"num_attention_heads": 8}}, {}, f"queries have {HEADS * HD} rows"),
    "another vocabulary": ({"layer": {"vocab_size": 99}}, {}, f"with a vocabulary of 99, the model has {V}"),
    "another draft vocabulary": ({"draft_vocab_size": 50}, {}, f"the drafter has 50 words, lm_head.weight has {WORDS}"),
    "no head": ({}, without("lm_head.weight"), "lacks tensors: lm_head.weight"),
    "no fc": ({}, without("fc.weight"), "lacks tensors: fc.weight"),
    "no norm": ({}, without("norm.weight"), "lacks tensors: norm.weight"),
    "no norm of states": ({}, without(f"{P}.hidden_norm.weight"), "lacks tensors: layers.0.hidden_norm.weight"),
    "no norms of features": ({"fc_norm": True}, {}, "lacks tensors: fc_norm.0.weight"),
    "no norm before fc": ({"norm_before_fc": True}, {}, "lacks tensors: input_norm.weight"),
    "no biases of the MLP": ({"layer": {"mlp_bias": True}}, {}, "lacks tensors: layers.0.mlp.down_proj.bias"),
    "no norms of heads": ({"layer": {"model_type": "qwen3"}}, {}, "lacks tensors: layers.0.self_attn.k_norm.weight"),
    "norms of heads": ({}, {f"{P}.self_attn.q_norm.weight": torch.ones(HD)}, "unknown tensors: layers.0.self_attn.q_n"),
    "a longer embedding": ({}, {"embed_tokens.weight": torch.ones(V + 1, H)}, f"vocabulary of {V + 1}, the model has"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_folders_are_one_line(name: str, target: Target, tmp_path: Path) -> None:
    changed, tensors, stated = WRONG[name]
    made = {k: v for k, v in (tensors_of(config_of()) | tensors).items() if v is not None}
    weights = folder(tmp_path / "e", made, config_of(**changed))
    refused(Eagle3, Eagle3Options(weights=weights), target, stated)


@pytest.mark.parametrize("name", ["an unknown type"])
def test_a_run_with_a_wrong_folder_is_one_line(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed, tensors, stated = WRONG[name]
    made = {k: v for k, v in (tensors_of(config_of()) | tensors).items() if v is not None}
    weights = folder(tmp_path / "e", made, config_of(**changed))
    check_refused_run(f"eagle3[weights={weights}]", stated, tmp_path, capsys, layers=N)


def test_other_methods_name_the_one_that_reads_it(target: Target, tmp_path: Path) -> None:
    weights = folder(tmp_path / "e", tensors_of(config_of()), config_of())
    refused(DFlash, DFlashOptions(weights=weights), target, "use the method eagle3")
    refused(Eagle2, DynamicOptions(weights=weights), target, "use the method eagle3")


def test_usual_layers_of_a_shallow_model_are_asked_for(tmp_path: Path) -> None:
    config = config_of(eagle_aux_hidden_state_layer_ids=None)
    weights, target = folder(tmp_path / "e", tensors_of(config), config), Target(tiny_model("llama"))
    refused(Eagle3, Eagle3Options(weights=weights), target, "does not state eagle_aux_hidden_state_layer_ids")
    assert Eagle3.load(target, Eagle3Options(weights=weights, layers="0:1:2")).layers == (0, 1, 2)
    assert not [name for name in read_tensors(tmp_path / "e" / "model.safetensors") if "verifier" in name]
