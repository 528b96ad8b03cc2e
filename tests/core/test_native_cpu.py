"""Native kernels of CPU layers: torch's results, the same bits for every number of rows and threads."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from specbench_ss import registry
from specbench_ss.engine.architectures import family_of
from specbench_ss.engine.generate import DecodeSession, StopParams
from specbench_ss.engine.layers import cpu
from specbench_ss.engine.layers.fused import FusedBlock, NativeBlock
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.target import FINAL, Target
from specbench_ss.engine.tree import DraftTree
from specbench_ss.models.tiny import tiny_model, tiny_target
from specbench_ss.options import MethodSpec
from tests.tiny import few, thorough

TYPES = list(cpu.PAIRS)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
PARENTS = [-1, 0, 0, 1, 3, 2, 4]  # with the path 0, 1, 3, 4, 6
PATH = [0, 1, 3, 4, 6]

available = pytest.mark.skipif(cpu.kernels() is None, reason=cpu.problem() or "they are there")


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return cpu.NativeLinear(weight, bias, x.dtype)(x)


@available
@pytest.mark.parametrize("types", TYPES, ids=str)
@pytest.mark.parametrize("inputs", [7, 64, 131])
def test_products_are_torchs(types: tuple[torch.dtype, torch.dtype], inputs: int) -> None:
    torch.manual_seed(0)
    dtype, of_weights = types
    weight, bias = torch.randn(83, inputs).to(of_weights), torch.randn(83).to(dtype)
    for rows in (1, 2, 3, 5, 33, cpu.MOST_ROWS + 1):
        x = torch.randn(1, rows, inputs).to(dtype)
        for extra in (None, bias):
            made, right = product(x, weight, extra), F.linear(x, weight.to(dtype), extra)
            assert made.shape == right.shape and made.dtype == dtype
            assert (made - right).abs().max() <= TOLERANCE[dtype] * (1 + right.abs().max())


@available
@pytest.mark.parametrize("types", TYPES, ids=str)
def test_a_row_has_the_same_bits_alone_and_among_others(types: tuple[torch.dtype, torch.dtype]) -> None:
    torch.manual_seed(0)
    dtype, of_weights = types
    weight, x = torch.randn(300, 200).to(of_weights), torch.randn(1, 11, 200).to(dtype)
    together = product(x, weight, None)
    for count in (1, 2):
        torch.set_num_threads(count)
        assert torch.equal(product(x, weight, None), together)
        for i in range(x.shape[1]):
            assert torch.equal(product(x[:, i : i + 1], weight, None), together[:, i : i + 1])


@available
def test_nan_is_not_hidden() -> None:
    weight = torch.ones(4, 8)
    weight[1, 3] = float("nan")
    made = product(torch.ones(1, 2, 8), weight, None)
    assert made[..., 1].isnan().all() and made[..., [0, 2, 3]].isfinite().all()


def targets(dtype: torch.dtype, fp16_weights: bool = False) -> Iterator[Target]:
    """Models with biases, norms of heads, and an MLP of whole panels, which the native MLP needs."""
    for kind in ("llama", "qwen2", "qwen3", "mistral"):
        config = tiny_model(kind).config
        config.hidden_size, config.intermediate_size = 160, 64  # rows that torch's norm sums in several parts
        config.max_position_embeddings = 4 * cpu.MOST_ROWS
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        for p in model.parameters():
            if p.ndim > 1:
                torch.nn.init.normal_(p, std=0.15)
        yield Target(model.to(dtype), fp16_weights=fp16_weights)


def step(target: Target, cache: object, tokens: list[int], parents: list[int]) -> torch.Tensor:
    return target.forward_tree(DraftTree.from_parents(tokens, parents), cache, ()).logits[0]  # type: ignore[arg-type]


def test_the_source_has_room_for_all_rows() -> None:
    found = re.search(r"MOST_TOKENS = (\d+);", cpu.SOURCE.read_text())
    assert found and int(found[1]) == cpu.MOST_ROWS


@available
@pytest.mark.parametrize("more", [0, cpu.MOST_ROWS - len(PARENTS)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_path_of_a_tree_has_the_bits_of_decoding_token_by_token(dtype: torch.dtype, more: int) -> None:
    """more: further children of the root."""
    tokens, parents = [3, 5, 4, 7, 2, 6, 1, *(i % 8 for i in range(more))], [*PARENTS, *[0] * more]
    for target in targets(dtype):
        assert all(isinstance(block, NativeBlock) for block in target.family.blocks)
        assert all(block.native.has_mlp for block in target.family.blocks)
        with torch.inference_mode():
            prompt = torch.arange(1, 10)[None]
            cache = target.new_cache(40 + more)
            target.prefill(prompt, cache)
            start = cache.get_seq_length()
            tree = step(target, cache, tokens, parents)
            cache.compact(start, [])
            for node in PATH:
                alone = step(target, cache, [tokens[node]], [-1])
                cache.commit(1)
                assert torch.equal(alone[0], tree[node]), (target.config.model_type, node)


@available
def test_layers_are_the_modules() -> None:
    for target in targets(torch.float32):
        with torch.inference_mode():
            prompt = torch.arange(1, 14)[None]
            cache = target.new_cache(40)
            made = target.prefill(prompt, cache, every=True).hidden_states[FINAL]
            target.family.blocks = family_of(target.model).blocks
            right = target.prefill(prompt, target.new_cache(40), every=True).hidden_states[FINAL]
        assert (made - right).abs().max() <= 1e-4 * (1 + right.abs().max())


@available
def test_a_long_pass_in_pieces_is_that_of_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    length, models = 2 * cpu.MOST_ROWS + 7, list(targets(torch.float32))
    monkeypatch.setattr(FusedBlock, "attend_by_torch", None)
    monkeypatch.setattr(FusedBlock, "mlp_by_torch", None)
    for target in models:
        for block in target.family.blocks:
            block.native.most = length  # type: ignore[attr-defined]
        prompt = torch.arange(length)[None] % 13
        made = target.prefill(prompt, target.new_cache(length), every=True).hidden_states[FINAL]
        target.family.blocks = family_of(target.model).blocks
        right = target.prefill(prompt, target.new_cache(length), every=True).hidden_states[FINAL]
        assert (made - right).abs().max() <= 1e-4 * (1 + right.abs().max())


@available
def test_a_long_pass_that_is_not_causal_is_not_cut_into_pieces() -> None:
    length, target = cpu.MOST_ROWS + 7, next(targets(torch.float32))
    block = target.family.blocks[0]
    assert isinstance(block, NativeBlock)
    block.native.causal, block.native.most = False, length
    block.attention.is_causal = False  # type: ignore[assignment]
    x = torch.randn(1, length, target.hidden_size)
    rotary = target.rotary(torch.arange(length)[None], length)
    made, right = (
        attend(x, target.new_cache(length), None, rotary) for attend in (block.attend, block.attend_by_torch)
    )
    assert (made - right).abs().max() <= 1e-4 * (1 + right.abs().max())


class Operators(TorchDispatchMode):
    """Counts torch's operators, views included."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@available
@pytest.mark.parametrize("rows", [1, cpu.MOST_ROWS + 3])
def test_a_layer_calls_torch_for_its_outputs_alone(rows: int) -> None:
    """Operators in Python, once a layer and step, took a quarter of a step of the lab's model."""
    target = next(targets(torch.float32))
    block, h = target.family.blocks[0], target.hidden_size
    assert isinstance(block, NativeBlock)
    d = target.attention_heads[2]
    x, rotary, cache = (
        torch.randn(1, rows, h),
        (torch.ones(1, rows, d), torch.zeros(1, rows, d)),
        target.new_cache(rows),
    )
    calls = (
        lambda: block(x, cache, None, rotary),
        lambda: block.attend(x, cache, None, rotary),
        lambda: block.run_mlp(x),
    )
    block.native.most = rows
    calls[0]()  # allocates the cache
    for call in calls:
        with torch.inference_mode(), Operators() as made:
            call()
        assert made.count == 1


@available
@pytest.mark.parametrize(("method", "most"), [("ar", 125), ("medusa", 150), ("ss", 195), ("eagle2", 255)])
def test_a_step_makes_few_python_calls(method: str, most: int, lab: Target) -> None:
    """Of the package's own functions: a layer is one native call, and asks nothing that loading decided."""
    decoder, prompt = registry.load_method(MethodSpec(method), lab), [5, 9, 5, 9, 5, 9, 7, 8]
    session = DecodeSession(decoder, prompt, StopParams(40), SamplingParams(), lab.new_cache(128))
    state, _ = session.prefill()
    calls = 0

    def count(frame: Any, event: str, _: object) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_globals.get("__name__", "").startswith("specbench_ss.")

    for number in range(4):
        sys.setprofile(count if number == 3 else None)
        session.step(state)
    sys.setprofile(None)
    assert 0 < calls <= most


@few(2)
@available
@pytest.mark.parametrize("replace_mlp", [False, True], ids=["added", "instead"])
@pytest.mark.parametrize("types", TYPES, ids=str)
def test_an_adapter_is_added_to_the_mlp_of_its_rows_or_replaces_it(
    types: tuple[torch.dtype, torch.dtype], replace_mlp: bool
) -> None:
    """The rank is more than a panel."""
    torch.manual_seed(0)
    dtype, of_weights = types
    for target in targets(dtype, fp16_weights=of_weights == torch.float16):
        block, h = target.family.blocks[0], target.hidden_size
        assert isinstance(block, NativeBlock) and block.native.has_mlp
        down, up = ((torch.randn(*shape) / 8).to(of_weights) for shape in ((40, h), (h, 40)))
        native = block.native.with_adapter(*(cpu.NativeLinear(w, None, dtype) for w in (down, up)))
        x = torch.randn(1, cpu.MOST_ROWS + 11, h).to(dtype)  # in two pieces
        adapter = F.linear(F.silu(F.linear(block.norm2(x), down.to(dtype))), up.to(dtype))
        for start in (0, 4, cpu.MOST_ROWS + 4, x.shape[1]):
            torch.set_num_threads(1)
            plain, one = block.native.mlp(x), native.mlp(x, start, replace_mlp)
            torch.set_num_threads(2)
            assert torch.equal(native.mlp(x, start, replace_mlp), one)
            assert torch.equal(one[:, :start], plain[:, :start])
            right = adapter if replace_mlp else plain + adapter
            assert (one - right)[:, start:].abs().sum() <= TOLERANCE[dtype] * (1 + right.abs().sum())


def run(script: str, **variables: str) -> str:
    environment = {**os.environ, **variables}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_dflashs_layers_which_are_not_causal_are_fused() -> None:
    if cpu.kernels() is None:
        pytest.skip(cpu.problem())
    target = tiny_target("llama")
    decoder = next(iter(registry.method_class("dflash").test_instances(target).values()))()
    blocks = decoder.drafter.blocks  # type: ignore[attr-defined]
    assert blocks and all(isinstance(block, FusedBlock) for block in blocks)


def test_requests_of_several_threads_do_not_share_buffers() -> None:
    if cpu.kernels() is None:
        pytest.skip(cpu.problem())
    target = next(targets(torch.float32))

    def answer(first: int) -> torch.Tensor:
        with torch.inference_mode():
            cache = target.new_cache(40)
            return step(target, cache, [first, 5, 4, 7, 2, 6, 1], PARENTS)

    alone = [answer(first) for first in range(8)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(answer, [*range(8)] * 4))
    assert all(torch.equal(made, alone[i % 8]) for i, made in enumerate(together))


AVX2 = """
import torch
import torch.nn.functional as F
from specbench_ss.engine.layers import cpu
cpu.FLAGS = (*cpu.FLAGS, '-march=haswell', '-O1')  # half the time of -O3
from specbench_ss.engine.layers.fused import NativeBlock
from specbench_ss.models.tiny import tiny_target
assert cpu.kernels().name == 'AVX2', cpu.problem()
torch.manual_seed(0)
with torch.inference_mode():
    for dtype, of_weights in cpu.PAIRS:
        for inputs, outputs in ((7, 19), (64, 83)):
            weight, x = torch.randn(outputs, inputs).to(of_weights), torch.randn(1, 9, inputs).to(dtype)
            made, right = cpu.NativeLinear(weight, None, dtype)(x), F.linear(x, weight.to(dtype))
            assert (made - right).abs().max() <= (1e-2 if dtype == torch.bfloat16 else 1e-5) * (1 + right.abs().max())
blocks = tiny_target('llama').family.blocks
print(all(isinstance(block, NativeBlock) and block.native.has_mlp for block in blocks))
"""


@available
@thorough
def test_the_form_for_avx2_is_right(tmp_path: Path) -> None:
    """Each layer is compared with its modules when a model is loaded; a MLP of 48 has whole panels of 16."""
    assert run(AVX2, SSBENCH_CACHE=str(tmp_path)) == "True"


DAMAGED = """
from specbench_ss.engine.layers import cpu
cpu.FLAGS = (*cpu.FLAGS, '-O0')  # a sixth of the time
file = cpu._library_file(['g++'], cpu.processor_flags())
file.write_bytes(b'damaged')
print(cpu._opened(file), cpu.kernels().name)
"""


@thorough
def test_a_damaged_library_is_compiled_again(tmp_path: Path) -> None:
    if cpu.kernels() is None:
        pytest.skip(cpu.problem())
    assert run(DAMAGED, SSBENCH_CACHE=str(tmp_path)).startswith(("None AVX", "None AMX"))


def test_a_folder_that_others_can_write_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "native"
    folder.mkdir()
    folder.chmod(0o777)
    if cpu.kernels() is None:
        pytest.skip(cpu.problem())
    monkeypatch.setenv("SSBENCH_CACHE", str(tmp_path))
    cpu._load.cache_clear()
    try:
        assert cpu.kernels() is None and "other users" in cpu.problem()
    finally:
        cpu._load.cache_clear()


@pytest.mark.parametrize(
    ("variables", "reason"),
    [({cpu.VARIABLE: "0"}, "is 0"), ({"CXX": "false"}, "cannot compile"), ({"CXX": "/no/compiler"}, "cannot")],
    ids=["off", "failing", "missing"],
)
def test_without_them_torchs_operators_are_used(
    variables: dict[str, str], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache is empty, so that it would have to be compiled."""
    for name, value in {**variables, "SSBENCH_CACHE": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    cpu._load.cache_clear()
    try:
        assert cpu.kernels() is None and reason in cpu.problem()
        assert "native" not in tiny_target("llama").kernel_summary
    finally:
        cpu._load.cache_clear()
