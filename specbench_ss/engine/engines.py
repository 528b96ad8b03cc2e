"""Execution engines of a model: eager, or CUDA graphs.

Every replayed pass proves itself (`engine/cuda_graphs.py`). When a model is loaded, a few passes show whether its
layers can be replayed at all, and stand rows and keys that are added.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from specbench_ss.engine.cuda_graphs import CudaGraphRunner, Graphs, Replay
from specbench_ss.engine.numerics import FRACTION_BITS, near_tie_drop
from specbench_ss.engine.target import Target
from specbench_ss.engine.tree import DraftTree
from specbench_ss.errors import UserError, first_line

AUTO, EAGER, GRAPH = ENGINES = ("auto", "eager", "graph")
PROMPT, TREES = 8, ((-1,), (-1, 0, 0), (-1, 0, 1))  # tokens and drafts of the proof
ROUNDING = 1e-3  # largest mean difference of a row of logits in full precision, as a share of their mean size


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
    run eagerly, and a warning says why.
    """
    if engine == EAGER or (engine == AUTO and (target.device.type != "cuda" or target.divided)):
        return
    try:
        with torch.cuda.device(target.device):
            replay_steps(target, Graphs(target.device), "CUDA graphs")
    except UserError as error:
        if engine == GRAPH:
            raise
        target.computed += f"; steps run eagerly: {error}"
        warnings.warn(f"steps are run eagerly: {error}", stacklevel=2)


def replay_steps(target: Target, replay: Replay, by: str) -> None:
    """Replay the target's passes over few rows. by: what replays them, for the record.

    Raises UserError, and leaves the target as it was, where its layers cannot be replayed, or where replayed passes
    give other logits than passes that are run eagerly.
    """
    if which := target.not_replayable:
        raise UserError(f"engine graph cannot be used with {target.name!r}: its layers {which}; engine eager can")
    unpadded = _logits(target)
    problem = "passes that were broken off"
    try:
        passes = target.graphs = CudaGraphRunner(replay)
        agreed = all(map(allclose_rows, _logits(target), unpadded))
        problem = next(iter(passes.fallbacks), "" if agreed else "other logits when rows and keys are added to a pass")
    except torch.OutOfMemoryError:
        problem = "not enough memory for recordings of its passes"
    except RuntimeError as error:  # of the device's own libraries
        problem = f"passes that cannot be replayed ({first_line(error)})"
    finally:
        target.drop_cache()
        if problem:
            target.graphs = None
    if problem:
        raise UserError(f"engine graph does not work with {target.name!r}: it has {problem}; engine eager does")
    target.computed += f"; steps replayed by {by}"


def replay_draft(draft: Target, target: Target) -> None:
    """Have the passes of a model that drafts replayed as the target's are, where those are and its own can be."""
    if isinstance(target.graphs, CudaGraphRunner) and draft.graphs is None and not draft.not_replayable:
        draft.graphs = target.graphs.of_draft()


def allclose_rows(given: Tensor, expected: Tensor) -> bool:
    """Return True if two logits tensors [.., V] agree within rounding.

    In half precision, where rounding may change a third of them, the best token of each row must be a numerical
    tie of the best expected one. In full precision every number counts.
    """
    finite = expected.isfinite()
    if not (torch.equal(given.isfinite(), finite) and finite.any()):
        return False
    a, b = (logits.float().where(finite, 0).flatten(0, -2) for logits in (given, expected))
    if str(expected.dtype).removeprefix("torch.") not in FRACTION_BITS:
        # a few very large numbers, as states of a model have, would hide the others in a largest difference
        return bool(((a - b).abs().mean(-1) <= ROUNDING * b.abs().mean(-1).clamp_min(1e-6)).all())
    best = b.where(finite.flatten(0, -2), -torch.inf).amax(-1)
    drops = best - b.gather(-1, given.flatten(0, -2).argmax(-1, keepdim=True))[..., 0]
    pairs = zip(drops.tolist(), best.tolist(), strict=True)
    return all(drop <= near_tie_drop(str(expected.dtype), most) for drop, most in pairs)


@torch.inference_mode()
def _logits(target: Target) -> list[Tensor]:
    """Return the logits of a few passes over trees, each made twice: the second time over the rows of the first.

    Their tokens are of the middle of the vocabulary: the first ones are special, and a model has rarely met them.
    """
    target.drop_cache()
    cache = target.request_cache(PROMPT + 8)
    words = (torch.arange(PROMPT, device=target.device) + target.vocab_size // 2) % target.vocab_size
    target.prefill(words[None], cache)
    made: list[Tensor] = []
    for parents in (*TREES, *TREES):
        tokens = words[: len(parents)] if len(made) < len(TREES) else words[-len(parents) :]
        made.append(target.forward_tree(DraftTree.from_parents(tokens, parents), cache).logits)
        cache.commit(1)
    return made
