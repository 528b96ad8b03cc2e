"""Logits processors of a model's own generation configuration, as transformers' `generate` applies them.

They change p before verification, so that the output of every method stays that of the autoregressive baseline.
Drafters do not apply them: a penalty lowers the acceptance of every method.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any

import torch
from annotated_types import Ge, Gt, Lt
from torch import Tensor

from specbench_ss.engine.tree import indices
from specbench_ss.errors import UserError
from specbench_ss.options import Bounded

NOT_APPLIED = (  # settings that change the tokens of `generate`; a run has its own temperature, top-p and lengths
    "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff", "num_beams",
    "max_length", "max_new_tokens", "min_length", "stop_strings", "bad_words_ids", "no_repeat_ngram_size",
    "encoder_repetition_penalty", "encoder_no_repeat_ngram_size", "begin_suppress_tokens", "forced_bos_token_id",
    "forced_eos_token_id", "exponential_decay_length_penalty", "sequence_bias", "guidance_scale", "dola_layers",
    "penalty_alpha", "watermarking_config",
)  # fmt: skip

_constant = lru_cache(maxsize=64)(indices)  # of settings, which no step shall copy again


@dataclass(frozen=True, slots=True)
class LogitsProcessors(Bounded):
    """Processors of the model's own settings.

    Attributes:
        repetition_penalty: divisor of the positive logits, and factor of the negative ones, of all tokens of the
            prompt and the output so far (Keskar et al., arXiv:1909.05858).
        suppress_tokens: ids that are never chosen.
        min_new_tokens: number of output tokens before which none of `stop_ids` is chosen.
    """

    repetition_penalty: Annotated[float, Gt(0), Lt(math.inf)] = 1.0
    suppress_tokens: tuple[int, ...] = ()
    min_new_tokens: Annotated[int, Ge(0)] = 0
    stop_ids: tuple[int, ...] = ()

    def process(self, logits: Tensor, context: Tensor, tokens: Tensor, visible: Tensor, n_new: Tensor) -> Tensor:
        """Return float32 logits [n, V] after the processors, without a synchronisation.

        Args:
            logits: [n, V], each for the token after its own path.
            context: int64 [S], prompt and output before all paths; at least one token.
            tokens: int64 [m] of the paths. visible: bool [n, m], the tokens on the path of each row.
            n_new: int64 [n], number of output tokens before the chosen one.
        """
        scores = logits.float()
        if self.repetition_penalty != 1:
            paths = torch.where(visible, tokens, context[-1])
            ids = torch.cat((context.expand(len(paths), -1), paths), 1)
            seen = scores.gather(1, ids)
            penalised = torch.where(seen < 0, seen * self.repetition_penalty, seen / self.repetition_penalty)
            scores = scores.scatter(1, ids, penalised)
        if self.suppress_tokens:
            scores = scores.index_fill(1, _constant(self.suppress_tokens, scores.device), -math.inf)
        if self.min_new_tokens and self.stop_ids:
            stops = _constant(self.stop_ids, scores.device)
            early = (n_new < self.min_new_tokens)[:, None]
            scores = scores.index_copy(1, stops, scores[:, stops].masked_fill(early, -math.inf))
        return scores

    def process_answer(self, logits: Tensor, prompt: Sequence[int], answer: Sequence[int], start: int) -> Tensor:
        """Return the processed logits [n, V] of n successive tokens of an answer, the first of them at `start`."""
        n, device = len(logits), logits.device
        context, tokens = indices([*prompt, *answer[:start]], device), indices(answer[start : start + n - 1], device)
        visible = torch.ones(n, len(tokens), dtype=torch.bool, device=device).tril(-1)
        return self.process(logits, context, tokens, visible, start + torch.arange(n, device=device))

    def applied(self) -> dict[str, Any]:
        """Return the settings that change the logits."""
        settings = {name: getattr(self, name) for name in ("repetition_penalty", "suppress_tokens", "min_new_tokens")}
        return {name: value for name, value in settings.items() if value not in (1.0, (), 0)}


def processors_of(model: Any, stop_ids: frozenset[int]) -> tuple[LogitsProcessors | None, dict[str, Any]]:
    """Return the processors of a model's generation configuration, and its other settings that change tokens.

    stop_ids: end tokens of the model. Raises UserError for values out of bounds.
    """
    config = getattr(model, "generation_config", None)
    stated: dict[str, Any] = {} if config is None else config.to_diff_dict()
    others = {name: stated[name] for name in NOT_APPLIED if stated.get(name) not in (None, 0, 1)}
    try:
        words = [list(word) for word in stated.get("bad_words_ids") or () if list(word) not in [[i] for i in stop_ids]]
        if all(len(word) == 1 for word in words):  # longer ones depend on the tokens before
            others.pop("bad_words_ids", None)
        ids = {*(stated.get("suppress_tokens") or ()), *(word[0] for word in words if len(word) == 1)}
        penalty, least = float(stated.get("repetition_penalty") or 1), int(stated.get("min_new_tokens") or 0)
        suppressed = tuple(sorted(token for token in map(int, ids) if 0 <= token < model.config.vocab_size))
        processors = LogitsProcessors(penalty, suppressed, least, tuple(sorted(stop_ids)))
    except (TypeError, ValueError, UserError) as error:
        raise UserError(f"generation_config.json: {error}; use --generation-config none") from error
    return processors if processors.applied() else None, others


def settings_note(settings: Mapping[str, Mapping[str, Any]]) -> str:
    """Return one line on the generation configuration in a manifest: its `applied` and `not_applied` settings."""
    parts = [
        f"{', '.join(f'{name} {str(value)[:40]}' for name, value in settings[part].items())} {text}"
        for part, text in (("applied", "applied to every method"), ("not_applied", "not applied"))
        if settings.get(part)
    ]
    return f"the model's generation_config.json: {'; '.join(parts)}" if parts else ""
