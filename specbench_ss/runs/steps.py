"""The steps of a run in columns: an array for each field of a step, the samples one after the other.

This module knows no file. docs/design/store.md says who needs what of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbench_ss.decoding.generation import Step
from specbench_ss.runs.keys import Key

Array = NDArray[Any]
COUNTS = ("nodes", "verified", "depth", "accepted", "tokens")
TIMES = ("draft_s", "verify_s", "accept_s", "host_s", "total_s")
DTYPES = {**dict.fromkeys(COUNTS, np.int32), **dict.fromkeys(TIMES, np.float64)}


@dataclass(frozen=True, slots=True, eq=False)
class StepColumns:
    """Some steps, one after the other: the fields of `Step` as arrays [n]. Times are in seconds."""

    nodes: Array
    verified: Array
    depth: Array
    accepted: Array
    tokens: Array
    draft_s: Array
    verify_s: Array
    accept_s: Array
    host_s: Array
    total_s: Array

    @classmethod
    def of(cls, steps: Iterable[Any]) -> StepColumns:
        """Return the columns of objects that have the fields of `Step`."""
        made = list(steps)
        return cls(*(np.fromiter(map(attrgetter(name), made), kind, len(made)) for name, kind in DTYPES.items()))

    @classmethod
    def joined(cls, parts: Iterable[StepColumns]) -> StepColumns:
        """Return the columns of all the parts, one after the other."""
        made = list(parts) or [cls.of(())]
        return cls(*(np.concatenate([getattr(part, name) for part in made]) for name in DTYPES))

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, which: Any) -> StepColumns:
        """Return the steps of a slice, which shares memory, or those at an array of places."""
        return StepColumns(*(getattr(self, name)[which] for name in DTYPES))

    def steps(self) -> list[Step]:
        """Return the steps as objects."""
        return [Step(*values) for values in zip(*(getattr(self, name).tolist() for name in DTYPES), strict=True)]


@dataclass(frozen=True, eq=False)
class Steps:
    """All steps of a run, in the order in which they were made.

    keys: the samples that have steps. starts: [samples + 1], where the steps of each begin; the last entry is the
    number of all steps.
    """

    keys: tuple[Key, ...]
    starts: Array
    columns: StepColumns

    @classmethod
    def from_rows(cls, rows: Iterable[Any]) -> Steps:
        """Return the steps that were given one by one, as `StepRow`s, those of a sample in their order."""
        grouped: dict[Key, list[Step]] = {}
        for row in rows:
            grouped.setdefault(row.key, []).append(row.step)
        return cls.from_samples(grouped)

    @classmethod
    def from_samples(cls, steps: Mapping[Key, list[Step]]) -> Steps:
        """Return the steps of samples that have some."""
        made = {key: some for key, some in steps.items() if some}
        columns = StepColumns.of(step for some in made.values() for step in some)
        return cls(tuple(made), starts_of([len(some) for some in made.values()]), columns)

    def __len__(self) -> int:
        return len(self.columns)

    @property
    def counts(self) -> Array:
        """Return the number of steps of each sample of `keys`."""
        return np.asarray(np.diff(self.starts))

    @property
    def index(self) -> Array:
        """Return the number of each step within its sample, from 0."""
        return np.asarray(np.arange(len(self)) - np.repeat(self.starts[:-1], self.counts))

    @cached_property
    def place(self) -> dict[Key, int]:
        """Return where each sample stands in `keys`."""
        return {key: i for i, key in enumerate(self.keys)}

    def of(self, key: Key) -> StepColumns:
        """Return the steps of one sample, in order; none for a sample without steps. Nothing is copied."""
        at = self.place.get(key)
        return self.columns.take(slice(0, 0) if at is None else slice(*self.starts[at : at + 2].tolist()))

    def together(self, keys: Iterable[Key]) -> StepColumns:
        """Return the steps of several samples, one after the other."""
        return self.columns.take(self.steps_of(self.places(keys)))

    @cached_property
    def totals(self) -> StepColumns:
        """Return the sums of every column over the steps of each sample: columns [samples]."""
        starts = self.starts[:-1]
        columns = (getattr(self.columns, name) for name in DTYPES)
        wide = (x.astype(np.int64) if x.dtype.kind == "i" else x for x in columns)
        return StepColumns(*(np.add.reduceat(x, starts) if len(starts) else x[:0] for x in wide))

    def places(self, keys: Iterable[Key]) -> Array:
        """Return where these samples stand in `keys`; samples without steps are left out."""
        return np.array([at for key in keys if (at := self.place.get(key)) is not None], dtype=np.int64)

    def only(self, keep: Array) -> Steps:
        """Return those samples whose places in `keys` are given."""
        keys = tuple(self.keys[i] for i in keep.tolist())
        return Steps(keys, starts_of(self.counts[keep]), self.columns.take(self.steps_of(keep)))

    def steps_of(self, samples: Array) -> Array:
        """Return the places of all steps of these samples. samples: their places in `keys`."""
        counts = self.counts[samples]
        offset = self.starts[samples] - (np.cumsum(counts) - counts)
        return np.asarray(np.arange(int(counts.sum())) + np.repeat(offset, counts))


def starts_of(counts: Any) -> Array:
    """Return where each of some samples begins, and the number of all steps. counts: steps of each, none of them 0."""
    return np.concatenate([[0], np.cumsum(np.asarray(counts, dtype=np.int64))]).astype(np.int64)


class StepsBySample(Mapping[Key, list[Step]]):
    """The steps of every sample as objects, made when they are asked for; an empty list for a sample without steps."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    def __getitem__(self, key: Key) -> list[Step]:
        return self._steps.of(key).steps()

    def __iter__(self) -> Iterator[Key]:
        return iter(self._steps.keys)

    def __len__(self) -> int:
        return len(self._steps.keys)


assert tuple(DTYPES) == tuple(field.name for field in fields(Step)) == tuple(f.name for f in fields(StepColumns))
