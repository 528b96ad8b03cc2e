"""Loading models and drafters, hashing weights, and chat templates."""

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
    """Return a name that this package used to hold, with a DeprecationWarning that names the module it has moved to."""
    for module, names in _MOVED.items():
        if name in names.split():
            home = f"{__name__}.{module}"
            warn(f"{__name__}.{name}", f"{home}.{name}")
            value = globals()[name] = getattr(import_module(home), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
