"""What a run does with telemetry: watch each sample, put the sums into its row, say whether to make it again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from specbench_ss.benchmark.telemetry.disturbance import Tries, disturbed_by
from specbench_ss.benchmark.telemetry.sampler import sampler_for
from specbench_ss.benchmark.telemetry.seen import Seen
from specbench_ss.runs.config import Recording
from specbench_ss.runs.rows import Row
from specbench_ss.runs.run_directory import RunDir
from specbench_ss.runs.side_files import TELEMETRY, Readings

if TYPE_CHECKING:
    import torch


class MachineRecord:
    """Of one session of a run. Records nothing where `recording` switches telemetry off."""

    def __init__(
        self, recording: Recording, device: torch.device, run_dir: RunDir, warn: Callable[[str], None]
    ) -> None:
        self.sampler = sampler_for(device, recording.telemetry)
        self.run_dir, self.warn = run_dir, warn
        self.tries = Tries(recording.remake_disturbed, device.type == "cuda")

    def watch(self) -> contextlib.AbstractContextManager[Seen | None]:
        """Read the machine while the block lasts; gives None where nothing is read."""
        return contextlib.nullcontext() if self.sampler is None else self.sampler.watch()

    def note(self, row: Row, seen: Seen | None) -> None:
        """Put what was read into the row, and write it down. `row.remade` counts the tries before this one."""
        if seen is None:
            return
        row.remade = row.remade or 0
        row.disturbed = disturbed_by(seen)
        for name, value in seen.summary(row.tokens or 0).items():
            setattr(row, name, value)
        line = Readings(
            *row.key,
            attempt=row.remade,
            started=seen.times[0],
            disturbed=row.disturbed,
            columns=seen.as_columns(),
        )
        self.run_dir.append_beside(TELEMETRY, line.as_dict())

    def again(self, row: Row, remembers: bool) -> bool:
        """Say whether to make the sample again, and count that in its row.

        One of a method that remembers prompts never is: it would answer from memory.
        """
        if row.disturbed is None or remembers:
            return False
        before = self.tries.given_up
        if self.tries.again(row.disturbed, row.remade or 0):
            row.remade = (row.remade or 0) + 1
            return True
        if self.tries.given_up and not before:
            self.warn(f"samples stay disturbed ({row.disturbed}): they are not made again any more")
        return False

    def close(self) -> None:
        """End the thread that reads."""
        if self.sampler is not None:
            self.sampler.close()
