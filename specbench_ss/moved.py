"""Modules that plugins of before import by a name that is no longer theirs: found, with a DeprecationWarning.

Only names that the project's own documents and template told authors to import. Light: the new module is imported when
the old name is.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

HERE = "specbench_ss."
MOVED = {  # old name -> where its names are now, the module that has most of them first
    "decoder": "decoding.decoder",
    "tree": "decoding.tree",
    "verify": "decoding.verify",
    "target": "decoding.target",
    "cache": "decoding.cache",
    "outline": "decoding.outline",
    "sampling": "decoding.sampling",
    "generate": "decoding.loop",
    "records": "decoding.generation",
    "suite": "runs.suite",
    "config": "runs.config method_spec",
    "report": "results.report",
    "trainer": "training.trainer",
    "methods.checkpoint": "models.drafter_folder",
    "methods.resumable": "training.resumable",
    "methods.together": "training.side_by_side",
    "methods.training": "training.trainee training.batches training.losses",
    "methods.train": "",  # a package, for the sake of the next one
    "methods.train.drafter": "training.drafter_trainer",
}


class MovedModules(MetaPathFinder, Loader):
    """Finds what nothing else has found under an old name: a module that holds the names of the new ones."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The old module, or None where the name is none of ours."""
        old = fullname.removeprefix(HERE)
        if old == fullname or old not in MOVED:
            return None
        return ModuleSpec(fullname, self, is_package=not MOVED[old])

    def exec_module(self, module: ModuleType) -> None:
        """Give it the names, and say where they are now."""
        new = [HERE + name for name in MOVED[module.__name__.removeprefix(HERE)].split()]
        if new:
            warn(module.__name__, " and ".join(new))
        for name in reversed(new):
            names = vars(import_module(name))
            vars(module).update({key: value for key, value in names.items() if not key.startswith("__")})


def warn(old: str, new: str) -> None:
    """Say to whoever imports an old name where it is now; the frames of the import itself are not counted."""
    warnings.warn(f"{old} has moved to {new}; what plugins need is in {HERE[:-1]} itself", DeprecationWarning, 3)


def install() -> None:
    """Look for old names after everything else has been looked through, once however often this is called."""
    if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
        sys.meta_path.append(MovedModules())
