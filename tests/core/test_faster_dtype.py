"""`--dtype auto` on a CPU: the fastest dtype is measured, kept, reported, and does not change in the middle of a
run."""

from __future__ import annotations

import html
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPTNeoXConfig, LlamaConfig, OPTConfig

from specbench_ss import load_run
from specbench_ss.cli.main import main
from specbench_ss.models import cpu_dtype
from specbench_ss.models.cpu_dtype import Choice, chosen_dtype, few_layers, pass_ms
from tests.architectures import DRIVEN, random_model
from tests.methods.train.tokenizers_made import made_tokenizer
from tests.served.fake_server import Clock

pytestmark = pytest.mark.measured_format
CONFIG = LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
                     num_key_value_heads=2, vocab_size=50)  # fmt: skip
FORMS = ("float32", "bfloat16", "float16-weights")


def changed(**values: int) -> LlamaConfig:
    """The configuration with other numbers."""
    return LlamaConfig(**CONFIG.to_dict() | values)


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, float]:
    """A processor with products in all formats; how long its passes take, by format."""
    monkeypatch.setenv("SSBENCH_CACHE", str(tmp_path / "cache"))
    made = {"float32": 40.0, "bfloat16": 21.0, "float16-weights": 30.0}
    monkeypatch.setattr(cpu_dtype, "has_bfloat16", lambda: True)
    monkeypatch.setattr(cpu_dtype, "supports_fp16_gemm", lambda: True)
    monkeypatch.setattr(cpu_dtype, "other_cpu_seconds", lambda: 0.0)
    monkeypatch.setattr(
        cpu_dtype, "pass_ms", lambda forms, *_: {form: {"1": made[form], "16": made[form] + 4} for form in forms}
    )
    return made


@pytest.mark.parametrize("context", [2, 16, 17, 128])
def test_a_short_context_is_measured_too(context: int) -> None:
    measured = pass_ms(("float32",), changed(max_position_embeddings=context), 1000, (1, 16))
    assert all(0 < ms < math.inf for ms in measured["float32"].values())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model that is not the lab's."""
    path, tokenizer = tmp_path / "model", made_tokenizer("gpt", "chatml")
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    random_model(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def test_the_faster_dtype_is_chosen_and_reported_in_words(times: dict[str, float]) -> None:
    name, why = chosen_dtype("auto", "cpu", "some/model", lambda: CONFIG)
    assert name == "bfloat16"
    assert "chose bfloat16" in why and "float32 40.0, 44.0; bfloat16 21.0, 25.0; float16-weights 30.0" in why


@pytest.mark.parametrize(
    ("ms", "taken"),
    [
        ((40, 39, 38), "float32"),
        ((40, 30, 31), "float16-weights"),
        ((40, 30, 25), "bfloat16"),
        ((40, 38, 33), "bfloat16"),
        ((40, 38, 36), "float16-weights"),
    ],
)
def test_what_rounds_less_is_taken_where_it_is_nearly_as_fast(ms: tuple[int, int, int], taken: str) -> None:
    float32, halved, bfloat16 = ms
    times = {"float32": float32, "bfloat16": bfloat16, "float16-weights": halved}
    assert cpu_dtype._fastest({name: {"1": one, "16": one} for name, one in times.items()}) == taken


def test_among_formats_equal_for_one_token_a_verification_pass_decides() -> None:
    """Native kernels, SmolLM2: the two take 11.5 ms for one token, 32 and 18.5 ms for sixteen."""
    ms = {"float32": (23.0, 40.0), "bfloat16": (11.4, 18.5), "float16-weights": (11.5, 32.0)}
    assert cpu_dtype._fastest({name: {"1": one, "16": more} for name, (one, more) in ms.items()}) == "bfloat16"
    ms["bfloat16"] = (12.2, 18.5)  # within 10 %, but the baseline would be slower
    assert cpu_dtype._fastest({name: {"1": one, "16": more} for name, (one, more) in ms.items()}) == "float16-weights"


def test_the_time_of_one_token_decides(times: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen tokens, and the sum of both, would choose bfloat16, in which `ar` takes 1.4 times as long."""
    ms = {"float32": (168.2, 179.7), "bfloat16": (46.4, 75.3), "float16-weights": (33.3, 167.6)}
    made = {form: {"1": one, "16": sixteen} for form, (one, sixteen) in ms.items()}
    monkeypatch.setattr(cpu_dtype, "pass_ms", lambda *_: made)
    assert chosen_dtype("auto", "cpu", "some/model", lambda: CONFIG)[0] == "float16-weights"


@pytest.mark.parametrize(
    ("other_cores", "sixteen", "reason"), [(1.3, 25.0, "other processes"), (0.0, 19.9, "less time for 16 tokens")]
)
def test_a_doubtful_measurement_is_used_with_a_warning_and_not_cached(
    other_cores: float, sixteen: float, reason: str, times: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    made = {form: {"1": one, "16": sixteen if form == "bfloat16" else one + 4} for form, one in times.items()}

    def in_two_seconds(*_: object) -> dict[str, dict[str, float]]:
        clock.pass_by(2.0)
        return made

    with monkeypatch.context() as doubtful:
        doubtful.setattr(cpu_dtype, "time", SimpleNamespace(perf_counter=clock))
        doubtful.setattr(cpu_dtype, "other_cpu_seconds", lambda: other_cores * clock.now)
        doubtful.setattr(cpu_dtype, "pass_ms", in_two_seconds)
        with pytest.warns(UserWarning, match=reason):
            name, why = chosen_dtype("auto", "cpu", "some/model", lambda: CONFIG)
    assert name == "bfloat16" and reason in why
    times["bfloat16"] = 100.0
    assert chosen_dtype("auto", "cpu", "some/model", lambda: CONFIG)[0] == "float16-weights"


def test_sixteen_tokens_may_take_a_little_less_than_one() -> None:
    assert cpu_dtype._doubt({"float32": {"1": 21.0, "16": 20.5}}, 0.0) == ""


def test_formats_are_measured_in_turns_and_the_least_time_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([0.005, 0.009, 0.003, 0.010, 0.004, 0.008])
    monkeypatch.setattr(cpu_dtype, "TURNS", 3)
    monkeypatch.setattr(cpu_dtype, "best_time", lambda *_: next(seconds))
    ms = pass_ms(("float32", "float16-weights"), CONFIG, 2048, (1,))
    assert ms["float32"]["1"] == pytest.approx(3) and ms["float16-weights"]["1"] == pytest.approx(8)


def test_float32_stays_where_nothing_is_clearly_faster(times: dict[str, float]) -> None:
    """On a tiny model noise alone would choose, and answers would differ from machine to machine."""
    times["bfloat16"], times["float16-weights"] = 37.5, 39.0
    assert chosen_dtype("auto", "cpu", "some/model", lambda: CONFIG)[0] == "float32"
    times["bfloat16"] = 34.0
    deeper = changed(num_hidden_layers=4)  # of which nothing is kept yet
    assert chosen_dtype("auto", "cpu", "some/model", lambda: deeper)[0] == "bfloat16"


def test_layers_that_are_not_fused_are_not_computed_with_rounded_weights(times: dict[str, float]) -> None:
    times["bfloat16"] = 200.0
    for kind in (GPT2Config, OPTConfig, GPTNeoXConfig):  # the last two are accessed by layer, and not fused
        assert chosen_dtype("auto", "cpu", "some/model", kind)[0] == "float32"


def test_weights_are_not_rounded_where_there_is_no_room_for_a_copy(
    times: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    times["bfloat16"] = 200.0
    assert chosen_dtype("auto", "cpu", "some/model", lambda: CONFIG)[0] == "float16-weights"
    monkeypatch.setattr(cpu_dtype, "has_room", lambda weights_bytes: False)
    assert chosen_dtype("auto", "cpu", "some/model", lambda: CONFIG)[0] == "float32"


def test_the_first_choice_of_a_machine_stays(times: dict[str, float]) -> None:
    first = chosen_dtype("auto", "cpu", "some/model", lambda: CONFIG)
    times["bfloat16"] = 100.0
    assert chosen_dtype("auto", "cpu", "some/model", lambda: CONFIG) == first
    other = changed(hidden_size=64)
    assert chosen_dtype("auto", "cpu", "some/model", lambda: other)[0] == "float16-weights"


def test_nothing_is_measured_where_there_is_no_choice(times: dict[str, float]) -> None:
    def never() -> Any:
        raise AssertionError("measured")

    assert chosen_dtype("float32", "cpu", "some/model", never) == ("float32", "")
    assert chosen_dtype("float16-weights", "cpu", "some/model", never) == ("float16-weights", "")
    assert chosen_dtype("auto", "cuda", "some/model", never) == ("bfloat16", "")
    assert chosen_dtype("auto", "cpu", "lab", never) == ("float32", "")


@pytest.mark.usefixtures("torch_kernels")
def test_a_processor_without_such_products_stays_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_dtype, "has_bfloat16", lambda: False)
    monkeypatch.setattr(cpu_dtype, "supports_fp16_gemm", lambda: False)
    assert chosen_dtype("auto", "cpu", "some/model", lambda: CONFIG) == ("float32", "")


def test_passes_are_measured_for_real() -> None:
    before = torch.random.get_rng_state()
    found = pass_ms(FORMS, CONFIG, 2048, (1, 16))
    assert set(found) == set(FORMS)
    for ms in found.values():
        assert set(ms) == {"1", "16"} and 0 < min(ms.values()) <= max(ms.values()) < math.inf
    assert cpu_dtype.has_bfloat16() in (True, False)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(
    ("form", "dtype"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("float16-weights", "float32")]
)
def test_what_is_measured_are_layers_of_these_sizes_in_that_format(form: str, dtype: str) -> None:
    target = few_layers(CONFIG, form, 2048)
    assert target.number_format == form and str(target.dtype) == f"torch.{dtype}" and target.n_layers == 3
    layer = target.model.model.layers[0]
    assert layer.mlp.up_proj.weight.shape == (48, 32) and layer.self_attn.k_proj.weight.shape == (16, 32)


@pytest.mark.parametrize("kind", ["gemma3_text", "qwen3_moe"])
def test_layers_of_any_architecture_are_measured(kind: str) -> None:
    assert min(pass_ms(("float32",), DRIVEN[kind], 2048, (1, 16))["float32"].values()) > 0


def test_a_cache_that_holds_nonsense_is_measured_again(times: dict[str, float]) -> None:
    chosen_dtype("auto", "cpu", "some/model", lambda: CONFIG)
    for file in (cpu_dtype.cache_folder() / "limits").glob("dtype-*.json"):
        file.write_text("{")
    found = cpu_dtype.faster_dtype(FORMS, CONFIG, 1 << 20)
    assert found == Choice("bfloat16", {form: {"1": times[form], "16": times[form] + 4} for form in FORMS})


def test_a_run_computes_in_it_states_so_and_goes_on_in_it(
    times: dict[str, float], folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Good morning"}\n')
    command = ["run", "--model", str(folder), "--methods", "ar", "--suite", "jsonl", "--data", str(prompts)]
    command += ["--warmup", "0", "--max-new-tokens", "4", "--out", str(out)]
    assert main(command) == 0
    captured = capsys.readouterr()
    assert "--dtype auto chose bfloat16" in " ".join((captured.out + captured.err).split())
    assert "warning: --dtype" not in captured.err  # a busy machine has warnings of its own
    model = load_run(out).manifest["model"]
    assert model["dtype"] == "bfloat16" and "chose bfloat16" in model["dtype_choice"]
    assert not [stated for stated in load_run(out).manifest.get("warnings", []) if "dtype" in stated]
    assert model["dtype_choice"] in html.unescape((out / "report.html").read_text())
    for file in (cpu_dtype.cache_folder() / "limits").glob("dtype-*.json"):
        file.unlink()
    times["bfloat16"] = 100.0
    assert main([*command, "--resume"]) == 0
    assert load_run(out).manifest["model"]["dtype_choice"] == model["dtype_choice"]
