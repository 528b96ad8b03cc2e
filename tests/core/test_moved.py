"""Plugins of before: the module names that they import are found, with a warning that names the new place."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import specbench_ss
from specbench_ss import Target, generate, load_method, registry
from specbench_ss.cli import main
from specbench_ss.plugin_file import load_plugin
from tests.tiny import tiny_model


def python(code: str, *arguments: str) -> str:
    """What a new interpreter prints."""
    command = [sys.executable, *arguments, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout.strip()


@pytest.fixture(scope="module")
def tiny() -> Target:
    return Target(tiny_model("llama"))


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    registry.clear_file_methods()


OLD = Path(__file__).parents[1] / "before" / "copycat_plugin.py"


@pytest.mark.filterwarnings("ignore:.* has moved to:DeprecationWarning")  # as outside of a test
@pytest.mark.usefixtures("few_laws")
def test_a_plugin_of_before_still_loads_and_decodes(tiny: Target, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--plugin", str(OLD)]) == 0
    checked = capsys.readouterr()
    assert checked.out.startswith("copycat: default\n  ok ") and checked.err == ""
    load_plugin(OLD)  # known until `forgotten`
    prompt = [5, 6, 7, 5, 6, 7, 8, 5, 6]
    copied = generate(load_method("copycat", tiny, length=3), prompt, max_new_tokens=60)
    assert copied.tokens == generate(load_method("ar", tiny), prompt, max_new_tokens=60).tokens
    assert copied.tokens_per_step is not None and copied.tokens_per_step > 1


@pytest.mark.filterwarnings("ignore:.* has moved to:DeprecationWarning")
def test_the_function_and_the_module_of_before_go_by_the_same_name(monkeypatch: pytest.MonkeyPatch) -> None:
    both = ("from specbench_ss.generate import generate as old, Limits", "from specbench_ss import generate as new")
    for order in (both, both[::-1]):
        monkeypatch.delitem(sys.modules, "specbench_ss.generate", raising=False)
        monkeypatch.delitem(vars(specbench_ss), "generate", raising=False)
        found: dict[str, Any] = {}
        exec("; ".join(order), found)
        assert found["new"] is specbench_ss.generate is vars(specbench_ss)["generate"]
        assert [found[name].__module__ for name in ("old", "new", "Limits")] == [
            "specbench_ss.decoding.loop",
            "specbench_ss.api",
            "specbench_ss.decoding.loop",
        ]


def test_every_name_of_before_is_found_with_a_warning_that_names_its_new_place() -> None:
    told = python(
        "import warnings, importlib\n"
        "from specbench_ss.moved import MOVED\n"
        "warnings.simplefilter('always')\n"
        "for old, new in MOVED.items():\n"
        "    with warnings.catch_warnings(record=True) as found:\n"
        "        module = importlib.import_module(f'specbench_ss.{old}')\n"
        "    said = [str(w.message) for w in found if 'has moved' in str(w.message)]\n"
        "    for part in new.split():\n"
        "        home = vars(importlib.import_module(f'specbench_ss.{part}'))\n"
        "        assert f'specbench_ss.{old} has moved to ' in said[-1] and f'specbench_ss.{part}' in said[-1], said\n"
        "        assert all(hasattr(module, n) for n in home if not n.startswith('__')), old\n"
        "from specbench_ss.models import load_target, hash_weights, loading\n"
        "from specbench_ss.config import MethodSpec, RunConfig, REFERENCE\n"
        "from specbench_ss.methods.train.drafter import DrafterTrainer, measured_accuracies\n"
        "from specbench_ss.methods.training import Trainee, Anchors, head_loss\n"
        "print(load_target is loading.load_target)",
    )
    assert told == "True"
    moved = r"specbench_ss.models.find_folder has moved to .*model_folder.find_folder"
    with pytest.warns(DeprecationWarning, match=moved):
        from specbench_ss.models import find_folder  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match="No module named 'specbench_ss.nothing'"):
        import specbench_ss.nothing  # noqa: F401
