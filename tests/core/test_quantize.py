"""`--quantize`: weights of linear layers in fewer bits; what is computed with them, counted and recorded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specbench_ss import load_method, load_run, registry
from specbench_ss.cli.main import main
from specbench_ss.engine.costs import model_shape
from specbench_ss.engine.generate import StopParams, generate
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.target import Target
from specbench_ss.models import load
from specbench_ss.models import quantize as quantising
from specbench_ss.models.quantize import PACKAGES
from tests.cli import failing
from tests.quantised import needs, quantised_target, small_model
from tests.tiny import few, thorough

PROMPT = [5, 9, 5, 9, 5, 9, 7, 8]


def kept(how: str) -> tuple[Target, Target]:
    """A tiny model as it is, and with its weights kept so."""
    return Target(small_model(), None, "tiny"), quantised_target(how)


@pytest.mark.parametrize("how", ["int8", "nf4"])
def test_logits_are_near_those_of_the_model_and_the_head_is_its_own(how: str) -> None:
    needs(how)
    as_is, quantised = kept(how)
    assert quantised.quantised.startswith(f"{how}: weights of 28 linear layers, by {PACKAGES[how]} ")
    expected, given = as_is.next_logits(PROMPT), quantised.next_logits(PROMPT)
    off = float((given - expected).abs().max() / expected.abs().max())
    assert 0 < off < (0.1 if how == "int8" else 0.6)
    assert torch.equal(quantised.unembed, as_is.unembed)


@few(3)
@pytest.mark.parametrize("how", ["int8", "nf4"])
@pytest.mark.parametrize("name", ["pld", "lookahead", "medusa", "ss", "eagle3", "medusa2", "space"])
def test_methods_answer_as_plain_decoding_of_the_same_weights(how: str, name: str) -> None:
    needs(how)
    target = kept(how)[1]
    method = next(iter(registry.method_class(name).test_instances(target).values()))()
    plain = load_method("ar", method.target)
    assert method.target.quantised == target.quantised
    own, expected = (generate(one, PROMPT, StopParams(30), SamplingParams()).tokens for one in (method, plain))
    assert own == expected


@pytest.mark.parametrize("how", ["int8", "nf4"])
def test_bytes_are_those_that_are_kept_and_numbers_those_that_they_stand_for(how: str) -> None:
    needs(how)
    targets = kept(how)
    for target in targets:
        target.next_logits(PROMPT)  # in which bitsandbytes may put weights in another order
    as_is, quantised = (model_shape(target) for target in targets)
    assert quantised["matrix_parameters"] == as_is["matrix_parameters"]
    assert quantised["weight_bytes"] < as_is["weight_bytes"] * (0.6 if how == "int8" else 0.5)


@thorough
def test_a_run_states_how_weights_were_kept_and_others_state_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(quantising, "find_spec", lambda name: True)
    monkeypatch.setattr(load, "quantise", lambda model, how: "" if how == "none" else f"{how}: as a test has it")
    asked = ["run", "--methods", "pld", "--limit", "1", "--tasks", "math_reasoning", "--max-new-tokens", "8"]
    for how in ("none", "int8"):
        assert main([*asked, "--warmup", "0", "--quantize", how, "--out", str(tmp_path / how)]) == 0
    plain, quantised = (load_run(tmp_path / how).manifest["model"] for how in ("none", "int8"))
    assert "quantised" not in plain
    assert quantised["quantised"] == "int8: as a test has it"
    assert plain["hash"] == quantised["hash"]
    assert "quantization" in failing(["compare", str(tmp_path / "none"), str(tmp_path / "int8")], capsys)
