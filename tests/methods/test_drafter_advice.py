"""Advice of a drafter's folder is used where the user states nothing, stated in one line, and written down."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from specbench_ss import load_model
from specbench_ss.cli.main import main
from specbench_ss.engine.target import Target
from specbench_ss.errors import UserError
from specbench_ss.methods.eagle.decode import Eagle2
from specbench_ss.methods.hydra.decode import Hydra
from specbench_ss.methods.medusa.decode import Medusa
from specbench_ss.methods.ss.config import SSOptions
from specbench_ss.methods.ss.decode import SpeculativeStreaming
from specbench_ss.models.checkpoint import Advice, advice_card, read_advice
from specbench_ss.models.resolve import LAB
from specbench_ss.options import MethodSpec
from specbench_ss.registry import method_options
from specbench_ss.runs.manifest import read_manifest
from tests.tiny import thorough

SHIPPED = tuple((LAB.parent / "drafters").iterdir())
BY_DEVICE = {"k": 3, "n_draft": 8, "cpu": {"n_draft": 2, "gamma": 2, "prune": "off"}, "cuda": {"n_draft": 12}}


def folder(path: Path, advice: Any, of: str = "ss") -> Path:
    """A copy of a lab drafter's folder that advises something else."""
    shutil.copytree(LAB / of, path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "advice": advice}))
    return path


def read(given: Any) -> Advice:
    return read_advice(given, SSOptions, SpeculativeStreaming.advisable, "ss", "ss/config.json")


def test_settings_go_by_the_class_of_the_device() -> None:
    advice = read(BY_DEVICE)
    assert advice.on("cpu") == {"k": 3, "n_draft": 2, "gamma": 2, "prune": "off"}
    assert advice.on("cuda") == {"k": 3, "n_draft": 12} and advice.on("mps") == {"k": 3, "n_draft": 8}
    plain = read({"k": 3})
    assert plain.on("cpu") == plain.on("cuda") == {"k": 3} and read(None).on("cpu") == read({}).on("cpu") == {}


def test_a_stated_option_stays_and_the_others_are_advised() -> None:
    options, taken = read(BY_DEVICE).apply(SSOptions(n_draft=5, prune="on"), "cpu")
    assert options == SSOptions(k=3, n_draft=5, gamma=2, prune="on") and taken == {"k": 3, "gamma": 2}


@pytest.mark.parametrize(
    ("method", "stated"),
    [
        (Medusa, {"heads": 0}), (Hydra, {"heads": 0}), (Eagle2, {"depth": 0}),
        (SpeculativeStreaming, {"n_draft": 0}), (SpeculativeStreaming, {"gamma": 3}),
    ],
)  # fmt: skip
def test_a_stated_value_that_means_all_or_none_is_kept(method: Any, stated: dict[str, int]) -> None:
    (name,) = stated
    spec = MethodSpec.parse(f"{method.name}[{name}={stated[name]}]")
    advice = read_advice({name: 2}, method.Options, method.advisable, method.name, "config.json")
    assert advice.apply(method_options(spec), "cpu") == (method.Options(**stated), {})
    assert advice.apply(method.Options(), "cpu")[1] == {name: 2}


@pytest.mark.parametrize(
    ("advice", "words"),
    [
        ({"gpu": {"k": 3}}, "advice for gpu: unknown device class.*cpu, cuda"),
        ({"n_drafts": 3}, "advice: no option 'n_drafts'.*did you mean n_draft"),
        ({"cuda": {"k": -1}}, "advice for cuda: k must be at least 0"),
    ],
)
def test_advice_that_cannot_be_is_one_line_with_its_file(advice: Any, words: str, tmp_path: Path, lab: Target) -> None:
    weights = str(folder(tmp_path / "ss", advice))
    for ask in (SpeculativeStreaming.check, lambda options, base: SpeculativeStreaming.load(base, options)):
        with pytest.raises(UserError, match=rf"^ss: {tmp_path}/ss/config\.json: {words}"):
            ask(SSOptions(weights=weights), lab)


def test_ss_drafts_as_advised_and_its_variants_do(tmp_path: Path, lab: Target) -> None:
    weights = str(folder(tmp_path / "ss", BY_DEVICE))
    found = SpeculativeStreaming.load(lab, SSOptions(weights=weights))
    assert (found.settings.n_draft, found.settings.gamma, found.settings.prune) == (2, 2, False)
    assert found.advised == {"k": 3, "n_draft": 2, "gamma": 2, "prune": "off"} and found.options.gamma == 2
    other = found.with_options(SSOptions(weights=weights, n_draft=6))
    assert (other.settings.n_draft, other.settings.gamma) == (6, 2)


def test_a_node_budget_replaces_the_advised_tree(tmp_path: Path) -> None:
    weights = folder(tmp_path / "ss", {"gamma": 1, "k": 3, "prune": "off"})
    found = SpeculativeStreaming.load(load_model("lab"), SSOptions(weights=weights, nodes=8))
    assert not found.advised and (found.settings.n_draft, found.settings.n_keep) == (8, 9) and found.settings.gamma > 1
    with pytest.raises(UserError, match="n_draft"):
        SSOptions(nodes=8, n_draft=4)


def test_the_folder_of_ss_may_advise_streams_that_have_their_parent(tmp_path: Path) -> None:
    base = load_model("lab")
    base.bundled_drafters = tmp_path
    folder(tmp_path / "ss", {"n_draft": 4, "cpu": {"parent": "on", "gamma": 1}})
    folder(tmp_path / "ss-parent", {"cpu": {"n_draft": 2}}, of="ss-parent")
    found = SpeculativeStreaming.load(base, SSOptions())
    assert found.drafter.config.parent_rank and found.advised == {"parent": "on", "n_draft": 2}
    for stated in (SSOptions(parent="off"), SSOptions(root="off")):  # both name the same folder
        papers = SpeculativeStreaming.load(base, stated)
        assert not papers.drafter.config.parent_rank and papers.advised == {"n_draft": 4, "gamma": 1}
    named = SpeculativeStreaming.load(base, SSOptions(weights=str(tmp_path / "ss")))
    assert not named.drafter.config.parent_rank
    base.device_type = "cuda"
    assert SpeculativeStreaming.load(base, SSOptions()).advised == {"n_draft": 4}


def test_the_size_of_a_measured_tree_is_advice(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--methods", "ss,medusa,eagle[nodes=4],pld", "--limit", "1", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "medusa: nodes=4 (advised by" in out
    assert "ss n_draft=4, medusa nodes=4, eagle[nodes=4] nodes=4, pld length=10" in out


@thorough
def test_a_run_states_and_records_what_was_advised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = folder(tmp_path / "ss", BY_DEVICE)
    prompts = tmp_path / "own.jsonl"
    prompts.write_text('{"prompt": "Hello"}\n')
    asked = ["run", "--methods", f"ss[weights={weights},k=2]", "--suite", f"jsonl:{prompts}", "--warmup", "0"]
    assert main([*asked, "--max-new-tokens", "4", "--out", str(tmp_path / "run")]) == 0
    stated_here = [line for line in capsys.readouterr().err.splitlines() if "advised" in line]
    advised = "n_draft=2, gamma=2, prune=off (advised by the drafter's folder)"
    assert stated_here == [f"ss[weights={weights},k=2]: {advised}"]
    assert main([*asked, "--dry-run"]) == 0
    assert f"ss[weights={weights},k=2]: weights={weights}, k=2; {advised}" in capsys.readouterr().out
    method = next(m for m in read_manifest(tmp_path / "run")["methods"] if m["name"] == "ss")
    assert method["advised"] == {"n_draft": 2, "gamma": 2, "prune": "off"}
    assert {name: method["options"][name] for name in ("k", "n_draft", "gamma", "prune")} == {
        "k": 2, "n_draft": 2, "gamma": 2, "prune": "off",
    }  # fmt: skip
    assert method["resolved"]["n_draft"] == 2 and method["resolved"]["gamma"] == 2


FOLDERS = [file.parent for place in (LAB, *SHIPPED) for file in sorted(place.glob("*/config.json"))]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: f"{folder.parent.name}-{folder.name}")
def test_the_card_of_a_folder_states_its_advice(folder: Path) -> None:
    assert advice_card(json.loads((folder / "config.json").read_text())) in (folder / "README.md").read_text()


def test_a_card_has_settings_by_device_class() -> None:
    text = advice_card({"advice": {"k": 3, "cpu": {"prune": False}}})
    assert "k=3; prune=off on cpu" in text and advice_card({}) == ""
