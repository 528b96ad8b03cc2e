"""`ssbench train together`: several drafters side by side, on the same answers, batches and states of the base.

What they learn from is then equal to the token, and the base runs once a batch for all of them.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from specbench_ss import registry
from specbench_ss.errors import UserError
from specbench_ss.options import Bounded, MethodSpec, parse_options, split_methods
from specbench_ss.storage import write_json
from specbench_ss.training.drafter_recipe import DrafterRecipe
from specbench_ss.training.trainer import TrainConfig, Trainer

if TYPE_CHECKING:
    from specbench_ss.training.session import Order

LISTED = "together.json"  # which drafter lies in which folder
LR = "lr"  # an option that every drafter has here


@dataclass(frozen=True, slots=True)
class TogetherOptions(Bounded):
    """Options of `ssbench train together`."""

    owner: ClassVar[str] = "together"
    drafters: str = field(
        default="",
        metadata={
            "help": "Drafters to train, separated by commas, each with options of its own and lr, its peak learning "
            "rate, if you like: A[lr=0.01],B. Each gets a folder in --out."
        },
    )


class Together(Trainer):
    """Any number of drafters that are trained by the common loop."""

    name = "together"
    summary = "several drafters side by side: the same answers, batches and budget, and the base computed once for all"
    Options = TogetherOptions

    def train(self, config: TrainConfig) -> None:
        """Train them all, and write a folder for each and the list of them. Raises UserError."""
        from specbench_ss.training import session

        orders = self.orders(config)
        if config.push_to_hub:
            raise UserError("together: a repository holds one drafter; publish each folder by itself")
        about = session.about_training(self, config)
        session.train(orders, config, about)
        listed = {order.label: order.folder.name for order in orders}
        write_json(config.out / LISTED, listed)

    def orders(self, config: TrainConfig) -> list[Order]:
        """Return what is to be trained. Raises UserError for what is no drafter of the common loop."""
        specs = [MethodSpec.parse(text) for text in split_methods(self.options.drafters)]
        if not specs:
            raise UserError("together: give --drafters, such as --drafters ss,medusa; `ssbench train` lists them all")
        found = [_order(spec, config) for spec in specs]
        for seen in ([order.label for order in found], [order.folder.name for order in found]):
            twice = [name for name, n in Counter(seen).items() if n > 1]
            if twice:
                raise UserError(f"together: {twice[0]} is named twice")
        return found


def _order(spec: MethodSpec, config: TrainConfig) -> Order:
    from specbench_ss.training.session import Order

    kind = registry.trainer_class(spec.name)
    if not issubclass(kind, DrafterRecipe):
        raise UserError(f"together: {spec.name} cannot be trained beside others")
    given = dict(spec.options)
    lr = given.pop(LR, None)
    recipe = kind(parse_options(kind.Options, given, f"together: {spec.name}"))
    folder = config.out / re.sub(r"[^A-Za-z0-9.]+", "-", spec.label).strip("-")
    return Order(recipe, folder, _rate(lr, spec) if lr else config.lr or recipe.lr, spec.label)


def _rate(text: str, spec: MethodSpec) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not 0 < rate < math.inf:
        raise UserError(f"{spec.label}: lr must be a number above 0, not {text!r}")
    return rate
