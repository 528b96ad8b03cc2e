"""A folder's advice on the draft tree of methods whose option `tree` states one."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from specbench_ss.engine.architectures import Outline
from specbench_ss.models.checkpoint import KEY, read_advice


def with_advice(
    method: Any, options: Any, config: Mapping[str, Any], base: Outline, path: Path, others: Collection[str] = ()
) -> tuple[Any, dict[str, Any]]:
    """Return the options with the folder's advice in place of defaults, and what was taken.

    A tree that the user states is drafted as it is. Raises UserError for options that the folder may not advise.

    method: a class with `name`, `Options` and `advisable`. others: options of other methods that use the same folder.
    """
    file = path / "config.json" if path.is_dir() else path
    advice = read_advice(config.get(KEY), method.Options, method.advisable, method.name, file, others)
    if getattr(options, "tree", "auto") != "auto":
        return options, {}
    return advice.settle(options, base.device_type)
