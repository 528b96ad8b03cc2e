"""The papers' published tables as data: a CSV file each, as printed, from the ACL text and the 2024 text (`old_`).

Sources: "Speculative Streaming: Efficient and Scalable Speculative Decoding with Multi-Stream Attention" (ACL) and
arXiv:2402.11131 (2024). All were measured on one NVIDIA A100-80G in float16 at batch 1 (ACL sec. 3, 2024 sec. 4.1).
Tasks have this project's names; `-` and empty cells of the papers are empty here.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Entry:
    """One printed row. values: {column: text as printed}, without columns that are empty in print."""

    task: str
    model: str
    method: str
    values: dict[str, str]

    def number(self, column: str) -> float | None:
        """Return the value of a column, of 'ROUGE-1/ROUGE-LSum' the first; None where nothing is printed."""
        text = self.values.get(column, "").partition("/")[0]
        return float(text) if text else None


@cache
def published(name: str) -> tuple[Entry, ...]:
    """Return the rows of a table in print order. name: 'acl_table_1', 'old_table_2' and so on."""
    with (Path(__file__).parent / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return tuple(_entry(row) for row in csv.DictReader(file))


def _entry(row: dict[str, str]) -> Entry:
    values = {k: v for k, v in row.items() if k not in ("task", "model", "method") and v}
    return Entry(row["task"], row["model"], row["method"], values)
