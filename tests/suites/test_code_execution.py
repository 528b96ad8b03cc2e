"""pass@1: extraction of code from outputs, its execution within limits, and the switch --run-code."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from specbench_ss import registry, run
from specbench_ss.bench import server_run
from specbench_ss.cli.main import main
from specbench_ss.conformance.suite_checks import check_suite
from specbench_ss.errors import UserError
from specbench_ss.runs.config import Endpoint, OutputOptions, RunConfig
from specbench_ss.suites import code_execution, sandbox
from specbench_ss.suites.code_execution import CodeQuestion, called_names, program
from specbench_ss.suites.sandbox import Outcome, run_program
from specbench_ss.suites.task_suites import MBPP, HumanEval
from tests.tiny import few, thorough

SHARED = Path(os.environ.get("SSBENCH_SHARED", Path(__file__).resolve().parents[3] / "shared")) / "data"
HUMANEVAL = SHARED / "humaneval" / "HumanEval.jsonl.gz"
needs_humaneval = pytest.mark.skipif(not HUMANEVAL.is_file(), reason="HumanEval.jsonl.gz is not here")

PROMPT = 'from typing import List\n\n\ndef evens(xs: List[int]) -> List[int]:\n    """Return the even numbers."""\n'
BODY = "    return [x for x in xs if x % 2 == 0]\n"
FUNCTION = f"def evens(xs: List[int]) -> List[int]:\n{BODY}"
ROW = {
    "task_id": "Own/0",
    "prompt": PROMPT,
    "canonical_solution": BODY,
    "test": "def check(candidate):\n    assert candidate([1, 2, 4]) == [2, 4]\n    assert candidate([]) == []\n",
    "entry_point": "evens",
}
MBPP_ROW = {
    "task_id": 7,
    "text": "Write a function that returns the distance of two points.",
    "code": "import math\ndef distance(p, q):\n    return math.hypot(p.x - q.x, p.y - q.y)",
    "test_setup_code": "class Point:\n    def __init__(self, x, y):\n        self.x, self.y = x, y",
    "test_list": ["assert distance(Point(0, 0), Point(3, 4)) == 5", "assert distance(Point(1, 1), Point(1, 1)) == 0"],
}


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Use a folder for temporary files that is empty at the end of every test."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    code_execution._outcome.cache_clear()
    yield folder
    assert not list(folder.iterdir())


def question(suite: HumanEval, row: dict[str, Any]) -> CodeQuestion:
    made = suite.question("rows.jsonl:1", 0, row)
    assert isinstance(made, CodeQuestion) and made.metric == "pass@1"
    return made


def score(output: str, row: dict[str, Any] = ROW) -> float | None:
    suite = MBPP() if "test_list" in row else HumanEval()
    suite.run_code = True
    return suite.score(question(suite, row), 0, output)


FAILING = {
    "assert": ("assert 1 == 2, 'one is not two'", r"^AssertionError: one is not two$"),
    "syntax": ("def f(:", r"^SyntaxError"),
    "null byte": ("x = 1\x00", r"null byte"),
    "half of a surrogate pair": ("x = '\ud800'", r"^UnicodeEncodeError"),
    "sys.exit": ("import sys\nsys.exit(0)", r"^SystemExit: 0$"),
    "interrupt": ("raise KeyboardInterrupt", r"^KeyboardInterrupt$"),
    "exit": ("import os\nos._exit(0)", r"^exited with status 0 before the end"),
    "exit in a thread": (
        "import os, threading, time\nthreading.Timer(0.01, os._exit, [0]).start()\ntime.sleep(5)", r"^exited with"
    ),
    "abort": ("import os\nos.abort()", r"^ended by signal 6$"),
    "memory": ("x = bytearray(2 ** 31)", r"^MemoryError$"),
    "slow growth": ("x = []\nwhile True: x.append(bytearray(2 ** 24))", r"^MemoryError$"),
    "loop": ("while True: pass", r"^used more than 1 s of CPU time$"),
    "loop without mercy": (
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass", r"CPU time"
    ),
    "sleep": ("import time\ntime.sleep(60)", r"^took longer than 1 s$"),
    "fork": ("import os\nwhile True: os.fork()", r"^os.fork is not allowed$"),
    "fork, caught": ("import os\ntry: os.fork()\nexcept BaseException: pass", r"^os.fork is not allowed$"),
    "shell": ("import os\nos.system('true')", r"^os.system is not allowed$"),
    "subprocess": ("import subprocess\nsubprocess.run(['true'])", r"^subprocess.Popen is not allowed$"),
    "processes": (
        "import multiprocessing as m\nm.get_context('spawn').Process(target=print).start()", r"is not allowed$"
    ),
    "kill": ("import os\nos.kill(os.getppid(), 9)", r"^os.kill is not allowed$"),
    "socket": ("import socket\nsocket.create_connection(('127.0.0.1', 9))", r"^socket.* is not allowed$"),
    "url": ("import urllib.request\nurllib.request.urlopen('http://127.0.0.1:9')", r"^socket.* is not allowed$"),
    "native code": ("import ctypes\nctypes.CDLL(None).getpid()", r"^ctypes.* is not allowed$"),
    "large file": ("with open('f', 'wb') as f:\n    while True: f.write(bytes(2 ** 20))", r"^OSError.*File too large"),
    "input": ("input()", r"^EOFError"),
    "wide message": ("raise ValueError('é\\n' * 10 ** 6)", r"^ValueError: é é .{1,400}$"),
    "message that exits": (
        "class E(Exception):\n    def __str__(self): import os; os._exit(0)\nraise E", r"^exited with status 0"
    ),
    "report": ("import os\nfor fd in range(3, 20):\n    try: os.write(fd, b'started')\n    except OSError: pass", r"."),
}  # fmt: skip


@few(8)
@pytest.mark.parametrize("name", FAILING)
def test_a_program_that_does_not_end_in_order_fails_with_a_reason(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "CPU_S", 1 if name in ("loop", "loop without mercy") else 20)
    monkeypatch.setattr(sandbox, "WALL_S", 1 if name == "sleep" else 60)
    monkeypatch.setattr(sandbox, "GRACE_S", 60.0)
    code, reason = FAILING[name]
    found = run_program(["x = 0", code, "assert True"])
    assert not found.passed
    assert found.reason.isprintable()
    assert re.search(reason, found.reason)


@few(3)
@pytest.mark.parametrize(
    "write",
    [
        "open({!r}, 'w')", "open({!r}, 'ab')", "__import__('os').open({!r}, 66)", "__import__('os').mkdir({!r})",
        "__import__('pathlib').Path({!r}).touch()", "__import__('sqlite3').connect({!r})",
        "open('here', 'w').close(); __import__('os').rename('here', {!r})",
        "__import__('os').symlink({!r}, 'link'); open('link', 'w')",
    ],
)  # fmt: skip
def test_only_the_programs_own_folder_can_be_written(write: str, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    found = run_program([write.format(str(outside))])
    assert found.reason == f"wrote outside its folder: {outside}" and not outside.exists()
    assert run_program([write.format("inside")]).passed or "symlink" in write


@thorough
def test_files_of_others_are_kept(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("text")
    for change in ("remove", "unlink", "truncate", "chmod", "rename"):
        more = {"truncate": ", 0", "chmod": ", 0", "rename": ", 'here'"}.get(change, "")
        found = run_program([f"import os\nos.{change}({str(tmp_path / 'kept')!r}{more})"])
        assert found.reason.startswith("wrote outside")
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    (tmp_path / "folder" / "kept").touch()
    remove = "import os, shutil\nos.makedirs('a/b'); open('a/b/c', 'w').close(); shutil.rmtree({!r})"
    assert run_program([remove.format("a") + "\nassert not os.listdir()"]).passed
    assert run_program([remove.format(str(tmp_path / "folder"))]).reason.startswith("wrote outside")
    assert (tmp_path / "kept").read_text() == "text" and len(list((tmp_path / "folder").iterdir())) == 2


def test_a_program_sees_an_empty_folder_and_no_variable_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OWN_API_KEY", "secret")
    monkeypatch.setenv("PYTHONSTARTUP", "/nowhere")
    look = """
    import os, sys, tempfile
    assert os.listdir() == [] and tempfile.gettempdir() == os.getcwd() == os.environ["HOME"]
    assert not any(name.startswith(("OWN", "SSBENCH", "PATH")) for name in os.environ), os.environ
    assert sys.stdin.read() == "" and sys.argv == ["answer"]
    assert not any("sandbox" in str(place) for place in sys.path) and "specbench_ss" not in sys.modules
    os.makedirs("a/b"); open("a/b/c", "w").write("x" * 1000); os.chmod("a", 0)
    print("x" * 10 ** 7); print("x" * 10 ** 7, file=sys.stderr)
    """
    assert run_program([look.replace("\n    ", "\n")]) == Outcome()


def test_what_answers_use_can_be_imported() -> None:
    names = "numpy, asyncio, threading, subprocess, socket, uuid, random, sqlite3, dataclasses, typing, decimal, ctypes"
    use = """
import numpy
@dataclasses.dataclass
class Point:
    x: "int" = 0
thread = threading.Thread(target=print); thread.start(); thread.join()
assert numpy.linalg.det(numpy.eye(3)) == 1 and Point() == Point(0) and __name__ != "__main__"
"""
    assert run_program([f"import {names}", "from __future__ import annotations\n" + use]) == Outcome()


def test_sets_have_one_order() -> None:
    order = "raise ValueError(list({'a', 'b', 'c', 'd', 'e', 'f', 'g', 'h'}))"
    assert run_program([order]) == run_program([order])


@pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")
def test_there_is_no_network_interface_where_namespaces_are_permitted() -> None:
    probe = "import ctypes, sys; sys.exit(ctypes.CDLL(None).unshare(0x50000000))"
    if subprocess.run([sys.executable, "-c", probe]).returncode:
        pytest.skip("the system does not permit network namespaces to this user")
    found = run_program(["raise ValueError([x.split(':')[0].strip() for x in open('/proc/self/net/dev')][2:])"])
    assert found.reason in ("ValueError: ['lo']", "ValueError: []")


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_processes_that_were_started_despite_the_rules_are_killed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A subprocess without the rules leaves a child behind, which ends with its group."""
    script = "import os, time\npid = os.fork()\nos.write(1, b'started\\n%d' % pid) if pid else time.sleep(60)\n"
    (tmp_path / "other.py").write_text(script)
    monkeypatch.setattr(sandbox, "__file__", str(tmp_path / "other.py"))
    pid = int(run_program([]).reason)
    for _ in range(100):
        state = Path(f"/proc/{pid}/stat")
        if not state.exists() or state.read_text().rpartition(") ")[2][0] == "Z":
            return
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    pytest.fail("the child is alive")


def test_an_interpreter_that_does_not_start_is_no_failure_of_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "__file__", "/nowhere/sandbox.py")
    with pytest.raises(RuntimeError, match=r"did not start \(exited with status 2"):
        run_program(["x = 1"])


RIGHT = {
    "continuation": BODY,
    "continuation with more": f"{BODY}\n\ndef main():\n    print(evens([1]))\n\nmain(",
    "continuation with a comment": f"{BODY}\n# Test it:\nassert False",
    "continuation to the fence of the prompt": f"{BODY}```\nThis function filters the numbers. It's short.",
    "whole function": f"```python\n{FUNCTION}```",
    "prose around it": f"Sure! Here it is:\n\n```python\n{FUNCTION}```\n\nIt takes `xs` and filters it. Don't worry.",
    "other blocks": f"Install:\n```bash\npip install x\n```\n```python\nimport typing\n```\n```py\n{FUNCTION}```",
    "usage first": f"Use it so:\n```python\nassert evens([1]) == 9\n```\n\n```python\n{FUNCTION}```",
    "no language": f"```\n{FUNCTION}```",
    "body in a block": f"```python\n{BODY}```",
    "not closed": f"```python\nimport os\n\n{FUNCTION}",
    "in a list": "1. So:\n\n   ```python\n" + "".join(f"   {line}\n" for line in FUNCTION.splitlines()) + "   ```",
    "tildes": f"~~~python\n{FUNCTION}~~~",
    "windows": f"```python\n{FUNCTION}```\n".replace("\n", "\r\n"),
    "future": f"```python\nfrom __future__ import annotations\n{FUNCTION}```",
    "lambda": "```python\nevens = lambda xs: [x for x in xs if not x % 2]\n```",
    "helper": "```python\ndef even(x):\n    return not x % 2\n\ndef evens(xs):\n    return list(filter(even, xs))\n```",
    "main": f"```python\n{FUNCTION}\nif __name__ == '__main__':\n    raise SystemExit(1)\n```",
    "no fence": FUNCTION,
    "no fence, with prose": f"Here is the function:\n\n{FUNCTION}\nThis works because it's a filter.",
    "no fence, with imports": f"from what I see, it's easy:\nimport os\n{FUNCTION}# done",
}
WRONG = {
    "nothing": "",
    "prose": "I cannot do that. It's not possible.",
    "pass": "    pass\n",
    "the prompt alone": f"```python\n{PROMPT}```",
    "another function": f"```python\n{FUNCTION.replace('evens', 'odds')}```",
    "a wrong function": f"```python\n{FUNCTION.replace('== 0', '== 1')}```",
    "the function in a class": "```python\nclass Solution:\n    def evens(self, xs):\n        return xs\n```",
    "an end in the middle": "```python\ndef evens(xs):\n    return [x for x in",
    "no fence, an end in the middle": "def evens(xs):\n    return [x for x in",
}


# Runs many programs in one process, each in a namespace of its own, and ends with the names of those that differ.
MANY = """
def passes(parts):
    names = {{}}
    try:
        for part in parts:
            exec(part, names)
    except Exception:
        return False
    return True

raise ValueError([name for name, parts in {programs!r}.items() if passes(parts) is not {expected}])
"""


def differing(made: Mapping[str, tuple[CodeQuestion, str]], expected: bool) -> str:
    """Return the names of the outputs that do not pass, or fail, as expected: 'ValueError: []' for none."""
    programs = {name: program(*of) for name, of in made.items()}
    return run_program([MANY.format(programs=programs, expected=expected)]).reason


def test_code_is_found_in_outputs() -> None:
    made = question(HumanEval(), ROW)
    assert differing({name: (made, output) for name, output in RIGHT.items()}, True) == "ValueError: []"


def test_outputs_without_the_right_function_fail() -> None:
    made = question(HumanEval(), ROW)
    assert differing({name: (made, output) for name, output in WRONG.items()}, False) == "ValueError: []"


@pytest.mark.parametrize("end", ["import os; os._exit(0)", "raise SystemExit", "import sys; sys.exit(0)"])
def test_an_output_that_exits_before_the_tests_fails(end: str) -> None:
    assert score(f"```python\n{FUNCTION}\n```") == 1
    assert score(f"```python\n{FUNCTION}\n{end}\n```") == 0


def test_helpers_of_the_prompt_are_there() -> None:
    row = {**ROW, "prompt": f"def even(x):\n    return not x % 2\n\n\n{PROMPT}"}
    assert score("```python\ndef evens(xs):\n    return [x for x in xs if even(x)]\n```", row) == 1
    assert score("```python\ndef evens(xs):\n    return [x for x in xs if event(x)]\n```", row) == 0


def test_mbpp_has_its_setup_before_the_answer_and_its_tests_after_it() -> None:
    assert score(f"```python\n{MBPP_ROW['code']}\n```", MBPP_ROW) == 1
    assert score(str(MBPP_ROW["code"]), MBPP_ROW) == 1
    assert score("```python\ndef distance(p, q):\n    return 5\n```", MBPP_ROW) == 0  # the second test
    sanitized = {
        "task_id": 8,
        "prompt": "Write it.",
        "code": "def area(r):\n    return math.pi * r * r",
        "test_imports": ["import math"],
        "test_list": ["assert math.isclose(area(1), 3.14159, rel_tol=1e-3)"],
    }
    assert score(f"```python\ndef circle(): ...\n```\n```python\n{sanitized['code']}\n```", sanitized) == 1
    assert called_names("assert set(similar((1, 2))) == m.close(len([3]))") == ("similar", "close")
    # the text of a list would be a program that passes
    with pytest.raises(UserError, match="'test_list' must be a list of texts"):
        question(MBPP(), {**MBPP_ROW, "test_list": str(MBPP_ROW["test_list"])})


def test_rows_without_tests_have_no_score() -> None:
    suite = HumanEval()
    suite.run_code = True
    for lacking in ("test", "entry_point"):
        made = suite.question("rows.jsonl:1", 0, {name: value for name, value in ROW.items() if name != lacking})
        assert made.metric is None and suite.score(made, 0, RIGHT["whole function"]) is None


def test_the_hash_has_the_tests_and_the_run_directory_does_not() -> None:
    made, other = question(HumanEval(), ROW), question(HumanEval(), {**ROW, "test": "def check(f): pass\n"})
    assert made.content() != other.content()
    assert "candidate" not in json.dumps(made.content()) and "assert" not in json.dumps(made.content())


def test_equal_outputs_are_executed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    executed: list[Any] = []

    def execute(parts: Any) -> Outcome:
        executed.append(parts)
        return Outcome()

    monkeypatch.setattr(code_execution, "run_program", execute)
    assert [score(RIGHT["whole function"]), score(RIGHT["whole function"]), score(BODY)] == [1, 1, 1]
    assert len(executed) == 2


@few(1)
@pytest.mark.parametrize(("name", "row"), [("humaneval", ROW), ("mbpp", MBPP_ROW)])
def test_the_checks_of_suites_hold_with_and_without_execution(name: str, row: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n" + json.dumps({**row, "task_id": "other"}) + "\n")
    kind = type(registry.load_suite(name))
    check_suite(kind, data=tmp_path / "rows.jsonl")
    check_suite(type("Executing", (kind,), {"run_code": True}), data=tmp_path / "rows.jsonl")


def rows_of(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


@needs_humaneval
def test_every_solution_of_humaneval_passes_and_every_empty_body_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "CPU_S", 120)
    monkeypatch.setattr(sandbox, "WALL_S", 300)
    rows = {row["task_id"]: (question(HumanEval(), row), row) for row in rows_of(HUMANEVAL)}
    assert len(rows) == 164
    forms = {
        "continuation": "{body}",
        "chat": "Here it is:\n\n```python\n{prompt}{body}\n```\n\nIt's done.",
        "unfenced": "Here it is:\n{prompt}{body}\nIt's done.",
    }
    for form in forms.values():
        outputs = {
            name: (made, form.format(prompt=row["prompt"], body=row["canonical_solution"]))
            for name, (made, row) in rows.items()
        }
        assert differing(outputs, True) == "ValueError: []"
    for empty in ("", "    pass\n", "```python\n```"):
        assert differing({name: (made, empty) for name, (made, _) in rows.items()}, False) == "ValueError: []"


@needs_humaneval
def test_solutions_of_humaneval_are_scored_one_by_one() -> None:
    for row in rows_of(HUMANEVAL)[::41]:
        assert score(row["canonical_solution"], row) == 1
        assert score("    pass\n", row) == 0


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "h.jsonl"
    path.write_text("".join(json.dumps({**ROW, "task_id": f"Own/{number}"}) + "\n" for number in range(2)))
    return path


def measured(data: Path, out: Path, **given: Any) -> Any:
    return run("pld", suite="humaneval", data=data, max_new_tokens=8, warmup=0, telemetry=0, out=out, **given)


def test_a_run_executes_code_with_the_option_alone(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    executed: list[float] = []

    def execute(parts: Any) -> Outcome:
        executed.append(time.time())
        return Outcome()

    monkeypatch.setattr(code_execution, "run_program", execute)
    without = measured(data, tmp_path / "without")
    assert not executed and all(row.quality is None for row in without.run.rows)
    assert any("--run-code" in text for text in without.run.manifest["suite"]["notes"])

    made = measured(data, tmp_path / "with", run_code=True)
    assert executed and all(row.quality == 1 for row in made.run.rows)
    assert not any("no quality" in text for text in made.run.manifest["suite"]["notes"])
    assert made.run.questions == without.run.questions and made.run.questions[0].metric == "pass@1"
    for row in made.run.rows:  # no execution while a sample is decoded
        assert row.ended is not None and not any(row.started <= at < row.ended for at in executed)
    capsys.readouterr()
    assert main(["report", str(tmp_path / "with"), "-v"]) == 0
    assert "quality" in capsys.readouterr().out


@pytest.mark.parametrize("run_code", [False, True])
def test_servers_are_scored_with_the_option_alone(run_code: bool, data: Path, tmp_path: Path) -> None:
    endpoints = (Endpoint("one", "http://localhost:1"),)
    config = RunConfig((), "humaneval", data=str(data), endpoints=endpoints, run_code=run_code)
    plan = server_run.check(config, OutputOptions(tmp_path / "run"))
    assert plan.suite.score(plan.data.questions[0], 0, BODY) == (1 if run_code else None)


@thorough
def test_garbage_of_a_model_is_no_missing_quality(data: Path, tmp_path: Path) -> None:
    made = measured(data, tmp_path / "run", run_code=True)
    assert [row.quality for row in made.run.rows] == [0.0] * len(made.run.rows)
