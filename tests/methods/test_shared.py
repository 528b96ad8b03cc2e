"""Shared mode: its output is its own model's, training sees what decoding sees, and the base stays what it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from specbench_ss.bench import preflight
from specbench_ss.engine.decoder import DecodeState
from specbench_ss.engine.generate import StopParams, generate
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.target import Target
from specbench_ss.engine.tree import DraftTree
from specbench_ss.errors import UserError
from specbench_ss.methods._shared.fine_tuned import ADAPTER
from specbench_ss.methods.ar import Autoregressive
from specbench_ss.methods.ss.config import SharedAROptions, SSOptions, StreamConfig
from specbench_ss.methods.ss.decode import SpeculativeStreaming
from specbench_ss.methods.ss.shared import SharedAutoregressive, SharedStreaming
from specbench_ss.methods.ss.train import SharedTrainer, carriers_of
from specbench_ss.options import MethodSpec
from specbench_ss.runs.config import RunConfig
from specbench_ss.training.batch import BaseStates
from specbench_ss.training.loop import Budget, DrafterLoop
from tests.methods.batches import answers_of, plain_text
from tests.methods.decoders import randomise
from tests.tiny import WITHOUT_WINDOW, few, tiny_model

PROMPT = [5, 6, 7, 8, 9, 10, 11]


def config(attends: bool = True, **changes: Any) -> StreamConfig:
    shape = {"gamma": 3, "n_msa_layers": 2, "adapter_rank": 0, "mode": "shared", "lora_rank": 4}
    return StreamConfig(**{**shape, "main_attends_streams": attends, **changes})


def trained(kind: str, shape: StreamConfig, segment: int = 0, seed: int = 2) -> tuple[Target, SharedTrainer]:
    """A trainee with random LoRA and streams on a tiny base."""
    target = Target(tiny_model(kind))
    torch.manual_seed(seed)
    trainee = SharedTrainer(target, shape, segment=segment)
    randomise(trainee.module, seed, std=0.2)
    with torch.no_grad():
        for weight in trainee.module.parameters():
            if weight.requires_grad:
                weight.copy_(weight.half())  # as they are written
    return target, trainee


EMPTY = BaseStates(torch.empty(0), {}, {})


@few(2)
@pytest.mark.parametrize("attends", [True, False])
@pytest.mark.parametrize("kind", WITHOUT_WINDOW)
def test_output_is_the_shared_models_own(kind: str, attends: bool, tmp_path: Path) -> None:
    target, trainee = trained(kind, config(attends))
    trainee.save(tmp_path, {})
    before = generate(Autoregressive(target), PROMPT, StopParams(30), SamplingParams()).tokens
    own = SharedAutoregressive.load(target, SharedAROptions(weights=str(tmp_path)))
    reference = generate(own, PROMPT, StopParams(30), SamplingParams()).tokens
    for options in (SSOptions(k=2, n_keep=5), SSOptions(k=2, prune="off"), SSOptions(mode="chain"), SSOptions(gamma=3)):
        drafted = SharedStreaming.load(target, SSOptions(weights=str(tmp_path), **chosen(options)))
        assert generate(drafted, PROMPT, StopParams(30), SamplingParams()).tokens == reference
    assert generate(Autoregressive(target), PROMPT, StopParams(30), SamplingParams()).tokens == before
    assert reference != before


@pytest.mark.parametrize("attends", [True, False])
def test_its_logits_are_those_it_decodes_with(attends: bool, tmp_path: Path) -> None:
    """Output match requires, after any part of an answer, the token that the answer goes on with."""
    target, trainee = trained("llama", config(attends))
    trainee.save(tmp_path, {})
    own = SharedAutoregressive.load(target, SharedAROptions(weights=str(tmp_path)))
    tokens = generate(own, PROMPT, StopParams(12), SamplingParams()).tokens
    with torch.inference_mode():
        assert [int(own.next_logits(PROMPT, tokens[:i]).argmax()) for i in range(len(tokens))] == tokens
        every = torch.cat(list(own.answer_logits(PROMPT, tokens)))
        assert every.argmax(-1).tolist() == tokens
        if attends:  # and without their streams the rows state something else
            after = own.next_logits(PROMPT, tokens[:6])
            assert (after - own.target.next_logits([*PROMPT, *tokens[:6]])).abs().max() > 1e-2


def test_a_run_includes_the_reference_with_all_that_changes_its_output() -> None:
    options = SSOptions(weights="a,b", gamma=2, k=5, stream_attention_top_p=7)
    same = SharedStreaming.baseline_for(options)
    assert same == MethodSpec("ss-shared-ar", {"weights": "a,b", "gamma": "2", "stream_attention_top_p": "7"})
    asked = RunConfig((MethodSpec("ar"), MethodSpec("ss-shared", {"gamma": "2"}), MethodSpec("ss-shared")))
    labels = [spec.label for spec in preflight.with_references(asked).methods]
    assert labels == ["ar", "ss-shared[gamma=2]", "ss-shared", "ss-shared-ar[gamma=2]", "ss-shared-ar"]


def chosen(options: SSOptions) -> dict[str, Any]:
    return {name: getattr(options, name) for name in ("k", "n_keep", "prune", "mode", "gamma")}


KNOWING = {"root_rank": 4, "parent_rank": 4}
SAME = {"stream_position": "same"}
ROTATED = {"stream_init": "rotation", "rotation_step": 0.4}


@few(4)
@pytest.mark.parametrize("more", [{}, KNOWING, SAME, {**SAME, **KNOWING}, {**SAME, **ROTATED}], ids=str)
@pytest.mark.parametrize("attends", [True, False])
@pytest.mark.parametrize("kind", WITHOUT_WINDOW)
def test_training_sees_what_decoding_sees(kind: str, attends: bool, more: dict[str, Any], tmp_path: Path) -> None:
    """Main logits and stream logits at every answer position, teacher-forced, equal those of decoding steps."""
    target, trainee = trained(kind, config(attends, **more))
    ids = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12, 13, 14]])
    first = 4
    one = answers_of(ids, first)
    with torch.no_grad():
        low, _ = trainee._lower(ids)
        carriers, real = carriers_of(one.labels[..., 0] != -100)
        roots = ids.gather(1, carriers + 1)
        logits, _ = trainee.upper(low, 0, carriers, real, [], 3, None, roots[..., None])  # [1, c, 4, V]
    assert carriers.tolist() == [[3, 4, 5, 6, 7, 8]]
    trainee.save(tmp_path, {})
    decoder = SharedStreaming.load(target, SSOptions(weights=str(tmp_path), k=1, prune="off"))
    with torch.inference_mode():
        cache = decoder.target.new_cache(64)
        state = DecodeState(ids[0, :first].tolist(), first, ids[0, first - 1 : first], cache, SamplingParams())
        out = decoder.prefill(state, ids[:, :first])
        for column in range(len(carriers[0])):
            final = decoder.target.family.norm(decoder._last_streams)
            reported = decoder.drafter.condition_on_tokens(decoder.target, final, roots[0, column, None])
            streams = decoder.target.logits(reported)
            decoded = torch.cat((out.logits[0], streams))
            torch.testing.assert_close(logits[0, column], decoded, atol=1e-4, rtol=1e-4)
            root = DraftTree.root_only(ids[0, first + column : first + column + 1])
            out = decoder.forward(state, root)
            cache.compact(first + column, [0])
            decoder._last_streams = out.extra[0]


@few(1)
@pytest.mark.parametrize(("attends", "more"), [(True, {}), (False, {}), (True, SAME)])
def test_segments_change_neither_loss_nor_gradients(attends: bool, more: dict[str, Any]) -> None:
    torch.manual_seed(0)
    one = answers_of(torch.randint(3, 61, (2, 30)), 11)
    found = []
    for segment in (0, 30, 7, 1):
        _, trainee = trained("llama", config(attends, **more), segment)
        loss, _ = trainee.loss(EMPTY, one)
        loss.backward()
        grads = [p.grad for p in trainee.module.parameters()]
        assert all(g is not None for g in grads)
        found.append([loss.detach(), *grads])
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-3)


def test_a_segment_leaves_nothing_of_its_streams_behind() -> None:
    """Its main keys and values, in memory of their own; its rows are computed again in the backward pass."""
    one = answers_of(torch.randint(3, 61, (2, 30)), 4)
    saved = {}
    for segment in (0, 5):
        _, trainee = trained("llama", config(), segment)
        low = trainee._lower(one.ids)[0].detach().requires_grad_(True)
        kept: list[torch.Tensor] = []
        past: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: (kept.append(t), t)[1], lambda t: t):
            for start in range(0, 30, segment or 30):
                piece = slice(start, start + (segment or 30))
                past.append(trainee._segment(low[:, piece], one.labels[:, piece], start, past, None)[1])
        for keys, values in (pair for own in past for pair in own):
            assert keys.shape[2] == values.shape[2] == (segment or 30)
            assert all(x.untyped_storage().nbytes() == x.numel() * 4 for x in (keys, values))
        saved[segment] = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}.values())
    assert saved[5] < saved[0] / 10


def test_main_logits_depend_on_streams_only_where_they_attend() -> None:
    ids = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12]])
    one = answers_of(ids, 4)
    for attends in (True, False):
        _, trainee = trained("llama", config(attends))
        carriers, real = carriers_of(one.labels[..., 0] != -100)
        with torch.no_grad():
            low, _ = trainee._lower(ids)
            before, _ = trainee.upper(low, 0, carriers, real, [], 3)
            trainee.streams.embedding += 1
            after, _ = trainee.upper(low, 0, carriers, real, [], 3)
        assert torch.equal(before[:, :, 0], after[:, :, 0]) is not attends
        assert not torch.equal(before[:, :, 1], after[:, :, 1])


@pytest.mark.parametrize("kind", ["llama", "opt"])
def test_where_streams_stand_changes_what_they_state_and_what_sees_them(kind: str) -> None:
    """The same weights at both positions; where positions were added below the streams, both are one."""
    ids = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12]])
    carriers, real = carriers_of(answers_of(ids, 4).labels[..., 0] != -100)
    stated = {}
    for position in ("ahead", "same"):
        _, trainee = trained(kind, config(stream_position=position))
        with torch.no_grad():
            stated[position], _ = trainee.upper(trainee._lower(ids)[0], 0, carriers, real, [], 3)
    differs = (
        (stated["ahead"] - stated["same"]).abs().amax((0, 1, 3))
    )  # of the main row under eq. 3, and of its streams
    assert (differs > 1e-3).tolist() == [kind == "llama"] * 4


def test_next_token_training_has_no_streams() -> None:
    _, trainee = trained("llama", config(False))
    trainee.alpha_j = 0.0
    loss, right = trainee.loss(EMPTY, answers_of(torch.randint(3, 61, (2, 20)), 5))
    loss.backward()
    assert right.shape == (1,)
    assert trainee.streams.embedding.grad is None
    assert all(p.grad is not None for p in trainee.lora)


@few(2)
@pytest.mark.parametrize(
    ("changes", "field"),
    [({"alpha_j": 1.0}, "alpha_j"), ({"lr": 1e-2}, "learning rates"), ({}, "main_attends_streams")],
)
def test_a_checkpoint_is_of_one_set_of_settings(changes: dict[str, Any], field: str, tmp_path: Path) -> None:
    target = Target(tiny_model("llama"))
    rows = np.random.default_rng(0).integers(3, 60, (4, 12), dtype=np.int32)
    text = plain_text(rows, np.arange(12) > 4)

    def trainer(attends: bool, **settings: Any) -> DrafterLoop:
        trainee = SharedTrainer(target, config(attends), **settings)
        return DrafterLoop(target, [trainee], text, Budget(2, 2, 4, 3, warmup=0), tmp_path)

    trainer(True).train(lambda _: None)
    assert trainer(True).resumed
    with pytest.raises(UserError, match=field):
        trainer(bool(changes), **changes)


def test_losses_of_streams_rise_from_nothing() -> None:
    """At first the loss is the next token's and the pruning map's alone; after the ramp it is eq. 6's."""
    target = Target(tiny_model("llama"))
    batch = answers_of(torch.arange(3, 43).view(2, 20) % 37, 3)

    def losses(**settings: Any) -> tuple[list[float], float]:
        torch.manual_seed(0)
        trainee = SharedTrainer(target, config(False), **settings)
        with torch.no_grad():
            looked = trainee.loss(EMPTY, batch)[0].item()
        return [trainee.loss(EMPTY, batch)[0].item() for _ in range(4)], looked

    (plain, _), (whole, seen), (rising, looked) = losses(alpha_j=0.0), losses(), losses(ramp=3)
    assert rising[0] == pytest.approx(plain[0], rel=1e-4)
    assert rising[0] < rising[1] < rising[2] < rising[3] == pytest.approx(whole[0], rel=1e-4)
    assert looked == pytest.approx(seen, rel=1e-4), "what is held out is weighed as at the end, and is no update"


def test_the_base_is_not_touched(tmp_path: Path) -> None:
    target, trainee = trained("qwen3", config())
    before = {k: v.clone() for k, v in target.model.state_dict().items()}
    trainee.save(tmp_path, {})
    SharedStreaming.load(target, SSOptions(weights=str(tmp_path)))
    after = target.model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(v, after[k]) for k, v in before.items())


def test_modes_are_not_mixed_up(tmp_path: Path) -> None:
    target, trainee = trained("llama", config())
    trainee.save(tmp_path, {})
    with pytest.raises(UserError, match="use ss-shared"):
        SpeculativeStreaming.load(target, SSOptions(weights=str(tmp_path)))
    with pytest.raises(UserError, match="lora_rank=8 does not fit"):
        SharedStreaming.load(target, SSOptions(weights=str(tmp_path), lora_rank=8))
    with pytest.raises(UserError, match="main_attends_streams=off does not fit"):
        SharedStreaming.load(target, SSOptions(weights=str(tmp_path), main_attends_streams="off"))
    with pytest.raises(UserError, match="requires a lora_rank"):
        StreamConfig(mode="shared")
    with pytest.raises(UserError, match="does not support main_attends_streams"):
        StreamConfig(main_attends_streams=True)


def test_it_is_checked_before_the_target_is_loaded(tmp_path: Path) -> None:
    target, trainee = trained("llama", config())
    trainee.save(tmp_path, {})
    given = SSOptions(weights=str(tmp_path))
    with pytest.raises(UserError, match="not defined for layers with a sliding window"):
        SharedStreaming.check(given, Target(tiny_model("mistral-window")))
    SharedStreaming.check(given, target)
    SharedAutoregressive.check(SharedAROptions(str(tmp_path)), target)
    with pytest.raises(UserError, match="use ss-shared"):
        SpeculativeStreaming.check(given, target)
    with pytest.raises(UserError, match="gamma must be 1 to"):
        SharedAutoregressive.check(SharedAROptions(str(tmp_path), gamma=99), target)
    (tmp_path / ADAPTER).unlink()
    with pytest.raises(UserError, match=f"no weight file {tmp_path / ADAPTER}"):
        SharedStreaming.check(given, target)
    SharedStreaming.check(SSOptions(weights="someone/somewhere"), target)  # a hub id: looked at when it is loaded


def test_another_lora_in_the_same_folder_is_another_model(tmp_path: Path) -> None:
    target, trainee = trained("llama", config())
    trainee.save(tmp_path, {})
    options = SSOptions(weights=str(tmp_path))
    before = SharedStreaming.load(target, options)
    assert SharedStreaming.load(target, options).target is before.target
    file = tmp_path / "adapter_config.json"
    file.write_text(file.read_text().replace('"lora_alpha": 8', '"lora_alpha": 1'))
    after = SharedStreaming.load(target, options)
    assert before.metadata()["model_hash"] != after.metadata()["model_hash"]
    assert not torch.equal(before.next_logits(PROMPT, [5]), after.next_logits(PROMPT, [5]))


@pytest.mark.parametrize("strange", ["key", "bias"])
def test_only_lora_of_linear_layers_is_merged(strange: str, tmp_path: Path) -> None:
    target, trainee = trained("llama", config())
    trainee.save(tmp_path, {})
    if strange == "key":
        tensors = load_file(tmp_path / "adapter_model.safetensors")
        tensors["base_model.model.model.embed_tokens.lora_embedding_A"] = torch.zeros(4, 61)
        save_file(tensors, tmp_path / "adapter_model.safetensors")
    else:
        file = tmp_path / "adapter_config.json"
        file.write_text(file.read_text().replace('"bias": "none"', '"bias": "all"'))
    with pytest.raises(UserError, match="more than LoRA of linear layers"):
        SharedStreaming.load(target, SSOptions(weights=str(tmp_path)))
