"""A judge behind an OpenAI-compatible endpoint, by the package `openai`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from specbench_ss.errors import UserError, first_line
from specbench_ss.judging.prompts import Message

KEY = "OPENAI_API_KEY"


@dataclass(frozen=True, slots=True)
class Reply:
    """What the judge said. input_tokens, output_tokens: as the endpoint counts them, where it does."""

    text: str
    input_tokens: int | None
    output_tokens: int | None


class Endpoint:
    """One judging model. Requests that may pass by themselves are tried again by the package, with growing pauses.

    Raises UserError where the package is missing.
    """

    def __init__(self, model: str, base_url: str, retries: int, max_tokens: int, timeout: float = 120.0) -> None:
        try:
            import openai
        except ImportError:
            raise UserError("a judge needs the package openai: pip install -e '.[judge]'") from None
        self.model, self.base_url, self.max_tokens = model, base_url, max_tokens
        key = os.environ.get(KEY) or "none"  # a server of one's own asks for no key
        self._client = openai.OpenAI(api_key=key, base_url=base_url, max_retries=retries, timeout=timeout)
        self._failure: type[Exception] = openai.OpenAIError

    def ask(self, messages: list[Message]) -> Reply:
        """Return the judge's answer. Raises UserError where the endpoint refuses, or cannot be reached."""
        request: dict[str, Any] = {"model": self.model, "messages": messages, "max_tokens": self.max_tokens}
        try:
            done = self._client.chat.completions.create(**request, temperature=0)
        except self._failure as error:
            raise UserError(f"the judge at {self.base_url} failed: {first_line(error)}") from None
        if not getattr(done, "choices", None):  # a page of HTML comes as text
            raise UserError(f"the judge at {self.base_url} gave no answer of the kind that OpenAI endpoints give")
        usage = done.usage
        counted = (usage.prompt_tokens, usage.completion_tokens) if usage else (None, None)
        return Reply(done.choices[0].message.content or "", *counted)
