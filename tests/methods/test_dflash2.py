"""DFlash2 and Domino: published layouts load, drafts equal a computation by single positions, blocks are apart."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from specbench_ss.engine.batching import BatchEngine, BatchRequest
from specbench_ss.engine.cuda_graphs import CudaGraphRunner, run_eagerly
from specbench_ss.engine.decoder import DecodeState
from specbench_ss.engine.generate import StopParams, generate
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.target import Target
from specbench_ss.engine.tree import DraftTree
from specbench_ss.errors import UserError
from specbench_ss.methods.block_drafters.convolution import BlockConvolution, inside_block
from specbench_ss.methods.block_drafters.decode import CONVOLUTIONS, RECURRENT_HEAD, SELECTOR, DFlash, DFlashOptions
from specbench_ss.methods.block_drafters.dflash import (
    config_of,
    new_drafter,
    random_drafter,
    read_drafter,
    speculators_config_of,
)
from specbench_ss.methods.block_drafters.dspark_decode import DSpark, DSparkOptions
from specbench_ss.methods.block_drafters.train import DFlashTrainer, DFlashTraining
from specbench_ss.models.checkpoint import read_tensors, write_checkpoint
from specbench_ss.models.tiny import randomise, tiny_target
from specbench_ss.training.batch import base_states
from specbench_ss.training.loop import Budget, DrafterLoop
from tests.methods import oracles
from tests.methods.batches import batch_of, text_of
from tests.methods.reference_drafter import Reference, draft_words, folder, layer_weights, refused
from tests.methods.refused_runs import check_refused_run
from tests.tiny import few, thorough, tiny_model

H, V, HEADS, KV, HD, FFN, D, B, R, K, MASK = 32, 61, 4, 2, 12, 40, 2, 5, 6, 7, 7
GRU, EMB = 9, 5
PROMPT = [20, 4, 4, 4, 30, 12, 9, 8, 50, 41, 33, 22, 17, 60, 9]
IDS = [0, 2]  # of the layers whose outputs are features
LAYER = {
    "model_type": "qwen3", "hidden_size": H, "intermediate_size": FFN, "num_hidden_layers": D, "vocab_size": V,
    "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": HD, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 16, "rope_theta": 5e4,
}  # fmt: skip
CONVOLVED = {"conv_kernel_size": 2, "conv_group_size": 8}
SELECTED = {"selector_rank": R, "selector_top_k": K}
DOMINO = {"projector_type": "domino", "emb_dim": EMB, "gru_hidden_dim": GRU}
BOTH = {**CONVOLUTIONS, **SELECTOR}


# -- checkpoints as they are published, scaled down ----------------------------------------------------------------


def tensors(taps: int = 0, selector: bool = False, domino: bool = False, words: int = V) -> dict[str, Tensor]:
    torch.manual_seed(1)
    made = {"fc.weight": torch.randn(H, len(IDS) * H) * 0.2}
    for i in range(D):
        norms = ("input_layernorm", "post_attention_layernorm")
        made |= layer_weights(f"layers.{i}", H, FFN, HEADS, KV, HD, norms=norms, qk_norm=True)
        for name in ("attention_conv", "mlp_conv") if taps else ():
            made[f"layers.{i}.{name}.base_kernel"] = torch.randn(2, taps, H) * 0.5
            made[f"layers.{i}.{name}.kernel_projection.weight"] = torch.randn(2 * taps * H // 8, H) * 0.1
    made |= {"norm.weight": torch.rand(H) + 0.5, "hidden_norm.weight": torch.rand(H) + 0.5}
    if selector:
        made |= {f"candidate_selector.{n}_codebook": torch.randn(V, R) * 0.5 for n in ("predecessor", "successor")}
        made["candidate_selector.hidden_projection.weight"] = torch.randn(R, H) * 0.5
    if domino:
        made |= {f"prefix_gru.weight_{n}_l0": torch.randn(3 * GRU, width) for n, width in (("ih", H), ("hh", GRU))}
        made |= {"embed_proj.0.weight": torch.randn(EMB, H + GRU), "embed_proj.2.weight": torch.randn(V, EMB)}
    if words < V:
        made |= {**draft_words(words, V), "lm_head.weight": torch.randn(words, H)}
    return made


def zlab(*parts: dict[str, Any], **changed: Any) -> dict[str, Any]:
    """config.json in z-lab's layout."""
    nested: dict[str, Any] = {"target_layer_ids": IDS, "mask_token_id": MASK}
    for part in parts:
        nested |= part
    named = {"architectures": ["DFlash2DraftModel"], "block_size": B, "num_target_layers": 4}
    return {**LAYER, **named, "dflash_config": nested, **changed}


def speculators(**changed: Any) -> dict[str, Any]:
    """config.json as speculators writes it."""
    return {
        "architectures": ["DFlash2DraftModel"], "speculators_model_type": "dflash2", "transformer_layer_config": LAYER,
        "draft_vocab_size": V, "block_size": B, "aux_hidden_state_layer_ids": [i + 1 for i in IDS],
        "mask_token_id": MASK, "sample_from_anchor": False, "sliding_window_non_causal": True,
        "speculators_config": {"algorithm": "dflash2"}, **CONVOLVED, **SELECTED, **changed,
    }  # fmt: skip


SLIDING = {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"]}
UNSTATED = {k: v for k, v in speculators(transformer_layer_config=LAYER | SLIDING).items() if "non_causal" not in k}
CHECKPOINTS: dict[str, tuple[dict[str, Tensor], dict[str, Any]]] = {
    "z-lab": (tensors(2, True), zlab(CONVOLVED, SELECTED)),
    "z-lab, from the anchor": (tensors(0, True), zlab(SELECTED, {"sample_from_anchor": True})),
    "z-lab, convolutions": (tensors(4), zlab(CONVOLVED | {"conv_kernel_size": 4})),
    "speculators": (tensors(2, True), speculators()),
    "speculators, windows": (tensors(2, True), UNSTATED),
    "Domino": (tensors(domino=True), zlab(DOMINO)),
    "Domino, a prefix": (tensors(domino=True), zlab(DOMINO, {"pure_draft_prefix_len": 1})),
    "Domino, shifted": (tensors(domino=True), zlab(DOMINO, {"pure_draft_prefix_len": 1, "shift_label": True})),
}


class Watching(DFlash):
    """Keeps what was drafted: tokens so far, the tree, and the decoder's block size."""

    seen: list[tuple[list[int], DraftTree]]

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seen = []

    def propose(self, state: DecodeState) -> DraftTree:
        tree = super().propose(state)
        self.seen.append((list(state.ids), tree))
        return tree


@few(5)
@pytest.mark.parametrize(("temperature", "size"), [(0.0, 3), (1.0, 0)])
@pytest.mark.parametrize("name", CHECKPOINTS)
@torch.no_grad()
def test_drafts_are_what_the_description_states(name: str, temperature: float, size: int, tmp_path: Path) -> None:
    """At the first and the last step of an output: tokens and q, on transformers' own hidden states."""
    weights, config = CHECKPOINTS[name]
    model = tiny_model("llama")
    target = Target(model)
    options = DFlashOptions(weights=folder(tmp_path / "d", weights, config), sample="on", block_size=size)
    Watching.check(options, target)
    decoder: Any = Watching.load(target, options)
    generate(decoder, PROMPT, StopParams(9), SamplingParams(temperature))
    about = config | config.get("dflash_config", {})
    first = 0 if about.get("shift_label") or about.get("sample_from_anchor") else 1
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    reference = Reference(weights, {"sliding_window_non_causal": True, "use_sliding_window": False} | config, table)
    for ids, tree in (decoder.seen[0], decoder.seen[-1]):
        hidden = model(torch.tensor([ids[:-1]]), output_hidden_states=True).hidden_states
        features = list(torch.cat([hidden[i + 1][0] for i in IDS], -1))
        states = reference.block_states([ids[-1]] + [MASK] * ((size or B) - 1), features)[first:]
        drafted = tree.tokens.tolist()
        assert len(drafted) == 1 + len(states)
        for k, state in enumerate(states):
            logits = head @ state
            if about.get("selector_rank"):
                logits = reference.selected(logits, state, drafted[k], K)
            if about.get("gru_hidden_dim") and k >= about.get("pure_draft_prefix_len", 0):
                logits = logits + reference.domino(state, drafted[: k + 1])
            if temperature == 0:
                assert drafted[k + 1] == int(logits.argmax())
            else:
                torch.testing.assert_close(tree.draft_probs[k], logits.softmax(-1), atol=1e-4, rtol=2e-3)
    assert len(decoder.seen) > 1


# -- convolutions --------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_a_new_drafter_drafts_as_dflash() -> None:
    target = tiny_target("llama", V)
    torch.manual_seed(3)
    plain = new_drafter(target, 2, B)
    parts = new_drafter(target, 2, B, **BOTH)
    parts.load_state_dict(plain.state_dict(), strict=False)
    drafted = []
    for drafter in (plain, parts):
        decoder = Watching(target, DFlashOptions(), drafter)
        generate(decoder, PROMPT, StopParams(12), SamplingParams())
        drafted.append([(ids, tree.tokens.tolist()) for ids, tree in decoder.seen])
    assert drafted[0] == drafted[1]


@torch.no_grad()
def test_a_convolution_does_not_cross_a_block() -> None:
    """Two blocks in a row: a row of the first changes rows after it there, and none of the second."""
    torch.manual_seed(2)
    taps, size = 3, 4
    convolution = BlockConvolution(8, taps, 4)
    randomise(convolution, 3, 0.5)
    x, inside = torch.randn(1, 2 * size, 8), inside_block(2 * size, size, taps, torch.zeros(()))
    changed = x.clone()
    changed[0, size - 1] += 1.0
    before, after = (convolution(rows, inside, torch.tanh) for rows in (x, changed))
    different = (before != after).any(-1)[0].tolist()
    assert different == [False] * (size - 1) + [True] + [False] * size
    alone = convolution(x[:, size:], inside_block(size, size, taps, x), torch.tanh)
    torch.testing.assert_close(before[:, size:], alone)
    changed[0, 0] += 1.0
    different = (before != convolution(changed, inside, torch.tanh)).any(-1)[0].tolist()
    assert different == [True] * size + [False] * size


@torch.no_grad()
def test_training_sees_what_decoding_sees() -> None:
    """Blocks of several anchors in one pass equal the blocks that decoding computes from the same tokens."""
    target = Target(tiny_model("llama"))
    ids, anchors = torch.randint(3, V, (1, 20), generator=torch.Generator().manual_seed(1)), [2, 6, 12]
    trainer = DFlashTrainer(target, DFlashTraining(), 1e-3, random_drafter(target, **BOTH))
    batch = batch_of(ids, torch.tensor([anchors]))
    found = trainer.blocks(base_states(target, ids, trainer.aux_hidden_state_layers, None, None), batch)
    for n, t in enumerate(anchors):
        decoder = DFlash(target, DFlashOptions(), copy.deepcopy(trainer.module))
        with torch.inference_mode():
            root = ids[0, t + 1 : t + 2]
            state = DecodeState(ids[0, : t + 2].tolist(), t + 1, root, target.new_cache(60), SamplingParams())
            decoder.prefill(state, ids[:, : t + 1])
            decoder.on_prefill(state)
            torch.testing.assert_close(decoder.block_states(state), found[0, n], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("graphs", [False, True])
@torch.no_grad()
def test_the_number_format_and_replayed_passes_change_nothing_but_rounding(graphs: bool) -> None:
    """Chains of float32 and bfloat16 targets, eagerly and over the padded buffers of replayed passes."""
    states = []
    for dtype in (torch.float32, torch.bfloat16):
        target = Target(tiny_model("llama").to(dtype))
        drafter = random_drafter(Target(tiny_model("llama")), **BOTH)
        decoder = DFlash(target, DFlashOptions(), drafter)
        target.graphs = CudaGraphRunner(run_eagerly) if graphs else None
        with torch.inference_mode():
            for _ in range(3):  # captured, checked, replayed
                cache = target.request_cache(300)
                root = torch.tensor([9])
                state = DecodeState([*PROMPT, 9], len(PROMPT), root, cache, SamplingParams())
                decoder.prefill(state, torch.tensor([PROMPT]))
                decoder.on_prefill(state)
                found = decoder.block_states(state).float()
        states.append(found)
        assert not graphs or target.graphs is not None and not target.graphs.fallbacks
    assert states[0].shape == (B - 1, H)
    torch.testing.assert_close(states[1], states[0], atol=0.1, rtol=0.1)


@torch.no_grad()
def test_concurrent_requests_draft_as_alone() -> None:
    """Their rows share passes, in which blocks begin anywhere."""
    target = tiny_target("llama", V)
    drafter, options = random_drafter(target, **BOTH), DFlashOptions(block_size=3)
    prompts = ([5, 6, 7], PROMPT, [3, 9, 9, 2, 1])
    runs: list[dict[tuple[int, ...], Tensor]] = []

    class Recording(DFlash):
        def block_states(self, state: DecodeState) -> Tensor:
            states = super().block_states(state)
            runs[-1][tuple(state.ids)] = states
            return states

    for together in (1, 3):
        runs.append({})
        requests = [BatchRequest(prompt, StopParams(8), SamplingParams()) for prompt in prompts]
        BatchEngine(Recording(target, options, drafter), together).answer(requests, lambda index, output: None)
    assert len(runs[0]) > 9
    torch.testing.assert_close(runs[1], runs[0], atol=1e-5, rtol=1e-5)


# -- corrections ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [0, 2])
def test_the_selector_restricts_q_to_its_candidates(nodes: int) -> None:
    target = tiny_target("llama", V)
    decoder = Watching(target, DFlashOptions(sample="on", nodes=nodes), random_drafter(target, **SELECTOR))
    generate(decoder, PROMPT, StopParams(12), SamplingParams(0.9))
    for _, tree in decoder.seen:
        assert tree.draft_probs is not None
        q, tokens = tree.draft_probs, tree.tokens[1:]
        assert ((q > 0).sum(-1) <= 5).all() and (q.gather(-1, tokens[:, None]) > 0).all()
        torch.testing.assert_close(q.sum(-1), torch.ones(len(q)))


@pytest.mark.parametrize("parts", [SELECTOR, RECURRENT_HEAD])
@torch.inference_mode()
def test_a_tree_has_the_corrected_scores_of_its_paths(parts: dict[str, int]) -> None:
    """Its nodes are the best of all paths of at most k candidates, of which the selector leaves 5."""
    target = tiny_target("llama", V)
    drafter, width = random_drafter(target, **parts), 5 if parts is SELECTOR else 6
    decoder = DFlash(target, DFlashOptions(mode="tree", nodes=12, k=6), drafter)
    assert decoder.metadata()["k"] == width
    torch.manual_seed(4)
    states, root, correction = torch.randn(3, target.hidden_size), torch.tensor([41]), drafter.correction
    logits = drafter.logits(states, target)
    state = DecodeState([5, 41], 1, root, target.new_cache(9), SamplingParams())
    tree = decoder._tree(state, logits, states)
    assert correction is not None
    block, table = correction.open(logits, states), drafter.table(target)
    scores: dict[tuple[int, ...], float] = {}

    def follow(path: tuple[int, ...], memory: Tensor, score: float) -> None:
        k = len(path)
        if k == len(states):
            return
        row, after = correction.step(*block.at(k), torch.tensor(path[-1:] or [41]), memory, table)
        best = row.log_softmax(-1)[0].topk(width)
        for value, token in zip(best.values, block.drafted(k, best.indices).tolist(), strict=True):
            scores[*path, token] = score + float(value)
            follow((*path, token), after, score + float(value))

    follow((), correction.start(states[:1]), 0.0)
    paths: dict[int, tuple[int, ...]] = {0: ()}
    for node, parent in enumerate(tree.topology.parents[1:], start=1):
        paths[node] = (*paths[parent], int(tree.tokens[node]))
    found = sorted((scores[path] for node, path in paths.items() if node), reverse=True)
    assert found == pytest.approx(sorted(scores.values(), reverse=True)[:12], abs=1e-4)


# -- checkpoints ---------------------------------------------------------------------------------------------------


@thorough
@torch.no_grad()
def test_the_package_speculators_computes_the_same(tmp_path: Path) -> None:
    """Its reading of a folder that is written here, its layers and its selector."""
    theirs = oracles.speculators("models.dflash2")
    target = tiny_target("llama", V)
    drafter = random_drafter(target, **BOTH)
    write_checkpoint(tmp_path, drafter, speculators_config_of(drafter, target))
    config = theirs.DFlash2SpeculatorConfig.from_pretrained(tmp_path)
    config.transformer_layer_config._attn_implementation = "eager"
    model = theirs.DFlash2DraftModel(config)
    stored = {k: v.float() for k, v in read_tensors(tmp_path / "model.safetensors").items()}
    missing, unexpected = model.load_state_dict(stored, strict=False)
    assert not unexpected and all(name.startswith(("embed", "lm_head", "verifier")) for name in missing)
    decoder = DFlash(target, DFlashOptions(), read_drafter(tmp_path, target, read_tensors)[0])
    with torch.inference_mode():
        root = torch.tensor([9])
        state = DecodeState([*PROMPT, 9], len(PROMPT), root, target.new_cache(60), SamplingParams())
        output = decoder.prefill(state, torch.tensor([PROMPT]))
        decoder.on_prefill(state)
        states = decoder.block_states(state).clone()
    features = torch.cat([output.hidden_states[i] for i in decoder.layers], -1).clone()
    context, embedding = model.hidden_norm(model.fc(features)), target.model.get_input_embeddings().weight
    x = embedding[torch.tensor([9] + [drafter.shape.mask_token] * (B - 1))][None]
    rotary = model.rotary_emb(x, torch.arange(len(PROMPT) + B)[None])
    for layer in model.layers:
        x = layer(target_hidden=context, hidden_states=x, attention_mask=None, position_embeddings=rotary)
    torch.testing.assert_close(model.norm(x)[0, 1:], states, atol=1e-4, rtol=1e-4)
    logits, before = target.logits(states), torch.randint(V, (B - 1,))
    correction = decoder.drafter.correction
    block = correction.open(logits, states)
    candidates, scores = model.candidate_selector.select(logits, states, before)
    assert torch.equal(candidates, block.candidates)
    for k in range(B - 1):
        row, _ = correction.step(*block.at(k), before[k : k + 1], correction.start(states[:1]))
        torch.testing.assert_close(row[0], scores[k], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("layout", "parts"),
    [
        (speculators_config_of, BOTH), (speculators_config_of, {**BOTH, "from_anchor": True}),
        (config_of, BOTH), (config_of, SELECTOR), (config_of, CONVOLUTIONS),
    ],
)  # fmt: skip
def test_what_is_written_is_read_again(layout: Any, parts: dict[str, Any], tmp_path: Path) -> None:
    target = Target(tiny_model("llama"))
    drafter = random_drafter(target, **parts)
    write_checkpoint(tmp_path, drafter, layout(drafter, target))
    again, _ = read_drafter(tmp_path, target, read_tensors)
    assert again.shape == drafter.shape
    for name, tensor in drafter.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name].float(), tensor.float(), atol=1e-3, rtol=1e-3)


def test_what_is_written_is_served_by_vllm(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    target = Target(tiny_model("llama"))
    decoder = DFlash(target, DFlashOptions(), random_drafter(target, **BOTH))
    assert decoder.export(tmp_path) == {"method": "dflash", "num_speculative_tokens": B - 1}
    config = read_drafter(tmp_path, target, read_tensors)[1]
    assert config["speculators_model_type"] == "dflash2" and config["architectures"] == ["DFlash2DraftModel"]
    assert not recwarn.list


@pytest.mark.parametrize(
    ("parts", "reported"),
    [(CONVOLUTIONS, "convolutions, not a selector"), (SELECTOR, "not convolutions"), (RECURRENT_HEAD, "Domino")],
)
def test_what_a_layout_cannot_describe_is_one_line(parts: dict[str, int], reported: str) -> None:
    target = Target(tiny_model("llama"))
    drafter = random_drafter(target, **parts)
    with pytest.raises(UserError, match=reported):
        speculators_config_of(drafter, target)
    if parts is RECURRENT_HEAD:
        with pytest.raises(UserError, match="Domino"):
            config_of(drafter, target)


FULL = tensors(2, True)
BAD: dict[str, tuple[dict[str, Tensor], dict[str, Any], str]] = {
    "groups": (FULL, zlab(CONVOLVED, SELECTED, {"conv_group_size": 5}), "conv_group_size is 5, it must divide"),
    "no groups": (FULL, zlab(SELECTED, {"conv_kernel_size": 2}), "config.json lacks conv_group_size"),
    "taps above the block": (FULL, speculators(conv_kernel_size=6), "conv_kernel_size is 6, it must be at most"),
    "taps below 0": (FULL, speculators(conv_kernel_size=-1), "conv_kernel_size is -1"),
    "other taps": (FULL, speculators(conv_kernel_size=3), "tensor layers.0.attention_conv.base_kernel has shape"),
    "candidates": (FULL, zlab(CONVOLVED, SELECTED, {"selector_top_k": 62}), "selector_top_k is 62, it must be 1 to 61"),
    "no candidates": (FULL, speculators(selector_top_k=0), "selector_top_k is 0"),
    "a huge rank": (FULL, speculators(selector_rank=10**9), "selector_rank in config.json is 1000000000"),
    "fewer words": (tensors(2, True, words=40), speculators(draft_vocab_size=40), "need the whole vocabulary"),
    "a tensor less": (
        {k: v for k, v in FULL.items() if "hidden_projection" not in k}, speculators(),
        "lacks tensors: candidate_selector.hidden_projection.weight",
    ),
    "no kernels": (
        {k: v for k, v in FULL.items() if k != "layers.1.mlp_conv.base_kernel"}, zlab(CONVOLVED, SELECTED),
        "lacks tensors: layers.1.mlp_conv.base_kernel",
    ),
    "not stated": (FULL, zlab(CONVOLVED), "has unknown tensors: candidate_selector"),
    "type dflash": (FULL, speculators(speculators_model_type="dflash"), "unknown tensors"),
    "a multiplier": (FULL, zlab(CONVOLVED, SELECTED, {"output_multiplier": 2.0}), "output_multiplier, which is not"),
    "a softcap": (FULL, zlab(CONVOLVED, {"final_logit_softcapping": 30.0}), "final_logit_softcapping, which is not"),
    "no width of the GRU": (tensors(domino=True), zlab(DOMINO, {"gru_hidden_dim": None}), "lacks gru_hidden_dim"),
    "another width": (tensors(domino=True), zlab(DOMINO, {"gru_hidden_dim": 8}), "weight_hh_l0 has 9 columns"),
    "a prefix below 0": (tensors(domino=True), zlab(DOMINO, {"pure_draft_prefix_len": -1}), "_prefix_len is -1"),
    "another head": (tensors(domino=True), zlab(DOMINO, {"projector_type": "xpress"}), "'xpress', which is not"),
}  # fmt: skip


@few(7)
@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_one_line(name: str, tmp_path: Path) -> None:
    weights, config, reported = BAD[name]
    refused(DFlash, DFlashOptions(weights=folder(tmp_path / "d", weights, config)), tiny_target("llama", V), reported)


def test_a_run_with_it_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights, config, reported = BAD["groups"]
    check_refused_run(f"dflash[weights={folder(tmp_path / 'd', weights, config)}]", reported, tmp_path, capsys)


def test_other_methods_name_the_one_that_reads_it(tmp_path: Path) -> None:
    options = DSparkOptions(weights=folder(tmp_path / "d", FULL, speculators()))
    refused(DSpark, options, tiny_target("llama", V), "'dflash2', not 'dspark': use the method dflash")


# -- training ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["kl", "tv", "ce"])
@torch.no_grad()
def test_the_selectors_loss_is_added(kind: Any) -> None:
    """Computed again place by place: cross-entropy among the candidates, the teacher's token in the last rank."""
    target = Target(tiny_model("llama"))
    ids = torch.randint(3, V, (2, 12), generator=torch.Generator().manual_seed(3))
    batch = batch_of(ids, torch.tensor([[0, 4, 9], [2, 3, 8]]))
    drafter = random_drafter(target, **BOTH)
    trainer = DFlashTrainer(target, DFlashTraining(loss=kind), 1e-3, drafter)
    states = base_states(target, ids, trainer.aux_hidden_state_layers, None, None)
    loss, right = trainer.loss(states, batch)
    out, selector, total, hits, replaced = trainer.blocks(states, batch), drafter.candidate_selector, 0.0, [], 0
    assert selector is not None
    for k in range(B - 1):
        terms, good = [], []
        for row in range(2):
            for n, t in enumerate(batch.anchors.at[row].tolist()):
                if t + 2 + k >= 12:
                    continue
                logits, teacher = (target.logits(x) for x in (out[row, n, k], states.final[row, t + 1 + k]))
                p, log_q, label = teacher.softmax(-1), logits.log_softmax(-1), int(ids[row, t + 2 + k])
                unary = {"kl": -(p * log_q).sum(), "tv": 0.5 * (p - log_q.exp()).abs().sum(), "ce": -log_q[label]}
                best, true = logits.topk(5).indices.tolist(), int(teacher.argmax())
                left = selector.predecessor_codebook[ids[row, t + 1 + k]] * selector.hidden_projection(out[row, n, k])

                def score(token: int, left: Tensor = left, logits: Tensor = logits) -> Tensor:
                    return logits[token] + left @ selector.successor_codebook[token]  # type: ignore[union-attr]

                good.append(max(best, key=lambda token: float(score(token))) == label)
                candidates = best if true in best else [*best[:-1], true]
                replaced += true not in best
                scores = torch.stack([score(token) for token in candidates])
                terms.append(float(unary[kind] - scores.log_softmax(-1)[candidates.index(true)]))
        total += math.exp(-k / 4) * sum(terms) / len(terms)
        hits.append(sum(good) / len(good))
    assert replaced
    assert float(loss) == pytest.approx(total, rel=1e-4)
    assert right.tolist() == pytest.approx(hits)


@thorough
def test_it_learns_and_what_is_saved_loads(tmp_path: Path) -> None:
    target = Target(tiny_model("llama"))
    torch.manual_seed(0)
    options = DFlashTraining(
        loss="ce", layers=1, block_size=B, format="speculators",
        conv_kernel_size=2, conv_group_size=8, selector_rank=R, selector_top_k=4,
    )  # fmt: skip
    trainer = DFlashTrainer(target, options, 5e-3)
    before = {name: p.clone() for name, p in trainer.module.named_parameters() if p.requires_grad}
    loop = DrafterLoop(target, [trainer], text_of(target), Budget(25, 8, 16, B - 1, warmup=3), tmp_path / "t")
    losses = []
    for _ in range(25):
        loop.advance()
        losses.append(loop.outcomes["dflash"].loss)
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])
    assert all(not torch.equal(p, before[name]) for name, p in trainer.module.named_parameters() if name in before)
    trainer.save(tmp_path / "d", {})
    decoder = DFlash.load(target, DFlashOptions(weights=str(tmp_path / "d")))
    runs = [generate(decoder, [i], StopParams(23), SamplingParams()) for i in range(3, 11)]
    assert sum(len(r.tokens) - 1 for r in runs) / sum(len(r.steps) for r in runs) > 1.2


@pytest.mark.parametrize(
    ("options", "reported"),
    [
        ({"conv_kernel_size": 2, "conv_group_size": 5}, "dflash: conv_group_size is 5"),
        ({"conv_kernel_size": 9}, "dflash: conv_kernel_size is 9"),
        ({"selector_rank": 4, "selector_top_k": 62}, "dflash: selector_top_k is 62"),
        ({"selector_rank": 4, "draft_vocab": 40}, "dflash: DFlash2 and Domino need the whole vocabulary"),
    ],
)
def test_training_refuses_what_does_not_fit(options: dict[str, Any], reported: str) -> None:
    with pytest.raises(UserError, match=reported):
        DFlashTrainer(Target(tiny_model("llama")), DFlashTraining(layers=1, **options))


def test_a_layout_that_cannot_describe_the_drafter_is_refused_before_training() -> None:
    options = DFlashTraining(layers=1, format="speculators", selector_rank=4)
    with pytest.raises(UserError, match="--format z-lab"):
        DFlashTrainer.build(Target(tiny_model("llama")), options, 1e-3)


def test_the_selectors_candidates_include_the_teachers_token_for_the_loss_alone() -> None:
    target = tiny_target("llama", V)
    selector = random_drafter(target, **SELECTOR).candidate_selector
    assert selector is not None
    logits, states = torch.arange(V).float()[None], torch.zeros(1, target.hidden_size)
    losses, drafted = selector.loss(logits, states, torch.tensor([4]), torch.tensor([0]))
    wanted = F.cross_entropy(torch.tensor([[60.0, 59, 58, 57, 0]]), torch.tensor([4]))
    assert losses.item() == pytest.approx(float(wanted), rel=1e-5) and drafted.tolist() == [60]
    with torch.no_grad():  # the last candidate becomes the best one, and is drafted though the loss replaces it
        selector.predecessor_codebook.fill_(1.0)
        selector.successor_codebook.zero_()[56] = selector.hidden_projection(states + 1)[0].sign() * 1e3
    assert selector.loss(logits, states + 1, torch.tensor([4]), torch.tensor([0]))[1].tolist() == [56]
