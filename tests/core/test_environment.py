"""The description of the machine: JSON-ready, and never a reason to fail."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from specbench_ss.runs import environment as env


def test_it_is_json_and_states_the_essentials() -> None:
    found = env.environment()
    assert json.loads(json.dumps(found)) == found
    assert found["packages"]["torch"]
    assert found["cpu"]["model"]
    assert found["cpu"]["available"] >= 1
    assert found["memory_bytes"] > 2**20


def test_nothing_that_is_missing_makes_it_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise OSError("no such thing here")

    monkeypatch.setattr(env.psutil, "virtual_memory", fails)
    monkeypatch.setattr(env.pynvml, "nvmlInit", fails)
    monkeypatch.setattr(env, "revision", env.revision.__wrapped__)  # without the cache
    monkeypatch.setattr(env.subprocess, "run", lambda *a, **k: (_ for _ in ()).throw(FileNotFoundError("git")))
    found = env.environment()
    assert found["gpus"] == []
    assert found["revision"] is None
    assert found["memory_bytes"] is None


class FakeNvml:
    NVML_CLOCK_SM = 1

    def __getattr__(self, name: str) -> Any:
        if name in ("nvmlInit", "nvmlShutdown"):
            return lambda: None
        if name == "nvmlDeviceGetCount":
            return lambda: 1
        if name == "nvmlDeviceGetName":
            return lambda handle: b"A GPU"
        if name == "nvmlSystemGetDriverVersion":
            return lambda: "999.1"
        if name == "nvmlDeviceGetHandleByIndex":
            return lambda i: i
        raise RuntimeError("not supported")


def test_a_gpu_that_answers_half_the_questions_is_still_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "pynvml", FakeNvml())
    found = env.environment()
    assert found["gpus"][0]["name"] == "A GPU"
    assert found["gpus"][0]["memory_bytes"] is None
    assert found["driver"] == "999.1"


def test_machine_changes_names_what_differs_but_not_the_clock_of_the_moment() -> None:
    old = {"cpu": {"model": "x"}, "gpus": [{"name": "g", "sm_clock_mhz_now": 100}], "python": "3.11"}
    new = {"cpu": {"model": "x"}, "gpus": [{"name": "g", "sm_clock_mhz_now": 900}], "python": "3.12"}
    assert env.machine_changes(old, new) == []
    assert env.machine_changes(old, {**new, "cpu": {"model": "y"}}) == ["cpu"]
    assert env.machine_changes(old, {**new, "gpus": []}) == ["gpus"]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"threads": {"intra_op": 1}}, "threads"),
        ({"packages": {"torch": "2", "numpy": "1"}}, "torch"),
        ({"driver": "2"}, "driver"),
        ({"revision": {"commit": "a", "dirty": True}}, "code revision"),
        ({"packages": {"torch": "1", "numpy": "2"}}, None),
    ],
)
def test_every_condition_of_a_timing_counts_against_every_earlier_session(change: Any, name: str | None) -> None:
    here = {
        "threads": {"intra_op": 2},
        "packages": {"torch": "1", "numpy": "1"},
        "driver": "1",
        "revision": {"commit": "a", "dirty": False},
    }
    expected = [name] if name else []
    assert env.machine_changes(here, {**here, **change}) == expected
    sessions = [{"environment": here}, {"environment": {**here, **change}}]
    assert env.changed_since({"environment": here, "sessions": sessions}, here) == expected


def test_a_busy_machine_is_reported_with_its_load_and_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "_usable_cores", lambda: 2)
    monkeypatch.setattr(env, "_other_load", lambda: 3.9)
    for load, words in ((2.0, ""), (6.08, "the machine is busy (load 6.1 on 2 cores): times will be unstable")):
        monkeypatch.setattr("os.getloadavg", lambda load=load: (load, 0.0, 0.0))
        assert env.busy() == words

    def unknown() -> None:
        raise OSError

    monkeypatch.setattr("os.getloadavg", unknown)
    assert env.busy() == ""


@pytest.mark.parametrize(("others", "reported"), [(0.1, False), (1.0, True), (None, True)])
def test_a_load_of_work_that_has_ended_is_not_reported(
    others: float | None, reported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(env, "_usable_cores", lambda: 2)
    monkeypatch.setattr("os.getloadavg", lambda: (2.1, 0.0, 0.0))
    monkeypatch.setattr(env, "_other_load", lambda: others)
    assert bool(env.busy()) == reported


def test_work_of_others_is_reported_from_this_process_s_own() -> None:
    """Anyone who else works here: what is counted of this process is no part of it."""
    assert env._other_load() >= -0.2
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        try:
            assert env._other_load() > 0.2
        finally:
            other.kill()
