"""Detection of external disturbances of a sample."""

from __future__ import annotations

import os

from specbench_ss.benchmark.telemetry.nvml import throttles
from specbench_ss.benchmark.telemetry.seen import Seen

FOREIGN_SHARE = 0.10  # of the usable cores, above which other processes' work is told
TICKS = 20  # of the system's own clock of the processor; a shorter sample is told nothing of others' work
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
GIVE_UP = 3  # disturbed samples in a row, each after all its tries, after which remaking is given up


def disturbed_by(seen: Seen) -> str:
    """Return what disturbed a sample, parts separated by '; ', or ''.

    A clock that changes is no disturbance by itself: it follows the load. The driver's reason for slowing down is one.
    """
    return "; ".join((*_foreign_on_device(seen), *_throttled(seen), *_foreign_on_host(seen)))


def _foreign_on_device(seen: Seen) -> list[str]:
    most = int(max(seen.within("nvml_foreign_processes"), default=0))
    return [f"{most} other {'process' if most == 1 else 'processes'} on the device"] if most else []


def _throttled(seen: Seen) -> list[str]:
    bits = 0
    for value in seen.within("nvml_clock_events"):
        bits |= int(value)
    words = throttles(bits)
    return [f"the device was slowed down: {', '.join(words)}"] if words else []


def _foreign_on_host(seen: Seen) -> list[str]:
    if seen.span < TICKS * TICK_S:  # what the system counts in ticks would be rounding
        return []
    share = seen.mean("host_foreign_share") or 0.0
    return [f"other processes took {share:.0%} of the processor"] if share > FOREIGN_SHARE else []


class Tries:
    """How often a disturbed sample may be made again. most: None is twice on a GPU, and never elsewhere."""

    def __init__(self, most: int | None, on_gpu: bool) -> None:
        self.most = (2 if on_gpu else 0) if most is None else most
        self.in_vain = 0

    def again(self, reason: str, made: int) -> bool:
        """Say whether a sample that has been made again `made` times already is to be made once more."""
        if not reason:
            self.in_vain = 0
        elif made >= self.most:
            self.in_vain += 1
        return bool(reason) and made < self.most and not self.given_up

    @property
    def given_up(self) -> bool:
        """Whether remaking has not helped for so long that it is not tried any more."""
        return self.most > 0 and self.in_vain >= GIVE_UP
