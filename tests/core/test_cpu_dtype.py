"""`--dtype auto` on a CPU: chosen by the processor's instructions, reported, and kept when a run is resumed."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2Config, GPTNeoXConfig, LlamaConfig, OPTConfig

from specbench_ss import load_run
from specbench_ss.cli.main import main
from specbench_ss.engine.layers import cpu
from specbench_ss.models import cpu_dtype
from specbench_ss.models.cpu_dtype import chosen_dtype
from tests.architectures import random_model
from tests.methods.train.tokenizers_made import made_tokenizer
from tests.tiny import thorough

pytestmark = pytest.mark.dtype_of_processor
CONFIG = LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
                     num_key_value_heads=2, vocab_size=50)  # fmt: skip


def chosen(config: Any = CONFIG, quantized: bool = False) -> str:
    return chosen_dtype("auto", "cpu", "some/model", lambda: config, quantized)[0]


@pytest.fixture
def flags(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """A processor's instructions, with AVX2; native kernels are there."""
    made = {"avx2", "fma", "f16c"}
    monkeypatch.setattr(cpu, "processor_flags", lambda: made)
    monkeypatch.setattr(cpu, "supports", lambda *_: True)
    return made


@pytest.mark.parametrize("flag", ["avx512_bf16", "amx_bf16"])
def test_bfloat16_where_the_processor_has_instructions_for_it(flag: str, flags: set[str]) -> None:
    flags.add(flag)
    dtype, why = chosen_dtype("auto", "cpu", "some/model", lambda: CONFIG)
    assert dtype == "bfloat16" and "chose bfloat16" in why and "instructions" in why
    assert chosen(GPT2Config()) == chosen(quantized=True) == "bfloat16"


@pytest.mark.usefixtures("flags")
def test_float16_weights_where_native_kernels_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen() == "float16-weights"
    for kind in (GPT2Config, OPTConfig, GPTNeoXConfig):  # the last two are accessed by layer, and not fused
        assert chosen(kind()) == "float32"
    assert chosen(quantized=True) == "float32", "float16 weights are another quantization"
    monkeypatch.setattr(cpu_dtype, "has_room", lambda weights_bytes: False)
    assert chosen() == "float32"
    monkeypatch.setattr(cpu, "supports", lambda *_: False)
    assert chosen() == "float32"


def test_no_configuration_is_read_where_there_is_no_choice() -> None:
    def never() -> Any:
        raise AssertionError("read")

    assert chosen_dtype("float32", "cpu", "some/model", never) == ("float32", "")
    assert chosen_dtype("float16-weights", "cpu", "some/model", never) == ("float16-weights", "")
    assert chosen_dtype("auto", "cuda", "some/model", never) == ("bfloat16", "")
    assert chosen_dtype("auto", "cpu", "lab", never) == ("float32", "")


@thorough
def test_a_run_computes_in_it_states_so_and_goes_on_in_it(
    flags: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "supports", lambda *_: False)
    flags.add("avx512_bf16")
    tokenizer, out, prompts = made_tokenizer("gpt", "chatml"), tmp_path / "run", tmp_path / "prompts.jsonl"
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    random_model(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    prompts.write_text('{"prompt": "Good morning"}\n')
    command = ["run", "--model", str(tmp_path / "model"), "--methods", "ar", "--suite", "jsonl", "--data", str(prompts)]
    command += ["--warmup", "0", "--max-new-tokens", "4", "--out", str(out)]
    assert main(command) == 0
    captured = capsys.readouterr()
    assert "--dtype auto chose bfloat16" in " ".join((captured.out + captured.err).split())
    model = load_run(out).manifest["model"]
    assert model["dtype"] == "bfloat16" and "chose bfloat16" in model["dtype_choice"]
    assert model["dtype_choice"] in html.unescape((out / "report.html").read_text())
    flags.remove("avx512_bf16")
    assert main([*command, "--resume"]) == 0
    assert load_run(out).manifest["model"]["dtype_choice"] == model["dtype_choice"]
