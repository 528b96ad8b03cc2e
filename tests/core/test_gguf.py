"""A GGUF file as a model: what it loads as, what a run keeps of it, and what is stated of one that cannot be read."""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from specbench_ss import UserError, generate, load_method, load_model, load_run
from specbench_ss.models import load
from specbench_ss.models.gguf import dequantize, gguf_facts, gguf_origin
from tests import gguf_made
from tests.cli import failing
from tests.tiny import thorough

TEXTS = ("What is the sum of 12 and 30?", "two\n\n12  lines", "<|im_start|>user\nyes 4<|im_end|>\n")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return path, gguf_made.write(path)


@torch.inference_mode()
def logits(model: Any) -> torch.Tensor:
    out: torch.Tensor = model(torch.arange(40, 70)[None]).logits
    return out


@pytest.mark.parametrize(
    ("kind", "type_name"), [("llama", "Q8_0"), ("llama", "Q4_1"), ("qwen2", "Q8_0"), ("qwen2", "F16")]
)
def test_it_loads_as_the_model_whose_rounded_weights_it_holds(tmp_path: Path, kind: str, type_name: str) -> None:
    """Also where the file does not end in .gguf, which its first bytes show."""
    file = tmp_path / "a-file"
    expected = gguf_made.write(file, kind, type_name)
    target = load_model(str(file), dtype="float32", device="cpu")
    torch.testing.assert_close(logits(target.model), logits(expected), atol=1e-5, rtol=1e-5)
    types = target.origin["gguf"]["types"]
    assert set(types) == {type_name, "F32"} and target.origin["gguf"]["file"] == "a-file"
    assert sum(types.values()) == sum(1 for _ in expected.parameters())


def test_text_becomes_the_tokens_that_the_file_means(written: tuple[Path, Any]) -> None:
    path, _ = written
    outline, meant = load.load_model_info(str(path)), gguf_made.tokenizer_of("smollm")
    plain = gguf_made.tokenizer_of("gpt-2")
    assert any(plain(text)["input_ids"] != meant(text)["input_ids"] for text in TEXTS)  # or it would show nothing
    for text in TEXTS:
        assert outline.tokenizer(text)["input_ids"] == meant(text)["input_ids"]
    asked = [{"role": "user", "content": "hi 12"}]
    assert (
        outline.encode_chat(asked)
        == meant(meant.apply_chat_template(asked, add_generation_prompt=True, tokenize=False))["input_ids"]
    )


def test_what_lies_next_to_the_file_is_not_read(tmp_path: Path, written: tuple[Path, Any]) -> None:
    path, _ = written
    next_to = tmp_path / "tiny.gguf"
    next_to.write_bytes(path.read_bytes())
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "chat_template.jinja").write_text("nothing")
    outline = load.load_model_info(str(next_to))
    assert outline.tokenizer.chat_template == gguf_made.tokenizer_of().chat_template
    assert outline.tokenizer(TEXTS[0])["input_ids"] == gguf_made.tokenizer_of()(TEXTS[0])["input_ids"]


def test_the_end_of_a_turn_ends_an_answer(tmp_path: Path) -> None:
    file, end = tmp_path / "t.gguf", gguf_made.tokenizer_of().convert_tokens_to_ids(gguf_made.TURN_END)
    gguf_made.write(file, tokenizer__ggml__eot_token_id=end)
    assert load_model(str(file), device="cpu").eos_ids == {1, end}


def test_what_transformers_leaves_out_is_stated(tmp_path: Path) -> None:
    gguf_made.write(tmp_path / "t.gguf", factors=True)
    with pytest.warns(UserWarning, match="t.gguf: rope_freqs.weight is not read"):
        load_model(tmp_path / "t.gguf", device="cpu")


def test_methods_decode_with_it_and_it_can_be_saved(written: tuple[Path, Any], tmp_path: Path) -> None:
    path, expected = written
    target = load_model(path, device="cpu")
    ids = target.encode_chat([{"role": "user", "content": "yes no yes no yes"}])
    plain = generate(load_method("ar", target), ids, max_new_tokens=12, stop_ids=())
    assert generate(load_method("pld", target), ids, max_new_tokens=12, stop_ids=()).tokens == plain.tokens
    drafted = generate(load_method("sd", target, weights=str(path)), ids, max_new_tokens=12, stop_ids=())
    assert drafted.tokens == plain.tokens and drafted.tokens_per_step > 3  # it guesses its own words
    target.model.save_pretrained(tmp_path / "folder")
    target.tokenizer.save_pretrained(tmp_path / "folder")
    again = load_model(tmp_path / "folder", device="cpu")
    torch.testing.assert_close(logits(again.model), logits(expected), atol=1e-5, rtol=1e-5)
    assert again.weights_hash == target.weights_hash and again.origin == {}


@thorough
def test_a_run_keeps_what_was_dequantised(written: tuple[Path, Any], tmp_path: Path, run_cli: Any) -> None:
    path, out = written[0], tmp_path / "out"
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "What is the sum of 12 and 30?"}\n')
    run_cli(
        "run", "--model", path, "--methods", "pld", "--suite", f"jsonl:{prompts}", "--max-new-tokens", 4, "--out", out
    )
    origin = load_run(out).manifest["model"]["origin"]
    assert origin == gguf_origin(path) == {"gguf": {"file": "tiny.gguf", "types": {"Q8_0": 15, "F32": 5}}}
    assert "gguf (file tiny.gguf, types (Q8_0 15, F32 5))" in (out / "report.html").read_text()


@pytest.fixture
def run_cli(capfd: pytest.CaptureFixture[str]) -> Any:
    from specbench_ss.cli.main import main

    def run(*words: object) -> None:
        assert main([str(word) for word in words]) == 0, capfd.readouterr().err

    return run


def _stated_of(path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    return failing(["run", "--model", str(path), "--methods", "pld", "--suite", "specbench"], capsys)


@pytest.mark.parametrize("kept", [10, 30, 200, 5_000, 20_000, -100])
def test_a_file_that_is_cut_short_is_refused(
    kept: int, written: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the counts, in the metadata, in the vocabulary, and in the weights."""
    file = tmp_path / "cut.gguf"
    file.write_bytes(written[0].read_bytes()[:kept])
    assert f"{file} is truncated or damaged" in _stated_of(file, capsys)


def test_weights_of_an_unknown_type_are_refused(
    written: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a type that no version has, and of one that has a number but cannot be made float."""
    name, content = b"blk.0.attn_v.weight", written[0].read_bytes()
    place = content.index(name) + len(name) + 4 + 2 * 8  # behind the number of dimensions and two of them
    assert struct.unpack_from("<I", content, place) == (8,)  # Q8_0
    file = tmp_path / "strange.gguf"
    for number, stated in ((977, "of an unknown type, number 977"), (24, "of type I8, which cannot be dequantized")):
        file.write_bytes(content[:place] + struct.pack("<I", number) + content[place + 4 :])
        assert f"{file} has weights {stated}" in _stated_of(file, capsys)


def test_other_files_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    part = tmp_path / "part.gguf"
    gguf_made.write(part, split__count=3)
    assert f"{part} is one of 3 parts of a model" in _stated_of(part, capsys)
    bare = tmp_path / "bare.gguf"
    gguf_made.write(bare, template=False)
    assert "has no chat template; use --chat-template" in _stated_of(bare, capsys)


def test_an_architecture_that_transformers_does_not_read(
    written: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "strange.gguf"
    file.write_bytes(written[0].read_bytes().replace(b"llama", b"lamma"))
    assert "GGUF model with architecture lamma is not supported" in _stated_of(file, capsys)


def test_a_file_needs_the_package_that_reads_it(
    written: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "another.gguf"  # nothing is known of it yet
    file.write_bytes(written[0].read_bytes())
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert "reading another.gguf needs the package gguf: pip install gguf" in _stated_of(file, capsys)


def test_a_file_that_has_changed_is_looked_at_again(tmp_path: Path) -> None:
    file = tmp_path / "t.gguf"
    gguf_made.write(file, type_name="Q8_0")
    assert gguf_facts(file).types[0] == ("Q8_0", 15)
    gguf_made.write(file, type_name="Q4_1")
    assert gguf_facts(file).types[0] == ("Q4_1", 15)


def test_the_header_is_parsed_once_and_its_long_lists_are_not_read(
    written: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, parsed, init = tmp_path / "t.gguf", list[Any](), gguf_made.gguf.GGUFReader.__init__
    file.write_bytes(written[0].read_bytes())
    before, dequantize = gguf_made.gguf.GGUFReader, gguf_made.gguf.dequantize
    monkeypatch.setattr(before, "__init__", lambda self, path: [parsed.append(self), init(self, path)][1])
    monkeypatch.setattr("specbench_ss.models.gguf.SHORT", 8)
    outline = load.load_model_info(str(file))
    target = load_model(file, device="cpu", dtype="float32")
    assert len(parsed) == 1 and set(parsed[0].get_field("tokenizer.ggml.tokens").contents()) == {0}
    torch.testing.assert_close(logits(target.model), logits(written[1]), atol=1e-5, rtol=1e-5)
    assert outline.tokenizer.get_vocab() == gguf_made.tokenizer_of().get_vocab()
    assert (gguf_made.gguf.GGUFReader, gguf_made.gguf.dequantize) == (before, dequantize)  # as they were


@pytest.mark.parametrize("type_name", ["Q5_0", "Q8_0", "Q4_1"])
def test_blocks_become_the_numbers_of_the_gguf_package(type_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specbench_ss.models.gguf.CHUNK", 5)
    kind = gguf_made.gguf.GGMLQuantizationType[type_name]
    rows = torch.randn(7, 96, generator=torch.Generator().manual_seed(0)).mul(9).numpy()
    packed = gguf_made.gguf.quants.quantize(rows, kind)
    assert (dequantize(packed, kind) == gguf_made.gguf.dequantize(packed, kind)).all()


def _patched(content: bytes, key: bytes, offset: int, form: str, value: int) -> bytes:
    """The file with a number changed, so many bytes behind the end of a name."""
    place = (content.index(key) if key else 0) + len(key) + offset
    return content[:place] + struct.pack(form, value) + content[place + struct.calcsize(form) :]


@pytest.mark.parametrize(
    ("key", "offset", "form", "value"),
    [
        (b"", 4, "<I", 99),  # the version
        (b"", 8, "<Q", 1 << 63),  # tensors
        (b"", 16, "<Q", 1 << 63),  # entries of the metadata
        (b"", 24, "<Q", 1 << 63),  # letters of the first key
        (b"tokenizer.ggml.tokens", 8, "<Q", 1 << 63),  # tokens
        (b"tokenizer.ggml.tokens", 8, "<Q", 1 << 40),
        (b"tokenizer.ggml.tokens", 16, "<Q", (1 << 64) - 1),  # letters of the first token
        (b"tokenizer.ggml.tokens", 4, "<I", 9),  # a list of lists
        (b"tokenizer.ggml.tokens", 4, "<I", 77),
        (b"tokenizer.ggml.token_type", 8, "<Q", 1 << 62),
        (b"general.architecture", 0, "<I", 77),
        (b"general.architecture", 4, "<Q", 1 << 50),
        (b"blk.0.attn_v.weight", 0, "<I", 1 << 30),  # dimensions
        (b"blk.0.attn_v.weight", 4, "<Q", 1 << 62),  # rows
        (b"blk.0.attn_v.weight", 24, "<Q", 0),  # where the weights are: in those of another
        (b"blk.0.attn_v.weight", 24, "<Q", 1 << 62),
    ],
)
def test_headers_with_impossible_numbers_are_refused_at_once(
    key: bytes, offset: int, form: str, value: int, written: tuple[Path, Any], tmp_path: Path
) -> None:
    file = tmp_path / "t.gguf"
    file.write_bytes(_patched(written[0].read_bytes(), key, offset, form, value))
    with pytest.raises(UserError, match="truncated or damaged"):
        gguf_facts(file)


def test_metadata_of_another_kind_is_refused(written: tuple[Path, Any], tmp_path: Path) -> None:
    """Sizes that no model has."""
    for key, value in ((b"llama.block_count", 1 << 31), (b"llama.attention.head_count", 0)):
        file = tmp_path / "t.gguf"
        file.write_bytes(_patched(written[0].read_bytes(), key, 4, "<I", value))
        with pytest.raises(UserError, match="its num_|is 0 or"):
            load.load_model_info(str(file))


def test_it_is_not_kept_in_four_bits(written: tuple[Path, Any]) -> None:
    with pytest.raises(UserError, match="cannot be loaded with nf4"):
        load.load_model(str(written[0]), torch.float32, "cpu", nf4=True)
