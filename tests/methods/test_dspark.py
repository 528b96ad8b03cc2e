"""DSpark: published layouts load, drafts equal a computation written from the description, short drafts stay exact."""

from __future__ import annotations

import itertools
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
from specbench_ss.methods.ar import Autoregressive
from specbench_ss.methods.block_drafters import dspark_decode
from specbench_ss.methods.block_drafters.decode import DFlash, DFlashOptions
from specbench_ss.methods.block_drafters.dspark import random_drafter, read_drafter, speculators_config_of
from specbench_ss.methods.block_drafters.dspark_decode import DSpark, DSparkOptions
from specbench_ss.methods.block_drafters.verified_length import StepTimes, convex_hull, threshold_length
from specbench_ss.models.checkpoint import read_tensors, write_checkpoint
from specbench_ss.models.tiny import tiny_target
from tests.methods import oracles
from tests.methods.reference_drafter import Reference, draft_words, folder, layer_weights, refused
from tests.methods.refused_runs import check_refused_run
from tests.tiny import few, thorough, tiny_model

H, V, HEADS, KV, HD, FFN, D, B, R, MASK, WORDS = 32, 61, 4, 2, 12, 40, 2, 4, 6, 7, 40
PROMPT = [20, 4, 4, 4, 30, 12, 9, 8, 50, 41, 33, 22, 17, 60, 9]
OUTPUTS = [-1, 0, 2]  # layers whose outputs are features; -1 is the embedding
QWEN = {
    "model_type": "qwen3", "hidden_size": H, "intermediate_size": FFN, "num_hidden_layers": D, "vocab_size": V,
    "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": HD, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 16, "rope_theta": 5e4,
}  # fmt: skip
HEADS_OF = {"markov_rank": R, "markov_head_type": "vanilla", "enable_confidence_head": True}


def tensors(kind: str = "vanilla", words: int = V, markov: bool = True, copies: bool = False) -> dict[str, Tensor]:
    """A drafter's tensors. markov: its confidence head reads W1 too. copies: embedding and LM head."""
    torch.manual_seed(1)
    made = {"fc.weight": torch.randn(H, len(OUTPUTS) * H) * 0.2}
    for i in range(D):
        norms = ("input_layernorm", "post_attention_layernorm")
        made |= layer_weights(f"layers.{i}", H, FFN, HEADS, KV, HD, norms=norms, qk_norm=True)
    made |= {"norm.weight": torch.rand(H) + 0.5, "hidden_norm.weight": torch.rand(H) + 0.5}
    head, width = "markov_head", H + R * markov
    made |= {f"{head}.markov_w1.weight": torch.randn(V, R), f"{head}.markov_w2.weight": torch.randn(words, R)}
    if kind == "gated":
        made |= {f"{head}.gate_proj.weight": torch.randn(R, H + R), f"{head}.gate_proj.bias": torch.randn(R)}
    if kind == "rnn":
        made |= {f"{head}.joint_proj.weight": torch.randn(3 * R, 2 * R + H) * 0.3}
        made |= {f"{head}.joint_proj.bias": torch.randn(3 * R)}
    made |= {"confidence_head.proj.weight": torch.randn(1, width) * 0.2, "confidence_head.proj.bias": torch.randn(1)}
    if words < V:
        made |= {**draft_words(words, V), "lm_head.weight": torch.randn(words, H)}
    if copies:
        made |= {"embed_tokens.weight": torch.randn(V, H), "lm_head.weight": torch.randn(V, H)}
    return made


def deepspec(**changed: Any) -> dict[str, Any]:
    """config.json as DeepSpec publishes it."""
    fields = {"target_layer_ids": OUTPUTS, "mask_token_id": MASK, "block_size": B, "num_target_layers": 4}
    more = {"num_anchors": 512, "confidence_head_with_markov": True, "layer_types": ["full_attention"] * D}
    return {**QWEN, "architectures": ["Qwen3DSparkModel"], **fields, **more, **HEADS_OF, **changed}


def speculators(**changed: Any) -> dict[str, Any]:
    """config.json as speculators writes it."""
    return {
        "architectures": ["DSparkSpeculator"], "speculators_model_type": "dspark", "transformer_layer_config": QWEN,
        "draft_vocab_size": V, "block_size": B, "aux_hidden_state_layer_ids": [i + 1 for i in OUTPUTS],
        "mask_token_id": MASK, "sample_from_anchor": True, "sliding_window_non_causal": True,
        "confidence_head_with_markov": True, "speculators_config": {"algorithm": "dspark"}, **HEADS_OF, **changed,
    }  # fmt: skip


CHECKPOINTS: dict[str, tuple[dict[str, Tensor], dict[str, Any]]] = {
    "DeepSpec": (tensors(copies=True), deepspec()),
    "DeepSpec, gated": (tensors("gated"), deepspec(markov_head_type="gated")),
    "DeepSpec, rnn": (
        tensors("rnn", markov=False), deepspec(markov_head_type="rnn", confidence_head_with_markov=False)
    ),
    "speculators": (tensors(), speculators()),
    "speculators, fewer words": (tensors(words=WORDS), speculators(draft_vocab_size=WORDS)),
    "speculators, not from the anchor": (tensors("rnn"), speculators(markov_head_type="rnn", sample_from_anchor=False)),
}  # fmt: skip


class Watching(DSpark):
    """Keeps what was drafted: tokens so far, drafted tokens with the root, q or None, confidences."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seen: list[tuple[list[int], list[int], Tensor | None, list[float]]] = []

    def _chain(self, state: DecodeState, logits: Tensor, states: Tensor) -> tuple[Tensor, Tensor | None]:
        tokens, q = super()._chain(state, logits, states)
        confidence = self.drafter.confidence(states[: len(tokens) - 1], tokens[:-1]).sigmoid().tolist()
        self.seen.append((list(state.ids), tokens.tolist(), q, confidence))
        return tokens, q


@few(4)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", CHECKPOINTS)
@torch.no_grad()
def test_drafts_are_what_the_description_states(name: str, temperature: float, tmp_path: Path) -> None:
    """At the first and the last step of an output: tokens, q and confidences, on transformers' own hidden states."""
    weights, config = CHECKPOINTS[name]
    model = tiny_model("llama")
    target = Target(model)
    options = DSparkOptions(weights=folder(tmp_path / "d", weights, config))
    Watching.check(options, target)
    decoder: Any = Watching.load(target, options)
    generate(decoder, PROMPT, StopParams(12), SamplingParams(temperature))
    first = 1 - config.get("sample_from_anchor", True)
    words = (weights["d2t"] + torch.arange(WORDS) if "d2t" in weights else torch.arange(V)).tolist()
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    reference = Reference(weights, config | {"use_sliding_window": False}, table)
    reference.about["use_sliding_window"] = False
    for ids, drafted, q, confidence in (decoder.seen[0], decoder.seen[-1]):
        hidden = model(torch.tensor([ids[:-1]]), output_hidden_states=True).hidden_states
        features = list(torch.cat([hidden[i + 1][0] for i in OUTPUTS], -1))
        states = reference.block_states([ids[-1]] + [MASK] * (B - 1), features)[first:]
        memory = torch.zeros(R)
        assert len(drafted) == 1 + B - first
        for k, state in enumerate(states):
            bias, memory = reference.markov(config["markov_head_type"], state, drafted[k], memory)
            logits = weights.get("lm_head.weight", head) @ state + bias
            if q is None:
                assert drafted[k + 1] == words[int(logits.argmax())]
            else:
                torch.testing.assert_close(q[k], logits.softmax(-1), atol=1e-4, rtol=1e-3)
                assert drafted[k + 1] in words
            assert confidence[k] == pytest.approx(reference.confidence(state, drafted[k]), abs=1e-4)
    assert len(decoder.seen) > 1


def test_without_a_markov_head_it_drafts_as_dflash_from_the_root() -> None:
    target = tiny_target("llama", V)
    drafter = random_drafter(target, rank=0)
    outputs = [
        generate(decoder, PROMPT, StopParams(20), SamplingParams(0.7, seed=3))
        for decoder in (DSpark(target, DSparkOptions(), drafter), DFlash(target, DFlashOptions(sample="on"), drafter))
    ]
    assert outputs[0].tokens == outputs[1].tokens
    assert [s.accepted_tokens for s in outputs[0].steps] == [s.accepted_tokens for s in outputs[1].steps]


@pytest.mark.parametrize("kind", ["vanilla", "rnn"])
@torch.inference_mode()
def test_a_tree_has_the_corrected_scores_of_its_paths(kind: Any) -> None:
    """With room for all, every path of candidates is there; with less, each node's score is among the best."""
    target = tiny_target("llama", V)
    decoder = DSpark(target, DSparkOptions(mode="tree", nodes=63, k=3), random_drafter(target, kind=kind))
    kept: list[tuple[Tensor, Tensor]] = []

    class Keeping(DSpark):
        def _tree(self, state: DecodeState, logits: Tensor, states: Tensor) -> Any:
            kept.append((logits, states))
            return super()._tree(state, logits, states)

    few = Keeping(target, DSparkOptions(mode="tree", nodes=9, k=3), decoder.drafter)
    steps = generate(few, PROMPT, StopParams(6), SamplingParams()).steps
    assert {step.draft_nodes for step in steps} == {9}
    logits, states = kept[0]
    root, correction = torch.tensor([41]), decoder.drafter.correction
    state = DecodeState([5, 41], 1, root, target.new_cache(9), SamplingParams())
    tree = few._tree(state, logits, states)
    scores: list[tuple[float, tuple[int, ...]]] = []

    def follow(path: tuple[int, ...], memory: Tensor, score: float) -> None:
        k = len(path)
        if k == len(states):
            return
        before = torch.tensor([path[-1]]) if path else root
        row, after = correction.step(logits[k : k + 1], states[k : k + 1], before, memory)
        for value, token in zip(*row.log_softmax(-1)[0].topk(3), strict=True):
            scores.append((score + float(value), (*path, int(token))))
            follow((*path, int(token)), after, score + float(value))

    follow((), correction.start(states[:1]), 0.0)
    paths: dict[int, tuple[int, ...]] = {0: ()}
    for node, parent in enumerate(tree.topology.parents[1:], start=1):
        paths[node] = (*paths[parent], int(tree.tokens[node]))
    known = {path: score for score, path in scores}
    found = sorted((known[path] for node, path in paths.items() if node), reverse=True)
    assert found == pytest.approx(sorted(known.values(), reverse=True)[:9], abs=1e-4)


# -- how many drafted tokens are verified --------------------------------------------------------------------------


def test_the_hull_is_the_largest_convex_function_below() -> None:
    assert convex_hull([2.0, 2.0, 5.0, 5.0, 5.0]) == pytest.approx([2.0, 2.0, 3.0, 4.0, 5.0])
    for seed in range(20):
        values = torch.rand(9, generator=torch.Generator().manual_seed(seed)).cumsum(0).tolist()
        hull = convex_hull(values)
        slopes = [b - a for a, b in itertools.pairwise(hull)]
        assert all(h <= v + 1e-6 for h, v in zip(hull, values, strict=True)) and hull[0] == values[0]
        assert all(b >= a - 1e-6 for a, b in itertools.pairwise(slopes))
        corners = [i for i in range(1, 8) if slopes[i] > slopes[i - 1] + 1e-5]
        assert all(hull[i] == pytest.approx(values[i], abs=1e-6) for i in corners)


def test_lengths() -> None:
    times = StepTimes((1.0, 1.1, 1.2, 1.3))
    assert times.best_length([0.9, 0.9, 0.9]) == times.stopping_length([0.9, 0.9, 0.9]) == 3
    assert times.best_length([0.05, 0.9, 0.9]) == times.stopping_length([0.05, 0.9, 0.9]) == 0
    assert times.best_length([0.9, 0.02, 0.9]) == times.stopping_length([0.9, 0.02, 0.9]) == 1
    staircase = StepTimes((1.0, 1.6, 1.6, 1.6))  # its first step alone does not pay
    assert staircase.best_length([0.5, 0.9, 0.9]) == 3 and staircase.stopping_length([0.5, 0.9, 0.9]) == 3
    assert threshold_length([0.9, 0.5, 0.7], 0.6) == 1 and threshold_length([0.9, 0.9], 0.6) == 2


def first_token(rule: Any, p: list[Tensor], q: list[Tensor], confidence: Any) -> Tensor:
    """The exact distribution of the first output token, if two tokens are drafted and `rule` of them is verified.

    p, q: after 0 and 1 drafted tokens, [V] and [V, V]. confidence: of both, given the first drafted token.
    """
    out = torch.zeros(len(p[0]), dtype=torch.float64)
    for x in range(len(out)):
        length = rule(confidence(x))
        if length == 0:
            out += q[0][x] * p[0]
            continue
        accept = min(1.0, float(p[0][x] / q[0][x]))
        rest = (p[0] - q[0]).clamp_min(0)
        out[x] += q[0][x] * accept
        out += q[0][x] * (1 - accept) * rest / rest.sum()
    return out


def test_early_stop_is_exact_and_the_global_maximum_is_not() -> None:
    """The second token's confidence depends on the first token: the decision to verify that one must not."""
    p, q = ([torch.tensor(x, dtype=torch.float64)] for x in ([0.6, 0.4], [0.3, 0.7]))
    times = StepTimes((1.0, 1.6, 1.7))

    def confidence(x: int) -> list[float]:
        return [0.5, 0.95 if x == 0 else 0.05]

    assert times.best_length(confidence(0)) == 2 and times.best_length(confidence(1)) == 0
    for rule in (times.stopping_length, lambda c: threshold_length(c, 0.4), lambda c: 2):
        torch.testing.assert_close(first_token(rule, p, q, confidence), p[0])
    assert (first_token(times.best_length, p, q, confidence) - p[0]).abs().max() > 0.05


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_fewer_nodes_are_the_first_of_the_trained_block(temperature: float) -> None:
    target = tiny_target("llama", V)
    whole, part = (Watching(target, DSparkOptions(nodes=n), random_drafter(target)) for n in (0, 2))
    for decoder in (whole, part):
        generate(decoder, PROMPT, StopParams(3), SamplingParams(temperature))
    assert part.max_tokens_per_step() == 3 and part.seen[0][1] == whole.seen[0][1][:3]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_length_follows_the_rule(temperature: float) -> None:
    target = tiny_target("llama", V)
    drafter = random_drafter(target)
    with torch.no_grad():
        drafter.get_parameter("confidence_head.proj.weight").mul_(20)
    times = StepTimes((1.0, 1.4, 1.5, 1.6, 1.7))
    decoder = Watching(target, DSparkOptions(verified_length="measured"), drafter, None, {B: times})
    answer = generate(decoder, PROMPT, StopParams(40), SamplingParams(temperature))
    rule = times.stopping_length if temperature else times.best_length
    lengths = [step.draft_nodes for step in answer.steps]
    assert lengths[:-1] == [rule(confidence) for *_, confidence in decoder.seen][: len(lengths) - 1]
    assert len(set(lengths)) > 1
    if not temperature:
        assert answer.tokens == generate(Autoregressive(target), PROMPT, StopParams(40), SamplingParams()).tokens


@thorough
def test_times_are_measured_when_it_is_loaded_and_shared_by_its_copies(tmp_path: Path) -> None:
    target = tiny_target("llama", V)
    drafter = random_drafter(target)
    write_checkpoint(tmp_path / "d", drafter, speculators_config_of(drafter, target))
    options = DSparkOptions(weights=str(tmp_path / "d"), verified_length="measured")
    decoder = DSpark.load(target, options)
    assert decoder.step_times is not None and len(decoder.step_times.seconds) == 1 + B
    assert all(t > 0 for t in decoder.step_times.seconds) and decoder.fixed_length is None
    assert [*decoder.step_times.seconds] == sorted(decoder.step_times.seconds)
    assert decoder.clone().step_times is decoder.step_times  # type: ignore[attr-defined]
    assert "relative step times" in decoder.measured
    shorter = decoder.with_options(DSparkOptions(weights=str(tmp_path / "d"), verified_length="measured", block_size=2))
    assert len(shorter.step_times.seconds) == 3 and decoder.measured_times.keys() == {2, B}  # type: ignore[attr-defined, union-attr]
    full = DSpark.load(target, DSparkOptions(weights=str(tmp_path / "d")))
    assert full.step_times is None and not full.measured


@thorough
def test_each_length_is_measured_at_that_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where all drafted tokens are accepted: the number of measured steps is the same."""
    target = tiny_target("llama", V)
    measured: list[tuple[int | None, list[int]]] = []

    def watched(decoder: Any, *args: Any) -> Any:
        answer = generate(decoder, *args)
        measured.append((decoder.fixed_length, [step.draft_nodes for step in answer.steps]))
        for step in answer.steps:
            step.total_s = 10.0 - step.draft_nodes  # shorter with more tokens: noise
        return answer

    monkeypatch.setattr(dspark_decode, "generate", watched)
    decoder = DSpark(target, DSparkOptions(verified_length="measured"), random_drafter(target))
    assert [length for length, _ in measured] == 3 * [0, 1, 2, 3, 4]
    for length, nodes in measured:
        assert len(nodes) >= dspark_decode.MEASURED_STEPS and set(nodes[: dspark_decode.MEASURED_STEPS]) == {length}
    assert decoder.step_times == StepTimes((10.0,) * 5)


# -- checkpoints ---------------------------------------------------------------------------------------------------


@few(1)
@torch.no_grad()
@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_the_package_speculators_computes_the_same(kind: Any, tmp_path: Path) -> None:
    """Its reading of a folder that is written here, its Markov head and its confidence head."""
    theirs = oracles.speculators("models.dspark")
    target = tiny_target("llama", V)
    drafter = random_drafter(target, kind=kind)
    write_checkpoint(tmp_path, drafter, speculators_config_of(drafter, target))
    config = theirs.DSparkSpeculatorConfig.from_pretrained(tmp_path)
    config.transformer_layer_config._attn_implementation = "eager"
    model = theirs.DSparkDraftModel(config)
    stored = {k: v.float() for k, v in read_tensors(tmp_path / "model.safetensors").items()}
    missing, unexpected = model.load_state_dict(stored, strict=False)
    assert not unexpected and all(name.startswith(("embed", "lm_head", "verifier")) for name in missing)
    states, before = torch.randn(3, B, target.hidden_size), torch.randint(V, (3, B))
    drafter.load_state_dict(stored, strict=False)
    bias = model.markov_head.block_bias(prev_token_ids=before, hidden_states=states)
    memory = drafter.correction.start(states[:, 0])
    for k in range(B):
        row, memory = drafter.correction.step(torch.zeros(3, V), states[:, k], before[:, k], memory)
        torch.testing.assert_close(row, bias[:, k], atol=1e-5, rtol=1e-5)
    features = torch.cat((states, model.markov_head.prev_embeddings(before)), -1)
    torch.testing.assert_close(drafter.confidence(states, before), model.confidence_head(features))


@pytest.mark.parametrize("shape", [{}, {"kind": "gated", "draft_vocab": 20}, {"rank": 0, "confidence": False}])
def test_what_is_written_is_read_again(shape: dict[str, Any], tmp_path: Path) -> None:
    target = Target(tiny_model("llama"))
    drafter = random_drafter(target, **shape)
    write_checkpoint(tmp_path, drafter, speculators_config_of(drafter, target))
    again, _ = read_drafter(tmp_path, target, read_tensors)
    assert again.shape == drafter.shape
    for name, tensor in drafter.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name].float(), tensor.float(), atol=1e-3, rtol=1e-3)


def test_an_export_warns_of_a_head_that_vllm_does_not_have(tmp_path: Path) -> None:
    target = Target(tiny_model("llama"))
    decoder = DSpark(target, DSparkOptions(), random_drafter(target, kind="gated"))
    with pytest.warns(UserWarning, match="dspark: vLLM has no Markov head of the kind gated"):
        decoder.export(tmp_path)


ZLAB = {**QWEN, "block_size": B, "dflash_config": {"target_layer_ids": [0, 1, 2], "mask_token_id": MASK}}
BAD: dict[str, tuple[dict[str, Tensor], dict[str, Any], str]] = {
    "z-lab's layout": (tensors(), ZLAB, "use the method dflash"),
    "no drafter": (tensors(), QWEN, "describes no supported DSpark drafter"),
    "Gemma": (tensors(), deepspec(architectures=["Gemma4DSparkModel"]), "'Gemma4DSparkModel'"),
    "another type": (tensors(), speculators(speculators_model_type="dflash"), "of the type 'dflash', not 'dspark'"),
    "no rank": (tensors(), deepspec(markov_rank=None), "lacks markov_rank"),
    "a rank below 0": (tensors(), deepspec(markov_rank=-1), "markov_rank in config.json is -1"),
    "another rank": (tensors(), speculators(markov_rank=10**9), "markov_w1.weight has 6 columns"),
    "an unknown head": (tensors(), deepspec(markov_head_type="lstm"), "markov_head_type in config.json is 'lstm'"),
    "a gate that is not there": (tensors(), speculators(markov_head_type="gated"), "lacks tensors: markov_head.gate"),
    "confidence of nothing": (tensors(), deepspec(markov_rank=0), "needs a markov_rank above 0"),
    "a multiplier": (tensors(), deepspec(output_multiplier=2.0), "sets output_multiplier, which is not supported"),
    "causal": (tensors(), deepspec(is_causal=True), "causal layers or layers with a sliding window"),
    "mask token": (tensors(), deepspec(mask_token_id=V), "mask_token_id in config.json is 61"),
    "layer ids": (tensors(), deepspec(target_layer_ids=[0, 1, 4]), "names layer 4"),
    "another width": (tensors(), deepspec(hidden_size=64), "a hidden size of 64, the model has 32"),
    "words": (tensors(words=WORDS), speculators(draft_vocab_size=50), "the drafter has 50 words"),
}


@few(6)
@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_one_line(name: str, tmp_path: Path) -> None:
    weights, config, reported = BAD[name]
    options = DSparkOptions(weights=folder(tmp_path / "d", weights, config))
    refused(DSpark, options, Target(tiny_model("llama")), reported)


def test_a_run_with_it_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights, config, reported = BAD["another rank"]
    check_refused_run(f"dspark[weights={folder(tmp_path / 'd', weights, config)}]", reported, tmp_path, capsys)


def test_dflash_names_the_method_that_reads_deepspecs_layout(tmp_path: Path) -> None:
    options = DFlashOptions(weights=folder(tmp_path / "d", tensors(), deepspec()))
    refused(DFlash, options, Target(tiny_model("llama")), "use the method dspark")


def test_options_that_exclude_each_other() -> None:
    target = tiny_target("llama", V)
    for options, reported in (
        ({"verified_length": "measured", "mode": "tree"}, "mode=chain"),
        ({"verified_length": "measured", "confidence_threshold": 0.5}, "exclude each other"),
    ):
        with pytest.raises(UserError, match=reported):
            DSparkOptions(**options)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="need a confidence head"):
        DSpark(target, DSparkOptions(confidence_threshold=0.5), random_drafter(target, confidence=False))
    with pytest.raises(UserError, match="block_size must be 1 to 4"):
        DSpark(target, DSparkOptions(block_size=5), random_drafter(target))
