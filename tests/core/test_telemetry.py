"""Telemetry: NVML's answers under the real binding, means over time, what disturbs a sample and makes it again."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specbench_ss import load_run
from specbench_ss.bench import telemetry as disturbance
from specbench_ss.bench import telemetry as telemetry_record
from specbench_ss.bench.telemetry import GIVE_UP, Host, Nvml, RerunPolicy, Sampler, Seen, noise_of, sampler_for
from specbench_ss.runs.config import Recording
from tests.core.nvml_replay import replay
from tests.core.test_runner import Bench

ALONE = {
    "host_core_share": [0.5, 0.5],
    "host_cpu_share": 0.5,
    "host_foreign_share": 0.0,
    "host_rss_bytes": 1000,
    "host_page_faults": 0,
}


class StillHost:
    """A processor of which every reading is known; `readings` are given out one after the other, the last for ever."""

    core_share = [0.5, 0.5]  # noqa: RUF012

    def __init__(self, *readings: dict[str, Any]) -> None:
        self.readings, self.read_times = list(readings) or [ALONE], 0

    def read(self, slow: bool = False) -> dict[str, Any]:
        self.read_times += 1
        return {k: v for k, v in self.readings[min(self.read_times, len(self.readings)) - 1].items() if "core" not in k}


def device_seen(monkeypatch: pytest.MonkeyPatch, readings: int = 4, **changes: list[list[Any]]) -> Seen:
    """Readings of the replayed device, a reading each tenth of a second."""
    monkeypatch.setattr(telemetry_record, "GPM_S", 0.0)
    replay(monkeypatch, **changes)
    device, seen = Nvml("00000000:17:00.0"), Seen()
    for i in range(readings):
        seen.add(100 + 0.1 * i, device.read())
    device.close()
    return seen


def test_nvml_answers_become_readings_in_units_of_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry_record, "GPM_S", 0.0)
    library = replay(monkeypatch)
    device = Nvml("00000000:17:00.0")
    first, second = device.read(), device.read()
    assert first["nvml_kernel_busy"] == 0 and second["nvml_kernel_busy"] == 0.62
    assert second == {
        "nvml_kernel_busy": 0.62,
        "nvml_memory_busy": 0.31,
        "nvml_sm_mhz": 2619,
        "nvml_mem_mhz": 2619,
        "nvml_clock_events": 0,
        "nvml_power_w": 264.0,
        "nvml_energy_j": 5026.4,
        "nvml_used_bytes": 16520809984,
        "nvml_foreign_processes": 0,
        "gpm_sm_active": 0.41,
        "gpm_tensor_active": 0.075,
        "gpm_dram_active": 0.55,
    }
    device.close()
    assert library.calls["nvmlShutdown"] == 1 and library.calls["nvmlGpmSampleFree"] == 2


def gpm(sm: float, dram: float) -> list[Any]:
    return [0, {"metrics": {"2": 100 * sm, "5": 0.0, "10": 100 * dram}}]


def test_counters_without_a_new_measurement_enter_no_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [gpm(0.0, 0.0), gpm(0.197, 0.083), gpm(0.210, 0.090), gpm(0.0, 0.0)]  # as an H200 gave them
    found = device_seen(monkeypatch, nvmlGpmMetricsGet=answers).summary(1)
    assert found["gpm_sm_active"] == pytest.approx(0.20, abs=0.01)
    assert found["gpm_dram_active"] == pytest.approx(0.087, abs=0.003)
    assert found["gpm_tensor_active"] == 0.0  # a model in float32 uses no tensor core
    idle = device_seen(monkeypatch, nvmlGpmMetricsGet=[gpm(0.0, 0.0)]).summary(1)
    assert idle["gpm_sm_active"] is None and idle["gpm_dram_active"] is None


def test_counters_are_read_at_least_a_fifth_of_a_second_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(monotonic=lambda: now, time=time.time)
    monkeypatch.setattr(telemetry_record, "time", clock)
    replay(monkeypatch, nvmlGpmMetricsGet=[gpm(0.3, 0.1), gpm(0.5, 0.2)])
    now, seen = 10.0, Seen()
    device = Nvml("00000000:17:00.0")
    now = 10.15
    device.restart()  # as at the start of a sample
    for now in (10.15, 10.25, 10.36, 10.46, 10.57, 10.6):
        seen.add(now, device.read())
    assert seen.columns["gpm_sm_active"] == [None, None, 0.3, None, 0.5, None]
    assert seen.mean("gpm_sm_active") == pytest.approx(0.4)  # each of 0.21 s
    device.close()


def test_energy_is_a_difference_and_means_weigh_time() -> None:
    seen = Seen()
    for when, joules, busy in ((0.0, 50.0, 1.0), (1.0, 60.0, 0.0), (4.0, 110.0, 0.8)):
        seen.add(when, {"nvml_energy_j": joules, "nvml_kernel_busy": busy, "host_page_faults": 7})
    found = seen.summary(tokens=30)
    assert (found["energy_j"], found["joules_per_token"]) == (60.0, 2.0)
    assert found["nvml_kernel_busy"] == pytest.approx(0.6)  # (1 * 0 + 3 * 0.8) / 4: the first is of the time before
    assert found["host_page_faults"] == 0 and found["nvml_power_w"] is None


PROCESSES = "nvmlDeviceGetComputeRunningProcesses_v3"
CLOCKS = [[0, mhz] for sm in (345, 900, 1980, 1980, 1400, 1980) for mhz in (sm, 2619)]  # of multiprocessors, memory


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({PROCESSES: [[7, 2], [0, 2, [{"pid": 1}, {"pid": 2}]]] * 4}, "1 other process on the device"),
        ({"nvmlDeviceGetCurrentClocksEventReasons": [[0, 0], [0, 0x20 | 0x04]]}, "slowed down: power cap, heat"),
        ({"nvmlDeviceGetClockInfo": CLOCKS}, ""),
        ({"nvmlDeviceGetCurrentClocksEventReasons": [[0, 0], [0, 0x01 | 0x02 | 0x10]]}, ""),  # idle, asked for, in step
    ],
)
def test_what_disturbs_a_device_is_reported(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, list[list[Any]]], words: str
) -> None:
    steady = {"nvmlDeviceGetClockInfo": [[0, 1980]]}
    reported = noise_of(device_seen(monkeypatch, 6, **(steady | changes)))
    assert words in reported and bool(words) == bool(reported)


def test_foreign_work_on_the_processor_is_reported() -> None:
    seen = Seen()
    for when in range(3):
        seen.add(when, {"host_foreign_share": 0.25})
    assert noise_of(seen) == "other processes used 25% of the CPU"
    short = Seen()
    for when in range(3):
        short.add(when / 50, {"host_foreign_share": 0.25})  # a tick more or less is as much
    assert noise_of(short) == ""


def test_samples_are_made_again_a_few_times_and_not_for_ever() -> None:
    tries = RerunPolicy(None, on_gpu=True)
    assert [tries.again("heat", made) for made in range(3)] == [True, True, False]
    assert not RerunPolicy(None, on_gpu=False).again("heat", 0)
    assert RerunPolicy(1, on_gpu=False).again("heat", 0) and not RerunPolicy(1, on_gpu=False).again("", 0)
    for _ in range(GIVE_UP - 1):
        assert tries.again("heat", 0)
        tries.again("heat", 2)
    assert tries.given_up and not tries.again("heat", 0)
    tries.again("", 0)
    assert tries.again("heat", 0), "a quiet sample gives hope again"


def test_the_host_reports_its_own_share_from_that_of_others() -> None:
    host = Host()
    until = time.perf_counter() + 0.3
    while time.perf_counter() < until:
        pass
    found = host.read(slow=True)
    assert found["host_rss_bytes"] > 1e6 and found["host_page_faults"] > 0
    assert 0 < found["host_cpu_share"] <= 1 and 0 <= found["host_foreign_share"] <= 1
    assert len(host.core_share) == len(host.cores) and all(0 <= share <= 1 for share in host.core_share)


def test_the_thread_reads_only_while_a_sample_is_made() -> None:
    host = StillHost()
    sampler = Sampler(host, interval=0.01)
    with sampler.watch() as seen:
        while len(seen.times) < 4:
            time.sleep(0.005)
    made = len(seen.times)
    assert host.read_times == made >= 5
    time.sleep(0.05)
    assert host.read_times == made == len(seen.times)
    sampler.close()
    assert not sampler._thread.is_alive()


class Recorded(Bench):
    """A run of fakes that is watched by a fake machine."""

    recording = Recording(telemetry=5.0, rerun_noisy=2)

    def run(self, resume: bool = False) -> Any:
        super().run(resume)
        return load_run(self.path)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[StillHost]:
    """The readings of the processor, for tests to change."""
    host = StillHost(ALONE)
    monkeypatch.setattr(telemetry_record, "sampler_for", lambda device, interval: Sampler(host, None, interval))
    monkeypatch.setattr(disturbance, "TICKS", 0)  # the fakes take no time
    yield host


def test_every_sample_has_its_readings(machine: StillHost, tmp_path: Path) -> None:
    done = Recorded(tmp_path).run()
    assert len(done.telemetry) == 2 * len(done.samples)
    assert set(done.samples["noise_reason"]) == {""} and set(done.samples["n_reruns"]) == {0}
    assert set(done.samples["host_cpu_share"]) == {0.5} and done.samples["energy_j"].isna().all()
    assert done.telemetry["host_core_share"].iloc[0] == [0.5, 0.5]


def test_a_noisy_sample_is_made_again_and_states_how_often(machine: StillHost, tmp_path: Path) -> None:
    busy = ALONE | {"host_foreign_share": 0.5}
    machine.readings = [ALONE, busy, ALONE, busy, ALONE]
    bench = Recorded(tmp_path)
    done = bench.run()
    assert done.samples["n_reruns"].tolist() == [2] + [0] * (len(done.samples) - 1)
    assert set(done.samples["noise_reason"]) == {""}
    first = done.telemetry[done.telemetry["question_id"] == done.samples["question_id"].iloc[0]]
    assert first.groupby("attempt")["noise_reason"].first().tolist()[:3] == [
        "other processes used 50% of the CPU",
        "other processes used 50% of the CPU",
        "",
    ]
    assert len(bench.calls) == len(done.samples) + 2


def test_a_lasting_disturbance_marks_samples_and_is_given_up(machine: StillHost, tmp_path: Path) -> None:
    machine.readings = [ALONE | {"host_foreign_share": 0.5}]
    bench = Recorded(tmp_path)
    done = bench.run()
    assert done.samples["n_reruns"].tolist() == [2] * GIVE_UP + [0] * (len(done.samples) - GIVE_UP)
    assert done.samples["noise_reason"].str.contains("other processes").all()
    assert any("re-runs are disabled" in warning for warning in bench.events.warnings)


def test_tries_of_a_killed_session_are_none_of_the_sample_made_later(machine: StillHost, tmp_path: Path) -> None:
    busy = ALONE | {"host_foreign_share": 0.5}
    machine.readings = [ALONE, busy, ALONE, busy, ALONE]
    Recorded(tmp_path).run()
    first = (tmp_path / "samples.jsonl").read_bytes().splitlines(keepends=True)[0]
    (tmp_path / "samples.jsonl").write_bytes(b"")  # as if killed before the first sample was committed
    done = Recorded(tmp_path).run(resume=True)
    of_first = done.telemetry[done.telemetry["question_id"] == json.loads(first)["question_id"]]
    assert set(of_first["attempt"]) == {0} and set(done.samples["n_reruns"]) == {0}


def test_a_killed_line_of_telemetry_is_cut_by_resuming(machine: StillHost, tmp_path: Path) -> None:
    readings = len(Recorded(tmp_path).run().telemetry)
    file = tmp_path / "telemetry.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:-1]) + lines[-1][:20])
    assert len(load_run(tmp_path).telemetry) == readings - 2
    rows = (tmp_path / "samples.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "samples.jsonl").write_bytes(b"".join(rows[:-1]))
    again = Recorded(tmp_path).run(resume=True)
    assert len(again.telemetry) == readings
    assert all(json.loads(line) for line in file.read_text().splitlines())


def test_a_gpu_is_found_by_its_place_on_the_bus(monkeypatch: pytest.MonkeyPatch) -> None:
    replay(monkeypatch)
    place = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x17, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: place)
    sampler = sampler_for(torch.device("cuda:0"), 1.0)
    assert sampler is not None and sampler.device is not None
    with sampler.watch() as seen:
        pass
    sampler.close()
    assert seen.columns["nvml_kernel_busy"] == [0, 0.62] and seen.columns["host_rss_bytes"]
