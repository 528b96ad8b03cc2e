"""Weights that are written can be read by anyone who may read any other new file."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import torch

from specbench_ss.models.checkpoint import write_checkpoint


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_weights_have_the_mode_that_the_umask_states(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        write_checkpoint(tmp_path / "made", torch.nn.Linear(2, 2), {"kind": "x"})
    finally:
        os.umask(before)
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "made").iterdir()}
    assert modes == {"model.safetensors": mode, "config.json": mode}
