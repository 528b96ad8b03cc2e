"""A folder as many older models are published: a SentencePiece file in place of tokenizer.json, weights in a pickle."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest
import sentencepiece
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specbench_ss.engine.generate import StopParams, generate
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.methods.ar import Autoregressive
from specbench_ss.models.load import load_target

TEXT = "A chat between a curious user and an artificial intelligence assistant. USER: Hello ASSISTANT: "


def published(folder: Path) -> sentencepiece.SentencePieceProcessor:
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([TEXT] * 20), model_writer=written, vocab_size=320, model_type="bpe",
        byte_fallback=True, unk_id=0, bos_id=1, eos_id=2, pad_id=-1, minloglevel=2,
        remove_extra_whitespaces=False, normalization_rule_name="identity",
    )  # fmt: skip
    (folder / "tokenizer.model").write_bytes(written.getvalue())
    about = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "legacy": False, "model_max_length": 128}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    config = LlamaConfig(
        vocab_size=320, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=128,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    return sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())


def test_a_sentencepiece_tokenizer_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = published(tmp_path)
    monkeypatch.delenv("DISABLE_SAFETENSORS_CONVERSION", raising=False)
    target = load_target(str(tmp_path), device="cpu", chat_template="vicuna")
    assert os.environ["DISABLE_SAFETENSORS_CONVERSION"] == "1"  # nobody is asked to convert the pickle
    assert target.tokenizer(TEXT)["input_ids"] == [1, *pieces.encode(TEXT)]
    prompt = target.encode_chat([{"role": "user", "content": "Hello"}])
    assert "USER: Hello ASSISTANT:" in target.decode_text(prompt)
    assert len(generate(Autoregressive(target), prompt, StopParams(4), SamplingParams()).tokens) == 4
