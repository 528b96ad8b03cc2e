"""The command line: what it asks for, what it states when that is wrong, what it leaves alone."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from importlib.metadata import EntryPoint
from io import StringIO
from pathlib import Path
from typing import IO, Any

import pytest
import typer
from rich.console import Console

from specbench_ss import storage
from specbench_ss.bench.build_config import default_out, method_specs, recording_of
from specbench_ss.cli import run_output
from specbench_ss.cli.commands import COMMANDS
from specbench_ss.cli.main import main
from specbench_ss.cli.placeholders import only_prints
from specbench_ss.cli.run_output import Progress
from specbench_ss.errors import UserError
from specbench_ss.registry import METHODS
from specbench_ss.results.analysis import load_run
from specbench_ss.runs.config import OutputOptions, RunConfig
from specbench_ss.runs.run_dir import MANIFEST, SAMPLES, read_run
from specbench_ss.runs.run_options import RunOptions
from tests.cli import failing
from tests.tiny import THOROUGH

MakeRun = Callable[..., Path]
Asked = list[tuple[RunConfig, OutputOptions]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """Return the configuration that `ssbench run` would run."""
    seen: Asked = []
    monkeypatch.setattr(run_output, "run", lambda config, where, *_: seen.append((config, where)))
    return seen


@pytest.mark.parametrize(
    "arguments,words",
    [
        (["rn"], "'rn'"),
        (["run"], "--methods"),
        (["run", "--methods", "arr", "--dry-run"], "did you mean ar?"),
        (["run", "--methods", "ar", "--suite", "specbnch", "--dry-run"], "did you mean specbench?"),
        (["run", "--methods", "ss", "--chat-template", "vicunja"], "did you mean vicuna?"),
        (["report", "nowhere"], "does not exist"),
        (["report", "tests"], "is not a run directory"),
        (["suites", "fetch", "specbnch"], "did you mean specbench?"),
        (["suites", "show", "README.md"], "use --suite jsonl:README.md"),
        (["run", "--methods", "pld", "--dry-run", "--json"], "leave out --json"),
        (["methods", "pdl"], "did you mean pld?"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert words in failing(arguments, capsys)


def test_methods_are_listed_by_name_and_alias(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods", "prompt-lookup,ar"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == ["pld", "ar"]


@pytest.mark.parametrize("more", ["--dry-run", "--warmup 0 -q", "--temperature 1 --dry-run"])
def test_the_effect_of_block_verification_is_printed_once(
    more: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--methods", "pld", "--tasks", "qa", "--limit", "1", "--max-new-tokens", "2", "--dtype", "float32"]
    options += [*more.split(), "--out", str(tmp_path / "run")]
    text = "sampled by the drafter" if "--temperature" in more else "which changes nothing at temperature 0"
    assert main(["run", *options, "--verification", "block"]) == 0
    assert "".join(capsys.readouterr()).count(text) == 1
    if "--dry-run" in more:
        assert main(["run", *options]) == 0
        assert "verification" not in "".join(capsys.readouterr())


def test_reference_is_added_first(asked: Asked) -> None:
    assert main(["run", "--methods", "ss[k=1,prune=off],medusa"]) == 0
    assert [spec.label for spec in asked[0][0].methods] == ["ar", "ss[k=1,prune=off]", "medusa"]


def test_reference_is_not_added_twice() -> None:
    assert [s.label for s in method_specs("ss,ar", ())] == ["ar", "ss"]


def test_set_holds_for_every_variant_that_does_not_state_otherwise() -> None:
    specs = method_specs("ss,ss[k=1]", ["ss.k=4", "ss.prune=off"])
    assert [s.options for s in specs[1:]] == [{"k": "4", "prune": "off"}, {"k": "1", "prune": "off"}]
    with pytest.raises(UserError, match="given twice"):
        method_specs("ss,ss[k=1]", ["ss.k=1"])


def test_options_reach_the_configuration(asked: Asked, tmp_path: Path) -> None:
    out = tmp_path / "run"
    arguments = "--suite apps --tasks sql, --limit 3 --repeats 2 --temperature 0.7 --top-k 5 --history own --seed 9"
    assert main(["run", "--methods", "ss", "--out", str(out), "--resume", *arguments.split()]) == 0
    config, where = asked[0]
    assert where == OutputOptions(out, resume=True, recording=recording_of(RunOptions()))
    assert (config.suite, config.categories, config.limit, config.repeats) == ("apps", ("sql",), 3, 2)
    assert (config.temperature, config.top_k, config.history, config.seed) == (0.7, 5, "own", 9)
    assert (config.model, config.warmup, config.data) == ("lab", RunConfig(methods=()).warmup, None)


CONFIG = """
methods: [ss, "medusa[k=2]"]
limit: 5
max-new-tokens: 32
temperature: 1
trust_remote_code: true
set:
  ss: {prune: off, depth: 3, weights: null}
"""


def test_stop_texts_come_from_both_places_as_they_are(asked: Asked, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    for text, stops in (('stop: ["Q:, A:", "\\n"]', ("Q:, A:", "\n")), ("stop: END", ("END",)), ("", ())):
        file.write_text(text)
        assert main(["run", "--methods", "ss", "--config", str(file)]) == 0
        assert asked[-1][0].stop == stops
    assert main(["run", "--methods", "ss", "--stop", "a,b", "--stop", " "]) == 0
    assert asked[-1][0].stop == ("a,b", " ")
    assert len({config.fingerprint for config, _ in asked}) == 4


@pytest.mark.parametrize("text", ["{ss.k: 1, ss.prune: off}", "{ss: {k: 1, prune: off}}", "[ss.k=1, ss.prune=off]"])
def test_a_config_file_sets_options_in_three_forms(text: str, asked: Asked, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"methods: ss\nset: {text}")
    assert main(["run", "--config", str(file)]) == 0
    assert asked[0][0].methods[1].label == "ss[k=1,prune=off]"


def test_config_file_and_command_line_wins(asked: Asked, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(CONFIG)
    assert main(["run", "--config", str(file), "--limit", "7"]) == 0
    config = asked[0][0]
    assert [s.label for s in config.methods] == ["ar", "ss[prune=off,depth=3,weights=none]", "medusa[k=2]"]
    assert (config.limit, config.max_new_tokens, config.temperature, config.trust_remote_code) == (7, 32, 1.0, True)


def test_interrupt_states_how_to_resume(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run_output, "run", interrupted)
    arguments = ["run", "--methods", "ss[k=1]", "--out", str(tmp_path / "a b")]
    monkeypatch.setattr(sys, "argv", ["ssbench", *arguments])
    assert main(arguments) == 130
    assert capsys.readouterr().err.strip() == "ssbench: interrupted"  # nothing was begun
    (tmp_path / "a b").mkdir()
    (tmp_path / "a b" / MANIFEST).write_text("{}")
    assert main(arguments) == 130
    line = capsys.readouterr().err.strip()
    assert line.endswith(f"ssbench run --methods 'ss[k=1]' --out '{tmp_path}/a b' --resume")


def test_default_out_has_only_plain_characters() -> None:
    config = RunConfig(methods=(), model="some org/Model: 7B", suite="apps")
    assert default_out(config, datetime(2026, 1, 2, 3, 4, 5)) == Path("runs/20260102-030405-Model-7B-apps")


def test_the_end_of_a_run_reports_everything(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    out = make_run(
        labels=("ar", "ss", "medusa", "ar[again=1]"), failing=("medusa",), verdict="numerical tie", questions=8
    )
    run_output.show(load_run(out), open_report=False, form="verbose")
    reported = capsys.readouterr().out
    where = [reported.index(word) for word in ("is fastest", "By task", "math_reasoning", "Overall")]
    assert where == sorted(where)
    for words in (
        "1.00×",
        "32 numerical",
        "28 (4 failed)",
        "baseline",
        "x Samples failed; no number includes them.\n    medusa: 4 samples",
        "≈ not significant",
    ):
        assert words in reported
    assert f"report   {out / 'report.html'}\nmore     ssbench report {out} -v, " in reported
    assert (out / "report.html").stat().st_size > 50_000


def test_a_method_without_one_good_sample_is_reported_and_exits_1(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as end:
        run_output.show(load_run(make_run(failing=("ss",), questions=1)), open_report=False)
    reported = capsys.readouterr()
    assert end.value.exit_code == 1
    assert reported.err == "ssbench: every sample failed of ss: RuntimeError: out of luck\n"
    assert "x ss failed on 4 of 4 prompts: RuntimeError: out of luck" in reported.out and "report   " in reported.out


def test_quiet_is_two_lines_and_json_is_one_object(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    results = load_run(make_run(labels=("ar", "ss"), questions=5))
    run_output.show(results, False, form="quiet")
    finding, report = capsys.readouterr().out.splitlines()
    assert finding.startswith(results.headline) and report == f"report   {results.path / 'report.html'}"
    run_output.show(results, False, form="json")
    record = json.loads(capsys.readouterr().out)
    assert record["headline"] == results.headline and record["paths"]["report"].endswith("report.html")
    assert [row["method"] for row in record["rows"]] == ["ar", "ss"]
    assert {check["name"] for check in record["checks"]} == {check.name for check in results.checks}


@pytest.mark.parametrize("keys", [("model",), ("model", "name"), ("environment", "gpus"), ("methods",), ("created",)])
def test_a_manifest_that_lacks_something_is_one_line(
    keys: tuple[str, ...], make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(questions=1)
    manifest = json.loads((run / MANIFEST).read_text())
    part = manifest
    for key in keys[:-1]:
        part = part[key]
    del part[keys[-1]]
    (run / MANIFEST).write_text(json.dumps(manifest))
    assert f"it lacks {'.'.join(keys)}" in failing(["report", str(run)], capsys)


def test_a_report_of_an_unfinished_run_states_so(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(questions=2)
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().err == ""
    lines = (run / SAMPLES).read_bytes().splitlines(keepends=True)
    (run / SAMPLES).write_bytes(b"".join(lines[:5]))
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().err == (
        f"ssbench: warning: {run} is not complete (samples are missing): 5 of 24 samples\n"
    )
    assert "The run is not complete (samples are missing): 5 of 24 samples." in (run / "report.html").read_text()
    (run / SAMPLES).write_bytes(b"")
    assert "none of the run's 24 samples" in failing(["report", str(run)], capsys)


def test_a_run_that_was_interrupted_is_not_complete_even_with_all_its_rows(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(questions=1)
    manifest = json.loads((run / MANIFEST).read_text())
    (run / MANIFEST).write_text(json.dumps({**manifest, "status": "interrupted"}))
    assert main(["report", str(run)]) == 0
    assert "not complete (interrupted): 12 of 12 samples" in capsys.readouterr().err


def test_sessions_under_other_conditions_are_reported_in_one_line_at_the_end(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    out = make_run(questions=1)
    manifest = json.loads((out / MANIFEST).read_text())
    here = manifest["environment"]
    sessions = [{"started": "1", "environment": here}, {"started": "2", "environment": {**here, "threads": None}}]
    for reported, given in ((False, sessions[:1]), (True, sessions)):
        (out / MANIFEST).write_text(json.dumps({**manifest, "sessions": given}))
        run_output.show(load_run(out), open_report=False)
        line = "  ! Not all sessions had the same threads: their times do not compare."
        assert (line in capsys.readouterr().out.splitlines()) == reported


def test_a_report_that_cannot_be_written_is_one_line(
    make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, folder = make_run(questions=1), tmp_path / "folder"
    folder.mkdir()
    for out in (folder, tmp_path / "no" / "report.html"):
        assert f"cannot write {out}: " in failing(["report", str(run), "--out", str(out)], capsys)
    assert not list(tmp_path.glob("*.tmp"))


def test_progress_without_a_terminal_is_a_few_lines(make_run: MakeRun) -> None:
    rows = read_run(make_run(failing=("ss",))).rows
    console = Console(file=StringIO(), force_terminal=False, width=100)
    with Progress(["ar", "ss", "medusa"], console) as progress:
        progress.on_start(len(rows))
        for label in ("ar", "ss[k=1]", "ar"):
            progress.on_warm_up(label)
        progress.on_estimate(480, len(rows))
        for row in rows:
            progress.on_sample_start(row.method, row.question_id)
            progress.on_tokens(row.tokens or 0)
            progress.on_sample(row)
        progress.on_warning("the [fan] is loud")
    assert isinstance(console.file, StringIO)
    lines = console.file.getvalue().splitlines()
    assert f"{len(rows)} of {len(rows)} samples" in lines and len(lines) < 18
    assert f"about 8 min for {len(rows)} samples" in lines
    assert lines[:2] == ["warming up: ar", "warming up: ss[k=1]"] and lines.count("warming up: ar") == 1
    assert "warning: the [fan] is loud" in lines
    samples, rate, tau = progress.totals["ss"].cells()
    assert samples == "24 (4 failed)" and float(rate) > 0 and float(tau) > 1


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("ssbench ")
    assert main(["run", "--help"]) == 0
    assert "--max-new-tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "texts"),
    [
        (["tune"], ["NAME[option=value] to keep", "[default: METHOD-MODEL-DEVICE.yaml]"]),
        (
            ["run"],
            [
                "Options in --set and METHOD[...] have priority",
                "[default: runs/TIME-MODEL-SUITE]",
                "A,B[option=value]",
                "[default: lab]",
            ],
        ),
        (["paper"], ["[default: runs/TIME-paper-NAME]"]),
    ],
)
def test_brackets_in_help_are_shown(
    command: list[str], texts: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 200)
    assert main([*command, "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for text in texts:
        assert text in shown
    assert "\\" not in shown


def test_a_bug_has_a_traceback_and_an_exit_code_of_its_own() -> None:
    script = "from specbench_ss.cli import main\nmain.main = lambda: 1 / 0\nmain.console()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 3 and "Traceback" in done.stderr and "ZeroDivisionError" in done.stderr


def test_a_run_that_cannot_go_on_has_an_exit_code_of_its_own_and_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["run", "--methods", "pld", "--tasks", "qa", "--limit", "1", "--warmup", "0", "--max-new-tokens", "4", "-q"]
    words += ["--out", str(tmp_path / "run")]
    append, full = storage.append, [False, True]

    def until_it_is_full(file: IO[bytes], lines: Sequence[Mapping[str, Any]]) -> None:
        if file.name.endswith(SAMPLES) and full and full.pop(0):
            raise OSError(errno.ENOSPC, "No space left on device")
        append(file, lines)

    monkeypatch.setattr(storage, "append", until_it_is_full)
    assert main(words) == 4 and "no space left" in capsys.readouterr().err
    assert main([*words, "--resume"]) == 0
    kept = read_run(tmp_path / "run")
    assert kept.manifest["status"] == "complete" and len({row.key for row in kept.rows}) == len(kept.rows) == 2


LIGHT = ["--help", "methods ss,medusa", "suites", "train medusa --help", "run --help"]
MORE = ["methods", "suites show --help", *(f"{name} --help" for name in COMMANDS if name != "run")]


@pytest.mark.parametrize("line", [*LIGHT, *(MORE if THOROUGH else ())])
def test_lists_and_help_import_no_heavy_package(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    script = (
        "import sys\nfrom specbench_ss.cli import main, placeholders\n"
        "try: main.console()\nexcept SystemExit: pass\n"
        "print(*{m for m in sys.modules if m.partition('.')[0] in placeholders.HEAVY "
        "and type(sys.modules[m]) is not placeholders.Placeholder}, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script, *line.split()], capture_output=True, text=True, timeout=60)
    assert main(line.split()) == 0
    assert done.stdout == capsys.readouterr().out  # the same text as with all packages
    assert done.stderr == "\n"  # no module


@pytest.mark.parametrize(
    "line", ["suites show lab", "run --label --help", "methods --plugin file.py", "methods a b", ""]
)
def test_a_command_that_computes_imports_its_packages(line: str) -> None:
    assert not only_prints(line.split())


def test_lists_with_plugins_of_others_import_their_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("other", "other_package:Method", METHODS.entry_points)
    monkeypatch.setattr("specbench_ss.registry._entry_points", lambda *_: [point])
    assert not only_prints(["methods"])
