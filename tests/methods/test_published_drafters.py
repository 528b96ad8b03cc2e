"""The catalog of published drafters: its entries are sound, and runs of hub models take them if none are given."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants

from specbench_ss import registry
from specbench_ss.bench.preflight import with_published_drafters
from specbench_ss.cli.main import main
from specbench_ss.errors import UserError
from specbench_ss.models.published_drafters import published_drafter, published_drafters
from specbench_ss.models.tiny import tiny_model, tiny_tokenizer
from specbench_ss.options import MethodSpec, split_methods
from specbench_ss.runs.config import RunConfig
from tests.methods.reference_drafter import folder
from tests.methods.test_eagle_speculators import N, config_of, tensors_of

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
TARGET = "Qwen/Qwen3-8B"


def test_every_entry_names_hub_ids_a_method_with_weights_and_a_page() -> None:
    every = published_drafters()
    assert len({one.target for one in every}) >= 40
    for one in every:
        assert HUB_ID.fullmatch(one.target) and HUB_ID.fullmatch(one.drafter), one
        assert one.page.startswith("https://") and one.layout, one
        assert hasattr(registry.method_class(one.method).Options(), "weights"), one
    places = [(one.target.lower(), one.method, one.drafter) for one in every]
    assert len(set(places)) == len(places) and places == sorted(places, key=lambda place: place[:2])


def filled(methods: str, model: str = TARGET, optional: tuple[str, ...] = ()) -> tuple[list[MethodSpec], list[str]]:
    config = RunConfig(tuple(map(MethodSpec.parse, split_methods(methods))), model=model)
    made, notes = with_published_drafters(config, optional)
    return list(made.methods), list(notes)


def test_a_method_without_weights_takes_the_first_drafter_of_its_target() -> None:
    first = published_drafter(TARGET, "eagle3")
    assert first is not None and published_drafter(TARGET.lower(), "eagle3") == first
    assert filled("eagle3[weights=]")[0][0].options == {"weights": first.drafter}
    specs, notes = filled("ar,eagle3[depth=3],pld")
    assert specs[1].options == {"weights": first.drafter, "depth": "3"}
    assert [spec.options for spec in (specs[0], specs[2])] == [{}, {}]
    assert len(notes) == 1 and first.drafter in notes[0] and first.page in notes[0]


def test_eagle2_takes_the_weights_of_eagle() -> None:
    found = published_drafter("lmsys/vicuna-7b-v1.3", "eagle2")
    assert found is not None and found == published_drafter("lmsys/vicuna-7b-v1.3", "eagle")


@pytest.mark.parametrize("methods", ["eagle3[weights=own]", "pld", "ss"])
def test_given_weights_and_methods_without_an_entry_stay(methods: str) -> None:
    assert filled(methods) == ([MethodSpec.parse(methods)], [])


def test_methods_of_all_and_local_models_get_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert filled("eagle3", optional=("eagle3",)) == ([MethodSpec("eagle3")], [])
    monkeypatch.chdir(tmp_path)
    (tmp_path / TARGET).mkdir(parents=True)
    assert filled("eagle3") == ([MethodSpec("eagle3")], [])


def test_one_drafter_twice_is_refused() -> None:
    found = published_drafter(TARGET, "eagle3")
    assert found is not None
    with pytest.raises(UserError, match="given twice"):
        filled(f"eagle3,eagle3[weights={found.drafter}]")


def test_the_list_names_drafters_and_pages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "drafters", TARGET.lower()]) == 0
    listed = capsys.readouterr().out
    found = published_drafter(TARGET, "eagle3")
    assert found is not None and f"  eagle3   {found.drafter}  (" in listed and found.page in listed
    assert main(["models", "drafters", "lab"]) == 0, "a model of the catalog without one"
    assert "no published drafter is known" in capsys.readouterr().out
    assert main(["models", "drafters", "nobody/nothing"]) == 2


def snapshot(cache: Path, repository: str) -> Path:
    """Return the empty folder of a repository's files in a cache of the hub."""
    cached = cache / f"models--{repository.replace('/', '--')}"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0" * 40)
    made = cached / "snapshots" / ("0" * 40)
    made.mkdir(parents=True)
    return made


def test_a_run_from_a_mirror_folder_needs_no_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The hub's cache has a target and its published drafter, both with random weights; there is no network."""
    found = published_drafter(TARGET, "eagle3")
    assert found is not None
    cache, prompts = tmp_path / "hub", tmp_path / "prompts.jsonl"
    model, target = tiny_model("llama", layers=N), snapshot(cache, TARGET)
    model.save_pretrained(target)
    tiny_tokenizer(model.config.vocab_size).save_pretrained(target)
    folder(snapshot(cache, found.drafter), tensors_of(config_of()), config_of())
    prompts.write_text(json.dumps({"prompt": "abc"}) + "\n")
    command = [
        "run", "--model", TARGET, "--methods", "eagle3", "--dtype", "float32", "--chat-template", "plain",
        "--suite", f"jsonl:{prompts}", "--max-new-tokens", "8", "--warmup", "0", "--out", str(tmp_path / "run"),
    ]  # fmt: skip
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    code = main(command)
    reported = capsys.readouterr().err
    assert code == 0 and f"using {found.drafter} ({found.page})" in reported, reported
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["methods"][1]["label"] == f"eagle3[weights={found.drafter}]" and manifest["status"] == "complete"
    assert main(["models", "check", TARGET, "eagle3", "--chat-template", "plain"]) == 0
    assert f"works: eagle3 on {TARGET}" in capsys.readouterr().out
    shutil.rmtree(cache / f"models--{found.drafter.replace('/', '--')}")
    for again in ([*command[:-1], str(tmp_path / "again")], ["models", "check", TARGET, "eagle3"]):
        assert main(again) == 2
        assert f"ssbench: eagle3: no file or folder {found.drafter!r}" in capsys.readouterr().err
