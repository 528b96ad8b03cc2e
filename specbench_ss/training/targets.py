"""What a drafter learns at a drafted place: the base's distribution, or the text's own token. Any drafter can.

Papers differ in it: heads and streams are published with the token, Hydra and EAGLE's drafters with the distribution. A
comparison of drafters that hides it compares two things at once, so every trainer has it as an option.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any, Literal

Targets = Literal["distribution", "tokens"]
HELP = "What is learnt: the base's distribution at each drafted place, or the text's own token."


def targets_option(published: Targets, later: bool = True) -> Any:
    """Return the field of a trainer's options. published: what the drafter was published with, the default.

    later: whether the trainer was there before it had this option.
    """
    return field(default=published, metadata={"help": HELP, **({"later": True} if later else {})})


def told_targets(targets: Targets, published: Targets) -> dict[str, Any]:
    """Return what a trainee says of it: nothing where it is as published, as before there was a choice."""
    return {} if targets == published else {"targets": targets}
