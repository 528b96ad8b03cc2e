"""Coverage of the intervals of speedups, by simulation: `python -m benchmarks.interval_coverage` prints the tables.

Each simulated run has questions in tasks. Lengths differ between tasks and questions, and the speedup between tasks and
questions; every time has noise. The truth is the ratio of expected times over these tasks. docs/metrics.md has the
table, tests/core/test_intervals.py a few of its cells. Effects that are constant within a process (the floor of 1 %)
are not simulated, and the floor is left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from specbench_ss.bench.schedule import question_blocks, turns_of_servers
from specbench_ss.stats.intervals import Floats, Strata, log_ratio, pairwise, strata_of
from specbench_ss.suite import Question


@dataclass(frozen=True, slots=True)
class Noise:
    """Standard deviations of logarithms: of each time, and of the speedup of questions and of tasks.

    spikes: share of the times that are longer by an exponentially distributed share of mean 1. one_sided: those of the
    method alone.
    """

    name: str
    time: float
    questions: float = 0.0
    tasks: float = 0.0
    spikes: float = 0.0
    one_sided: bool = False


NOISES = (
    Noise("A/A, 2 %", 0.02),
    Noise("A/A, 7 %", 0.07),
    Noise("A/A, 20 %", 0.20),
    Noise("A/A, 7 % and spikes", 0.07, spikes=0.05),
    Noise("7 %, questions 15 %, tasks 30 %", 0.07, 0.15, 0.3),
    Noise("10 %, questions 40 %, tasks 40 %", 0.10, 0.4, 0.4),
    Noise("7 %, 15 %, 30 % and spikes", 0.07, 0.15, 0.3, 0.05),
    Noise("7 %, 15 %, 30 %, spikes of the method alone", 0.07, 0.15, 0.3, 0.05, one_sided=True),
)
DESIGNS: dict[str, tuple[int, ...]] = {  # name -> questions of each task
    "4": (4,),
    "6": (6,),
    "10": (10,),
    "20": (20,),
    "80": (80,),
    "2 x 2": (2,) * 2,
    "4 x 6": (6,) * 4,
    "13 x 2": (2,) * 13,
    "13 x 4": (4,) * 13,
    "8 x 10": (10,) * 8,
    "12+6+4+2": (12, 6, 4, 2),
    "40+20+10+8+2": (40, 20, 10, 8, 2),
    "13 x 1": (1,) * 13,
}


@dataclass(frozen=True, slots=True)
class Simulated:
    """Seconds of simulated runs: baseline and method, [runs, questions] each. truth: [runs], log of the speedup."""

    baseline: Floats
    method: Floats
    truth: Floats
    strata: Strata


def simulate(sizes: tuple[int, ...], noise: Noise, runs: int, rng: np.random.Generator) -> Simulated:
    """Return runs with these numbers of questions by task."""
    task = np.repeat(np.arange(len(sizes)), sizes)
    shape = (runs, len(task))
    task_length, task_speed = (
        spread * rng.normal(size=(runs, len(sizes))) for spread in (0.4, noise.tasks)
    )  # logarithms
    work = np.exp(task_length[:, task] + 0.5 * rng.normal(size=shape))
    faster = task_speed[:, task] + noise.questions * rng.normal(size=shape)

    def noise_of(spikes: float) -> Floats:
        spike = (rng.random(shape) < spikes) * rng.exponential(size=shape)
        return np.asarray(np.exp(noise.time * rng.normal(size=shape)) * (1 + spike))

    baseline = work * noise_of(0.0 if noise.one_sided else noise.spikes)
    method = work * np.exp(-faster) * noise_of(noise.spikes)
    expected = np.exp(task_length) * np.array(sizes)
    slower = np.exp(-task_speed + noise.questions**2 / 2) * (1 + noise.spikes * noise.one_sided)
    truth = np.log(expected.sum(1) / (expected * slower).sum(1))
    return Simulated(baseline, method, truth, strata_of(task.astype(str).tolist()))


def covered(made: Simulated) -> tuple[float, float]:
    """Return the share of runs whose interval contains the truth, and the mean half-width, of the logarithm."""
    found = [log_ratio((a,), (b,), made.strata).around() for a, b in zip(made.baseline, made.method, strict=True)]
    low, high = np.array(found).T
    return float(((low <= made.truth) & (made.truth <= high)).mean()), float((high - low).mean() / 2)


def covered_sessions(
    sizes: tuple[int, ...], noise: Noise, sessions: int, effect: float, runs: int, rng: np.random.Generator
) -> tuple[float, float]:
    """Return coverage and mean half-width over several sessions, whose speedups differ by lognormal effects.

    effect: standard deviation of the logarithm of the speedup between sessions. Spikes are not simulated.
    """
    task, n = np.repeat(np.arange(len(sizes)), sizes), sum(sizes)
    strata, hits, halves = strata_of(task.astype(str).tolist()), 0, 0.0
    length, speed = (spread * rng.normal(size=(runs, len(sizes))) for spread in (0.4, noise.tasks))
    for of_task, tasks in zip(length, speed, strict=True):
        work = np.exp(of_task[task] + 0.5 * rng.normal(size=n))
        faster = tasks[task] + noise.questions * rng.normal(size=n) + effect * rng.normal(size=(sessions, 1))
        times = np.exp(noise.time * rng.normal(size=(2, sessions, n))) * np.stack(
            [np.ones_like(faster), np.exp(-faster)]
        )
        times *= work
        effects = [(side - side.mean(0)).sum(1) / side.sum() for side in times]
        a, b = times.sum(1)
        low, high = log_ratio((a,), (b,), strata, [effects[0] - effects[1]]).around()
        expected = np.exp(of_task) * np.array(sizes)
        slower = np.exp(-tasks + (noise.questions**2 + effect**2) / 2)
        hits += low <= np.log(expected.sum() / (expected * slower).sum()) <= high
        halves += (high - low) / 2
    return hits / runs, halves / runs


def session_table(runs: int, rng: np.random.Generator) -> Iterator[str]:
    """Yield the lines of the table of coverages over sessions, in percent, for 13 tasks of four questions."""
    effects = (0.0, 0.02, 0.05, 0.1)
    yield f"| noise | sessions | {' | '.join(f'{100 * one:g} %' for one in effects)} |"
    yield f"|---|---|{'---|' * len(effects)}"
    for noise in (NOISES[1], NOISES[4], NOISES[5]):
        for many in (2, 3, 5):
            cells = [covered_sessions(DESIGNS["13 x 4"], noise, many, one, runs, rng) for one in effects]
            shown = " | ".join(f"{100 * share:.1f} (±{100 * half:.1f})" for share, half in cells)
            yield f"| {noise.name} | {many} | {shown} |"


def covered_blocks(
    sizes: tuple[int, ...],
    noise: Noise,
    blocks: int,
    process: float,
    drift: float,
    runs: int,
    rng: np.random.Generator,
) -> tuple[float, float]:
    """Return coverage and median half-width of a server's speedup, where three servers take turns in blocks.

    process: standard deviation of the logarithm of the times of a start. drift: change of the logarithm of all times
    over the run, which is linear. Spikes are not simulated.
    """
    names = ("plain", "drafting", "other")
    asked = [Question(f"{task}-{i}", str(task), ("?",)) for task, many in enumerate(sizes) for i in range(many)]
    task, strata = np.array([int(one.category) for one in asked]), strata_of([one.category for one in asked])
    block = np.array([question_blocks(asked, blocks)[one.id] for one in asked], np.int64)
    found = []
    for run in range(runs):
        turns = turns_of_servers(names, blocks, run)
        place = np.array([[3 * n + order.index(name) for n, order in enumerate(turns)] for name in names[:2]])
        of_start = drift * place / (3 * blocks - 1) + process * rng.normal(size=place.shape)
        length, speed = 0.4 * rng.normal(size=len(sizes)), noise.tasks * rng.normal(size=len(sizes))
        work = np.exp(length[task] + 0.5 * rng.normal(size=len(task)))
        faster = speed[task] + noise.questions * rng.normal(size=len(task))
        times = work * np.exp(noise.time * rng.normal(size=(2, len(task))) + of_start[:, block])
        times[1] *= np.exp(-faster)
        expected = np.exp(length) * np.array(sizes)
        truth = np.log(expected.sum() / (expected * np.exp(-speed + noise.questions**2 / 2)).sum())
        estimate = log_ratio(times[:1], times[1:], strata, blocks=(block,))
        half = estimate.around()[1] - estimate.value
        found.append((abs(estimate.value - truth) <= half, half))
    hits, halves = np.array(found, float).T
    return float(hits.mean()), float(np.median(halves))


def block_table(runs: int, rng: np.random.Generator) -> Iterator[str]:
    """Yield the lines of the table of coverages of servers that take turns, for 13 tasks of four questions."""
    cases = ((0.0, 0.0), (0.01, 0.0), (0.03, 0.0), (0.05, 0.0), (0.0, 0.1))  # process, drift
    yield "| noise | blocks | 0 % | 1 % | 3 % | 5 % | 0 %, drift 10 % |"
    yield f"|---|---|{'---|' * len(cases)}"
    for noise in (NOISES[1], NOISES[4]):
        for blocks in (1, 2, 4, 8):
            made = [covered_blocks(DESIGNS["13 x 4"], noise, blocks, *case, runs, rng) for case in cases]
            cells = [f"{100 * share:.1f} (±{100 * half:.1f})" for share, half in made]
            yield f"| {noise.name} | {blocks} | {' | '.join(cells)} |"


def significant_pairs(
    sizes: tuple[int, ...], methods: int, noise: Noise, runs: int, rng: np.random.Generator, simultaneous: bool = True
) -> float:
    """Return the share of runs in which two of several equally fast methods differ significantly."""
    strata = strata_of(np.repeat(np.arange(len(sizes)), sizes).astype(str).tolist())
    found = 0
    for _ in range(runs):
        work = rng.lognormal(0, 0.5, len(strata))
        spread = np.hypot(noise.time, noise.questions)
        spike = (rng.random((methods, len(strata))) < noise.spikes) * rng.exponential(size=(methods, len(strata)))
        seconds = work * np.exp(spread * rng.normal(size=(methods, len(strata)))) * (1 + spike)
        ratios = pairwise(seconds, np.tile(work, (methods, 1)), strata, 0, simultaneous)
        found += any(low > 1 for row in ratios for low, _ in row)
    return found / runs


def table(runs: int, rng: np.random.Generator) -> Iterator[str]:
    """Yield the lines of the table of coverages, in percent, as Markdown."""
    yield f"| noise | {' | '.join(DESIGNS)} |"
    yield f"|---|{'---|' * len(DESIGNS)}"
    for noise in NOISES:
        cells = [f"{100 * covered(simulate(sizes, noise, runs, rng))[0]:.1f}" for sizes in DESIGNS.values()]
        yield f"| {noise.name} | {' | '.join(cells)} |"


def main() -> None:
    """Print the tables."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--runs", type=int, default=4000, help="simulated runs of each cell")
    options.add_argument("--seed", type=int, default=0)
    chosen = options.parse_args()
    rng = np.random.default_rng(chosen.seed)
    for line in table(chosen.runs, rng):
        print(line, flush=True)
    print("\nsessions whose speedups differ by 0 to 10 %")
    for line in session_table(chosen.runs, rng):
        print(line, flush=True)
    print("\nservers that take turns, whose starts differ by 0 to 5 %, or which drift")
    for line in block_table(chosen.runs, rng):
        print(line, flush=True)
    print("\n20 equally fast methods: runs with a significant pair, in percent; each pair at 95 %")
    for name in ("4", "10", "13 x 4", "80"):
        for noise in (NOISES[1], NOISES[6]):
            both = [significant_pairs(DESIGNS[name], 20, noise, chosen.runs // 20, rng, x) for x in (True, False)]
            print(f"{name}, {noise.name}: {100 * both[0]:.1f}; {100 * both[1]:.1f}", flush=True)


if __name__ == "__main__":
    main()
