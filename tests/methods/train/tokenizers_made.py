"""Tokenizers made on the spot: the two kinds that models have, with the chat forms of theirs."""

from __future__ import annotations

from functools import cache
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from specbench_ss.models.load import template_text
from specbench_ss.models.resolve import LAB

TEXT = [
    "Hello there, how are you? I am well; thank you.",
    "What is the sum of 12 and 30? The sum of 12 and 30 is 42.",
    "yes no a b s hi ASSISTANT: USER: [INST] a chat between a curious user and an artificial intelligence",
    "The answer has\n\ntwo lines, and  two  spaces.",
]
SPECIAL = ["<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "[INST]", "[/INST]"]

TEMPLATES = {
    "chatml": (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    # Qwen3's way: an empty thought before the last answer only
    "thought": (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
        "{% if loop.last and m.role == 'assistant' %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
        "{{ m.content.strip() + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    # Phi-3's way: one more end behind the whole
    "two-ends": (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% else %}{{ '<|endoftext|>' }}{% endif %}"
    ),
    # Mistral's way: the system's words stand in the last question
    "late-system": (
        "{{ '<s>' }}{% set system = messages[0].content if messages[0].role == 'system' else '' %}"
        "{% set talk = messages[1:] if system else messages %}"
        "{% for m in talk %}{% if m.role == 'user' %}{{ '[INST] ' }}"
        "{% if loop.last or loop.index == loop.length - 1 %}{{ system + '\n' if system else '' }}{% endif %}"
        "{{ m.content + ' [/INST]' }}{% else %}{{ ' ' + m.content.strip() + '</s>' }}{% endif %}{% endfor %}"
    ),
    # the space that opens the answer is the template's, and belongs to the first word's token
    "space": "{% for m in messages %}{{ m.role + ': ' + m.content + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}",
    # not to be understood: the words are changed, and the start depends on the end
    "shouting": "{% for m in messages %}{{ messages|length ~ m.role + ': ' + m.content.upper() + '\n' }}{% endfor %}",
    **{name: template_text(name) for name in ("plain", "vicuna", "llama-2")},
}


@cache
def _made(kind: str) -> Any:
    trainer_of: dict[str, Any] = {"special_tokens": SPECIAL, "vocab_size": 420, "show_progress": False}
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>" if kind == "llama" else None))
    if kind == "llama":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)  # as Llama 3 has it: spaces have no offsets
        trainer_of["initial_alphabet"] = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(TEXT * 3, trainers.BpeTrainer(**trainer_of))
    return tokenizer


def made_tokenizer(kind: str, template: str) -> Any:
    """kind: 'llama' (SentencePiece's manner), 'gpt' (bytes) or 'lab' (the shipped one, with its own template)."""
    if kind == "lab":
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(LAB / "base")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_made(kind).to_str()), bos_token="<s>", eos_token="</s>",
        additional_special_tokens=SPECIAL[3:],
    )  # fmt: skip
    tokenizer.chat_template = TEMPLATES[template]
    return tokenizer
