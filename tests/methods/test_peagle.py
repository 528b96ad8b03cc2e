"""P-EAGLE: published layouts load, drafts equal a computation written from the description, one pass a step."""

from __future__ import annotations

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
from specbench_ss.methods._shared.drafter_network import input_levels
from specbench_ss.methods.ar import Autoregressive
from specbench_ss.methods.block_drafters.decode import PEagle, PEagleOptions
from specbench_ss.methods.block_drafters.peagle import (
    config_of,
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

H, V, HEADS, KV, HD, FFN, K, MASK, WORDS = 32, 61, 4, 2, 12, 40, 4, 7, 40
EPS, THETA = 1e-5, 5e4
PROMPTS = ([5, 6, 7, 8, 9, 10, 11], [3], [20, 4, 4, 4, 30, 12, 9, 8, 50, 41, 33, 22, 17, 60, 9])
IDS = [1, 3]  # of the layers whose inputs are features
LAYER = {
    "model_type": "llama", "hidden_size": H, "intermediate_size": FFN, "num_hidden_layers": 1, "vocab_size": V,
    "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": HD, "rms_norm_eps": EPS,
    "max_position_embeddings": 16, "rope_theta": THETA,
}  # fmt: skip


# -- checkpoints as they are published, scaled down ----------------------------------------------------------------


def tensors(
    layers: int = 1, words: int = WORDS, embed: bool = True, features: int = len(IDS), qk_norm: bool = False,
    bias: bool = False, first: str = "layers.0", norms: str = "",
) -> dict[str, Tensor]:  # fmt: skip
    torch.manual_seed(1)
    made = {"fc.weight": torch.randn(H, features * H) * 0.2, "mask_hidden": torch.randn(1, 1, features * H)}
    for i in range(layers):
        wide = {} if i else {"width": 2 * H}
        every = ("input_layernorm", "post_attention_layernorm", *([] if i else ["hidden_norm"]))
        biases = [f"self_attn.{n}_proj" for n in "qkvo"] if bias else []
        p = f"layers.{i}" if i else first
        made |= layer_weights(p, H, FFN, HEADS, KV, HD, norms=every, biases=biases, qk_norm=qk_norm, **wide)
    made |= {"norm.weight": torch.rand(H) + 0.5, "lm_head.weight": torch.randn(words, H)}
    made |= draft_words(words, V)
    if embed:
        made["embed_tokens.weight"] = torch.randn(V, H)
    if norms == "each":
        made |= {f"fc_norm.{i}.weight": torch.rand(H) + 0.5 for i in range(features)}
    if norms == "all":
        made["input_norm.weight"] = torch.rand(features * H) + 0.5
    return made


def speculators(**changed: Any) -> dict[str, Any]:
    """config.json as speculators writes it; `layer` changes its layers' configuration, `depths` what it proposes."""
    layer, depths = LAYER | changed.pop("layer", {}), changed.pop("depths", K)
    return {
        "architectures": ["PEagleDraftModel"], "speculators_model_type": "peagle", "transformer_layer_config": layer,
        "draft_vocab_size": WORDS, "eagle_aux_hidden_state_layer_ids": IDS, "mask_token_id": MASK,
        "norm_before_residual": False, "norm_before_fc": False, "fc_norm": False, "norm_output": False,
        "embed_requires_grad": True, "target_hidden_size": None,
        "speculators_config": {
            "algorithm": "peagle", "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": depths}],
        },
        **changed,
    }  # fmt: skip


def flat(**changed: Any) -> dict[str, Any]:
    """config.json as EAGLE-3's drafters have it, with the mask token's name in vLLM."""
    nested = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": IDS}}
    return {**LAYER, "draft_vocab_size": WORDS, "ptd_token_id": MASK, **nested, **changed}


# -- the same, written from the description ------------------------------------------------------------------------

Watching = watching(PEagle)
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5, "num_hidden_layers": 2}
CHECKPOINTS: dict[str, tuple[dict[str, Tensor], dict[str, Any]]] = {
    "speculators": (tensors(), speculators()),
    "speculators, four layers": (tensors(4), speculators(layer={"num_hidden_layers": 4})),
    "speculators, a Qwen3": (
        tensors(2, qk_norm=True), speculators(layer={"model_type": "qwen3", "num_hidden_layers": 2})
    ),
    "speculators, all words": (tensors(words=V), speculators(draft_vocab_size=V)),
    "speculators, normed residual, norms": (
        tensors(norms="each"), speculators(norm_before_residual=True, fc_norm=True, norm_output=True)
    ),
    "speculators, a norm over all": (tensors(norms="all"), speculators(norm_before_fc=True, target_hidden_size=H)),
    "speculators, windows": (tensors(2), speculators(layer=SLIDING)),
    "flat, a midlayer": (tensors(embed=False, first="midlayer"), flat(num_depths=K)),
    "flat, biases": (
        tensors(bias=True), flat(attention_bias=True, num_depths=K, eagle_aux_hidden_state_layer_ids=IDS)
    ),
}  # fmt: skip


@few(3)
@pytest.mark.parametrize("name", CHECKPOINTS)
@torch.no_grad()
def test_drafts_are_what_the_description_states(name: str, tmp_path: Path) -> None:
    """At the first and the last step of an answer; features are transformers' own hidden states."""
    weights, config = CHECKPOINTS[name]
    model = tiny_model("llama")
    target = Target(model)
    options = PEagleOptions(weights=folder(tmp_path / "d", weights, config, pickled=name == "speculators"))
    Watching.check(options, target)
    decoder: Any = Watching.load(target, options)
    answer = generate(decoder, PROMPTS[2], StopParams(12), SamplingParams()).tokens
    assert answer == generate(Autoregressive(target), PROMPTS[2], StopParams(12), SamplingParams()).tokens
    words = weights["d2t"] + torch.arange(WORDS) if "d2t" in weights else torch.arange(V)
    assert decoder.vocabulary.token_ids(torch.arange(len(words))).tolist() == words.tolist()
    for ids, logits in (decoder.seen[0], decoder.seen[-1]):
        hidden = model(torch.tensor([ids[:-1]]), output_hidden_states=True).hidden_states
        features = torch.cat([hidden[i][0] for i in IDS], -1)
        reference = Reference(weights, config, model.get_input_embeddings().weight)
        wanted = reference.peagle(ids, list(features), K, MASK)
        torch.testing.assert_close(logits, wanted, atol=3e-4, rtol=1e-4)
    assert len(decoder.seen) > 1


def test_what_a_configuration_leaves_open(tmp_path: Path) -> None:
    """EAGLE-3's own layers, eight depths, the mask token by each of its names."""
    target = Target(tiny_model("llama"))
    reported = {k: v for k, v in flat().items() if k not in ("eagle_config", "ptd_token_id")}
    for i, name in enumerate(("mask_token_id", "pard_token", "ptd_token_id")):
        there = folder(tmp_path / str(i), tensors(features=3), reported | {name: 5})
        shape = read_drafter(Path(there), target, read_tensors)[0].shape
        assert (shape.layers, shape.depths, shape.mask_token) == ((1, 2, 3), 8, 5)
    assert input_levels(36) == (2, 18, 33) and input_levels(2) == (1,) and input_levels(1) == (0,)


# -- the package that writes the other layout, where it is installed -----------------------------------------------


@thorough
@pytest.mark.parametrize("form", [{}, {"layers": 1, "draft_vocab": 40}])
@torch.no_grad()
def test_the_package_speculators_computes_the_same(
    form: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own model, its own reading of a folder that is written here, its own masks for depths."""
    theirs, core = oracles.speculators("models.peagle"), oracles.speculators("models.peagle.core")
    losses = oracles.speculators("losses.eager")  # those without Triton
    target = tiny_target("llama", V)
    drafter, out = random_drafter(target, **form), tmp_path / "d"
    write_checkpoint(out, drafter, speculators_config_of(drafter, target))
    config = theirs.PEagleSpeculatorConfig.from_pretrained(out)
    config.transformer_layer_config._attn_implementation = "eager"
    model = theirs.PEagleDraftModel(config).eval()
    saved = {k: v.float() if v.is_floating_point() else v for k, v in read_tensors(out / "model.safetensors").items()}
    missing, unexpected = model.load_state_dict(saved, strict=False)
    assert not unexpected and all(name.startswith(("embed", "verifier")) for name in missing)
    if drafter.embed_tokens is None:
        model.embed_tokens.weight.copy_(target.model.get_input_embeddings().weight)
    model.verifier_lm_head.weight.copy_(model.lm_head.weight)
    model.verifier_norm.weight.fill_(1)
    seen: list[Tensor] = []
    model.lm_head.register_forward_hook(lambda *args: seen.append(args[2][0]))
    decoder: Any = Watching(target, PEagleOptions(), read_drafter(out, target, read_tensors)[0])
    generate(decoder, PROMPTS[2], StopParams(8), SamplingParams())
    for ids, logits in decoder.seen:
        s, depths = len(ids) - 1, drafter.shape.depths
        ahead = [*ids[1:], *[0] * depths]  # slots of theirs: tokens one further than features; then room for depths
        hidden_states = target.prefill(
            torch.tensor([ids[:-1]]), target.new_cache(s), decoder.aux_hidden_state_layers, every=True
        ).hidden_states
        features = torch.cat([hidden_states[i] for i in drafter.shape.layers], -1)
        places = torch.arange(len(ahead)), torch.zeros(len(ahead), dtype=torch.long)  # anchors and depths of all slots
        deep = torch.full((depths - 1,), s - 1), torch.arange(1, depths)  # and the depths of the root's
        chosen = tuple(torch.cat(pair) for pair in zip(places, deep, strict=True))
        monkeypatch.setattr(core, "generate_cod_sample_indices", lambda chosen=chosen, **_: chosen)
        model(
            torch.cat((features, torch.zeros(1, depths, features.shape[-1])), 1), torch.tensor([ahead]),
            torch.zeros(1, len(ahead), dtype=torch.long), num_depths=depths,
            verifier_last_hidden_states=torch.zeros(1, len(ahead), H),
            loss_config={"kl_div": (losses.kl_div_loss, 1.0)},
        )  # fmt: skip
        found = seen.pop()[[s - 1, *range(len(ahead), len(ahead) + depths - 1)]]
        torch.testing.assert_close(found, logits, atol=1e-4, rtol=1e-4)


# -- what is written here is read again ----------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [config_of, speculators_config_of])
@pytest.mark.parametrize("form", [{}, {"layers": 1, "draft_vocab": 20}, {"windows": (6, None)}])
def test_what_is_written_is_read_again(layout: Any, form: dict[str, Any], tmp_path: Path) -> None:
    target = Target(tiny_model("llama"))
    drafter = random_drafter(target, **form)
    write_checkpoint(tmp_path, drafter, layout(drafter, target))
    again, _ = read_drafter(tmp_path, target, read_tensors)
    assert again.shape == drafter.shape
    for name, tensor in drafter.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name].float(), tensor.float(), atol=1e-3, rtol=1e-3)


# -- a step --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["chain", "tree"])
def test_a_step_is_one_pass_and_leaves_true_slots_alone(mode: Any) -> None:
    """For any number of accepted tokens; a chain as long as the depths that are asked for."""
    target = Target(tiny_model("llama"))

    class Counting(PEagle):
        def propose(self, state: DecodeState) -> Any:
            before, pending = self.cache.lengths, len(self._tokens)
            assert before[0] + pending == state.position and self._tokens[-1] == state.root
            tree = super().propose(state)
            assert self.cache.lengths == [state.position] * 2
            return tree

    for depths, deep in ((0, 5), (3, 3), (1, 1)):
        decoder = Counting(target, PEagleOptions(mode=mode, nodes=20, k=5, depths=depths), random_drafter(target))
        answer = generate(decoder, PROMPTS[2], StopParams(30), SamplingParams())
        assert answer.num_draft_forwards == 1 + len(answer.steps)  # the prompt's own
        assert max(step.draft_depth for step in answer.steps) <= deep
        if mode == "chain":
            assert {step.draft_depth for step in answer.steps} == {deep} and decoder.max_tokens_per_step() == deep + 1
    with pytest.raises(UserError, match="depths must be 1 to 5, as the drafter was trained, or 0, not 6"):
        PEagle(target, PEagleOptions(depths=6), random_drafter(target))
    with pytest.raises(UserError, match="peagle: sample=on does not support mode=tree"):
        PEagleOptions(sample="on", mode="tree")


# -- checkpoints that do not fit -----------------------------------------------------------------------------------


def without(name: str, **kwargs: Any) -> dict[str, Tensor]:
    return {k: v for k, v in tensors(**kwargs).items() if not k.startswith(name)}


BAD: dict[str, tuple[dict[str, Tensor], dict[str, Any], str]] = {
    "mask token": (tensors(), speculators(mask_token_id=V), "mask_token_id in config.json is 61, the model has tokens"),
    "no mask token": (tensors(), speculators(mask_token_id=None), "mask_token_id is not a whole number"),
    "no drafter of its": (tensors(), flat(ptd_token_id=None), "describes no P-EAGLE drafter: it has no mask_token_id"),
    "no depths": (tensors(), speculators(depths=0), "has 0 tokens drafted a step, it must be 1 to 64"),
    "many depths": (tensors(), flat(num_depths=1000), "has 1000 tokens drafted a step"),
    "depths are words": (tensors(), speculators(depths="eight"), "speculative_tokens"),
    "layer ids": (
        tensors(), speculators(eagle_aux_hidden_state_layer_ids=[1, 5]), "layer_ids in config.json names layer 5"
    ),
    "layer ids are words": (tensors(), speculators(eagle_aux_hidden_state_layer_ids=["a"]), "not a whole number"),
    "more features than ids": (tensors(features=3), speculators(), "fc.weight has shape (32, 96), the model needs"),
    "another vocabulary": (tensors(), speculators(layer={"vocab_size": 99}), "a model with a vocabulary of 99"),
    "another width": (tensors(), flat(hidden_size=64), "a hidden size of 64, the model has 32"),
    "another target's width": (tensors(), speculators(target_hidden_size=64), "a hidden size of 64, the model has 32"),
    "draft vocabulary": (tensors(), speculators(draft_vocab_size=50), "the drafter has 50 words, lm_head"),
    "no head": (without("lm_head"), speculators(), "lacks tensors: lm_head.weight"),
    "no mask_hidden": (without("mask_hidden"), speculators(), "lacks tensors: mask_hidden"),
    "d2t points outside": (tensors() | {"d2t": torch.full((WORDS,), 30)}, speculators(), "d2t maps to token 69"),
    "another type": (
        tensors(), speculators(speculators_model_type="dflash"), "a speculator of the type 'dflash', not 'peagle'"
    ),
    "no layers": (tensors(), speculators(transformer_layer_config="llama"), "layer_config in config.json is not"),
    "other layers": (tensors(), speculators(layer={"model_type": "mistral"}), "of the type 'mistral', not llama or"),
    "no heads": (tensors(), speculators(layer={"num_attention_heads": 0}), "num_attention_heads in config.json is 0"),
    "more layers": (tensors(first="midlayer"), flat(num_hidden_layers=2), "is 2, the drafter has tensors of 1"),
    "two norms": (tensors(), speculators(fc_norm=True, norm_before_fc=True), "norm_before_fc and fc_norm"),
    "a small window": (
        tensors(), speculators(layer={"layer_types": ["sliding_attention"], "sliding_window": 3}),
        "sliding_window in config.json is 3, fewer than the 4 draft positions",
    ),
    "a layer more": (tensors(2), speculators(), "has unknown tensors: layers.1."),
    "a tensor less": (without("norm."), speculators(), "lacks tensors: norm.weight"),
    "NaN": (tensors() | {"norm.weight": torch.full((H,), math.nan)}, speculators(), "tensor norm.weight has NaN"),
}  # fmt: skip
SEEN_LATER = ("NaN",)  # in numbers, of which `check` reads the map's alone


@few(8)
@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_one_line(name: str, tmp_path: Path) -> None:
    weights, config, reported = BAD[name]
    target = Target(tiny_model("llama"))
    options = PEagleOptions(weights=folder(tmp_path / "d", weights, config))
    refused(PEagle, options, target, reported, only_load=name in SEEN_LATER)


@pytest.mark.parametrize("name", ["mask token"])
def test_a_run_with_it_is_one_line(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights, config, reported = BAD[name]
    there = folder(tmp_path / "d", weights, config)
    check_refused_run(f"peagle[weights={there}]", reported, tmp_path, capsys)
