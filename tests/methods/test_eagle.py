"""EAGLE: published layouts load, drafts equal a computation written from the description alone, trees are closed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from specbench_ss.engine.decoder import Decoder, DecodeState
from specbench_ss.engine.generate import StopParams, generate
from specbench_ss.engine.kv_cache import Cache
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.target import FINAL, Target
from specbench_ss.errors import UserError
from specbench_ss.methods._shared.draft_vocabulary import DraftVocabulary
from specbench_ss.methods._shared.drafter_network import Rotary, published_levels
from specbench_ss.methods._shared.speculators import LAYER_IDS
from specbench_ss.methods._shared.tree_growth import best, grow
from specbench_ss.methods.ar import Autoregressive
from specbench_ss.methods.eagle import checkpoint
from specbench_ss.methods.eagle.checkpoint import choose_layers, layers_of
from specbench_ss.methods.eagle.decode import (
    PUBLISHED,
    DynamicOptions,
    Eagle,
    Eagle2,
    Eagle3,
    Eagle3Options,
    EagleOptions,
)
from specbench_ss.methods.eagle.drafter import Drafter, new_eagle, random_eagle
from specbench_ss.methods.eagle.slots import Size
from tests.methods.reference_drafter import Reference, draft_words, layer_weights, refused
from tests.methods.reference_drafter import folder as written
from tests.tiny import few, paths, tiny_model

H, V, HEADS, KV, HD, FFN, WORDS = 32, 61, 4, 2, 8, 48, 40
WIDE = ("hidden_norm", "input_layernorm")
PROMPTS = ([5, 6, 7, 8, 9, 10, 11], [3], [20, 4, 4, 4, 30, 12, 9, 8, 50, 41, 33, 22, 17, 60, 9])
CONFIG = {
    "num_attention_heads": HEADS, "hidden_size": H, "num_hidden_layers": 40, "rms_norm_eps": 1e-5,
    "rope_theta": 5e4, "max_position_embeddings": 16, "intermediate_size": 7,
}  # fmt: skip


# -- checkpoints as they are published, scaled down ----------------------------------------------------------------


def layer(prefix: str, width: int, biases: Sequence[str] = (), norms: Sequence[str] = ()) -> dict[str, Tensor]:
    every = ("post_attention_layernorm", *norms)
    return layer_weights(prefix, H, FFN, HEADS, KV, HD, width=width, norms=every, biases=biases)


def eagle1(bias: bool = True, embed: bool = False, qkv_bias: bool = False) -> dict[str, Tensor]:
    torch.manual_seed(1)
    tensors = {
        "fc.weight": torch.randn(H, 2 * H) * 0.3,
        **layer("layers.0", H, [f"self_attn.{n}_proj" for n in "qkv"] if qkv_bias else []),
    }
    if bias:
        tensors["fc.bias"] = torch.randn(H)
    if embed:
        tensors["embed_tokens.weight"] = torch.randn(V, H)
    return tensors


def eagle3(prefix: str = "midlayer", words: int = WORDS, embed: bool = False, norms: bool = False) -> dict[str, Tensor]:
    torch.manual_seed(2)
    tensors = {
        "fc.weight": torch.randn(H, 3 * H) * 0.2,
        **layer(prefix, 2 * H, norms=("hidden_norm", "input_layernorm")),
    }
    tensors |= {"norm.weight": torch.rand(H) + 0.5, "lm_head.weight": torch.randn(words, H)}
    tensors |= draft_words(words, V)
    if embed:
        tensors["embed_tokens.weight"] = torch.randn(V, H)
    if norms:
        tensors |= {f"fc_norm.{i}.weight": torch.rand(H) + 0.5 for i in range(3)}
    return tensors


def folder(path: Path, tensors: dict[str, Tensor], pickled: bool = False, **config: Any) -> str:
    return written(path, tensors, {**CONFIG, **config}, pickled)


# -- the same, written from the description ------------------------------------------------------------------------


def steps(decoder: Decoder, prompt: list[int], tokens: int = 12) -> list[tuple[list[int], Any]]:
    """(ids before the step, tree proposed) of every step, greedy."""
    seen = []
    propose = decoder.propose

    def spy(state: DecodeState) -> Any:
        tree = propose(state)
        seen.append((list(state.ids), tree))
        return tree

    decoder.propose = spy  # type: ignore[method-assign]
    generate(decoder, prompt, StopParams(tokens), SamplingParams())
    decoder.propose = propose  # type: ignore[method-assign]
    return seen


def features_of(target: Target, ids: list[int], layers: tuple[int, ...]) -> list[Tensor]:
    out = target.prefill(torch.tensor([ids]), target.new_cache(len(ids)), [i for i in layers if i != FINAL], every=True)
    return list(torch.cat([out.hidden_states[i][0] for i in layers], -1))


@torch.inference_mode()
def check_static(target: Target, decoder: Decoder, w: dict[str, Tensor]) -> None:
    """The published tree, whose siblings are the best tokens after their path, in order."""
    reference = Reference(w, CONFIG, target.model.get_input_embeddings().weight)
    for ids, tree in steps(decoder, PROMPTS[0], 5):
        features = features_of(target, ids[:-1], (FINAL,))
        tokens, nodes = tree.tokens.tolist(), paths(tree.topology.parents)
        assert len(tree) == 1 + len(PUBLISHED)
        for node, children in enumerate(tree.topology.children()):
            path = [tokens[i] for i in nodes[node][1:]]
            state = reference.eagle(ids[1:] + path, features)[-1]
            best = target.logits(state).topk(4).indices.tolist()
            assert [tokens[c] for c in children] == best[: len(children)], path


@torch.inference_mode()
def check_dynamic(
    target: Target, decoder: Eagle2, w: dict[str, Tensor], layers: tuple[int, ...], about: dict[str, Any]
) -> None:
    """The trees are those of beam search and reranking over path probabilities, one path after the other."""
    reference = Reference(w, CONFIG | about, target.model.get_input_embeddings().weight)
    k, depth, kept = decoder.size.top_k, decoder.size.depth, decoder.size.drafted
    words = torch.arange(WORDS) + w["d2t"] if "d2t" in w else torch.arange(V)
    for ids, tree in steps(decoder, PROMPTS[0], 5):
        features = features_of(target, ids[:-1], layers)

        def following(path: list[int], ids: list[int] = ids, features: list[Tensor] = features) -> list[tuple]:
            state = reference.eagle(ids[1:] + path, features)[-1]
            logits = target.logits(state) if layers == (FINAL,) else reference.eagle3_logits(state)
            best = logits.log_softmax(-1).topk(k)
            chosen = range(V) if layers == (FINAL,) else words.tolist()
            return [([*path, chosen[i]], p) for p, i in zip(best.values.tolist(), best.indices.tolist(), strict=True)]

        beams = [(path, p) for path, p in following([])]
        every = list(beams)
        for _ in range(depth):
            grown = [(path, p + q) for parent, p in beams for path, q in following(parent)]
            every += grown
            beams = sorted(grown, key=lambda b: -b[1])[:k]
        best = sorted(every, key=lambda b: -b[1])[:kept]
        tokens = tree.tokens.tolist()
        found = {tuple(tokens[i] for i in path[1:]) for path in paths(tree.topology.parents)[1:]}
        assert found == {tuple(path) for path, _ in best}


@few(2)
@pytest.mark.parametrize(
    ("kind", "change"),
    [("llama", {}), ("opt", {}), ("qwen2", {"bias": False, "embed": True, "qkv_bias": True})],
)
@pytest.mark.parametrize("pickled", [False, True])
def test_eagle_1_drafts_what_its_description_states(
    kind: str, change: dict[str, bool], pickled: bool, tmp_path: Path
) -> None:
    w, target = eagle1(**change), Target(tiny_model(kind))
    given = {**w, "layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}  # as old files have it
    weights = folder(tmp_path / "e", given, pickled)
    if not pickled:
        check_static(target, Eagle.load(target, EagleOptions(weights=weights)), w)
    options = DynamicOptions(weights=weights, total_tokens=12, depth=2, top_k=3)
    check_dynamic(target, Eagle2.load(target, options), w, (FINAL,), {})


BIAS = {f"layers.0.self_attn.{n}.bias": torch.zeros(r) for n, r in (("q_proj", H), ("k_proj", 16), ("v_proj", 16))}


def test_a_new_drafter_has_no_bias_and_states_so() -> None:
    """The authors' code takes a missing `bias` for true, vLLM takes a true one for attention biases."""
    drafter, config = new_eagle(Target(tiny_model("llama")))
    assert config["bias"] is False and not [name for name in drafter.state_dict() if name.endswith("bias")]


@few(2)
@pytest.mark.parametrize(
    ("change", "about"),
    [
        ({}, {}),
        ({"prefix": "layers.0", "embed": True}, {"norm_before_residual": True}),
        ({"words": V}, {}),
        ({"norms": True}, {"norm_output": True, "fc_norm": True}),
    ],
)
def test_eagle_3_drafts_what_its_description_states(
    change: dict[str, Any], about: dict[str, Any], tmp_path: Path
) -> None:
    w, target = eagle3(**change), Target(tiny_model("llama", layers=8))
    weights = folder(tmp_path / "e", w, **about)
    options = Eagle3Options(weights=weights, total_tokens=12, depth=2, top_k=3)
    decoder = Eagle3.load(target, options)
    assert decoder.layers == (2, 4, 5)
    check_dynamic(target, decoder, w, (2, 4, 5), about)


def test_a_nested_configuration_is_read(tmp_path: Path) -> None:
    target, w = Target(tiny_model("llama", layers=8)), eagle3("layers.0")
    weights = folder(tmp_path / "e", w)
    outer = {"transformer_layer_config": CONFIG}  # speculators' layout itself: test_eagle_speculators.py
    (tmp_path / "e" / "config.json").write_text(json.dumps(outer))
    options = Eagle3Options(weights=weights, total_tokens=8, depth=1, top_k=3)
    check_dynamic(target, Eagle3.load(target, options), w, (2, 4, 5), {})


class Oracle:
    """Has the features of these layers by heart, and what comes two tokens after each."""

    draft_vocab = 0

    def __init__(self, target: Target, ids: list[int], layers: tuple[int, ...]) -> None:
        self.config = random_eagle(target).config
        self.features = torch.stack(features_of(target, ids, layers))
        self.logits_of = target.logits(torch.stack(features_of(target, ids, (FINAL,))))  # after each token

    def to(self, *_: Any) -> Oracle:
        return self

    eval = to

    def embed(self, tokens: Tensor, target: Target) -> Tensor:
        return tokens[..., None]

    def fuse(self, features: list[Tensor]) -> Tensor:
        return torch.cat(features, -1)

    def __call__(self, tokens: Tensor, state: Tensor, *_: Any) -> Tensor:
        return state

    def logits(self, state: Tensor, target: Target) -> Tensor:
        distance, nearest = torch.cdist(state, self.features[:-2]).min(-1)
        return self.logits_of[nearest + 1] * (distance < 1e-3)[..., None]

    def vocabulary(self, vocab: int) -> DraftVocabulary:
        return DraftVocabulary(vocab)


@few(1)
@pytest.mark.parametrize("true", [(1, 3, 4), (2, 4, 5)])
def test_layers_that_can_be_read_two_ways_are_tried_out(
    true: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Target(tiny_model("llama", layers=8))
    weights = folder(tmp_path / "e", eagle3(), eagle_aux_hidden_state_layer_ids=[1, 3, 4])
    readings, reason = layers_of(json.loads((tmp_path / "e" / "config.json").read_text()), target)
    assert readings == ((1, 3, 4), (2, 4, 5))
    ids = [1, *generate(Autoregressive(target), [1], StopParams(96), SamplingParams(1.0)).tokens]
    oracle: Any = Oracle(target, ids, true)
    index, why, certain = choose_layers(target, oracle, readings, reason)
    assert readings[index] == true and certain and ("inputs" if true[0] == 1 else "outputs") in why
    monkeypatch.setattr(checkpoint, "CERTAIN", 1e9)
    with pytest.warns(UserWarning, match=r"set layers=1:3:4 \(inputs\) or 2:4:5 \(outputs\)"):
        decoder = Eagle3.load(target, Eagle3Options(weights=weights))
    assert decoder.layers in readings and decoder.load_warnings and "reads layers" in decoder.measured
    assert Eagle3.load(target, Eagle3Options(weights=weights, layers="2:4:-1")).layers == (2, 4, FINAL)


@pytest.mark.parametrize(
    ("config", "layers", "why"),
    [
        ({"eagle_config": {LAYER_IDS: [1, 3, 4]}}, [(2, 4, 5)], "outputs"),
        ({"eagle_config": {LAYER_IDS: [4, 6, 8]}}, [(4, 6, 8)], "inputs"),
        ({LAYER_IDS: [1, 3, 8]}, [(1, 3, 8)], "inputs"),
        ({"eagle_config": {LAYER_IDS: [2, 4, 5]}}, [(2, 4, 5), (3, 5, 6)], ""),
        ({LAYER_IDS: [1, 3, 7]}, [(1, 3, 7), (2, 4, 8)], ""),
        ({"feature_layers": [2, 4, 8]}, [(2, 4, 8)], ""),
        ({}, [(2, 4, 5)], "published"),
    ],
)
def test_stated_conventions_of_layer_ids_are_followed(
    config: dict[str, Any], layers: list[tuple[int, ...]], why: str
) -> None:
    readings, reason = layers_of(config, Target(tiny_model("llama", layers=8)))
    assert list(readings) == layers and why in reason


@pytest.mark.parametrize("layers", range(1, 12))
def test_levels_are_distinct_layers(layers: int) -> None:
    chosen = published_levels(layers)
    assert len(set(chosen)) == len(chosen) == min(3, layers)
    assert all(0 < i < layers or i == FINAL for i in chosen)


# -- checks ----------------------------------------------------------------------------------------------------------

METHODS = (Eagle, Eagle2, Eagle3)


@few(1)
@pytest.mark.parametrize("method", METHODS)
def test_the_cache_holds_what_a_fresh_pass_gives(method: type[Decoder]) -> None:
    """Slots of every step, features and all, are those of one pass over everything."""
    target = Target(tiny_model("gpt_neox"))  # whose random weights accept several tokens in a step
    decoder: Any = next(iter(method.test_instances(target).values()))()
    kept = []
    for tokens in (3, 9, 20):
        run = generate(decoder, PROMPTS[0], StopParams(tokens), SamplingParams())
        length = decoder.slots.cache.get_seq_length()  # of the last step that went on
        kept.append((run.tokens, length, decoder.slots.cache.keys[0][:, :, :length].clone()))
    ids = PROMPTS[0] + kept[-1][0]
    session_ids = torch.tensor([ids])
    with torch.inference_mode():
        seen = target.prefill(session_ids, target.new_cache(len(ids)), decoder.aux_hidden_state_layers, every=True)
        seen = seen.hidden_states
        cache = Cache(1, len(ids))
        positions = torch.arange(len(ids) - 1)[None]
        drafter: Drafter = decoder.drafter
        fused = drafter.fuse([seen[i][:, :-1] for i in decoder.layers])
        rotary: Rotary = decoder.rotary
        drafter(drafter.embed(session_ids[:, 1:], target), fused, cache, None, rotary(positions, fused.dtype))
    for _, length, keys in kept:
        assert length >= len(PROMPTS[0])
        torch.testing.assert_close(keys, cache.keys[0][:, :, :length], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("sure", [0.0, 60.0, 1e4])
def test_a_child_as_likely_as_its_parent_does_not_lose_it(sure: float) -> None:
    """A drafter that is sure: paths of probability one, all of the same score."""
    logits = torch.zeros(9)
    logits[4] = sure

    def expand(tokens: Tensor, visible: Tensor, above: Tensor, level: int) -> Tensor:
        return logits.expand(len(tokens), -1)

    for nodes in (1, 2, 7, 20, 39):
        tree = grow(torch.tensor([1]), logits, best(3), expand, 30, nodes)
        assert len(tree) == 1 + nodes
        if sure:
            assert tree.topology.depth == min(nodes, 30)


# -- what a user may get wrong -------------------------------------------------------------------------------------


@few(6)
@pytest.mark.parametrize(
    ("change", "about", "stated"),
    [
        ({"layers.1.weird": torch.zeros(1)}, {}, "has unknown tensors: layers.1.weird"),
        ({"layers.0.input_layernorm.weight": torch.ones(H)}, {}, "unknown tensors: layers.0.input_layernorm.weight"),
        ({"layers.0.self_attn.o_proj.weight": None}, {}, "lacks tensors: layers.0.self_attn.o_proj.weight"),
        ({"fc.weight": None}, {}, "lacks tensors: fc.weight"),
        ({"layers.0.mlp.up_proj.weight": torch.zeros(3, H)}, {}, "layers.0.mlp.up_proj.weight has shape (3, 32)"),
        ({"embed_tokens.weight": torch.zeros(V + 3, H)}, {}, f"vocabulary of {V + 3}, the model has {V}"),
        ({}, {"num_attention_heads": None}, "config.json lacks num_attention_heads"),
        ({}, {"num_attention_heads": 3}, "3 heads of 10"),
        ({}, {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope of type 'dynamic'"),
        ({}, {"rope_theta": "many"}, "rope_theta in config.json is 'many', it must be a finite number above 0"),
        ({}, {"rms_norm_eps": -1.0}, "rms_norm_eps in config.json is -1.0, it must be a finite number above 0"),
        ({}, {"rope_scaling": {"rope_type": "linear", "factor": 0.0}}, "has angles that are not finite"),
        ({}, {"rms_norm_eps": "small"}, "does not describe a Llama layer: "),
        ({}, {"num_attention_heads": "4"}, "num_attention_heads, a count: it is '4'"),
        ({}, {"head_dim": "8"}, "4 heads of 8"),
        ({"fc.weight": torch.tensor(1.0)}, {}, "the hidden size is 0"),
        ({"layers.0.self_attn.k_proj.weight": torch.zeros(24, H)}, {}, "24 rows, no keys for 4 heads of 8"),
        ({"layers.0.self_attn.k_proj.weight": torch.zeros(0, H)}, {}, "0 rows, no keys for 4 heads of 8"),
        ({}, {"advice": {"depth": "deep"}}, "option depth='deep' is not int"),
    ],
)
def test_wrong_eagle_folders_are_one_line(
    change: dict[str, Tensor | None], about: dict[str, Any], stated: str, tmp_path: Path
) -> None:
    tensors = {n: t for n, t in {**eagle1(), **change}.items() if t is not None}
    weights = folder(tmp_path / "e", tensors, **about)
    refused(Eagle2, DynamicOptions(weights=weights), Target(tiny_model("llama")), stated)


@few(4)
@pytest.mark.parametrize(
    ("change", "about", "stated"),
    [
        ({"fc_norm.0.weight": torch.ones(H)}, {}, "lacks tensors: fc_norm.1.weight, fc_norm.2.weight"),
        ({"midlayer.self_attn.q_norm.weight": torch.ones(HD)}, {}, "lacks tensors: layers.0.self_attn.k_norm.weight"),
        ({"d2t": None}, {}, f"the drafter has {WORDS} words, the model {V}, and it lacks tensors: d2t"),
        ({"d2t": torch.arange(WORDS) + V}, {}, f"d2t maps to token {V + 2 * WORDS - 2}, the model has a vocabulary"),
        ({"t2d": torch.zeros(V + 1, dtype=torch.bool)}, {}, f"vocabulary of {V + 1}, the model has {V}"),
        ({"embed_tokens.weight": torch.zeros(V + 3, H)}, {}, f"vocabulary of {V + 3}, the model has {V}"),
        ({}, {"eagle_aux_hidden_state_layer_ids": [2, 4, 9]}, "names layer 9, the model has layers 0 to 7"),
        ({"fc.weight": torch.zeros(H, 3 * 64)}, {}, "fc.weight reads 192 numbers, not 3 hidden states of 32"),
        ({"norm.weight": None}, {}, "lacks tensors: norm.weight"),
        ({"t2d": torch.tensor(True)}, {}, "t2d has shape (), it should have one dimension"),
    ],
)
def test_wrong_eagle3_folders_are_one_line(
    change: dict[str, Tensor | None], about: dict[str, Any], stated: str, tmp_path: Path
) -> None:
    tensors = {n: t for n, t in {**eagle3(), **change}.items() if t is not None}
    weights = folder(tmp_path / "e", tensors, **about)
    refused(Eagle3, Eagle3Options(weights=weights), Target(tiny_model("llama", layers=8)), stated)


def test_weights_of_the_other_kind_and_of_another_size_are_named(tmp_path: Path) -> None:
    target = Target(tiny_model("llama", layers=8))
    third, first = folder(tmp_path / "3", eagle3()), folder(tmp_path / "1", eagle1())
    refused(Eagle, EagleOptions(weights=third), target, "weights of EAGLE-3: use eagle3")
    refused(Eagle3, Eagle3Options(weights=first), target, "no weights of EAGLE-3")
    refused(Eagle3, Eagle3Options(weights=third, layers="2:4:9"), target, "names layer 9")
    refused(Eagle3, Eagle3Options(weights=third, layers="2-4"), target, "not '2-4'")
    with pytest.raises(UserError, match="not 'config.json'$"):  # an option is nothing of the folder's
        Eagle3.check(Eagle3Options(weights=third, layers="config.json"), target)
    listed = folder(tmp_path / "listed", eagle3(), feature_layers=[2, 4, 9])
    refused(Eagle3, Eagle3Options(weights=listed), target, f"({listed})")
    wide = {n: torch.zeros([2 * s for s in t.shape]) for n, t in eagle1().items()}
    refused(Eagle, EagleOptions(weights=folder(tmp_path / "w", wide)), target, "hidden size 64, the model has 32")
    (tmp_path / "1" / "model.safetensors").unlink()
    refused(Eagle2, DynamicOptions(weights=first), target, "no weights in")
    (tmp_path / "1" / "config.json").unlink()
    with pytest.raises(UserError, match="no config.json in"):
        Eagle2.check(DynamicOptions(weights=first), target)


def test_trees_that_cannot_be_are_one_line(tmp_path: Path) -> None:
    target, tree = Target(tiny_model("llama")), tmp_path / "tree.json"
    weights = folder(tmp_path / "e", eagle1())
    tree.write_text("[[0], [0, 0], [0, 0, 0]]")
    refused(
        Eagle,
        EagleOptions(weights=weights, tree=str(tree), depth=2),
        target,
        "is 3 deep, there are 2 levels to draft with",
    )
    assert Eagle.load(target, EagleOptions(weights=weights, tree=str(tree))).tree.depth == 3
    tree.write_text("[[0], [70]]")
    refused(Eagle, EagleOptions(weights=weights, tree=str(tree)), target, "71 candidates, the draft vocabulary has 61")
    for bad in ({"depth": -2}, {"total_tokens": 1}, {"top_k": 1000}, {"depth": 1000}):
        with pytest.raises(UserError, match=f"eagle3: {next(iter(bad))}"):
            Eagle3Options(**bad)
    with pytest.raises(UserError, match="eagle: depth must be"):
        EagleOptions(depth=-1)
    with pytest.raises(UserError, match="eagle: nodes must be 0"):
        EagleOptions(nodes=-1)


def test_advice_and_options_settle_the_tree() -> None:
    def size_of(options: DynamicOptions, vocab: int, kind: type[Eagle2] = Eagle2) -> Size:
        return kind.resolve_options(options, {}, None, cast("Any", SimpleNamespace(vocab_size=vocab)))

    assert size_of(DynamicOptions(), 32000) == size_of(DynamicOptions(total_tokens=60, depth=5, top_k=10), 32000)
    assert size_of(Eagle3Options(), 32000, Eagle3).depth == 7
    advice = {"advice": {"total_tokens": 8, "depth": 3, "top_k": 2, "nodes": 4}}
    outline = Target(tiny_model("llama"))
    advised, taken = Eagle2.advised_by(DynamicOptions(depth=1), advice, outline, Path("e"))
    assert taken == {"total_tokens": 8, "top_k": 2}
    size = size_of(advised, 32000)
    assert (size.drafted, size.depth, size.top_k) == (6, 1, 2)  # two, and two of each
    assert size_of(DynamicOptions(), 7).top_k == 7


def test_it_reports_weights_and_trees_apart() -> None:
    target = Target(tiny_model("llama"))
    drafter = random_eagle(target)
    one = Eagle(target, EagleOptions(), drafter, {})
    assert one.metadata() == Eagle(target, EagleOptions(), random_eagle(target), {}).metadata()
    other = one.with_options(EagleOptions(depth=2))
    changed = {k for k, v in other.metadata().items() if v != one.metadata()[k]}
    assert changed == {"tree_nodes", "depth", "tree_hash"} and other.drafter is one.drafter


def test_it_counts_the_passes_of_the_drafter() -> None:
    target = Target(tiny_model("llama"))
    decoder = Eagle2(target, DynamicOptions(total_tokens=7, depth=2, top_k=3), random_eagle(target), {})
    run = generate(decoder, PROMPTS[0], StopParams(12), SamplingParams())
    assert (
        run.num_draft_forwards == len(run.steps) * 3
    )  # prompt, then two levels and the accepted ones a step, not the last
