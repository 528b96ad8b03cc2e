"""Which layers an EAGLE-3 checkpoint was trained on, where its configuration can be read in two ways: tried out.

`eagle_aux_hidden_state_layer_ids` names inputs of layers in some projects and their outputs in others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specbench_ss.engine.generate import Limits, generate
from specbench_ss.engine.sampling import Sampling
from specbench_ss.engine.target import Target
from specbench_ss.methods._shared.rotary import Rotary
from specbench_ss.methods.ar import Autoregressive
from specbench_ss.methods.eagle.drafter import Drafter

QUESTION = "Explain in a few sentences why the sky is blue, and name two other things with the same cause."
TOKENS = 48  # of the target's own answer, on which guesses are judged


@torch.inference_mode()
def best_layers(
    target: Target, drafter: Drafter, config: dict[str, Any], candidates: Sequence[tuple[int, ...]]
) -> tuple[int, ...]:
    """The candidate by which the drafter is right most often about the target's own greedy answer; ties: the first."""
    prompt = _prompt(target)
    tokens = min(TOKENS, target.context_length - len(prompt))
    answer = generate(Autoregressive(target), prompt, Limits(tokens), Sampling()).tokens
    ids = torch.tensor([[*prompt, *answer]], device=target.device)
    taps = sorted({layer for layers in candidates for layer in layers})
    seen = target.prefill(ids[:, :-1], target.new_cache(ids.shape[1]), taps, every=True).taps
    drafter = drafter.to(target.device, target.dtype).eval()
    rotary = Rotary(drafter.shape.llama(config), target.device)
    right = [_right(target, drafter, rotary, ids, [seen[i] for i in layers], len(prompt)) for layers in candidates]
    return candidates[right.index(max(right))]


def _right(
    target: Target, drafter: Drafter, rotary: Rotary, ids: Tensor, features: Sequence[Tensor], start: int
) -> int:
    """How many tokens of the answer from ids[start + 1] on are guessed from the true features before them."""
    positions = torch.arange(ids.shape[1] - 1, device=ids.device)[None]
    fused = drafter.fuse(features)
    out = drafter(drafter.embed(ids[:, 1:], target), fused, None, None, rotary(positions, fused.dtype))
    guesses = drafter.token_ids(drafter.logits(out[:, :-1], target).argmax(-1))  # slot s says x_{s+2}
    return int((guesses == ids[:, 2:])[:, start - 1 :].sum())


def _prompt(target: Target) -> list[int]:
    """A question where there is a chat template, else the token that texts begin with."""
    if target.tokenizer is not None and target.tokenizer.chat_template is not None:
        ids = target.encode_chat([{"role": "user", "content": QUESTION}])
        if len(ids) < target.context_length:
            return ids
    begin = target.config.bos_token_id
    return [begin if isinstance(begin, int) else 0]
