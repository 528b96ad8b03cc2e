"""How a model's steps are made: operator by operator, or replayed.

The model's layers prove that they can be replayed when it is loaded, and every pass when it is recorded (`replaying`).
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch

from specbench_ss.decoding.replaying import Replay, agree, captured_on
from specbench_ss.decoding.static_passes import StaticPasses
from specbench_ss.decoding.tree import DraftTree
from specbench_ss.errors import UserError, first_line

if TYPE_CHECKING:
    from torch import Tensor

    from specbench_ss.decoding.target import Target

AUTO, EAGER, GRAPH = ENGINES = ("auto", "eager", "graph")
PROMPT, TREES = (1, 2, 3, 4, 5, 6, 7, 8), ((-1,), (-1, 0, 0), (-1, 0, 1))  # of the proof


def check_engine(engine: str, device: str) -> None:
    """Raise UserError for an engine that is not known, or that this device does not have."""
    if engine not in ENGINES:
        raise UserError(f"unknown engine {engine!r}; known: {', '.join(ENGINES)}")
    if engine == GRAPH and "," in device:
        raise UserError(f"engine graph replays what one device does, not {device}: engine eager takes several")
    if engine == GRAPH and torch.device(device).type != "cuda":
        raise UserError(f"engine graph replays CUDA graphs: it needs a CUDA device, not {device!r}")


def use_engine(target: Target, engine: str) -> None:
    """Have the target's steps made so. auto: replayed on one CUDA device, where that proves itself.

    Raises UserError where steps that are to be replayed cannot be, or do not prove themselves. Under auto they are then
    made operator by operator, and a warning says why.
    """
    if engine == EAGER or (engine == AUTO and (target.device.type != "cuda" or target.divided)):
        return
    try:
        with torch.cuda.device(target.device):
            replay_steps(target, captured_on(target.device), "CUDA graphs")
    except UserError as error:
        if engine == GRAPH:
            raise
        target.computed += f"; steps operator by operator: {error}"
        warnings.warn(f"steps are made operator by operator: {error}", stacklevel=2)


def replay_steps(target: Target, replay: Replay, by: str) -> None:
    """Have the target's passes over few rows replayed. by: what replays them, for the record.

    Raises UserError, and leaves the target as it was, where its layers cannot be, or where replayed passes do not give
    what passes give that are made operator by operator.
    """
    if which := target.not_replayable:
        raise UserError(f"engine graph cannot be used with {target.name!r}: its layers {which}; engine eager can")
    expected = _logits(target)
    passes = target.passes = StaticPasses(replay)
    problem = "passes that were broken off"
    try:
        given = _logits(target)
        problem = next(iter(passes.declined), "" if agree(given, expected) else "other logits when passes are replayed")
    except torch.OutOfMemoryError:
        problem = "not enough memory for recordings of its passes"
    except RuntimeError as error:  # of the device's own libraries
        problem = f"passes that cannot be replayed ({first_line(error)})"
    finally:
        target.drop_cache()
        if problem:
            target.passes = None
    if problem:
        raise UserError(f"engine graph does not work with {target.name!r}: it has {problem}; engine eager does")
    target.computed += f"; steps replayed by {by}"


def replay_draft(draft: Target, target: Target) -> None:
    """Have the passes of a model that drafts replayed as the target's are, where those are and its own can be."""
    if isinstance(target.passes, StaticPasses) and draft.passes is None and not draft.not_replayable:
        draft.passes = target.passes.of_draft()


@torch.inference_mode()
def _logits(target: Target) -> list[Tensor]:
    """Logits of a few passes over trees, each made twice: the second time over what was kept of the first."""
    target.drop_cache()
    cache = target.request_cache(len(PROMPT) + 8)
    words = torch.tensor(PROMPT, device=target.device).clamp_max(target.vocab_size - 1)
    target.prefill(words[None], cache)
    made: list[Tensor] = []
    for parents in (*TREES, *TREES):
        tokens = words[: len(parents)] if len(made) < len(TREES) else words[-len(parents) :]
        made.append(target.forward_tree(DraftTree.of(tokens, parents), cache).logits)
        cache.advance(1)
    return made
