"""Rows of a suite's data, from a file or from the Hugging Face hub. This module knows no suite.

`hub:OWNER/NAME[:CONFIG[:SPLIT]][@REVISION]` names a data set of the hub; the split is `test` unless it is given. The
hub is asked for what is named so, and for nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from specbench_ss.errors import UserError
from specbench_ss.user_files import Row, read_rows

HUB = "hub:"
_FORM = re.compile(r"hub:(?P<name>[^:@]+)(:(?P<config>[^:@]*))?(:(?P<split>[^:@]+))?(@(?P<revision>.+))?")


def is_hub(data: Path) -> bool:
    """Say whether this names a data set of the hub, and not a file."""
    return str(data).startswith(HUB)


def read_data(data: Path) -> Iterator[tuple[str, Row]]:
    """Yield every row with its place, of a JSONL file (which may be NAME.gz) or a hub data set. Raises UserError."""
    return _hub_rows(str(data)) if is_hub(data) else read_rows(data)


def _hub_rows(text: str) -> Iterator[tuple[str, Row]]:
    from specbench_ss.training.text.sources import HubSource

    form = _FORM.fullmatch(text)
    if form is None:
        raise UserError(f"cannot read {text!r}: expected hub:OWNER/NAME, hub:OWNER/NAME:CONFIG:SPLIT or ...@REVISION")
    source = HubSource(form["name"], form["config"] or None, form["split"] or "test", form["revision"])
    for place, row in source.rows():
        yield place, dict(row)
