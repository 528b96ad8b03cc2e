"""Options of all methods that draft a fixed tree by heads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

LOSSY = "exact; or, at T>0 and lossy: typical (Medusa sec. 2.3.1)"


@dataclass(frozen=True, slots=True)
class HeadsOptions:
    """Which heads, which tree, what is accepted."""

    weights: str = field(default="", metadata={"help": "folder or file with the heads; empty = those of the model"})
    tree: str = field(
        default="auto",
        metadata={
            "help": "auto (from the heads' measured accuracies, else published), published, or a JSON file: a tree, "
            "or accuracies measured by `ssbench train NAME --measure`"
        },
    )
    nodes: int = field(default=0, metadata={"help": "drafted nodes of the auto tree; 0 = as the heads' config says"})
    heads: int = field(default=0, metadata={"help": "use only this many heads; 0 = all"})
    accept: Literal["exact", "typical"] = field(default="exact", metadata={"help": LOSSY})
    epsilon: float = field(default=0.09, metadata={"help": "of typical: accepted where p(x) > min(epsilon, ..)"})
    alpha: float = field(default=0.3, metadata={"help": "of typical: .., alpha exp(-H(p)))"})
