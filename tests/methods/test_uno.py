"""UNO: rows without the LoRA are the target's, rows of noise are the adapted model's, training equals decoding."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from specbench_ss import generate, load_method
from specbench_ss.engine.costs import bytes_read, drafter_shape
from specbench_ss.engine.decoder import DecodeState
from specbench_ss.engine.forward import EagerPass
from specbench_ss.engine.layers import cpu
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.target import Target
from specbench_ss.engine.tree import DraftTree
from specbench_ss.engine.verify import LazyTargetProbs, candidates, offers, verifies_as_block, verify_sampled
from specbench_ss.errors import UserError
from specbench_ss.methods._shared.fine_tuned import ADAPTER, ADAPTER_CONFIG, merged_target
from specbench_ss.methods.uno import train
from specbench_ss.methods.uno.decode import UNO, UNOOptions
from specbench_ss.methods.uno.lora import RowLora, gated_blocks, new_lora, noise_table, noise_tokens
from specbench_ss.methods.uno.train import UNOTrainer, UNOTraining
from specbench_ss.training.batch import base_states
from tests.methods.batches import answers_of
from tests.tiny import THOROUGH, few, tiny_model

PROMPT = [5, 9, 3, 7, 11, 4, 8]
KINDS = ["llama", "qwen3", "phi3", "mistral-window", "opt"] if THOROUGH else ["mistral-window", "opt"]


@pytest.fixture(params=KINDS)
def target(request: pytest.FixtureRequest) -> Target:
    return Target(tiny_model(request.param))


def random_lora(target: Target, rank: int = 3) -> RowLora:
    torch.manual_seed(2)
    lora = new_lora(target, rank, 2.0)
    for p in lora.parameters():
        p.data = 0.1 * torch.randn_like(p)
    return lora


@torch.inference_mode()
def draft_rows(method: UNO, n: int, prompt: list[int] | None = None) -> tuple[Tensor, list[int]]:
    """Return the draft pass's logits [n, V] behind a prompt, and its tokens, the root first."""
    target, prompt = method.target, prompt or PROMPT
    cache = target.new_cache(64)
    target.prefill(torch.tensor([prompt[:-1]]), cache)
    root = torch.tensor(prompt[-1:])
    (logits,) = method._draft_pass(n, EagerPass(target, cache, 63), root)
    noise = noise_tokens(method.noise, torch.tensor([len(prompt) - 1]), root)[0].tolist()
    return logits, [prompt[-1], *noise[: n - 1]]


def test_the_first_row_is_the_target_s(target: Target) -> None:
    method = UNO(target, UNOOptions(block=4), random_lora(target))
    assert torch.allclose(draft_rows(method, 4)[0][0], target.next_logits(PROMPT), atol=1e-4)


def test_rows_of_noise_are_those_of_the_merged_model(target: Target, tmp_path: Path) -> None:
    """With the LoRA on in all rows a pass is that of the model that peft merges; the first row's keys differ."""
    lora = random_lora(target)
    UNOTrainer.save(_trainer(target, lora), tmp_path, {})
    merged = merged_target(target, tmp_path, "uno")
    method = UNO(target, UNOOptions(block=3), lora)
    method.blocks = gated_blocks(target, method.drafter, first=0)
    logits, tokens = draft_rows(method, 3)
    with torch.inference_mode():
        cache = target.new_cache(64)
        target.prefill(torch.tensor([PROMPT[:-1]]), cache)  # true tokens are the base's
        mask = merged.causal_mask(3, len(PROMPT) - 1)
        positions = torch.arange(len(PROMPT) - 1, len(PROMPT) + 2)[None]
        x = merged.embed(torch.tensor([tokens]), positions)
        (x,) = merged.run(x, 0, merged.n_layers, cache, mask, merged.rotary(positions, 20))
        expected = merged.logits(merged.family.norm(x))[0]
    assert torch.allclose(logits, expected, atol=2e-2)  # the file has float16


def _trainer(target: Target, lora: RowLora | None = None, block: int = 4) -> UNOTrainer:
    torch.manual_seed(2)
    trainer = UNOTrainer(target, UNOTraining(block=block, rank=3, scale=2.0))
    if lora is not None:
        for mine, given in zip(trainer.module.parameters(), lora.parameters(), strict=True):
            mine.data = given.data.clone()
    return trainer


def test_training_computes_what_decoding_does(target: Target) -> None:
    """Logits of the rows of noise behind each anchor, against the draft pass behind the same tokens."""
    lora = random_lora(target)
    trainer, method = _trainer(target, lora), UNO(target, UNOOptions(block=4), lora)
    batch = answers_of(torch.randint(3, 61, (2, 20), generator=torch.Generator().manual_seed(5)), 4, 5)
    states = base_states(target, batch.ids, (), 0)
    logits = target.logits(trainer.final_states(states, batch.ids, batch.anchors.at))
    for row in range(2):
        for number, at in enumerate(batch.anchors.at[row].tolist()):
            if at < 1:
                continue
            drafted, _ = draft_rows(method, 4, batch.ids[row, : at + 1].tolist())
            assert torch.allclose(logits[row, number], drafted[1:], atol=1e-4)


def test_a_step_of_training_lowers_the_loss(target: Target) -> None:
    trainer = _trainer(target)
    batch = answers_of(torch.randint(3, 61, (4, 20), generator=torch.Generator().manual_seed(5)), 4, 5)
    states = base_states(target, batch.ids, (), 0)
    optimizer = torch.optim.Adam(trainer.module.parameters(), lr=1e-2)
    losses = []
    for _ in range(8):
        loss, right = trainer.loss(states, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] and right.shape == (3,)
    assert all(p.grad is None for p in target.model.parameters())


def test_losses_in_parts_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(tiny_model("llama"))
    trainer = _trainer(target, random_lora(target))
    batch = answers_of(torch.randint(3, 61, (4, 20), generator=torch.Generator().manual_seed(5)), 4, 5)
    states, results = base_states(target, batch.ids, (), 0), []
    for most in (train.MAX_LOGITS, 2 * 4 * 3 * target.vocab_size):  # two anchors at once
        monkeypatch.setattr(train, "MAX_LOGITS", most)
        loss, right = trainer.loss(states, batch)
        results.append((loss.detach(), right, *torch.autograd.grad(loss, list(trainer.module.parameters()))))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*results, strict=True))
    assert batch.anchors.at.shape[1] > 2


def test_later_rows_and_their_noise_change_no_earlier_row(target: Target) -> None:
    method = UNO(target, UNOOptions(block=6), random_lora(target))
    few, many = draft_rows(method, 3)[0], draft_rows(method, 6)[0]
    assert torch.allclose(few, many[:3], atol=1e-4)


@pytest.mark.skipif(cpu.kernels() is None, reason="there are no native kernels")
@pytest.mark.parametrize("numbers", ["float32", "float16-weights", "bfloat16"])
def test_native_kernels_compute_what_torch_does(numbers: str) -> None:
    """The first row has the bits of autoregressive decoding; one matrix has no LoRA."""
    model = tiny_model("qwen3", layers=2)
    model.config.intermediate_size = 64  # whole panels, which the native MLP needs
    torch.manual_seed(1)
    model = type(model)(model.config).to(torch.bfloat16 if numbers == "bfloat16" else torch.float32)
    target = Target(model, fp16_weights=numbers == "float16-weights")
    lora = random_lora(target, rank=5)
    pairs = {name: (2 * a, 4 * b) for name, (a, b) in lora.pairs.items() if "layers.0.self_attn.k_proj" not in name}
    method = UNO(target, UNOOptions(block=6), RowLora(pairs, 1.5))
    assert all(block.native is not None and block.native.has_mlp for block in method.blocks)
    native, _ = draft_rows(method, 6)
    for block in method.blocks:
        block.native = None
    by_torch, _ = draft_rows(method, 6)
    for block, own in zip(method.blocks, target.family.blocks, strict=True):
        block.native = own.native
    without, _ = draft_rows(method, 6)
    effect, error = (native - without)[1:].float().norm(), (native - by_torch).float().norm()
    assert error < (0.1 if numbers == "bfloat16" else 1e-4) * effect
    assert torch.equal(native[0].float(), step_logits(target, PROMPT))


def step_logits(target: Target, prompt: list[int]) -> Tensor:
    """Return float32 logits [V] of a decoding step behind a prompt."""
    with torch.inference_mode():
        cache = target.new_cache(64)
        target.prefill(torch.tensor([prompt[:-1]]), cache)
        return target.forward_tree(DraftTree.root_only(torch.tensor(prompt[-1:])), cache).logits[0, 0].float()


def test_noise_is_repeatable_and_varied() -> None:
    at, roots, table = torch.arange(500), torch.full((500,), 7), noise_table(1000, 5, torch.device("cpu"))
    noise = noise_tokens(table, at, roots)
    assert noise.min() >= 0 and noise.max() < 1000 and len(noise.unique()) > 800
    shorter = noise_tokens(noise_table(1000, 3, torch.device("cpu")), at, roots)
    assert torch.equal(noise[:, :3], shorter)  # a longer block begins with the same noise
    assert not torch.equal(noise, noise_tokens(table, at, roots + 1))


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    target = Target(tiny_model("llama"))
    trainer = _trainer(target, random_lora(target), block=6)
    trainer.save(tmp_path, {})
    method = load_method("uno", target, weights=str(tmp_path))
    assert method.metadata()["block"] == 6 and method.metadata()["rank"] == 3
    read = method.drafter.pairs
    for name, pair in trainer.module.pairs.items():
        assert all(torch.allclose(a, b, atol=1e-3) for a, b in zip(read[name], pair, strict=True))


def test_the_tree_begins_with_the_target_s_token() -> None:
    target = Target(tiny_model("llama"))
    method = UNO(target, UNOOptions(block=4, mode="tree", nodes=9, k=3), random_lora(target))
    with torch.inference_mode():
        cache = target.request_cache(64)
        target.prefill(torch.tensor([PROMPT[:-1]]), cache)
        state = DecodeState(PROMPT, len(PROMPT), torch.tensor(PROMPT[-1:]), cache, SamplingParams())
        tree = method.propose(state)
    assert tree.topology.children()[0] == [1] and len(tree) == 10
    assert int(tree.tokens[1]) == int(target.next_logits(PROMPT).argmax())


@few(1)
@pytest.mark.parametrize("on_access", [False, True])
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_a_drawn_child_with_deterministic_ones_below_leaves_the_distribution_alone(
    on_access: bool, scale: float
) -> None:
    """Count the first two tokens. scale: below 1, q of the first one differs from p; else it is always accepted."""
    first, second = torch.tensor([1.0, 0.2, -1.0]), torch.tensor([[0.5, 1.0, -1.0], [2.0, 0.0, 0.3], [0.0, 0.1, 0.2]])
    p, after, q = first.softmax(-1), second.softmax(-1), (scale * first).softmax(-1)[None]
    sampling, counts = SamplingParams(1.0), torch.zeros(3, 3)
    for seed in range(2000):
        rng = torch.Generator().manual_seed(seed)
        drawn = torch.multinomial(q[0], 1, generator=rng)
        tree = DraftTree.from_parents(torch.cat((torch.tensor([0]), drawn, torch.tensor([1, 0]))), [-1, 0, 1, 1], q)
        logits = torch.stack((first, second[drawn[0]], first, first))
        probs = LazyTargetProbs(logits, sampling) if on_access else sampling.probs(logits)
        result = verify_sampled(probs, tree, rng)
        assert result.accepted or scale < 1  # q = p
        tokens = result.tokens
        tokens += [] if len(tokens) > 1 else torch.multinomial(after[tokens[0]], 1, generator=rng).tolist()
        counts[tokens[0], tokens[1]] += 1
    expected = 2000 * p[:, None] * after
    assert chisquare(counts.flatten(), expected.flatten(), sum_check=False).pvalue > 1e-3


def test_a_sampled_tree_has_one_drawn_token() -> None:
    """Its candidates are then what a record of the output tests: q of the first token alone."""
    target = Target(tiny_model("llama"))
    method = UNO(target, UNOOptions(block=4, mode="tree", nodes=9, k=3), random_lora(target))
    with torch.inference_mode():
        cache = target.request_cache(64)
        target.prefill(torch.tensor([PROMPT[:-1]]), cache)
        state = DecodeState(PROMPT, len(PROMPT), torch.tensor(PROMPT[-1:]), cache, SamplingParams(0.7))
        trees = [method.propose(replace(state, rng=torch.Generator().manual_seed(seed))) for seed in range(20)]
    assert len({int(tree.tokens[1]) for tree in trees}) > 5
    assert all(torch.equal(tree.tokens[2:], trees[0].tokens[2:]) and len(tree) == 10 for tree in trees)
    tree, p = trees[0], state.sampling.probs(step_logits(target, PROMPT))
    assert tree.draft_probs is not None and torch.allclose(tree.draft_probs, p[None], atol=1e-5)
    q = tree.token_probs()
    assert q is not None and q[1] == tree.draft_probs[0, tree.tokens[1]] and (q[2:] == 1).all()
    path = [0, 1, tree.topology.children()[1][0]]
    first, second, _ = offers([candidates(tree, path, state.sampling)])
    assert first.q == pytest.approx(float(p[tree.tokens[1]]), rel=1e-3) and second.q is None and second.tokens
    assert not verifies_as_block(tree, SamplingParams(0.7, verification="block"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"r": 0}, "r = 0"),
        ({"peft_type": "IA3"}, "peft_type|LORA"),
        ({"rank_pattern": {"q_proj": 3}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": 3}}, "alpha_pattern"),
        ({"bias": "all"}, "bias"),
    ],
    ids=str,
)
def test_other_adapters_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    target = Target(tiny_model("llama"))
    _trainer(target).save(tmp_path, {})
    config = json.loads((tmp_path / ADAPTER_CONFIG).read_text()) | change
    (tmp_path / ADAPTER_CONFIG).write_text(json.dumps(config))
    with pytest.raises(UserError, match=message):
        load_method("uno", target, weights=str(tmp_path))


def test_a_lora_of_another_base_is_refused(tmp_path: Path) -> None:
    _trainer(Target(tiny_model("llama"))).save(tmp_path, {})
    with pytest.raises(UserError, match="another model|no matrix"):
        load_method("uno", Target(tiny_model("opt")), weights=str(tmp_path))
    (tmp_path / ADAPTER).unlink()
    with pytest.raises(UserError, match=ADAPTER):
        load_method("uno", Target(tiny_model("llama")), weights=str(tmp_path))


def test_a_lora_of_another_base_of_equal_shapes_is_noticed(tmp_path: Path) -> None:
    """By the name that training writes, if there is no config.json with a hash."""
    target = Target(tiny_model("llama"), name="someone/model-a")
    _trainer(target).save(tmp_path, {})
    (tmp_path / "config.json").unlink()
    other = Target(tiny_model("llama"), name="someone/model-b")
    with pytest.warns(UserWarning, match="trained on someone/model-a; this model is someone/model-b"):
        load_method("uno", other, weights=str(tmp_path))
    local = Target(tiny_model("llama"), name="someone/model-b", folder=tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for same in (target, local):
            load_method("uno", same, weights=str(tmp_path))
    _trainer(local).save(tmp_path, {})
    assert json.loads((tmp_path / ADAPTER_CONFIG).read_text())["base_model_name_or_path"] == ""  # no local path


def test_a_tree_keeps_its_budget_when_sampling() -> None:
    target = Target(tiny_model("llama"))
    method = UNO(target, UNOOptions(block=8, mode="tree", nodes=3), random_lora(target))
    output = generate(method, PROMPT, max_new_tokens=12, temperature=1.0)
    assert all(step.draft_nodes <= 3 for step in output.steps)


def test_gradients_reach_every_matrix_of_a_large_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepacked products, which have no gradient, are for inference."""
    monkeypatch.setattr(cpu, "supports", lambda *_: False)
    target = Target(tiny_model("llama"))
    trainer = _trainer(target)
    batch = answers_of(torch.randint(3, 61, (2, 20), generator=torch.Generator().manual_seed(5)), 4, 5)
    trainer.loss(base_states(target, batch.ids, (), 0), batch)[0].backward()
    for name, up in zip(trainer.module.names, trainer.module.up, strict=True):
        assert up.grad is not None and up.grad.abs().max() > 0, name


def test_a_draft_pass_costs_a_pass_of_the_target_and_the_lora() -> None:
    target = Target(tiny_model("llama"))
    lora = random_lora(target)
    shape = drafter_shape(UNO(target, UNOOptions(), lora).drafter_weights(), target)
    layers = bytes_read(list(target.model.model.layers.parameters()))
    assert shape is not None and shape["weight_bytes"] > layers + bytes_read(list(lora.parameters()))
