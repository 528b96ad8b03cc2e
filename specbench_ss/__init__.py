"""specbench_ss: benchmark of speculative-decoding methods on your model, prompts and hardware.

The names below are the public API (docs/api.md), imported on first use, so that importing the package loads no torch.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

from specbench_ss.version import __version__

if TYPE_CHECKING:
    from specbench_ss.api import generate, load_method, load_model, run
    from specbench_ss.conformance.kit import check_decoder
    from specbench_ss.engine.decoder import Decoder, DecodeState, Generation, Step
    from specbench_ss.engine.target import Output, Target
    from specbench_ss.engine.tree import DraftTree
    from specbench_ss.engine.verify import VerifyResult
    from specbench_ss.errors import UserError
    from specbench_ss.results.analysis import Results, load_run
    from specbench_ss.results.compare import RunComparison, compare

__all__ = [
    "Decoder",
    "DraftTree",
    "Generation",
    "Output",
    "RunComparison",
    "Results",
    "DecodeState",
    "Step",
    "Target",
    "UserError",
    "VerifyResult",
    "__version__",
    "check_decoder",
    "compare",
    "generate",
    "load_method",
    "load_model",
    "load_run",
    "run",
]

_MODULES = {  # module -> its public names
    "api": "generate load_method load_model run",
    "conformance.kit": "check_decoder",
    "engine.decoder": "DecodeState Decoder Generation Step",
    "engine.target": "Output Target",
    "engine.tree": "DraftTree",
    "engine.verify": "VerifyResult",
    "errors": "UserError",
    "results.analysis": "Results load_run",
    "results.compare": "RunComparison compare",
}
_MODULE_OF = {name: f"{__name__}.{module}" for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULE_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


def _worth_logging(record: logging.LogRecord) -> bool:
    """Return False for irrelevant messages that torchao logs on import: kernels of other devices, its enums."""
    return not any(text in record.getMessage() for text in ("Failed to load", "is an Enum subclass"))


for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).addFilter(_worth_logging)
