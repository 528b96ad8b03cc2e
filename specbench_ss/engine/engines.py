"""Execution engines of a model: eager, or CUDA graphs.

Every graph is checked against the eager pass (`engine/cuda_graphs.py`). At load time a few passes check that the layers
can be captured and that padding does not change them.
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
PROBE_PROMPT = 8  # prompt length of the check
PROBE_TREES = ((-1,), (-1, 0, 1), (-1, 0, 0))  # its draft trees: the last is compared bit by bit, and has siblings
LOGIT_TOLERANCE = 1e-3  # of the mean difference per row of logits in full precision, relative to their mean size


def check_engine(engine: str, device: str) -> None:
    """Raise UserError for an unknown engine, or one that this device does not support."""
    if engine not in ENGINES:
        raise UserError(f"unknown engine {engine!r}; known: {', '.join(ENGINES)}")
    if engine == GRAPH and "," in device:
        raise UserError(f"engine graph runs on one device, not {device}; use engine eager")
    if engine == GRAPH and torch.device(device).type != "cuda":
        raise UserError(f"engine graph needs a CUDA device, not {device!r}; use engine eager")


def use_engine(target: Target, engine: str) -> None:
    """Set the target's execution engine. auto: graph on one CUDA device if the check passes, else eager.

    Raises UserError if `graph` is requested and does not work; with auto, warns and stays eager.
    """
    if engine == EAGER or (engine == AUTO and (target.device.type != "cuda" or target.is_multi_device)):
        return
    try:
        with torch.cuda.device(target.device):
            enable_cuda_graphs(target, Graphs(target.device), "CUDA graphs")
    except UserError as error:
        if engine == GRAPH:
            raise
        target.kernel_summary += f"; steps run eagerly: {error}"
        warnings.warn(f"steps are run eagerly: {error}", stacklevel=2)


def enable_cuda_graphs(target: Target, replay: Replay, by: str) -> None:
    """Replay the target's decode passes. by: the mechanism, for `kernel_summary`.

    Raises UserError, and leaves the target eager, if its layers cannot be captured or replayed logits differ.
    """
    if reason := target.no_graph_reason:
        raise UserError(f"engine graph cannot run {target.name!r}: its layers {reason}; use engine eager")
    expected = _logits(target)
    problem = "interrupted passes"
    try:
        graphs = target.graphs = CudaGraphRunner(replay)
        equal = all(map(allclose_rows, _logits(target), expected))
        problem = next(iter(graphs.fallbacks), "" if equal else "other logits when passes are padded")
    except torch.OutOfMemoryError:
        problem = "not enough memory for its graphs"
    except RuntimeError as error:  # of the device's own libraries
        problem = f"passes that cannot be replayed ({first_line(error)})"
    finally:
        target.drop_cache()
        if problem:
            target.graphs = None
    if problem:
        raise UserError(f"engine graph does not work with {target.name!r}: it has {problem}; use engine eager")
    target.kernel_summary += f"; steps replayed by {by}"


def enable_draft_cuda_graphs(draft: Target, target: Target) -> None:
    """Use CUDA graphs for a draft model if the target does and the draft model's layers support them."""
    if target.graphs is not None and draft.graphs is None and not draft.no_graph_reason:
        draft.graphs = target.graphs.draft_runner()


def allclose_rows(actual: Tensor, expected: Tensor) -> bool:
    """Return True if two logits tensors [.., V] agree within rounding.

    In half precision rounding may change a third of them: the best token of each row must be a numerical tie of the
    expected one. In full precision every number counts.
    """
    finite = expected.isfinite()
    if not (torch.equal(actual.isfinite(), finite) and finite.any()):
        return False
    a, b = (logits.float().where(finite, 0).flatten(0, -2) for logits in (actual, expected))
    if str(expected.dtype).removeprefix("torch.") not in FRACTION_BITS:
        # means, since a few very large states would hide all other differences in a maximum
        return bool(((a - b).abs().mean(-1) <= LOGIT_TOLERANCE * b.abs().mean(-1).clamp_min(1e-6)).all())
    best = b.where(finite.flatten(0, -2), -torch.inf).amax(-1)
    drops = best - b.gather(-1, actual.flatten(0, -2).argmax(-1, keepdim=True))[..., 0]
    pairs = zip(drops.tolist(), best.tolist(), strict=True)
    return all(drop <= near_tie_drop(str(expected.dtype), best_logit) for drop, best_logit in pairs)


@torch.inference_mode()
def _logits(target: Target) -> list[Tensor]:
    """Return the logits of passes over the probe trees, each run twice: the second time over the rows of the first.

    Token ids come from the middle of the vocabulary, since the first ones are special and rarely trained.
    """
    target.drop_cache()
    cache = target.request_cache(PROBE_PROMPT + 8)
    token_ids = (torch.arange(PROBE_PROMPT, device=target.device) + target.vocab_size // 2) % target.vocab_size
    target.prefill(token_ids[None], cache)
    logits: list[Tensor] = []
    for parents in (*PROBE_TREES, *PROBE_TREES):
        tokens = token_ids[: len(parents)] if len(logits) < len(PROBE_TREES) else token_ids[-len(parents) :]
        logits.append(target.forward_tree(DraftTree.from_parents(tokens, parents), cache).logits.clone())
        cache.commit(1)
    return logits
