"""SPACE: its output is its own model's, masks see what they were trained to see, and bad files are reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specbench_ss.engine.decoder import DecodeState
from specbench_ss.engine.generate import StopParams, generate
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.target import Output, Target
from specbench_ss.engine.tree import DraftTree
from specbench_ss.engine.verify import VerifyResult
from specbench_ss.errors import UserError
from specbench_ss.methods.ar import Autoregressive
from specbench_ss.methods.space.decode import SPACE, SPACEAROptions, SPACEAutoregressive, SPACEOptions
from specbench_ss.methods.space.model import MaskToken, rows_of, save
from specbench_ss.methods.space.train import MaskOptions, SPACETrainer
from specbench_ss.models.load import load_target
from specbench_ss.training.batch import Anchors, BaseStates, Batch
from specbench_ss.training.loop import Budget, DrafterLoop
from specbench_ss.training.masks import Documents
from specbench_ss.training.session import run
from specbench_ss.training.trainer import TrainConfig
from tests.methods.batches import plain_text
from tests.methods.decoders import randomise
from tests.methods.exactness import assert_greedy_same, p_value
from tests.methods.train.tokenizers_made import made_tokenizer
from tests.tiny import SOME, WITHOUT_WINDOW, few, thorough, tiny_model

PROMPT = [5, 6, 7, 8, 9, 10, 11]
EMPTY = BaseStates(torch.empty(0), {}, {})


class Oracle(SPACE):
    """Drafts what its own model will state, or, from the place `wrong` on, something else: so that paths are long."""

    answer: list[int]
    wrong = 99

    def propose(self, state: DecodeState) -> DraftTree:
        stated = len(state.ids) - state.prompt_tokens
        true = (self.answer[stated : stated + self.k] + [3] * self.k)[: self.k]
        drafted = [x if i < self.wrong else (x + 1) % self.target.vocab_size for i, x in enumerate(true)]
        return DraftTree.chain(state.root, torch.tensor(drafted))


def masked(target: Target, k: int = 3, seed: int = 1, mask_id: int = 0) -> MaskToken:
    mask = MaskToken(target.hidden_size, k, mask_id)
    randomise(mask, seed)
    return mask


@pytest.fixture(scope="module", params=SOME)
def target(request: pytest.FixtureRequest) -> Target:
    return Target(tiny_model(request.param))


@few(3)
@pytest.mark.parametrize("wrong", [0, 1, 99])
def test_the_next_masks_are_those_of_a_fresh_pass(target: Target, wrong: int) -> None:
    """After each step, the masks behind the last accepted token are as if the text so far were the prompt."""
    reference = generate(Autoregressive(target), PROMPT, StopParams(40), SamplingParams()).tokens

    class Watched(Oracle):
        answer = reference

        def update(self, state: DecodeState, result: VerifyResult, output: Output) -> None:
            super().update(state, result, output)
            fresh = SPACE(self.target, self.options, self.mask)
            cache = self.target.new_cache(len(state.ids) + fresh.max_tokens_per_step())
            fresh.prefill(state_of(state.ids, cache), torch.tensor([state.ids[:-1]]))
            assert torch.allclose(self.mask_states, fresh.mask_states, atol=2e-4)

    Watched.wrong = wrong
    found = generate(Watched(target, SPACEOptions(), masked(target)), PROMPT, StopParams(40), SamplingParams())
    assert found.tokens == reference
    assert max(s.accepted_tokens for s in found.steps) == min(wrong, 3)


def state_of(ids: list[int], cache: Any) -> DecodeState:
    return DecodeState(ids, len(ids), torch.tensor(ids[-1:]), cache, SamplingParams())


def test_positions_end_with_the_context() -> None:
    for kind in ("llama", "opt"):  # a table of rotations, a table of embeddings
        target = Target(tiny_model(kind))
        answer = generate(Autoregressive(target), PROMPT, StopParams(500), SamplingParams()).tokens
        Oracle.answer, Oracle.wrong = answer, 99
        found = generate(Oracle(target, SPACEOptions(), masked(target, 5)), PROMPT, StopParams(500), SamplingParams())
        assert found.tokens == answer and found.finish == "context"
        longest = [1 + i % 60 for i in range(target.context_length - 1)]
        decoder = SPACE(target, SPACEOptions(), masked(target, 5))
        assert len(generate(decoder, longest, StopParams(9), SamplingParams()).tokens) == 1


def test_rows_are_a_chain_and_a_group_behind_each_node() -> None:
    shape = rows_of(3, 2)
    assert shape.parents == (-1, 0, 1, 0, 3, 1, 5, 2, 7)
    assert shape.depths == (0, 1, 2, 1, 2, 2, 3, 3, 4)
    target = Target(tiny_model("llama"))
    assert SPACE(target, SPACEOptions(), masked(target, 5)).max_tokens_per_step() == 36 == len(rows_of(6, 5).parents)


@thorough
def test_the_published_rule_is_reported_and_differs() -> None:
    target = Target(tiny_model("llama", vocab=7, layers=2))
    biased = SPACE.test_instances(target)["resample"]()
    assert SPACE.lossless and not biased.lossless
    assert p_value(biased, [3, 4, 5], SamplingParams(0.5)) < 1e-5


# -- training sees what decoding sees -------------------------------------------------------------------------------


def trained(kind: str, k: int = 3) -> tuple[Target, SPACETrainer]:
    """A trainee with random LoRA and mask on a tiny base."""
    target = Target(tiny_model(kind))
    trainee = SPACETrainer(target, MaskOptions(k, 4))
    randomise(trainee.module, 2, std=0.2)
    return target, trainee


@pytest.mark.parametrize("kind", WITHOUT_WINDOW)
def test_training_sees_what_decoding_sees(kind: str, tmp_path: Path) -> None:
    """Two texts in a row: at every anchor the masks' states are those of a prompt that ends there."""
    target, trainee = trained(kind)
    save(tmp_path, trainee.mask, trainee.tuned, {})
    decoder = SPACE.load(target, SPACEOptions(weights=str(tmp_path)))
    texts = [[5, 6, 7, 8, 9], [12, 13, 14, 15]]
    ids = torch.tensor([[*texts[0], *texts[1], 0]])
    numbers, places = torch.tensor([[0] * 5 + [1] * 4 + [-1]]), torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 0]])
    with torch.inference_mode():
        main, masks = trainee.states(ids, torch.tensor([[4, 2, 7]]), Documents(numbers, places))
        for i, prompt in enumerate((texts[0], texts[0][:3], texts[1][:3])):
            cache = decoder.target.new_cache(99)
            out = decoder.prefill(state_of(prompt, cache), torch.tensor([prompt]))
            assert torch.allclose(masks[0, i], decoder.mask_states, atol=2e-2)  # saved in float16
            at = (4, 2, 7)[i]
            assert torch.allclose(decoder.target.logits(main[:, at]), out.logits[:, 0], atol=5e-2)
        plain = trainee.states(ids[:, :5], torch.tensor([[2]]))[1]
        assert torch.allclose(plain[0, 0], masks[0, 1], atol=1e-4)


@few(1)
@pytest.mark.parametrize("kind", ["llama", "opt"])
def test_output_is_its_own_models(kind: str, tmp_path: Path) -> None:
    target, trainee = trained(kind)
    save(tmp_path, trainee.mask, trainee.tuned, {})
    before = generate(Autoregressive(target), PROMPT, StopParams(30), SamplingParams()).tokens
    reference = SPACEAutoregressive.load(target, SPACEAROptions(weights=str(tmp_path)))
    for k in (0, 1, 2):
        assert_greedy_same(SPACE.load(target, SPACEOptions(weights=str(tmp_path), k=k)), reference, 20)
    assert generate(Autoregressive(target), PROMPT, StopParams(30), SamplingParams()).tokens == before
    assert generate(reference, PROMPT, StopParams(30), SamplingParams()).tokens != before


@thorough
def test_it_learns(tmp_path: Path) -> None:
    """A text that counts: masks learn what comes, and next tokens are not forgotten."""
    target = Target(tiny_model("llama"))
    torch.manual_seed(0)
    trainee = SPACETrainer(target, MaskOptions(3, 8, mask_lr=5e-2), 2e-2)
    start = torch.arange(64)[:, None]
    rows = ((start + torch.arange(24)) % 50 + 5).int().numpy()
    text = plain_text(rows, rows >= 5)
    training = DrafterLoop(target, [trainee], text, Budget(60, 8, 8, 3, 5), tmp_path / "work")
    training.train(lambda _: None)
    assert min(training.outcomes["space"].top1_accuracy) > 0.5
    save(tmp_path, trainee.mask, trainee.tuned, {})
    decoder = SPACE.load(target, SPACEOptions(weights=str(tmp_path)))
    steps = generate(decoder, [10, 11, 12, 13], StopParams(20), SamplingParams()).steps
    assert sum(s.tokens for s in steps) / len(steps) > 1.5


def test_both_losses_are_of_their_own_places() -> None:
    target, trainee = trained("llama")
    ids = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12]])
    labels = torch.full((1, 8, 4), -100)
    labels[0, 3:7, 0] = ids[0, 4:]
    at = torch.tensor([[3, 4]])
    anchors = Anchors(at, torch.tensor([[[9, 10, 11, 12], [10, 11, 12, -100]]]))
    main, masks = trainee.states(ids, at)
    expected = torch.nn.functional.cross_entropy(trainee.tuned.logits(main[0, 3:7]), ids[0, 4:])
    per_mask = [
        torch.nn.functional.cross_entropy(trainee.tuned.logits(masks[0, :, j]), anchors.labels[0, :, j + 1])
        for j in range(3)
    ]
    loss, _ = trainee.loss(EMPTY, Batch(ids, labels, anchors))
    assert torch.allclose(loss, 0.5 * expected + 0.5 * sum(per_mask) / 3, atol=1e-4)


# -- published models, and what is wrong ----------------------------------------------------------------------------


def whole_model(folder: Path, vocab: int = 64) -> Any:
    """As published: a plain Llama whose vocabulary has room for the mask."""
    model = tiny_model("llama", seed=9, vocab=vocab)
    model.save_pretrained(folder)
    return model


def test_a_whole_model_with_the_mask_in_its_vocabulary(tmp_path: Path) -> None:
    model = whole_model(tmp_path)
    base, own = Target(tiny_model("llama")), Target(model)
    options = SPACEOptions(weights=str(tmp_path), mask_id=62)
    SPACE.check(options, base)
    decoder = SPACE.load(base, options)
    assert decoder.k == 5 and decoder.target.vocab_size == 64
    assert_greedy_same(decoder, SPACEAutoregressive.load(base, SPACEAROptions(str(tmp_path), 62)), 20)
    itself = SPACE.load(own, SPACEOptions(mask_id=62))
    assert itself.target is own
    # independently: the masks are the token itself behind the prompt
    ids = torch.tensor([[*PROMPT, *[62] * 5]])
    expected = model(ids).logits[0, -5:].argmax(-1)
    for found in (decoder, itself):
        state = state_of(PROMPT, found.target.new_cache(99))
        with torch.inference_mode():
            found.prefill(state, torch.tensor([PROMPT]))
            assert torch.equal(found.propose(state).tokens[1:], expected)


def reported(base: Target, **given: Any) -> str:
    with pytest.raises(UserError) as error:
        SPACE.check(SPACEOptions(**given), base)
    assert "\n" not in str(error.value) and "space" in str(error.value)
    return str(error.value)


def test_bad_models_are_reported(tmp_path: Path) -> None:
    target, trainee = trained("llama")
    ours, whole = tmp_path / "ours", tmp_path / "whole"
    save(ours, trainee.mask, trainee.tuned, {})
    SPACE.check(SPACEOptions(weights=str(ours)), target)
    assert "k must be 1 to 3" in reported(target, weights=str(ours), k=4)
    assert "mask_id is for a whole model" in reported(target, weights=str(ours), mask_id=3)
    assert "use --set space.weights" in reported(target)
    assert "mask_id must be 1 to 60" in reported(target, mask_id=61)
    whole_model(whole)
    assert "give its mask token" in reported(target, weights=str(whole))
    assert "mask_id must be 1 to 63" in reported(target, weights=str(whole), mask_id=64)
    whole_model(whole, vocab=50)
    assert "has 50 tokens" in reported(target, weights=str(whole), mask_id=3)
    tensors = load_file(ours / "model.safetensors")
    save_file({"offset": tensors["offset"][:9].contiguous()}, ours / "model.safetensors")
    assert "offset has shape (9,), the model needs (32,)" in reported(target, weights=str(ours))
    save_file({**tensors, "more": tensors["offset"].clone()}, ours / "model.safetensors")
    assert "unknown tensors: more" in reported(target, weights=str(ours))
    save_file(tensors, ours / "model.safetensors")
    config = json.loads((ours / "config.json").read_text())
    (ours / "config.json").write_text(json.dumps({**config, "base_hash": "another"}))
    target.weights_hash = "this"
    with pytest.raises(UserError, match="space was trained for another base"):
        SPACE.load(target, SPACEOptions(weights=str(ours)))
    (ours / "config.json").write_text(json.dumps({"space": {"masks": 3}}))
    assert "it lacks space.mask_id" in reported(target, weights=str(ours))
    (ours / "adapter_model.safetensors").unlink()
    with pytest.raises(UserError, match=r"no weight file .*adapter_model\.safetensors"):
        SPACE.check(SPACEOptions(weights=str(ours)), target)


@thorough
def test_the_trainer_writes_what_the_method_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSBENCH_CACHE", str(tmp_path / "cache"))
    tokenizer, model, out = made_tokenizer("gpt", "chatml"), tmp_path / "model", tmp_path / "out"
    tiny_model("llama", vocab=len(tokenizer)).save_pretrained(model)
    tokenizer.save_pretrained(model)
    rows = ({"prompt": f"What is {i} and {i}?", "completion": f"It is {2 * i}, I think."} for i in range(12))
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = (str(tmp_path / "chats.jsonl"),)
    config = TrainConfig(out=out, data=data, model=str(model), steps=2, batch_size=2, length=64, device="cpu", lr=0.02)
    run(SPACETrainer, MaskOptions(masks=2, lora_rank=4), config)
    target = load_target(str(model), device="cpu")
    decoder = SPACE.load(target, SPACEOptions(weights=str(out)))
    assert decoder.k == 2 and decoder.mask.offset.abs().max() > 0
    assert_greedy_same(decoder, SPACEAutoregressive.load(target, SPACEAROptions(str(out))), 12)


def test_masks_cannot_be_trained_behind_a_window() -> None:
    with pytest.raises(UserError, match="sliding window"):
        SPACETrainer(Target(tiny_model("mistral-window")))
