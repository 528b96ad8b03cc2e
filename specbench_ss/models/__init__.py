"""Loading models and drafters, hashing weights, chat templates."""

from importlib import import_module
from typing import Any

from specbench_ss.moved import warn

_MOVED = {  # module -> names of the one file that `specbench_ss.models` was before
    "loading": "config_of load_model load_target outline_of",
    "model_folder": "LAB ModelInfo available check_model find_folder is_lab",
    "devices": "DTYPES resolve_device resolve_dtype",
    "weight_hash": "hash_tensors hash_weights",
}


def __getattr__(name: str) -> Any:
    """A name of before, from the module that has it now, with a DeprecationWarning that names that module."""
    for module, names in _MOVED.items():
        if name in names.split():
            home = f"{__name__}.{module}"
            warn(f"{__name__}.{name}", f"{home}.{name}")
            value = globals()[name] = getattr(import_module(home), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
