"""Cost model: FLOPs, bytes, roofline, waterfall and the measured parts of a step for predictions.

Counts are lower bounds: weights and the context's keys and values are read once per step, and activations are not
counted. Extra rows of a method count with their GEMMs (`Decoder.extra_work`), without their attention.
docs/metrics.md has the definitions.

Predicted step time = max(bytes / bandwidth, FLOP / peak FLOP/s) + measured overhead. Additional verification time is
modelled as GEMMs below the peak: it grows with the rows and the model's size. docs/results states the errors.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated as Col
from typing import Any, final

from specbench_ss.engine.numerics import arithmetic
from specbench_ss.options import REFERENCE
from specbench_ss.results.summary import PARTS, Number, Tally, safe_div, tally
from specbench_ss.results.text import format_number, percent
from specbench_ss.runs.records import Run, SampleRecord
from specbench_ss.stats.pairs import Pairs


@final
@dataclass(frozen=True, slots=True)
class Cost:
    """Total cost of some steps.

    drafter_bytes, drafter_flops: of `bytes` and `flops`, the drafter's; bytes are None where they are not known.
    fixed_flops: of `flops`, those of rows that each step has whatever it verifies.
    """

    steps: int
    flops: float
    bytes: float
    drafter_bytes: float | None
    drafter_flops: float = 0.0
    fixed_flops: float = 0.0

    @property
    def intensity(self) -> float | None:
        """Return floating-point operations for each byte."""
        return safe_div(self.flops, self.bytes)

    def fastest_s(self, read: float | None, products: float | None) -> float | None:
        """Return the seconds of a step that reaches the nearer limit, bandwidth or products; None without limits."""
        return max(self.bytes / read, self.flops / products) / self.steps if read and products else None


def counted(rows: Sequence[SampleRecord], shape: Mapping[str, Any]) -> Cost | None:
    """Return the cost of all steps of these samples; None if there are none, or if the shapes are incomplete.

    shape: of `model_shape`, with the drafter's under `drafter` and that of further tokens under `extra_work`. The
    context of a step is taken as the mean of its lengths at the beginning and the end of the output.
    """
    good = [row for row in rows if row.ok and row.steps]
    if not good or shape["weight_bytes"] is None:
        return None
    steps, extra = sum(row.steps or 0 for row in good), shape.get("extra_work") or {}
    dropped = sum(max(0, (row.draft_nodes or 0) - (row.verified_nodes or 0)) for row in good)
    fixed = 2.0 * steps * extra.get("step", 0.0)
    flops, moved = fixed + 2.0 * dropped * extra.get("dropped", 0.0), 0.0
    for row in good:
        in_last_layer = (row.verified_nodes or 0) + (row.steps or 0)  # verified nodes, and the root of each step
        context = (row.prompt_tokens or 0) + (row.tokens or 0) / 2
        seen = sum(context if window is None else min(context, window) for window in shape["windows"])
        products = 2 * (shape["matrix_parameters"] + extra.get("node", 0.0)) + shape["attention_flops"] * seen
        flops += in_last_layer * products
        moved += (row.steps or 0) * (shape["weight_bytes"] + shape["kv_bytes"] * seen)
    drafter = shape.get("drafter")
    if drafter is None or (not drafter["weight_bytes"] and any(row.num_draft_forwards for row in good)):
        # a draft model has weights that `drafter_weights` does not state
        return Cost(steps, flops, moved, None, fixed_flops=fixed)
    calls = sum(row.num_draft_forwards or row.steps or 0 for row in good)
    read, drafting = float(calls * drafter["weight_bytes"]), calls * 2.0 * drafter["matrix_parameters"]
    return Cost(steps, flops + drafting, moved + read, read, drafting, fixed)


@dataclass(frozen=True, slots=True)
class MethodCost:
    """One method's samples. cost: from shapes, where these are known."""

    label: str
    rows: Sequence[SampleRecord]
    tally: Tally
    cost: Cost | None

    def total(self, name: str) -> float:
        """Return the sum of a field over the samples."""
        return float(sum(getattr(row, name) or 0 for row in self.rows))


@dataclass(frozen=True, slots=True)
class PairedCost:
    """A method and the baseline over the samples that both have. invalid: the method has no speedup."""

    method: MethodCost
    baseline: MethodCost
    invalid: bool = False


def pairs(run: Run, invalid: Collection[str] = ()) -> list[PairedCost]:
    """Return a pair for each method, in the order of the run; the baseline is paired with itself.

    invalid: labels of the methods without a speedup over all tasks.
    """
    both = [(label, Pairs(run.of(label), run.of(run.baseline))) for label in run.labels]
    return [
        PairedCost(_work(run, label, of.own), _work(run, run.baseline, of.other), label in invalid)
        for label, of in both
    ]


def _work(run: Run, label: str, rows: Sequence[SampleRecord]) -> MethodCost:
    shape = ((run.manifest.get("machine") or {}).get("shapes") or {}).get(label)
    return MethodCost(label, rows, tally(rows, run.steps), counted(rows, shape) if shape else None)


@dataclass(frozen=True, slots=True)
class Roof:
    """The machine's limits: bytes read a second, and floating-point operations a second in the model's dtype."""

    peak_bandwidth: float
    peak_flops: float

    @property
    def ridge(self) -> float:
        """Return the operations a byte from where products are the limit."""
        return self.peak_flops / self.peak_bandwidth

    def at(self, intensity: float) -> float:
        """Return the most operations a second with so many operations a byte."""
        return min(self.peak_flops, self.peak_bandwidth * intensity)


def limits_of(run: Run) -> tuple[float | None, float | None]:
    """Return the bytes and the operations a second that the run's machine reaches; None where not measured."""
    limits = (run.manifest.get("machine") or {}).get("limits") or {}
    products = (limits.get("flops_per_s") or {}).get(arithmetic(run.manifest["model"]["dtype"]))
    return limits.get("read_bytes_per_s"), products


def roof_of(run: Run) -> Roof | None:
    """Return the limits of the machine that the run was made on; None where they were not measured."""
    read, products = limits_of(run)
    return Roof(read, products) if read and products else None


@dataclass(frozen=True, slots=True)
class Point:
    """A part of a method's steps, `verification` or `drafting`. intensity: FLOP per byte. rate: FLOP per second.

    FLOP and bytes are counted from shapes, seconds are measured.
    """

    method: str
    part: str
    intensity: float
    rate: float


def points(pairs: Iterable[PairedCost]) -> list[Point]:
    """Return the parts of every method that could be counted; drafting only where a drafter has weights."""
    found = []
    for work, cost in ((pair.method, pair.method.cost) for pair in pairs):
        if cost is not None:
            drafted, took = cost.drafter_bytes or 0.0, work.tally.sums
            parts = (
                ("verification", cost.flops - cost.drafter_flops, cost.bytes - drafted, took["verify_s"]),
                ("drafting", cost.drafter_flops, drafted, took["draft_s"]),
            )
            found += [Point(work.label, part, x / y, x / s) for part, x, y, s in parts if x and y and s]
    return found


@dataclass(frozen=True, slots=True)
class MachineRow:
    """One method over its samples that are paired with the baseline's. Invalid results have no speedup."""

    method: Col[str, "label of the method: its name with the given options"]
    step_s: Col[Number, "mean step time, over all paired samples", "s"]
    draft_share: Col[Number, "share of the step time: drafting", "0 to 1"]
    verify_share: Col[Number, "share of the step time: forward pass of the target model", "0 to 1"]
    accept_share: Col[Number, "share of the step time: acceptance and compaction of the KV cache", "0 to 1"]
    host_share: Col[Number, "share of the step time: rest, on the host", "0 to 1"]
    parts_residual: Col[
        Number, "share of the step time outside these four; 0 unless the clocks of host and device differ", "0 to 1"
    ]
    flops_per_step: Col[Number, "FLOP per step, counted from shapes, drafter included", "FLOP"]
    bytes_per_step: Col[Number, "bytes read per step, counted from shapes, drafter included", "bytes"]
    drafter_bytes_per_step: Col[Number, "bytes of drafter weights read per step; missing if unknown", "bytes"]
    intensity: Col[Number, "arithmetic intensity: flops_per_step / bytes_per_step", "FLOP/byte"]
    bandwidth_share: Col[Number, "bytes per second / measured bandwidth; above 1 if the weights fit into caches"]
    compute_share: Col[Number, "FLOP per second / measured peak of the dtype"]
    fastest_step_s: Col[Number, "lower bound of the step time from both limits", "s"]
    predicted_speedup: Col[Number, "τ × fastest_step_s of `ar` / of the method; missing if invalid or unknown", "×"]
    decode_speedup: Col[Number, "τ × step_s of `ar` / of the method: without prefill; missing if invalid", "×"]
    samples: Col[int, "paired samples", "samples"]
    n_noisy: Col[int, "noisy samples among them", "samples"]
    n_reruns: Col[int, "re-runs of noisy samples"]
    host_cpu_share: Col[Number, "share of the usable cores that this process used, weighted by time", "0 to 1"]
    host_foreign_share: Col[Number, "share of the usable cores that other processes used", "0 to 1"]
    nvml_kernel_busy: Col[Number, "share of time with at least one running kernel (NVML utilization)", "0 to 1"]
    nvml_memory_busy: Col[Number, "share of time with memory traffic on the device (NVML utilization)", "0 to 1"]
    gpm_sm_active: Col[Number, "SM activity (GPM)", "0 to 1"]
    gpm_tensor_active: Col[Number, "tensor core activity (GPM)", "0 to 1"]
    gpm_dram_active: Col[Number, "used share of the memory bandwidth (GPM)", "0 to 1"]
    nvml_power_w: Col[Number, "mean power of the device", "W"]
    joules_per_token: Col[Number, "energy of all samples / their output tokens", "J"]
    trace_busy_share: Col[Number, "share of a traced request with a running kernel (CPU: operator)", "0 to 1"]
    trace_launches_per_token: Col[Number, "launched kernels (CPU: operators) per token of the traced request"]


def machine_rows(run: Run, worked: Sequence[PairedCost]) -> list[MachineRow]:
    """Return a row for each method. worked: of `pairs`."""
    return [_row(run, pair) for pair in worked]


def _row(run: Run, pair: PairedCost) -> MachineRow:
    rows, cost, tally = pair.method.rows, pair.method.cost, pair.method.tally
    columns, steps, limits = tally.columns(), cost.steps if cost else 0, limits_of(run)
    energy = [row for row in rows if row.energy_j is not None]
    decode_s = pair.method.total("decode_s")
    traced = (run.manifest.get("traces") or {}).get(pair.method.label) or {}
    return MachineRow(
        method=pair.method.label,
        step_s=tally.step_s,
        **{name.replace("_s", "_share"): safe_div(columns[name], tally.step_s) for name in PARTS},
        parts_residual=safe_div(columns["parts_residual_s"], tally.step_s),
        flops_per_step=safe_div(cost and cost.flops, steps),
        bytes_per_step=safe_div(cost and cost.bytes, steps),
        drafter_bytes_per_step=safe_div(cost and cost.drafter_bytes, steps),
        intensity=cost and cost.intensity,
        bandwidth_share=safe_div(safe_div(cost and cost.bytes, decode_s), limits[0]),
        compute_share=safe_div(safe_div(cost and cost.flops, decode_s), limits[1]),
        fastest_step_s=cost and cost.fastest_s(*limits),
        predicted_speedup=None if pair.invalid else _predicted(pair, limits),
        decode_speedup=None if pair.invalid else _times(tally.tau, safe_div(pair.baseline.tally.step_s, tally.step_s)),
        samples=len(rows),
        n_noisy=sum(bool(row.noise_reason) for row in rows),
        n_reruns=int(pair.method.total("n_reruns")),
        **{name: _weighted(rows, name) for name in TELEMETRY},
        joules_per_token=safe_div(sum(r.energy_j or 0.0 for r in energy), sum(r.tokens or 0 for r in energy)),
        trace_busy_share=traced.get("busy_share"),
        trace_launches_per_token=traced.get("launches_per_token"),
    )


def _predicted(pair: PairedCost, limits: tuple[float | None, float | None]) -> float | None:
    """Return the decode speedup predicted by τ and shapes; None if the drafter's bytes are unknown."""
    cost, baseline_cost = pair.method.cost, pair.baseline.cost
    if cost is None or cost.drafter_bytes is None or baseline_cost is None:
        return None
    return _times(pair.method.tally.tau, safe_div(baseline_cost.fastest_s(*limits), cost.fastest_s(*limits)))


TELEMETRY = (
    "host_cpu_share", "host_foreign_share", "nvml_kernel_busy", "nvml_memory_busy", "gpm_sm_active",
    "gpm_tensor_active", "gpm_dram_active", "nvml_power_w",
)  # fmt: skip


def _weighted(rows: Sequence[SampleRecord], name: str) -> float | None:
    """Return the mean of a row's field, samples weighted by how long they took."""
    known = [(row.wall_s or 0.0, getattr(row, name)) for row in rows if getattr(row, name) is not None]
    return safe_div(sum(s * value for s, value in known), sum(s for s, _ in known))


def _times(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a * b


@dataclass(frozen=True, slots=True)
class Waterfall:
    """Milliseconds per output token on shared prompts: baseline_ms + the parts = method_ms.

    parts, in order: fewer steps (below 0), slower verification, draft overhead, prefill, acceptance and host.
    relative_verify_time: verification time of a step, of the method / of the baseline.
    """

    method: str
    baseline_ms: float
    parts: dict[str, float]
    method_ms: float
    tau: float
    relative_verify_time: float | None

    def sentence(self) -> str:
        """Return the parts as a sentence."""
        saved, verifying, drafting, reading, other = self.parts.values()
        steps = "fewer steps save nothing"
        if saved < 0:
            share = percent(-saved / self.baseline_ms)
            steps = f"fewer steps save {format_number(-saved)} ms per token ({share})"
        ratio = self.relative_verify_time
        per_step = f" ({format_number(ratio)}× per step)" if ratio else ""
        verification = f"{'faster' if verifying < 0 else 'slower'} verification {_adds(verifying)}{per_step}"
        return (
            f"{self.method}, {format_number(self.tau)} tokens per step: {steps}; {verification}, "
            f"drafting {_adds(drafting)}, prefill and other work {_adds(reading + other)}. "
            f"Total: {format_number(self.baseline_ms)} to {format_number(self.method_ms)} ms per token."
        )


def _adds(ms: float) -> str:
    if abs(ms) < 0.005:
        return "adds nothing"
    return f"{'adds' if ms > 0 else 'saves'} {format_number(abs(ms))} ms"


def waterfalls(worked: Iterable[PairedCost]) -> dict[str, Waterfall]:
    """Return the waterfall of each method with samples and steps in common with the baseline, which has none."""
    valid = [pair for pair in worked if pair.method.label != REFERENCE and not pair.invalid]
    made = {pair.method.label: _waterfall(pair) for pair in valid}
    return {label: found for label, found in made.items() if found}


def _waterfall(pair: PairedCost) -> Waterfall | None:
    method, baseline = pair.method, pair.baseline
    times = Pairs(method.rows, baseline.rows)
    start = safe_div(float(times.other_s.sum()), float(times.other_tokens.sum()))
    end = safe_div(float(times.own_s.sum()), float(times.own_tokens.sum()))
    if not start or not end or not method.tally.steps or not baseline.tally.steps or method.tally.tau is None:
        return None

    def per_token(work: MethodCost, seconds: float) -> float:
        return seconds / work.total("tokens")

    verify, baseline_verify = (work.tally.sums["verify_s"] / work.tally.steps for work in (method, baseline))
    steps = per_token(method, method.tally.steps)
    parts = {
        "fewer steps": baseline_verify * (steps - per_token(baseline, baseline.tally.steps)),
        "slower verification": (verify - baseline_verify) * steps,
        "draft overhead": per_token(method, method.tally.sums["draft_s"])
        - per_token(baseline, baseline.tally.sums["draft_s"]),
        "prefill": per_token(method, method.total("prefill_s")) - per_token(baseline, baseline.total("prefill_s")),
    }
    parts["other"] = end - start - sum(parts.values())
    in_ms = {name: 1000 * seconds for name, seconds in parts.items()}
    return Waterfall(method.label, 1000 * start, in_ms, 1000 * end, method.tally.tau, safe_div(verify, baseline_verify))


@dataclass(frozen=True, slots=True)
class StepTimeParts:
    """One method's step, for the page's predictions. depth, nodes: drafted tokens in a row, and verified nodes, a step.

    read_s, product_s: seconds of the counted bytes and operations at the limits. overhead_s: measured time beyond the
    longer of the two. rows_s: the part of it by which verification takes longer than the baseline's step, beyond the
    counted operations. fixed_s: the part of product_s that does not grow with the nodes.
    """

    method: str
    tau: float
    depth: float
    nodes: float
    read_s: float
    product_s: float
    overhead_s: float
    rows_s: float = 0.0
    fixed_s: float = 0.0


def parts(worked: Iterable[PairedCost], roof: Roof | None) -> dict[str, tuple[StepTimeParts, StepTimeParts]]:
    """Return the step of every method that can be predicted, and the baseline's over the same samples."""
    found: dict[str, tuple[StepTimeParts, StepTimeParts]] = {}
    if roof is None:
        return found
    for pair in (pair for pair in worked if not pair.invalid):
        step, baseline_step = _parts(pair.method, roof), _parts(pair.baseline, roof)
        if step and baseline_step:
            verify, baseline_verify = (
                work.tally.sums["verify_s"] / work.tally.steps for work in (pair.method, pair.baseline)
            )
            explained = _verifying_s(pair.method, roof) - _verifying_s(pair.baseline, roof)
            added = verify - baseline_verify - max(0.0, explained)
            found[step.method] = replace(step, rows_s=min(max(0.0, added), max(0.0, step.overhead_s))), baseline_step
    return found


def _parts(work: MethodCost, roof: Roof) -> StepTimeParts | None:
    tally, cost = work.tally, work.cost
    if not cost or not cost.flops or not cost.bytes or not tally.tau or not tally.step_s:
        return None
    read, product = cost.bytes / cost.steps / roof.peak_bandwidth, cost.flops / cost.steps / roof.peak_flops
    depth, nodes = tally.sums["draft_depth"] / tally.steps, work.total("verified_nodes") / max(tally.steps, 1)
    fixed = (cost.drafter_flops + cost.fixed_flops) / cost.steps / roof.peak_flops
    return StepTimeParts(
        work.label, tally.tau, depth, nodes, read, product, tally.step_s - max(read, product), fixed_s=fixed
    )


def _verifying_s(work: MethodCost, roof: Roof) -> float:
    """Return the seconds that the model's part of a step takes at the limits, without the drafter's."""
    cost = work.cost
    assert cost is not None
    moved, flops = cost.bytes - (cost.drafter_bytes or 0.0), cost.flops - cost.drafter_flops
    return max(moved / roof.peak_bandwidth, flops / roof.peak_flops) / cost.steps


CLOSES = 0.02  # share of a step by which its parts, from another clock, may differ from it without a note
SHOWN_SHARE = 0.0005  # of a step: less is 0.0 %


def machine_lines(rows: Sequence[MachineRow], manifest: Mapping[str, Any]) -> list[str]:
    """Return a line on the time of a step outside its parts, and lines on the limits of the machine.

    rows, manifest: of the run.
    """
    if manifest["config"].get("endpoints"):
        return []
    busy = ((manifest.get("machine") or {}).get("limits") or {}).get("busy", "")
    noted = [f"roofline limits: possibly too low; when they were measured, {busy}"] if busy else []
    return [*_host_share(rows), _limits(rows), *noted]


def _host_share(rows: Sequence[MachineRow]) -> Iterator[str]:
    known = [row for row in rows if row.host_share is not None]
    most = max(known, key=lambda row: row.host_share or 0.0, default=None)
    off = [f"{row.method} {row.parts_residual or 0.0:+.1%}" for row in known if abs(row.parts_residual or 0.0) > CLOSES]
    if most is not None and (off or (most.host_share or 0.0) >= SHOWN_SHARE):
        rest = f"; the parts and the step, by two clocks, differ: {'; '.join(off)}" if off else ""
        yield f"steps: host time outside draft, verify and accept: at most {most.host_share:.1%} ({most.method}){rest}"


def _limits(rows: Sequence[MachineRow]) -> str:
    reached = [row for row in rows if row.bandwidth_share is not None and row.compute_share is not None]
    if not reached:
        return "roofline limits: not measured on this machine; run `ssbench doctor --calibrate`"
    parts = [f"{row.method} {row.bandwidth_share:.0%} and {row.compute_share:.1%}" for row in reached]
    return f"roofline limits: share of memory bandwidth and of peak FLOP/s, counted from shapes: {'; '.join(parts)}"
