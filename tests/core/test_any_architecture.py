"""A target drives the layers of any decoder, answers as the model itself does, and refuses what it cannot drive."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from specbench_ss.cli.main import main
from specbench_ss.conformance import check_decoder
from specbench_ss.engine.costs import model_shape
from specbench_ss.engine.decoder import Decoder, DecodeState
from specbench_ss.engine.generate import StopParams, generate
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.target import Target
from specbench_ss.engine.tree import DraftTree
from specbench_ss.methods._shared.fine_tuned import lora_parameters, with_lora
from specbench_ss.methods.ar import Autoregressive
from specbench_ss.methods.medusa.decode import Medusa, MedusaOptions
from specbench_ss.methods.pld import PromptLookup
from specbench_ss.models.load import load_model_info, load_target
from specbench_ss.models.tiny import WHOLE
from specbench_ss.results.cost_model import counted
from tests.architectures import BY_CONFIGURATION, DRIVEN, TRIED, VOCAB, random_model
from tests.checks import plain
from tests.cli import failing
from tests.methods.train.tokenizers_made import made_tokenizer
from tests.tiny import THOROUGH, few, thorough

PROMPT, TOKENS = [5, 9, 11, 6, 30, 22, 41, 8], 30  # past the windows, which are 9 wide


class Branches(Decoder):
    """Drafts trees whose right path, known to it, changes sides and length from step to step."""

    name, summary = "branches", "knows the answer"

    def __init__(self, target: Target, answer: list[int]) -> None:
        super().__init__(target)
        self.text = PROMPT + answer
        self.turn = itertools.cycle((2, 0, 3, 1))

    def propose(self, state: DecodeState) -> DraftTree:
        at, right = len(state.ids), next(self.turn)
        tokens, parents, parent = [state.ids[-1]], [-1], 0
        for depth, token in enumerate(self.text[at : at + 3]):
            wrong = [(token + i) % VOCAB for i in (1, 2)]
            pair = [*wrong, token if depth < right else (token + 3) % VOCAB]
            parents += [parent] * 3
            tokens += pair
            parent = len(tokens) - 1
        return DraftTree.from_parents(tokens, parents)


@few(4)
@pytest.mark.parametrize("kind", TRIED)
def test_answers_are_the_models_own(kind: str) -> None:
    """Of autoregressive decoding and of trees; the model generates with eager attention, before it is driven."""
    model = random_model(DRIVEN[kind], seed=1)
    ids = torch.tensor([PROMPT])
    theirs = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False, eos_token_id=None,
        pad_token_id=0,
    )[0, len(PROMPT) :].tolist()  # fmt: skip
    target = Target(model)
    assert not target.has_layer_access
    assert generate(Autoregressive(target), PROMPT, StopParams(TOKENS), SamplingParams()).tokens == theirs
    drafted = generate(Branches(target, theirs), PROMPT, StopParams(TOKENS), SamplingParams())
    assert drafted.tokens == theirs
    assert len(drafted.steps) < 16, "half of the tokens and more are drafted"
    assert len(set(theirs)) > 4, "an answer of one token would prove little"


@few(1)
@pytest.mark.parametrize("kind", WHOLE)
def test_methods_that_enter_no_layer_pass_the_checks(kind: str) -> None:
    """Those about passes through the target and its cache; methods have more shapes, checks more cases."""
    reported = ("target", "rows", "cache", "model", "greedy", "context", "lengths")
    check_decoder(
        PromptLookup, architectures=(kind,), checks=[check for check in plain(0) if THOROUGH or check.name in reported]
    )


@pytest.mark.parametrize("kind", ["gemma3_text", "gpt2", "qwen3_moe"])
def test_the_loaded_model_and_the_random_state_stay_as_they_are(kind: str) -> None:
    model = random_model(DRIVEN[kind])
    weights, config = copy.deepcopy(model.state_dict()), model.config.to_dict()
    before = torch.get_rng_state()
    Target(model)
    assert torch.equal(torch.get_rng_state(), before)
    assert model.config.to_dict() == config
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())
    assert not [m for m in model.modules() if "forward" in m.__dict__ or m._forward_hooks or m._forward_pre_hooks]


def test_windows_are_those_of_the_configuration() -> None:
    assert Target(random_model(DRIVEN["gemma3_text"])).windows == [9, None, 9]
    assert Target(random_model(DRIVEN["starcoder2"])).windows == [9, 9, 9]
    assert Target(random_model(DRIVEN["olmo2"])).windows == [None, None, None]


@pytest.mark.parametrize("kind", ["gpt2", "granite", "gemma2"])
def test_logits_of_any_shape_can_be_learnt_from(kind: str) -> None:
    """Training asks for logits of states [n, h] and [B, n, k, h], and for what they mean for the states."""
    target = Target(random_model(DRIVEN[kind]))
    states = torch.randn(2, 3, 4, target.hidden_size, requires_grad=True)
    logits = target.logits(states)
    assert logits.shape == (2, 3, 4, VOCAB)
    torch.testing.assert_close(target.logits(states[1, 2]), logits[1, 2])
    logits.square().sum().backward()
    assert states.grad is not None and float(states.grad.abs().min()) > 0


def test_costs_are_counted_where_shapes_report_them() -> None:
    gemma, experts = (model_shape(Target(random_model(DRIVEN[kind]))) for kind in ("gemma3_text", "qwen3_moe"))
    assert gemma["kv_bytes"] == 2 * 2 * 8 * 4 and gemma["attention_flops"] == 4 * 4 * 8
    assert gemma["windows"] == [9, None, 9] and gemma["weight_bytes"] > 0
    assert experts["weight_bytes"] is None and experts["matrix_parameters"] is None
    assert counted([], experts) is None


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Models on the disk, with a tokenizer."""
    tokenizer = made_tokenizer("gpt", "chatml")
    found = {}
    configs = DRIVEN | {kind: BY_CONFIGURATION[kind][0] for kind in ("mamba", "falcon")}
    for kind in ("gpt2", "gptj", "gemma3_text", "mamba", "falcon"):
        folder = tmp_path_factory.mktemp(kind)
        config = copy.deepcopy(configs[kind])
        config.vocab_size = len(tokenizer)
        random_model(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        found[kind] = str(folder)
    yield found


@pytest.mark.parametrize("kind", ["gpt2", "gptj"])
def test_a_folder_is_loaded_and_answers(folders: dict[str, str], kind: str) -> None:
    """GPT-J has eager attention alone, which the loader must not ask to be another."""
    target = load_target(folders[kind], device="cpu", dtype="float32")
    assert load_model_info(folders[kind]).context_length == target.context_length == 128
    assert len(generate(Autoregressive(target), PROMPT, StopParams(5), SamplingParams()).tokens) == 5


@thorough
def test_heads_are_trained_for_a_model_that_is_not_taken_apart(
    folders: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SSBENCH_CACHE", str(tmp_path / "cache"))
    rows = ({"prompt": f"What is {i} and {i}?", "completion": f"It is {2 * i}, I think."} for i in range(12))
    chats, out = tmp_path / "chats.jsonl", tmp_path / "out"
    chats.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ["--model", folders["gemma3_text"], "--data", str(chats), "--out", str(out), "--device", "cpu"]
    budget = ["--steps", "2", "--batch-size", "2", "--length", "64"]
    assert main(["train", "medusa", *given, *budget]) == 0
    target = load_target(folders["gemma3_text"], device="cpu", dtype="float32")
    drafted = generate(
        Medusa.load(target, MedusaOptions(weights=str(out))), PROMPT, StopParams(TOKENS), SamplingParams()
    )
    assert drafted.tokens == generate(Autoregressive(target), PROMPT, StopParams(TOKENS), SamplingParams()).tokens
    for method in ("ss", "uno"):
        assert f"{method} needs a model of type" in failing(["train", method, *given, *budget], capsys)


def test_a_model_with_lora_is_driven_too() -> None:
    target = Target(random_model(DRIVEN["gemma3_text"]))
    tuned = with_lora(target, 4)
    assert torch.equal(tuned.next_logits(PROMPT), target.next_logits(PROMPT)), "LoRA that has learnt nothing"
    lora = lora_parameters(tuned.model)
    for p in lora:
        torch.nn.init.normal_(p)
    assert not torch.equal(tuned.next_logits(PROMPT), target.next_logits(PROMPT))


def test_refusals_are_one_line_of_the_command(
    folders: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked, out = tmp_path / "asked.jsonl", tmp_path / "run"
    asked.write_text('{"prompt": "What is it?"}\n')

    def run(kind: str, methods: str) -> list[str]:
        given = ["run", "--model", folders[kind], "--methods", methods, "--suite", "jsonl", "--data", str(asked)]
        return [*given, "--out", str(out), "--device", "cpu"]

    line = failing(run("gpt2", "ss"), capsys)
    assert "ss needs a model of type gpt_neox, llama, " in line
    assert "has type 'gpt2'" in line
    assert "uno needs a model of type gpt_neox, llama, " in failing(run("gpt2", "uno"), capsys)
    assert "it has recurrent layers" in failing(run("mamba", "pld"), capsys)
    assert main(run("falcon", "pld")) == 2
    assert "ssbench: model type 'falcon' cannot be used: its layers take 'alibi'" in capsys.readouterr().err
    assert not out.exists()
    assert main(["models", "check", folders["gpt2"], "ss"]) == 2
    assert "ssbench: ss needs a model of type" in capsys.readouterr().err
    assert main(["models", "check", folders["gpt2"], "pld"]) == 0
    assert "which loading checks" in capsys.readouterr().out
