"""What speedups might be on another model or machine: a prediction from the measured parts and the counted shapes.

A step takes what reading or multiplying needs at the machine's limits, whichever is longer, and an overhead that the
shapes do not explain (starting operators, above all), which is what was measured beyond that. What verifying several
rows adds to a step beyond that is taken for products that are slower than the limit: it grows with the rows and with
the model's size, and shrinks with faster products. docs/results has how far predictions are off.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from specbench_ss.method_spec import REFERENCE
from specbench_ss.results.roofline import Roof, roof_of
from specbench_ss.results.work import Pair, Work, pairs
from specbench_ss.runs.rows import Run


@dataclass(frozen=True, slots=True)
class Parts:
    """One method's step. depth, nodes: drafted tokens one behind the other, and verified drafted nodes, a step.

    read_s, product_s: seconds that counted bytes and operations take at the limits. overhead_s: measured time beyond
    the longer of the two. rows_s: the part of it by which verifying takes longer than the reference's pass of one row,
    beyond what counted operations explain. fixed_s: of product_s, what does not grow with the nodes: the drafter's, and
    rows that each step has.
    """

    method: str
    tau: float
    depth: float
    nodes: float
    read_s: float
    product_s: float
    overhead_s: float
    rows_s: float = 0.0
    fixed_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Sides:
    """A method's step and that of the reference, over the samples that both answered."""

    own: Parts
    plain: Parts


@dataclass(frozen=True, slots=True)
class Change:
    """Factors on what was measured; 1 leaves it as it is.

    size: of the model, and of drafters with it. bandwidth, products: of the machine. launch: of the overhead without
    `rows_s`.
    acceptance: of accepted drafted tokens a step. nodes: of verified nodes, acceptance unchanged.
    """

    size: float = 1.0
    bandwidth: float = 1.0
    products: float = 1.0
    launch: float = 1.0
    acceptance: float = 1.0
    nodes: float = 1.0


def parts(run: Run, worked: Sequence[Pair] | None = None) -> list[Sides]:
    """Return both sides of every method that can be predicted; none where the machine's limits are not known.

    worked: what `work.pairs` gives, where that is known.
    """
    roof = roof_of(run)
    if roof is None:
        return []
    both = [
        (pair, _parts(pair.own, roof), _parts(pair.plain, roof)) for pair in (pairs(run) if worked is None else worked)
    ]
    return [Sides(_widened(own, roof, pair), plain) for pair, own, plain in both if own and plain]


def _parts(work: Work, roof: Roof) -> Parts | None:
    own, cost = work.tally, work.cost
    if not cost or not cost.flops or not cost.bytes or not own.tau or not own.step_s:
        return None
    read, product = cost.bytes / cost.steps / roof.read, cost.flops / cost.steps / roof.products
    depth = own.sums["depth"] / own.steps
    fixed = (cost.drafter_flops + cost.fixed_flops) / cost.steps / roof.products
    beyond = own.step_s - max(read, product)
    return Parts(work.method, own.tau, depth, work.nodes, read, product, beyond, fixed_s=fixed)


def _widened(own: Parts, roof: Roof, pair: Pair) -> Parts:
    """Return the method's parts with what its rows add to the overhead of verifying, drafting left aside."""
    verify, verify_plain = (work.tally.sums["verify_s"] / work.tally.steps for work in (pair.own, pair.plain))
    counted = _verifying_s(pair.own, roof) - _verifying_s(pair.plain, roof)
    added = verify - verify_plain - max(0.0, counted)
    return replace(own, rows_s=min(max(0.0, added), max(0.0, own.overhead_s)))


def _verifying_s(work: Work, roof: Roof) -> float:
    """Return the seconds that the model's part of a step takes at the limits, without the drafter's."""
    cost = work.cost
    assert cost is not None
    moved, flops = cost.bytes - (cost.drafter_bytes or 0.0), cost.flops - cost.drafter_flops
    return max(moved / roof.read, flops / roof.products) / cost.steps


def step_s(one: Parts, change: Change) -> float:
    """Return the predicted seconds of a step."""
    wider = (1 + change.nodes * one.nodes) / (1 + one.nodes)
    read = one.read_s * change.size / change.bandwidth
    products = change.size / change.products
    launched = (one.overhead_s - one.rows_s) * change.launch
    computed = (one.fixed_s + (one.product_s - one.fixed_s) * wider) * products
    return max(read, computed) + launched + one.rows_s * change.nodes * products


def speedup(one: Parts, plain: Parts, change: Change) -> float:
    """Return the predicted speedup of decoding over plain decoding."""
    kept = min((one.tau - 1) * change.acceptance, max(one.depth, one.tau - 1))  # no more than is drafted
    return (1 + kept) * step_s(plain, change) / step_s(one, change)


def breaks_even(one: Parts, plain: Parts, change: Change) -> float | None:
    """Return the factor of acceptance below which the method does not pay; None for one that keeps no draft.

    It is infinite where not even accepting all that is drafted would pay.
    """
    if one.tau <= 1:
        return None
    needed = step_s(one, change) / step_s(plain, change) - 1  # accepted tokens a step
    return math.inf if needed > max(one.depth, one.tau - 1) else max(0.0, needed / (one.tau - 1))


def predictions(found: Iterable[Sides], change: Change) -> Mapping[str, float]:
    """Return the predicted speedup of every method but the reference."""
    return {
        sides.own.method: speedup(sides.own, sides.plain, change) for sides in found if sides.own.method != REFERENCE
    }
