"""`--quantize`: weights of linear layers in fewer bits; what is computed with them, counted, recorded and refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from specbench_ss import load_method, load_model, load_run, registry
from specbench_ss.cli.main import main
from specbench_ss.engine.costs import model_shape
from specbench_ss.engine.generate import Limits, generate
from specbench_ss.engine.sampling import Sampling
from specbench_ss.engine.target import Target
from specbench_ss.errors import UserError
from specbench_ss.models import load
from specbench_ss.models import quantize as quantising
from specbench_ss.models.quantize import PACKAGES, quantise
from specbench_ss.models.tiny import tiny_model
from tests.cli import failing
from tests.quantised import needs, quantised_target, small_model

PROMPT = [5, 9, 5, 9, 5, 9, 7, 8]


def held(how: str) -> tuple[Target, Target]:
    """A tiny model as it is, and with its weights held so."""
    return Target(small_model(), None, "tiny"), quantised_target(how)


@pytest.mark.parametrize("how", ["int8", "nf4"])
def test_logits_are_near_those_of_the_model_and_the_head_is_its_own(how: str) -> None:
    needs(how)
    as_is, quantised = held(how)
    assert quantised.quantised.startswith(f"{how}: weights of 28 linear layers, by {PACKAGES[how]} ")
    expected, given = as_is.next_logits(PROMPT), quantised.next_logits(PROMPT)
    off = float((given - expected).abs().max() / expected.abs().max())
    assert 0 < off < (0.1 if how == "int8" else 0.6)
    assert torch.equal(quantised.unembed, as_is.unembed)


@pytest.mark.parametrize("how", ["int8", "nf4"])
@pytest.mark.parametrize("name", ["pld", "lookahead", "medusa", "ss", "eagle3", "medusa2", "space"])
def test_methods_answer_as_plain_decoding_of_the_same_weights(how: str, name: str) -> None:
    needs(how)
    target = held(how)[1]
    method = next(iter(registry.method_class(name).examples(target).values()))()
    plain = load_method("ar", method.target)
    assert method.target.quantised == target.quantised
    own, expected = (generate(one, PROMPT, Limits(30), Sampling()).tokens for one in (method, plain))
    assert own == expected


@pytest.mark.parametrize("how", ["int8", "nf4"])
def test_bytes_are_those_that_are_held_and_numbers_those_that_they_stand_for(how: str) -> None:
    needs(how)
    targets = held(how)
    for target in targets:
        target.next_logits(PROMPT)  # in which bitsandbytes may put weights in another order
    as_is, quantised = (model_shape(target) for target in targets)
    assert quantised["matrix_parameters"] == as_is["matrix_parameters"]
    assert quantised["weight_bytes"] < as_is["weight_bytes"] * (0.6 if how == "int8" else 0.5)


def test_nf4_leaves_rows_that_are_no_whole_blocks_as_they_are() -> None:
    with pytest.raises(UserError, match="nf4: the model has no linear layer that could be held so"):
        quantise(tiny_model("llama"), "nf4")


@pytest.mark.parametrize(
    ("how", "said"), [("int4", "int4 needs a CUDA device"), ("nf4", "needs the package"), ("int8", "needs the package")]
)
def test_what_cannot_be_held_so_is_one_line(
    how: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantising, "find_spec", lambda name: None)
    out = tmp_path / "run"
    assert said in failing(["run", "--methods", "pld", "--device", "cpu", "--quantize", how, "--out", str(out)], capsys)
    assert not out.exists()


def test_int4_says_that_torchao_needs_a_package_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantising, "find_spec", lambda name: None if name == "mslk" else True)
    with pytest.raises(UserError, match="--quantize int4 needs the package mslk"):
        quantising.check_quantize("int4", "cuda")


def test_a_model_that_the_package_cannot_take_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(model: Any, *rest: Any) -> None:
        raise NotImplementedError("no kernel\nand more")

    monkeypatch.setattr(quantising, "_nf4", fails)
    with pytest.raises(UserError, match="nf4 does not work with this model: NotImplementedError: no kernel$"):
        quantise(small_model(), "nf4")


def test_a_run_says_how_weights_were_held_and_others_say_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(quantising, "find_spec", lambda name: True)
    monkeypatch.setattr(load, "quantise", lambda model, how: "" if how == "none" else f"{how}: as a test has it")
    asked = ["run", "--methods", "pld", "--limit", "1", "--categories", "math_reasoning", "--max-new-tokens", "8"]
    for how in ("none", "int8"):
        assert main([*asked, "--warmup", "0", "--quantize", how, "--out", str(tmp_path / how)]) == 0
    plain, quantised = (load_run(tmp_path / how).manifest["model"] for how in ("none", "int8"))
    assert "quantised" not in plain
    assert quantised["quantised"] == "int8: as a test has it"
    assert plain["hash"] == quantised["hash"]
    assert "quantised weights" in failing(["compare", str(tmp_path / "none"), str(tmp_path / "int8")], capsys)


def test_rounding_to_float16_does_not_go_with_quantised_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantising, "find_spec", lambda name: True)
    asked = ["run", "--methods", "pld", "--device", "cpu", "--quantize", "int8", "--out", str(tmp_path / "run")]
    assert "both say how weights are held" in failing([*asked, "--dtype", "float16-weights"], capsys)
    assert not (tmp_path / "run").exists()


def stderr_of(script: str) -> str:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return done.stderr


@pytest.mark.parametrize(
    "script",
    [
        "from specbench_ss import load_model; load_model('lab', device='cpu')",
        "from specbench_ss.cli.main import main; main(['run', '--methods', 'ss', '--device', 'cpu', '--dry-run'])",
    ],
)
def test_what_torchao_logs_when_it_is_imported_is_not_passed_on(script: str) -> None:
    needs("int8")
    assert stderr_of(f"{script}; import sys; assert 'torchao' in sys.modules") == ""


def test_what_torchao_logs_otherwise_is_passed_on() -> None:
    later = "import specbench_ss.engine.target, logging; logging.getLogger('torchao').warning('a real warning')"
    assert stderr_of(later) == "a real warning\n"


def test_ways_that_are_not_known_are_one_line() -> None:
    with pytest.raises(UserError, match="unknown --quantize 'int3'; known: none, int8, int4, nf4"):
        load_model("lab", quantize="int3")
    with pytest.raises(UserError, match="unknown engine 'grahp'; known: auto, eager, graph"):
        load_model("lab", engine="grahp")
