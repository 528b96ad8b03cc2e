"""The drafters that ship for SmolLM2: one budget, one base, small; with the model here, they give right answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import specbench_ss
from specbench_ss import load_method, load_model
from specbench_ss.engine.generate import StopParams, generate
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.models.checkpoint import read_tensors
from specbench_ss.models.resolve import DRAFTERS, packaged_model
from tests.tiny import thorough

FOLDER = DRAFTERS / "smollm2"
TRAINED = ("ss", "ss-parent", "medusa", "eagle")
LARGEST = 60e6  # bytes of a tree that travels to another machine
WAYS = ("ss", "ss[parent=on]", "medusa", "eagle", "rest")


def test_all_learnt_from_the_same_text_for_the_same_base() -> None:
    configs = [json.loads((FOLDER / name / "config.json").read_text()) for name in TRAINED]
    # of the float32 weights, in which they are used as well: a hash of another format would be compared with nothing
    assert {(config["base_hash"], config["base_dtype"]) for config in configs} == {
        ("2d764162ba506fdd", "torch.float32")
    }
    own = ("lr", "parameters", "loss")  # a drafter's own
    budgets = [{k: v for k, v in config["trained"].items() if k not in own} for config in configs]
    assert budgets == [budgets[0]] * len(budgets) and budgets[0]["regenerate_responses"] and budgets[0]["tokens"]
    kept = json.loads((FOLDER / "rest" / "datastore.json").read_text())
    assert kept["made_of"].startswith("own answers to ")


@pytest.mark.parametrize("name", TRAINED)
def test_each_has_a_card_and_a_log_and_half_precision_numbers(name: str) -> None:
    card = (FOLDER / name / "README.md").read_text()
    assert "estimated tau" in card and "weights 00918996d5faa197, torch.bfloat16" in card
    config = json.loads((FOLDER / name / "config.json").read_text())
    last = json.loads((FOLDER / name / "training.jsonl").read_text().splitlines()[-1])
    assert last["step"] == config["trained"]["steps"] and last["estimated_tau"] > 1
    (file,) = (FOLDER / name).glob("*.safetensors")
    assert {str(t.dtype) for t in read_tensors(file).values() if t.is_floating_point()} == {"torch.float16"}


def test_what_ships_is_small_enough_to_travel() -> None:
    package = Path(specbench_ss.__file__).parent
    files = [file for place in ("lab", "drafters") for file in (package / place).rglob("*") if file.is_file()]
    assert sum(file.lstat().st_size for file in files) < LARGEST - 3e6  # links travel as links


@thorough
def test_answers_are_those_of_plain_decoding() -> None:
    if not packaged_model("smollm2").fetched:
        pytest.skip("the model was not fetched: ssbench models fetch smollm2")
    target = load_model("smollm2", dtype="float32", device="cpu")
    ids = target.encode_chat([{"role": "user", "content": "Name three rivers of Europe."}])
    made = {way: generate(load_method(way, target), ids, StopParams(24), SamplingParams()) for way in ("ar", *WAYS)}
    assert {way: one.tokens for way, one in made.items()} == dict.fromkeys(made, made["ar"].tokens)
    assert all(len(made[way].steps) < len(made["ar"].steps) for way in ("ss", "ss[parent=on]", "medusa", "eagle"))
