"""Models that give NaN or infinity: refused when they are loaded, named when they answer; drafters alike."""

from __future__ import annotations

import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from specbench_ss import generate, load_method, load_model, run
from specbench_ss.cli.main import main
from specbench_ss.conformance import tiny_target
from specbench_ss.engine.checks import NotFinite
from specbench_ss.engine.cuda_graphs import CudaGraphRunner
from specbench_ss.engine.decoder import Decoder, DecodeState
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.target import Output, Target
from specbench_ss.engine.tree import DraftTree
from specbench_ss.engine.verify import VerifyResult, verify_sampled
from specbench_ss.errors import UserError
from specbench_ss.methods._shared.lossy_acceptance import accept_per_path, accept_resampled, accept_typical
from specbench_ss.methods.ar import Autoregressive
from specbench_ss.models.resolve import LAB
from tests.cli import failing
from tests.frozen import frozen
from tests.tiny import few, thorough

PROMPT = [3, 4, 5, 3, 4, 6, 3, 4]
DRAFTERS = ("sd", "medusa", "medusa2", "hydra", "eagle", "eagle2", "eagle3", "ss", "ss-shared", "space")


def poisoned(target: Target, value: float = math.nan) -> Target:
    with torch.inference_mode():
        model: Any = target.model
        model.get_decoder().norm.weight[0] = value
    return target


def poison_file(file: Path, value: float = math.nan) -> str:
    """One number of the first tensor of floats; its name."""
    tensors = load_file(file)
    name = next(name for name, tensor in tensors.items() if tensor.is_floating_point())
    tensors[name].view(-1)[0] = value
    save_file(tensors, file, {"format": "pt"})
    return name


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", ["ar", "pld"])
def test_a_target_that_gives_nan_does_not_answer(method: str, temperature: float, value: float) -> None:
    decoder = load_method(method, poisoned(tiny_target("llama"), value))
    with pytest.raises(UserError, match="the target's logits are not finite: its weights or states hold NaN"):
        generate(decoder, PROMPT, max_new_tokens=6, temperature=temperature)


class OwnRule(Decoder):
    """Its rule shows nothing of the logits."""

    name, summary = "own", "an acceptance rule of its own"

    def propose(self, state: DecodeState) -> DraftTree:
        return DraftTree.root_only(state.root)

    def accept(self, state: DecodeState, tree: DraftTree, output: Output) -> VerifyResult:
        token = output.logits[0, 0].argmax()[None]
        return VerifyResult([0], [int(token)], token)


@pytest.mark.parametrize("kind", [Autoregressive, OwnRule])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_that_begins_in_the_midst_of_an_answer_is_seen(kind: type[Decoder], temperature: float) -> None:
    """At positions that the prompt does not reach; behind a rule of the method's own as well."""
    target = tiny_target("opt")
    with torch.inference_mode():
        model: Any = target.model
        model.get_decoder().embed_positions.weight[2 + len(PROMPT) + 3 :] = math.nan
    decoder = kind(target)
    assert len(generate(decoder, PROMPT, max_new_tokens=4, temperature=temperature, stop_ids=()).tokens) == 4
    with pytest.raises(NotFinite):
        generate(decoder, PROMPT, max_new_tokens=5, temperature=temperature, stop_ids=())


def test_lossy_rules_name_nan_before_they_draw_from_it() -> None:
    """Drawing from it is an error of its own, on a GPU one that ends the device's work."""
    tree, sampling, rng = (
        DraftTree.from_parents([3, 1, 1], [-1, 0, 0]),
        SamplingParams(0.5),
        torch.Generator().manual_seed(0),
    )
    logits = torch.full((3, 5), math.nan)
    for rule in (
        lambda: accept_per_path(logits, tree, sampling, rng),
        lambda: accept_resampled(logits, tree, torch.ones(3), sampling, rng),
        lambda: accept_typical(logits, tree, sampling),
    ):
        with pytest.raises(NotFinite):
            rule()


@pytest.mark.parametrize("bad", [0, 1])
def test_nan_is_seen_where_all_rows_are_filtered_at_once(bad: int) -> None:
    """As on a GPU; only of nodes that are reached."""
    tree = DraftTree.from_parents(torch.tensor([3, 1, 1]), [-1, 0, 0])
    logits = torch.full((3, 5), -9.0)
    logits[:, 1] = 9.0  # node 1 is accepted
    sampling, rng = SamplingParams(0.5), torch.Generator().manual_seed(0)
    logits[2] = math.nan
    assert verify_sampled(sampling.probs(logits), tree, rng).path == [0, 1]
    logits[bad, 4] = math.nan
    with pytest.raises(NotFinite):
        verify_sampled(sampling.probs(logits), tree, rng)


@thorough
def test_a_model_with_nan_is_not_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "base"
    shutil.copytree(LAB / "base", folder)
    shutil.copy(LAB / "lab.json", tmp_path)  # so that it is asked the lab's own questions
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = math.nan
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    stated = failing(
        ["run", "--methods", "pld", "--model", str(folder), "--limit", "1", "--out", str(tmp_path / "o")], capsys
    )
    assert "its logits after a short prompt are not finite" in stated
    assert not (tmp_path / "o").exists()
    assert main(["models", "check", str(folder), "pld"]) == 0
    assert "finite weights and logits" in capsys.readouterr().out
    target = load_model("lab")
    poisoned(target)
    with pytest.raises(UserError, match="cannot be used"):
        run("pld", model=target, out=tmp_path / "p")


@pytest.fixture(scope="module")
def lab() -> Target:
    return load_model("lab")


def folder_of(method: str) -> Path:
    return LAB / {"sd": "draft", "eagle2": "eagle"}.get(method, method)


@pytest.mark.parametrize("method", DRAFTERS)
def test_a_drafter_with_nan_in_its_file_is_not_loaded(method: str, lab: Target, tmp_path: Path) -> None:
    folder = tmp_path / "drafter"
    shutil.copytree(folder_of(method), folder)
    name = poison_file(next(folder.glob("*.safetensors")))
    stated = "sd: the draft: model .* cannot be used" if method == "sd" else rf"tensor {re.escape(name)} has NaN"
    with pytest.raises(UserError, match=stated):
        load_method(method, lab, weights=str(folder))


def modules_of(decoder: Decoder) -> list[nn.Module]:
    """The drafter's own, whatever the method calls it."""
    draft = getattr(decoder, "draft", None)
    found = [value for value in vars(decoder).values() if isinstance(value, nn.Module)]
    return found or ([draft.model.model] if draft is not None else [])


@few(4)
@pytest.mark.parametrize("temperature", [0.0, pytest.param(0.8, marks=thorough)])
@pytest.mark.parametrize("method", DRAFTERS)
def test_a_drafter_that_gives_nan_is_named(method: str, temperature: float) -> None:
    """In its weights once they are loaded: as states that overflow, which no file shows."""
    decoder = load_method(method, load_model("lab"))
    for module in modules_of(decoder):
        with torch.inference_mode():
            for p in module.parameters():
                p.fill_(math.nan)
    stated = f"{method}: the drafter's scores are not finite|the draft's probabilities are not finite"
    own_model = (
        "|the target's logits are not finite" if method in ("ss-shared", "space") else ""
    )  # streams that rows see
    with pytest.raises(UserError, match=stated + own_model):
        for seed in range(3):
            generate(decoder, list(range(5, 25)), max_new_tokens=12, temperature=temperature, seed=seed)


@few(1)
@pytest.mark.usefixtures("torch_kernels")
@pytest.mark.parametrize("method", ["medusa", "hydra", "eagle"])
def test_a_drafter_that_gives_nan_is_named_where_it_is_replayed(method: str) -> None:
    """Choices within a replay cannot be observed: the answer is begun again eagerly."""
    decoder = load_method(method, load_model("lab"))
    decoder.target.graphs = CudaGraphRunner(frozen)
    prompt = list(range(5, 25))
    generate(decoder, prompt, max_new_tokens=12)
    for module in modules_of(decoder):
        for p in module.parameters():
            p.data = torch.full_like(p, math.nan)
    decoder.target.graphs.evict()
    for _ in range(2):
        with pytest.raises(UserError, match=f"{method}: the drafter's scores are not finite"):
            generate(decoder, prompt, max_new_tokens=12)
    assert decoder.target.graphs.n_captures


class Hopeless(Decoder):
    """Drafts what is never right."""

    name, summary = "hopeless", "wrong"
    asked = 0

    def propose(self, state: DecodeState) -> DraftTree:
        self.asked += 1
        best = int(self.target.next_logits(state.ids).argmin())
        return DraftTree.chain(state.root, torch.tensor([best]))


def test_an_answer_without_a_drafted_token_is_begun_again_to_look_at_the_drafts() -> None:
    decoder = Hopeless(tiny_target("llama"))
    result = generate(decoder, PROMPT, max_new_tokens=8)
    assert all(step.accepted_tokens == 0 for step in result.steps)
    assert decoder.asked == len(result.steps) + 3
    decoder.asked, decoder.stateful = 0, True  # what it would learn from a second time may be worth something
    generate(decoder, PROMPT, max_new_tokens=8)
    assert decoder.asked == len(result.steps)
