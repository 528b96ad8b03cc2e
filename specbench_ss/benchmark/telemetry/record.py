"""What a run does with telemetry: watch each sample, put the sums into its row, say whether to make it again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch

from specbench_ss.benchmark.telemetry.disturbance import Tries, disturbed_by
from specbench_ss.benchmark.telemetry.sampler import sampler_for
from specbench_ss.benchmark.telemetry.seen import Seen
from specbench_ss.errors import UserError
from specbench_ss.runs.config import Recording
from specbench_ss.runs.ledger import Ledger
from specbench_ss.runs.rows import Row
from specbench_ss.runs.side_files import TELEMETRY, Readings


class MachineRecord:
    """Of one session of a run. Records nothing where `recording` switches telemetry off."""

    def __init__(
        self, recording: Recording, devices: Sequence[torch.device], run_dir: Ledger, warn: Callable[[str], None]
    ) -> None:
        one = devices[0] if len(devices) == 1 else None  # what one of several GPUs does would pass for what all do
        self.sampler = sampler_for(one, recording.telemetry)
        self.run_dir, self.warn = run_dir, warn
        self._told: set[str] = set()
        self.tries = Tries(recording.remake_disturbed, devices[0].type == "cuda")

    def watch(self) -> contextlib.AbstractContextManager[Seen | None]:
        """Read the machine while the block lasts; gives None where nothing is read."""
        return contextlib.nullcontext() if self.sampler is None else self.sampler.watch()

    def note(self, row: Row, seen: Seen | None) -> None:
        """Put what was read into the row, and write it down. `row.remade` counts the tries before this one."""
        if seen is None:
            return
        row.remade = row.remade or 0
        disturbed = disturbed_by(seen)
        row.disturbed = disturbed or (None if seen.problem else "")  # what was not read may have been a disturbance
        if seen.problem:
            self._tell_once(f"telemetry is incomplete, readings failed: {seen.problem}")
        for name, value in seen.summary(row.tokens or 0).items():
            setattr(row, name, value)
        line = Readings(
            *row.key,
            attempt=row.remade,
            started=seen.times[0],
            disturbed=disturbed,
            columns=seen.as_columns(),
        )
        if problem := self.run_dir.append_beside(TELEMETRY, line.as_dict()):
            self._tell_once(f"telemetry is incomplete: {problem}")

    def _tell_once(self, text: str) -> None:
        """Warn of what costs readings, and no sample: not even where the warning cannot be written down."""
        if text not in self._told:
            self._told.add(text)
            with contextlib.suppress(UserError):
                self.warn(text)

    def again(self, row: Row, remembers: bool) -> bool:
        """Say whether to make the sample again. One of a method that remembers prompts never is made again.

        It would answer from memory.
        """
        if row.disturbed is None or remembers:
            return False
        before = self.tries.given_up
        if self.tries.again(row.disturbed, row.remade or 0):
            return True
        if self.tries.given_up and not before:
            self.warn(f"samples stay disturbed ({row.disturbed}): they are not made again any more")
        return False

    def close(self) -> None:
        """End the thread that reads."""
        if self.sampler is not None:
            self.sampler.close()
