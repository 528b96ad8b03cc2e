"""The manifest of a run directory: whatever became of it, one line; another run's is named by what differs."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest

from specbench_ss.cli import report
from specbench_ss.cli.main import main
from specbench_ss.errors import UserError
from specbench_ss.reports.html import assets
from specbench_ss.runs import environment
from specbench_ss.runs.config import OutputOptions, RunConfig
from specbench_ss.runs.manifest import MANIFEST
from specbench_ss.runs.run_dir import RunDir
from specbench_ss.suite import SuiteData
from tests import fabricated
from tests.conftest import MakeRun
from tests.tiny import THOROUGH, thorough

REPLACEMENTS: tuple[Any, ...] = (None, [], {}, "x", -7)
CHANGES = ("gone", *REPLACEMENTS)
DATA = SuiteData("specbench", "generated", ())
Change = Callable[[dict[str, Any]], None]
LIMITS = {"device": "cpu", "read_bytes_per_s": 1e9, "flops_per_s": {"float32": 1e9}, "launch_s": 1e-6, "busy": "no"}
SHAPE = {
    "weight_bytes": 8, "matrix_parameters": 8, "kv_bytes": 8, "attention_flops": 8, "windows": [None, 3],
    "drafter": {"weight_bytes": 8, "matrix_parameters": 8}, "extra_work": {"step": 1.0, "node": 1.0, "dropped": 1.0},
}  # fmt: skip
TRACE = {
    "what": "operators", "tokens": 4, "wall_s": 0.1, "busy_share": 0.5, "launches_per_token": 2.0, "span_s": 0.1,
    "gaps": {"number": 1, "mean_s": 0.1, "longest_s": 0.1}, "timeline": [0.5, 0.4], "file": "ss.json",
}  # fmt: skip
READERS: dict[
    str, Callable[[Path, Path], list[str]]
] = {  # in addition the report: what reads a manifest, by the words of the command
    "compare": lambda run, other: ["compare", str(other), str(run), "--force"],
    "export": lambda run, other: ["export", str(run), "--form", "markdown"],
    "answers": lambda run, other: ["export", str(run), "--form", "specbench", "--out", str(other / "out")],
    "pages": lambda run, other: ["report", str(run), str(other)],
}


def manifest() -> dict[str, Any]:
    """A manifest with everything that one may hold."""
    made = fabricated.manifest(("ar", "ss"), DATA)
    made["config"] = {**RunConfig(methods=()).as_dict(), **made["config"]}
    made["config"]["methods"] = [{"name": "ar", "options": {}}, {"name": "ss", "options": {"k": "4"}}]
    made["methods"][1]["resolved"] = {"k": 4, "hash": "w"}
    made["model"] |= {"chat_template": "t", "device": "cuda"}
    made["environment"]["gpus"] = [{"name": "A GPU", "memory_bytes": 7}]
    made["sessions"] = [{"started": "1", "environment": copy.deepcopy(made["environment"])} for _ in range(2)]
    made["machine"] = {"limits": LIMITS, "shapes": dict.fromkeys(("ar", "ss"), SHAPE)}
    made["goodput"] = {"ttft": 500.0}
    made["traces"] = {"ss": TRACE, "ar": {"what": "nothing", "tokens": 1}}
    made["target_ci"] = {"asked": 0.02, "reached": 0.01, "method": "ss", "repeats": 3, "why": "narrow"}
    made["methods"][1]["training_info"] = {
        "tokens": 9,
        "steps": 3,
        "parameters": 5,
        "lr": 0.1,
        "regenerate_responses": True,
    }
    made["methods"][0]["training_info"] = {"searched": {"tokens": 9, "made_of": "text"}}
    made["model"] |= {
        "attention": "sdpa",
        "computed": "all",
        "quantised": "int8: all",
        "layer_devices": {"cuda": [0, 1]},
    }
    made["model"]["origin"] = {"gguf": {"file": "f", "types": {"Q8_0": 3}}, "page": "p"}
    made["sessions"][1]["workers"] = [{"machine": "m", "environment": copy.deepcopy(made["environment"])}]
    return json.loads(json.dumps(made))  # type: ignore[no-any-return]


def places(part: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to everything in the manifest; of two sessions only the last."""
    keys = list(part) if isinstance(part, dict) else range(len(part))[-1:] if isinstance(part, list) else ()
    for key in keys:
        yield (*at, key)
        yield from places(part[key], (*at, key))


def damaged() -> Iterator[str]:
    """Texts of the manifest, damaged or cut off: at each place one of CHANGES, in rotation, or two if thorough."""
    whole = manifest()
    for number, way in enumerate(places(whole)):
        for value in islice(cycle(CHANGES), number, number + (2 if THOROUGH else 1)):
            changed = copy.deepcopy(whole)
            part: Any = changed
            for key in way[:-1]:
                part = part[key]
            if value == "gone":
                del part[way[-1]]
            else:
                part[way[-1]] = value
            yield json.dumps(changed)
    text = json.dumps(whole)
    yield from (text[:size] for size in range(0, len(text), 97))
    yield from ("[" * 100_000, '{"format": 1}', "\ud800".encode("utf-8", "surrogatepass").decode("latin-1"))


@thorough
def test_whatever_became_of_a_manifest_a_report_is_made_or_one_line_is_reported(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(assets, "plotly_js", lambda: "")  # its five megabytes are not what is tested
    run = make_run(labels=("ar", "ss"), categories=("qa",), questions=1)
    refused = 0
    for text in islice(damaged(), 0, None, 1 if THOROUGH else 15):
        (run / MANIFEST).write_text(text, encoding="utf-8")
        try:
            report.command([run])
        except UserError as error:
            refused += len(str(error).splitlines()) == 1
        else:
            assert "report   " in capsys.readouterr().out
    assert refused > (50 if THOROUGH else 5)


def test_whatever_became_of_a_manifest_every_reader_ends_in_one_line(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The readers in turn; a few of the damaged manifests, all of them where the tests are thorough."""
    monkeypatch.setattr(assets, "plotly_js", lambda: "")
    run, other = (make_run(labels=("ar", "ss"), categories=("qa",), questions=1) for _ in range(2))
    for text, words in zip(islice(damaged(), 0, None, 1 if THOROUGH else 21), cycle(READERS.values()), strict=False):
        (run / MANIFEST).write_text(text, encoding="utf-8")
        capsys.readouterr()
        assert main(words(run, other)) in (0, 2)
        assert capsys.readouterr().err.count("\n") <= 2  # a warning may come before the error
        shutil.rmtree(other / "out", ignore_errors=True)


def test_whatever_became_of_a_manifest_resuming_is_done_or_one_line_is_reported(tmp_path: Path) -> None:
    wanted = manifest()
    RunDir.open(OutputOptions(tmp_path), wanted).close()
    for text in damaged():
        (tmp_path / MANIFEST).write_text(text, encoding="utf-8")
        try:
            with RunDir.open(OutputOptions(tmp_path, resume=True), wanted) as run:
                environment.changed_since(run.manifest, wanted["environment"])
        except UserError as error:
            assert len(str(error).splitlines()) == 1


def test_a_whole_manifest_is_read(tmp_path: Path) -> None:
    for again in (False, True):
        with RunDir.open(OutputOptions(tmp_path, resume=again), manifest()) as run:
            assert run.manifest["fingerprint"] == "f" * 64
    assert len(run.manifest["sessions"]) == 4


@pytest.mark.parametrize(
    ("change", "reported"),
    [
        (lambda m: m["config"].update(seed=1), "seed 0, not 1"),
        (lambda m: m["config"].update(temperature=0.5, max_new_tokens=8), "max-new-tokens none, not 8; temperature"),
        (lambda m: m["config"].update(stop=["Q:", "\n"]), "stop none, not Q:,'\\n'"),
        (lambda m: m["config"]["methods"].pop(), "methods ar,ss[k=4], not ar"),
        (lambda m: m["suite"].update(content_hash="c" * 64), f"suite content {DATA.content_hash[:16]}, not {'c' * 16}"),
        (lambda m: m["model"].update(hash="other"), "model hash 0123456789abcdef, not other"),
        (lambda m: m["model"].update(dtype="bfloat16"), "dtype float32, not bfloat16"),
        (lambda m: m["model"].update(device="cuda:1"), "device cuda, not cuda:1"),
        (lambda m: m["model"].update(chat_template="u"), "chat template t, not u"),
        (lambda m: m["methods"][1]["resolved"].update(k=3, hash="v"), "method ss with k 4, not 3; method ss with hash"),
        (lambda m: m["methods"][1]["resolved"].pop("k"), "method ss with k 4, not nothing"),
        (lambda m: m["methods"].pop(), "methods ar, ss, not ar"),
    ],
)
def test_another_run_is_not_continued_and_what_differs_is_named_with_both_values(
    tmp_path: Path, change: Change, reported: str
) -> None:
    RunDir.open(OutputOptions(tmp_path), manifest()).close()
    wanted = manifest()
    change(wanted)
    with pytest.raises(UserError) as refused:
        RunDir.open(OutputOptions(tmp_path, resume=True), wanted)
    assert f"--resume: the run in {tmp_path} has {reported}" in str(refused.value)
