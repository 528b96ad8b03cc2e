"""--plugin FILE.py: a method in one file, on every command that takes methods."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from specbench_ss import registry
from specbench_ss.cli import run_output
from specbench_ss.cli import tune as tune_work
from specbench_ss.cli.main import main
from specbench_ss.options import MethodSpec
from specbench_ss.runs.config import RunConfig
from specbench_ss.runs.manifest import MANIFEST
from tests.cli import failing
from tests.tiny import thorough

BODY = """
from dataclasses import dataclass, field

from specbench_ss.engine.decoder import Decoder, DecodeState
from specbench_ss.engine.tree import DraftTree


@dataclass(frozen=True)
class Options:
    k: int = field(default=1, metadata={"help": "words"})


class Nothing(Decoder):
    name, summary = "nothing", "drafts nothing"
    Options = Options

    def propose(self, state: DecodeState) -> DraftTree:
        return DraftTree.root_only(state.root)
"""
RUN = [
    "run",
    "--methods",
    "nothing[k=2]",
    "--tasks",
    "qa",
    "--limit",
    "1",
    "--max-new-tokens",
    "4",
    "--warmup",
    "0",
]


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    registry.clear_file_methods()


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    file = tmp_path / "my plugin.py"
    file.write_text(BODY)
    return file


@pytest.mark.usefixtures("few_checks")
def test_it_is_listed_checked_and_forgotten(plugin: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods", "--plugin", str(plugin)]) == 0
    assert "nothing    drafts nothing [same output as the model]\n            k=<int>  words" in capsys.readouterr().out
    assert main(["check", "--plugin", str(plugin)]) == 0
    assert capsys.readouterr().out.startswith("nothing, test instances: default\n  ok ")
    assert "no method 'nothing'" in failing(["check", "nothing"], capsys)


@thorough
def test_a_run_with_it_is_resumed_with_the_same_content_only(
    plugin: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(tmp_path / "run")]
    assert main([*RUN, *out, "--plugin", str(plugin)]) == 0
    sha256 = hashlib.sha256(plugin.read_bytes()).hexdigest()
    manifest = json.loads((tmp_path / "run" / MANIFEST).read_text())
    assert manifest["config"]["plugin"] == [{"file": str(plugin), "sha256": sha256, "methods": ["nothing"]}]
    begun = f"--resume: the run in {tmp_path / 'run'} has --plugin {plugin} ({sha256[:12]}), not"
    assert f"{begun} none; give the same again" in failing([*RUN, *out, "--resume"], capsys)
    moved = tmp_path / "moved.py"
    moved.write_bytes(plugin.read_bytes())
    assert main([*RUN, *out, "--resume", "--plugin", str(moved), "--dry-run"]) == 0
    moved.write_text(BODY + "# changed\n")
    assert f"{begun} --plugin {moved} (" in failing([*RUN, *out, "--resume", "--plugin", str(moved)], capsys)


def test_it_may_stand_in_a_configuration_file(plugin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[RunConfig] = []
    monkeypatch.setattr(run_output, "run", lambda config, *_: asked.append(config))
    for given in (str(plugin), [str(plugin)]):
        file = tmp_path / "run.yaml"
        file.write_text(yaml.safe_dump({"methods": "nothing", "plugin": given}))
        assert main(["run", "--config", str(file)]) == 0
    assert [config.plugin[0].methods for config in asked] == [("nothing",)] * 2


def test_tuning_takes_it(plugin: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[tuple[MethodSpec, str]] = []
    monkeypatch.setattr(tune_work, "run", lambda options, files: asked.append((options.spec, files[0].file)))
    assert main(["tune", "nothing", "--plugin", str(plugin)]) == 0
    assert asked == [(MethodSpec("nothing"), str(plugin))]
