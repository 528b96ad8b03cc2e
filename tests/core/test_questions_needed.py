"""`--dry-run --target-ci`: number of questions that each method needs, based on an earlier run with planted times."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest

from specbench_ss.bench import preflight
from specbench_ss.bench.build_config import asked_run, options_of_methods
from specbench_ss.bench.server_client import Server
from specbench_ss.cli.main import main
from specbench_ss.cli.questions_needed import questions_needed
from specbench_ss.engine.decoder import Generation
from specbench_ss.options import MethodSpec, PluginFile
from specbench_ss.results.parity import METHODS, SERVERS
from specbench_ss.runs.config import Endpoint, RunConfig
from specbench_ss.runs.manifest import MANIFEST
from specbench_ss.runs.records import OutputMatch, SampleRecord
from specbench_ss.runs.run_dir import OUTPUT_MATCH, SAMPLES, read_run
from specbench_ss.runs.run_options import SERVER, RunOptions
from specbench_ss.stats.precision import widths
from specbench_ss.suite import Question, SuiteData
from specbench_ss.user_files import encoded
from tests.fabricated import CATEGORIES, manifest

SIZES = dict.fromkeys(CATEGORIES, 100)
URL = "http://127.0.0.1:8000/v1"
LOCAL = RunConfig(tuple(map(MethodSpec, ("ar", "ss", "medusa"))))


def served(*labels: str, model: str = "M", started: bool = True) -> RunConfig:
    """Servers that the run starts, or that run already."""
    command = ("serve", model) if started else ()
    return RunConfig((), model="served", endpoints=tuple(Endpoint(one, URL, None, command) for one in labels))


def plant(
    path: Path,
    config: RunConfig,
    questions: int = 12,
    spread: float = 0.1,
    repeats: int = 1,
    sessions: int = 1,
    blocks: int = 1,
    effect: float = 0.0,
    tasks: tuple[str, ...] = CATEGORIES,
    failing: tuple[str, ...] = (),
    wrong: tuple[str, ...] = (),
    **more: Any,
) -> Path:
    """Write a complete run in which all methods are about twice as fast as the first.

    questions: of each task. spread: standard deviation of the logarithm of a speedup over them. effect: by how much
    sessions and blocks change it, in turn up and down. more: entries of the manifest.
    """
    labels = [one.label for one in (*config.methods, *config.endpoints)]
    asked = tuple(Question(f"{task}-{i}", task, ("?",)) for task in tasks for i in range(questions))
    about = manifest(tuple(labels), SuiteData(config.suite, "generated", asked))
    about |= {"config": replace(config, repeats=repeats).as_dict(), "baseline": labels[0], "status": "complete"}
    about |= {"n_sessions": sessions, "blocks": blocks if config.endpoints else None, **more}
    for entry in about["methods"] if config.endpoints else ():
        entry |= {"resolved": {"model": "M"}, "served": {"software": "vLLM"}}
    rows, verdicts = list[SampleRecord](), list[OutputMatch]()
    for number, question in enumerate(asked):
        pace = spread * NormalDist().inv_cdf((number % questions + 0.5) / questions)
        for repeat in range(sessions * repeats):
            session, block = repeat // repeats, number % blocks
            for label in labels:
                row = SampleRecord(question.id, 0, label, repeat, question.category, len(rows), 0, 0, "", "", "ok")
                row.session, row.block = session, block if config.endpoints else None
                log_speed = 0.0 if label == labels[0] else math.log(2) + pace + effect * (-1) ** (session + block)
                row.fill(Generation(list(range(100)), 5, "length", math.exp(-log_speed), 1))
                if label in failing:
                    row = row.without_numbers()
                if label in wrong:
                    verdicts.append(OutputMatch(*row.key, verdict="mismatch"))
                rows.append(row)
    path.mkdir(parents=True)
    (path / MANIFEST).write_text(json.dumps(about))
    (path / SAMPLES).write_bytes(b"".join(encoded(row) for row in rows))
    (path / OUTPUT_MATCH).write_bytes(b"".join(encoded(one) for one in verdicts))
    return path


def stated(config: RunConfig, folder: Path, target: float = 0.05, sizes: Mapping[str, int] = SIZES) -> str:
    return questions_needed(config, sizes, target, folder)


def found(config: RunConfig, folder: Path) -> bool:
    return "not known" not in stated(config, folder)


def half(path: Path, label: str) -> float:
    """Half the width of a method's interval in a planted run."""
    run = read_run(path)
    (width,) = widths(run.rows, [run.baseline, label], run.repeats)
    assert width.half is not None
    return width.half


@pytest.mark.parametrize(("questions", "spread"), [(12, 0.25), (30, 0.1)], ids=["too wide", "narrow enough"])
def test_a_run_with_the_stated_number_has_about_the_width(questions: int, spread: float, tmp_path: Path) -> None:
    """A run whose intervals are narrow enough already may have had more questions than they need."""
    folder = tmp_path / "runs"
    first = plant(folder / "first", LOCAL, questions, spread)
    wide = spread > 0.2
    assert (half(first, "ss") > 0.05) == wide
    text = stated(LOCAL, folder)
    assert text.startswith(f"±0.050 based on {first}, with 1 repeat: ss had ±")
    pattern = rf"(\w+) had ±0\.\d+ with {4 * questions} questions and needs about (\d+) \(--limit (\d+)\)"
    needs = [(label, int(needed), int(limit)) for label, needed, limit in re.findall(pattern, text)]
    assert [label for label, _, _ in needs] == ["ss", "medusa"]
    for _, needed, limit in needs:
        assert needed <= 4 * limit < needed + 4 and (limit > questions) == wide
    again = plant(tmp_path / "again", LOCAL, needs[0][2], spread)
    assert half(again, "ss") == pytest.approx(0.05, rel=0.08)


def test_the_limit_counts_the_questions_of_each_task_and_the_suite_may_have_too_few(tmp_path: Path) -> None:
    plant(tmp_path / "first", LOCAL, 12, 0.25)
    needed = int(re.findall(r"needs about (\d+)", stated(LOCAL, tmp_path))[0])
    small = {"writing": 5, "qa": 10, "summarization": needed - 15}
    assert f"(--limit {needed - 15})" in stated(LOCAL, tmp_path, sizes=small)
    few = stated(LOCAL, tmp_path, sizes=small | {"writing": 4})
    assert f"needs about {needed}, but the suite has only {needed - 1}" in few and "--limit" not in few


def test_no_number_of_questions_makes_up_for_sessions_or_blocks_that_differ(tmp_path: Path) -> None:
    plant(tmp_path / "a" / "r", LOCAL, sessions=3, repeats=2, effect=0.05)
    text = stated(LOCAL, tmp_path / "a")
    assert "with 2 repeats in each of 3 sessions: ss had" in text
    assert "no number of questions suffices; more processes would" in text and "--limit" not in text
    servers = served("plain", "x")
    plant(tmp_path / "b" / "r", servers, blocks=4, effect=0.1)
    text = stated(servers, tmp_path / "b")
    assert "with 1 repeat in 4 blocks: x had" in text
    assert "no number of questions suffices; more processes would" in text and "--limit" not in text


def test_repeats_of_the_earlier_run_are_stated(tmp_path: Path) -> None:
    plant(tmp_path / "r", LOCAL, repeats=5)
    assert ", with 5 repeats: ss had" in stated(LOCAL, tmp_path)


def changed(name: str, value: Any) -> Any:
    match value:
        case None:
            return "x"
        case bool():
            return not value
        case int() | float():
            return value + 1
        case str():
            return f"{value}x"
    return (PluginFile("p.py", "0" * 64, ()),) if name == "plugin" else ("x",)


def test_every_setting_that_changes_times_must_be_the_same(tmp_path: Path) -> None:
    plant(tmp_path / "r", LOCAL)
    assert found(LOCAL, tmp_path)
    names = {f.name for f in fields(RunConfig)} - {"methods", "endpoints", "presets"}
    free = {name for name in names if found(replace(LOCAL, **{name: changed(name, getattr(LOCAL, name))}), tmp_path)}
    assert free == {"limit", "repeats", "warmup", "seed", "order", "rate", "run_code"}


def test_methods_have_the_same_options_and_unfinished_runs_do_not_count(tmp_path: Path) -> None:
    plant(tmp_path / "r", LOCAL)
    methods = (MethodSpec("ar"), MethodSpec("ss", {"k": "2"}), MethodSpec("medusa"))
    text = stated(replace(LOCAL, methods=methods), tmp_path)
    assert "ss[k=2] has no outputs there; medusa had" in text
    assert not found(replace(LOCAL, methods=methods[:2]), tmp_path)
    plant(tmp_path / "later", LOCAL, created="2027-01-01T00:00:00+00:00", status="interrupted")
    assert f"based on {tmp_path / 'r'}," in stated(LOCAL, tmp_path)
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / MANIFEST).write_text("{")
    newest = plant(tmp_path / "newest", LOCAL, created="2027-01-01T00:00:00+00:00")
    assert f"based on {newest}," in stated(LOCAL, tmp_path)


def test_the_earlier_run_has_the_same_baseline(tmp_path: Path) -> None:
    plant(tmp_path / "r", served("plain", "x", "y"))
    assert not found(served("x", "y"), tmp_path)  # x was no baseline there
    assert not found(served("y", "plain", "x"), tmp_path)
    text = stated(served("plain", "y"), tmp_path)
    assert "y had" in text and "x had" not in text


def test_a_server_with_the_same_label_may_be_another_one(tmp_path: Path) -> None:
    plant(tmp_path / "r", served("plain", "x", "y"))
    assert not found(served("plain", "x", "y", model="N"), tmp_path)
    servers = served("plain", "x", "y").endpoints
    other = (*servers[:2], replace(servers[2], k=3))
    text = stated(RunConfig((), model="served", endpoints=other), tmp_path)
    assert "x had" in text and "y has no outputs there" in text


@pytest.mark.parametrize(
    ("model", "engine", "same"), [("M", "vLLM", True), ("M", "", True), ("N", "vLLM", False), ("M", "SGLang", False)]
)
def test_servers_that_run_already_have_the_same_model_and_engine(
    model: str, engine: str, same: bool, tmp_path: Path
) -> None:
    config = served("plain", "x", started=False)
    plant(tmp_path / "r", config)
    with closing(Server("plain", URL)) as plain, closing(Server("x", URL)) as drafting:
        plain.model, drafting.model, drafting.engine = "M", model, engine
        text = questions_needed(config, SIZES, 0.05, tmp_path, [plain, drafting])
    assert ("x had" in text, "not known" in text) == (same, not same)


def test_methods_without_an_interval_have_the_reason(tmp_path: Path) -> None:
    plant(tmp_path / "a" / "r", LOCAL, failing=("ss",), wrong=("medusa",))
    assert stated(LOCAL, tmp_path / "a").endswith(": ss has no outputs there; medusa has wrong outputs there")
    plant(tmp_path / "b" / "r", LOCAL, 3, tasks=("qa",))
    assert "ss and ar both answered fewer than 4 questions there" in stated(LOCAL, tmp_path / "b")


def precision_lines(text: str) -> list[str]:
    return [line.split(maxsplit=1)[1] for line in text.splitlines() if line.startswith("precision ")]


def test_a_dry_run_states_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "runs" / "new"
    config, where, _ = asked_run(RunOptions(methods="ss", target_ci=0.05, out=out))
    old = plant(out.parent / "old", preflight.check(config, where).config, 8, 0.05)
    words = ["run", "--methods", "ss", "--out", str(out), "--dry-run", "--limit", "2"]
    assert main(words) == 0 and not precision_lines(capsys.readouterr().out)
    assert main([*words, "--target-ci", "5%"]) == 0
    (line,) = precision_lines(capsys.readouterr().out)
    assert re.fullmatch(rf"±0\.050 based on {re.escape(str(old))}, with 1 repeat: ss had ±.* \(--limit \d+\)", line)


def test_a_dry_run_of_methods_and_servers_has_both_parts_of_an_earlier_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    questions, servers, out = tmp_path / "questions.jsonl", tmp_path / "servers.yaml", tmp_path / "runs" / "new"
    questions.write_text('{"question_id": "a", "turns": ["one fish"]}\n{"question_id": "b", "turns": ["two fish"]}\n')
    servers.write_text("servers: [{label: plain, command: [sh]}, {label: x, command: [sh], method: ss}]")
    options = RunOptions(methods="ss", servers=servers, suite=f"jsonl:{questions}", target_ci=0.05, out=out)
    of_servers, _, _ = asked_run(options.part((SERVER,)))
    config, where, _ = asked_run(options_of_methods(options))
    old = tmp_path / "runs" / "old"
    plant(old / METHODS, preflight.check(config, where).config, 8, 0.1)
    plant(old / SERVERS, of_servers, 8, 0.1)
    words = ["run", "--methods", "ss", "--servers", str(servers), "--suite", f"jsonl:{questions}", "--out", str(out)]
    assert main([*words, "--limit", "1", "--dry-run", "--target-ci", "5%"]) == 0
    methods, both = precision_lines(capsys.readouterr().out)
    assert f"based on {old / METHODS}, with 1 repeat: ss had" in methods
    assert f"based on {old / SERVERS}, with 1 repeat: x had" in both
    assert methods.endswith("but the suite has only 2") and both.endswith("but the suite has only 2")
