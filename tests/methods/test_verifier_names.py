"""Name of the base model in a folder of speculators' layout."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specbench_ss.errors import UserError
from specbench_ss.methods._shared.speculators import config_json
from specbench_ss.methods.block_drafters.dflash import new_drafter, speculators_config_of
from specbench_ss.models.tiny import tiny_target


def named(**about: Any) -> Any:
    base = SimpleNamespace(
        **{"name": "some/model", "origin": {}, "is_lab": False, "folder": None, "config": SimpleNamespace()} | about
    )
    written = config_json("dflash", {}, 7, base)  # type: ignore[arg-type]
    return written["speculators_config"]["verifier"]["name_or_path"]


def test_others_find_the_verifier_by_the_name_that_is_written() -> None:
    assert named() == "some/model"
    page = "https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct"
    assert named(name="smollm2", origin={"page": page}) == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert named(name="lab", is_lab=True) is None, "known by that name here alone"
    assert named(name="/some/folder", folder=Path("/some/folder")) is None, "a path says nothing elsewhere"
    assert named(name="model.gguf", origin={"gguf": {}}) is None


def test_a_drafter_that_reads_the_final_state_is_not_written_in_a_layout_without_a_name_for_it() -> None:
    target = tiny_target("llama", layers=1)
    drafter = new_drafter(target, 1, 4, 0, 3, False)
    with pytest.raises(UserError, match="final state"):
        speculators_config_of(drafter, target)
