"""Command `ssbench doctor`."""

from __future__ import annotations

import time
from typing import Annotated, Any

import torch
import typer

from specbench_ss.bench.telemetry import sampler_for
from specbench_ss.engine.layers import cpu
from specbench_ss.models import limits as machine_limits
from specbench_ss.models.devices import check_one_device, resolve_device
from specbench_ss.models.limits import MachineLimits, device_name
from specbench_ss.results.text import format_number
from specbench_ss.runs.environment import busy, environment
from specbench_ss.runs.run_options import DEVICE


def command(
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate",
            help="Measure memory bandwidth, GEMM throughput and launch latency of the device, and store them for "
            "later runs. It takes some seconds, during which nothing else should run.",
        ),
    ] = False,
    device: Annotated[str, typer.Option(help=DEVICE)] = "auto",
) -> None:
    """Show this machine's device, versions, available telemetry, and measured limits."""
    check_one_device(device, "doctor")
    here, chosen = environment(), torch.device(resolve_device(device))
    _versions(here, chosen)
    if chosen.type == "cpu":
        native = cpu.kernels()
        print(
            f"{'kernels':<12}{f'native, {native.name}' if native else f'of torch, which are slower: {cpu.problem()}'}"
        )
    _telemetry(chosen)
    note = busy()
    if note:
        print(f"{'busy':<12}{note}")
    limits = machine_limits.calibrate(chosen, busy=note) if calibrate else machine_limits.known_limits(chosen)
    _limits(limits)


def _versions(here: dict[str, Any], device: torch.device) -> None:
    print(f"{'device':<12}{device}: {device_name(device)}")
    cpu, threads = here["cpu"], here["threads"] or {}
    print(f"{'processor':<12}{cpu['model']}, {cpu['available']} usable cores, {threads.get('intra_op')} threads")
    if here["memory_bytes"]:
        print(f"{'memory':<12}{here['memory_bytes'] / 2**30:.1f} GiB")
    for gpu in here["gpus"]:
        print(f"{'GPU':<12}{gpu['name']}, driver {here['driver']}, CUDA {here['cuda']}")
    print(f"{'python':<12}{here['python']}")
    print(f"{'packages':<12}{', '.join(f'{name} {version}' for name, version in here['packages'].items() if version)}")


def _telemetry(device: torch.device) -> None:
    """Print the available telemetry of the machine."""
    sampler = sampler_for(device, 1.0)
    assert sampler is not None
    with sampler.watch() as readings:
        time.sleep(0.02)
    sampler.close()
    print(f"{'telemetry':<12}{', '.join(sorted(readings.columns))}")
    if device.type == "cuda" and not any(name.startswith("nvml_") for name in readings.columns):
        print(f"{'':<12}no GPU readings: libnvidia-ml is not available")


def _limits(limits: MachineLimits | None) -> None:
    if limits is None:
        print(f"{'limits':<12}not measured; run `ssbench doctor --calibrate`")
        return

    threads = f", {limits.threads} threads" if limits.threads else ""
    print(f"{'limits':<12}measured {limits.made} with torch {limits.torch}{threads}")
    if limits.busy:
        print(f"{'':<12}possibly too low: during the measurement, {limits.busy}")
    print(f"{'  memory':<12}{limits.read_bytes_per_s / 1e9:.1f} GB/s reads, beyond the last-level cache")
    for dtype, rate in limits.flops_per_s.items():
        print(f"{'  GEMM':<12}{format_number(rate / 1e9)} GFLOP/s in {dtype}")
    print(f"{'  launch':<12}{limits.launch_s * 1e6:.2f} µs per operator")
