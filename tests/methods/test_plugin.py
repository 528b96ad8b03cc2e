"""A third-party method: installed as a package, found by its entry point, tested by the same checks as ours."""

from __future__ import annotations

import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from specbench_ss.cli.main import main
from specbench_ss.cli.methods import write_package
from specbench_ss.conformance import Check, check_decoder
from specbench_ss.engine.generate import StopParams, generate
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.target import Target
from specbench_ss.methods.ar import Autoregressive
from specbench_ss.options import MethodSpec
from specbench_ss.tuning.session import DecoderBench
from tests.checks import checks, plain
from tests.tiny import THOROUGH, tiny_model

PACKAGE = Path(__file__).parents[1] / "plugin_pkg"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the plugin installed."""
    folder = tmp_path_factory.mktemp("plugin")
    source = shutil.copytree(PACKAGE, folder / "source")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--target", str(folder / "site"), str(source)], check=True, timeout=120)
    return folder / "site"


def test_an_installed_plugin_is_listed_with_its_options(
    site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(site))
    assert main(["methods"]) == 0
    listed = capsys.readouterr().out
    assert "copycat" in listed and "ngram" in listed


def test_the_package_is_what_new_method_writes(tmp_path: Path) -> None:
    write_package("copycat", tmp_path / "new")
    assert {p.name: p.read_text() for p in (tmp_path / "new").iterdir()} == {
        p.name: p.read_text() for p in PACKAGE.iterdir() if p.is_file()
    }


def test_its_own_test_passes(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setitem(check_decoder.__kwdefaults__, "checks", checks(0) if THOROUGH else plain(0))
    own = runpy.run_path(str(site.parent / "source" / "test_ssbench_copycat.py"))
    tests = [test for name, test in own.items() if name.startswith("test_")]
    assert len(tests) == 1
    tests[0]()


def test_it_is_checked_by_its_name(
    site: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    few_checks: tuple[Check, ...],
) -> None:
    """By a few checks: its own test has kept it to all."""
    monkeypatch.syspath_prepend(str(site))
    assert main(["check", "copycat"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "copycat, test instances: default" and len(lines) == len(few_checks) + 2
    assert all(line.startswith("  ok ") for line in lines[1:-1])


def test_the_plugin_accepts(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(site))
    from ssbench_copycat import Copycat  # type: ignore[import-not-found]

    prompt = [5, 6, 7, 5, 6, 7, 8, 5, 6]
    copied = generate(Copycat(Target(tiny_model("llama"))), prompt, StopParams(60), SamplingParams())
    assert copied.tokens_per_step is not None and copied.tokens_per_step > 1


def test_the_plugin_takes_part_in_tuning_by_declaring_what_may_be_tuned(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(site))
    from ssbench_copycat import Copycat

    target, default = Target(tiny_model("llama")), MethodSpec("copycat")
    prompt = [5, 6, 7, 5, 6, 7, 8, 5, 6]
    bench = DecoderBench(default, Copycat(target), Autoregressive(target), [prompt], StopParams(20))
    assert bench.options(default) == ["length", "ngram"]
    near = bench.around(default, "length")
    assert [spec.options["length"] for spec in near] == ["2", "4", "10", "16"]  # six is the default
    expected = generate(Autoregressive(target), prompt, StopParams(20), SamplingParams()).tokens
    assert all(generate(bench.decoder(s), prompt, StopParams(20), SamplingParams()).tokens == expected for s in near)
