"""What can be known of a target before its weights are loaded: its configuration, its tokenizer, what came with it.

Knows no method and no tensor; `target.Target` is one with weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specbench_ss.decoding.architectures import TAKEN_APART, check_config, usable_context, windows_of
from specbench_ss.errors import UserError, error_text


class Outline:
    """A causal LM by its configuration and tokenizer. Raises UserError for an architecture that is not known."""

    def __init__(self, config: Any, tokenizer: Any, name: str, folder: Path | None = None) -> None:
        check_config(config)
        self.config = config
        self.tokenizer = tokenizer
        self.name = name
        self.folder = folder
        self.is_lab = False
        self.device_type = "cpu"  # that it is to run on
        self.companions: Path | None = None  # folder with a folder for each method whose weights came with this model
        self.origin: dict[str, Any] = {}  # where its weights come from, and what was done to them, as far as is known
        self.n_layers: int = config.num_hidden_layers
        self.hidden_size: int = config.hidden_size
        self.vocab_size: int = config.vocab_size
        self.embedding_size: int = getattr(config, "word_embed_proj_dim", None) or config.hidden_size
        self.context_length = usable_context(config)
        self.windows = windows_of(config)  # sliding-window width of each layer, None = full attention

    @property
    def taken_apart(self) -> bool:
        """Whether attention, MLP and norms of its layers can be called one by one, not only whole layers."""
        return self.config.model_type in TAKEN_APART

    @property
    def attention_heads(self) -> tuple[int, int, int]:
        """Heads of queries, heads of keys and values, and numbers a head, by the configuration."""
        heads: int = self.config.num_attention_heads
        kv_heads = getattr(self.config, "num_key_value_heads", None) or heads
        return heads, kv_heads, getattr(self.config, "head_dim", None) or self.hidden_size // heads

    def check_taken_apart(self, method: str) -> None:
        """Raise UserError, for a method that must enter a layer, where only whole layers can be called."""
        if not self.taken_apart:
            raise UserError(
                f"{method} enters decoder layers, which it can in models of the types {', '.join(TAKEN_APART)}; "
                f"{self.name!r} is of type {self.config.model_type!r}"
            )

    def check_square(self, method: str) -> None:
        """Raise UserError, for a method that joins embeddings and hidden states, where these are of different sizes."""
        if self.embedding_size != self.hidden_size:
            raise UserError(
                f"{method}: {self.name!r} embeds tokens in {self.embedding_size:,} numbers and computes with "
                f"{self.hidden_size:,}: {method} needs a model where these are the same"
            )

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of a conversation, ready for the assistant's answer."""
        if self.tokenizer is None:
            raise UserError(f"model {self.name!r} has no tokenizer")
        if self.tokenizer.chat_template is None:
            raise UserError(f"the tokenizer of {self.name!r} has no chat template")
        return list(self.tokenizer(self.chat_text(messages), add_special_tokens=False)["input_ids"])

    def chat_text(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return the chat template filled with a conversation. Raises UserError where the template refuses it."""
        try:
            return str(self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
        except Exception as error:  # Jinja's own errors, and whatever a template raises by itself
            roles = ", ".join(message["role"] for message in messages[:6])
            more = ", ..." if len(messages) > 6 else ""
            said = f"the chat template of {self.name!r} refuses messages of the roles {roles}{more}"
            raise UserError(f"{said}: {error_text(error)}") from error

    def decode_text(self, ids: Sequence[int]) -> str:
        """Text of these ids, special tokens left out."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def companion(self, method: str) -> Path | None:
        """The folder with a method's weights that came along with this model, if there is one."""
        path = None if self.companions is None else self.companions / method
        return path if path is not None and path.is_dir() else None
