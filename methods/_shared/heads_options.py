"""Options of all methods that draft a fixed tree by heads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Gt

from specbench_ss.options import Bounded


@dataclass(frozen=True, slots=True)
class HeadsOptions(Bounded):
    """Which heads draft, on which tree, and which drafted tokens are accepted."""

    weights: str = field(
        default="", metadata={"help": "Folder or file with the heads. Empty: those that came with the model."}
    )
    tree: str = field(
        default="auto",
        metadata={
            "help": "Draft tree. auto: built from the measured accuracies that came with the heads, else the "
            "published one. published: that one. Else a JSON file with a tree, or with accuracies from "
            "`ssbench train NAME --measure`."
        },
    )
    nodes: int = field(
        default=0, metadata={"help": "How many nodes an auto tree has. 0: as the heads' folder advises."}
    )
    heads: int = field(
        default=-1,
        metadata={
            "help": "How many of the heads are used, the first ones. 0: all. -1: as the heads' folder advises, "
            "else all."
        },
    )
    accept: Literal["exact", "typical", "nucleus"] = field(
        default="exact",
        metadata={
            "help": "Rule by which drafted tokens are accepted where tokens are sampled. typical (Medusa sec. 2.3.1) "
            "and nucleus (every path is judged by itself) are lossy."
        },
    )
    epsilon: Annotated[float, Gt(0)] = field(
        default=0.09,
        metadata={
            "help": "With accept=typical: a drafted token of probability p is accepted where p is above the smaller of "
            "epsilon and alpha * exp(-H), H the entropy of the model's distribution."
        },
    )
    alpha: Annotated[float, Gt(0)] = field(
        default=0.3, metadata={"help": "With accept=typical: the factor before exp(-H); see epsilon."}
    )
