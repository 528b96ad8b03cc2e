"""Drafters that ship for fetched models: one budget, one base, small; outputs are those of `ar`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

import specbench_ss
from specbench_ss import load_method, load_model
from specbench_ss.engine.generate import StopParams, generate
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.models import frequent_tokens
from specbench_ss.models.bundled import DRAFTERS, VECTORS_HASH, bundled_drafters
from specbench_ss.models.catalog import FetchableModel, fetchable_model
from specbench_ss.models.checkpoint import read_tensors
from specbench_ss.models.resolve import ORIGIN
from tests.tiny import thorough

LARGEST = 60e6  # bytes of weights in a tree that travels to another machine


@dataclass(frozen=True)
class Shipped:
    """base: hash and number format in config.json, those in which the drafters are used. card: those of training."""

    base: tuple[str, str]
    card: str
    methods: tuple[str, ...]


SHIPPED: Mapping[str, Shipped] = {
    "smollm2": Shipped(
        ("2d764162ba506fdd", "torch.float32"),
        "weights 00918996d5faa197, torch.bfloat16",
        ("ss[parent=off]", "ss[parent=on]", "medusa", "rest"),
    ),
    "qwen2.5-coder-0.5b": Shipped(
        ("fbf2c227a09dc6a4", "torch.bfloat16"),
        "weights fbf2c227a09dc6a4, torch.bfloat16",
        ("ss[parent=off]", "ss[parent=on]", "medusa"),
    ),
}
TRAINED = ("ss", "ss-parent", "medusa")
EACH = [(model, name) for model in SHIPPED for name in TRAINED]


def fetched(name: str) -> FetchableModel:
    model = fetchable_model(name)
    if not model.fetched:
        pytest.skip(f"the model was not fetched: ssbench models fetch {name}")
    return model


@pytest.mark.parametrize("model", SHIPPED)
def test_all_learnt_from_the_same_text_for_the_same_base(model: str) -> None:
    configs = [json.loads((DRAFTERS / model / name / "config.json").read_text()) for name in TRAINED]
    assert {(config["base_hash"], config["base_dtype"]) for config in configs} == {SHIPPED[model].base}
    assert {config["base"] for config in configs} == {model} and len({c.get(VECTORS_HASH) for c in configs}) == 1
    own = ("lr", "parameters", "loss")  # a drafter's own
    budgets = [{k: v for k, v in config["trained"].items() if k not in own} for config in configs]
    assert budgets == [budgets[0]] * len(budgets) and budgets[0]["regenerate_responses"] and budgets[0]["tokens"]


def test_the_datastore_has_answers_of_the_model() -> None:
    kept = json.loads((DRAFTERS / "smollm2" / "rest" / "datastore.json").read_text())
    assert kept["made_of"].startswith("own answers to ")


@pytest.mark.parametrize(("model", "name"), EACH)
def test_each_has_a_card_and_a_log_and_half_precision_numbers(model: str, name: str) -> None:
    folder = DRAFTERS / model / name
    card, config = (folder / "README.md").read_text(), json.loads((folder / "config.json").read_text())
    last = json.loads((folder / "training.jsonl").read_text().splitlines()[-1])
    assert last["step"] == config["trained"]["steps"] and last["estimated_tau"] > 1
    assert f"estimated tau {last['estimated_tau']:.2f}" in card and SHIPPED[model].card in card
    (file,) = (file for file in folder.glob("*.safetensors") if file.name != frequent_tokens.FILE)
    assert {str(t.dtype) for t in read_tensors(file).values() if t.is_floating_point()} == {"torch.float16"}


@pytest.mark.parametrize("name", TRAINED)
def test_cards_state_what_is_shared_with_a_suite(name: str) -> None:
    assert "prompt of HumanEval" in (DRAFTERS / "qwen2.5-coder-0.5b" / name / "README.md").read_text()


def test_what_ships_is_small_enough_to_travel() -> None:
    package = Path(specbench_ss.__file__).parent
    files = [file for place in ("lab", "drafters") for file in (package / place).rglob("*") if file.is_file()]
    assert sum(file.lstat().st_size for file in files) < LARGEST  # links travel as links


def test_the_model_without_its_origin_has_its_drafters(tmp_path: Path) -> None:
    for file in fetched("qwen2.5-coder-0.5b").folder.iterdir():
        if file.name != ORIGIN:
            (tmp_path / file.name).symlink_to(file)
    assert bundled_drafters(str(tmp_path)) == DRAFTERS / "qwen2.5-coder-0.5b"


@thorough
@pytest.mark.parametrize("model", SHIPPED)
def test_outputs_are_those_of_the_baseline(model: str) -> None:
    fetched(model)
    methods = SHIPPED[model].methods
    target = load_model(model, dtype="float32", device="cpu")
    ids = target.encode_chat([{"role": "user", "content": "Name three rivers of Europe."}])
    made = {way: generate(load_method(way, target), ids, StopParams(24), SamplingParams()) for way in ("ar", *methods)}
    assert {way: one.tokens for way, one in made.items()} == dict.fromkeys(made, made["ar"].tokens)
    assert all(len(made[way].steps) < len(made["ar"].steps) for way in methods if way != "rest")
