"""The rule of references: a method is compared with an autoregressive method of the same model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specbench_ss.decoding.decoder import Decoder
from specbench_ss.errors import UserError
from specbench_ss.method_spec import REFERENCE, MethodSpec


def check_reference(method: type[Decoder], reference: type[Decoder]) -> None:
    """Raise UserError if a method may not be compared with the one that its `reference_for` names.

    The autoregressive baseline is a reference of every method. Any other reference must be autoregressive: it keeps one
    token a step, which the loop enforces (`loop.Session`). It is compared with the baseline alone, so that no method is
    compared with itself.
    """
    if reference.name == REFERENCE:
        return
    named = f"method {method.name!r}: reference_for names {reference.name!r}"
    if method.autoregressive:
        raise UserError(f"{named}; the reference of an autoregressive method is {REFERENCE!r}: leave reference_for out")
    if not reference.autoregressive:
        raise UserError(
            f"{named}, which is not autoregressive; name {REFERENCE!r} or autoregressive decoding of its model"
        )


def reference_spec(method: type[Decoder] | Decoder, options: Any) -> MethodSpec:
    """Return what `reference_for` gives. Raises UserError for anything but a MethodSpec."""
    found = method.reference_for(options)
    if not isinstance(found, MethodSpec):
        raise UserError(f"method {method.name!r}: reference_for returns {found!r}; return MethodSpec(name)")
    return found


def references(decoders: Mapping[str, Decoder]) -> dict[str, str]:
    """Return the label of every method's reference, by label.

    Raises UserError where a reference is not among the methods, or is one that `check_reference` refuses.
    """
    found = {label: reference_spec(decoder, decoder.options).label for label, decoder in decoders.items()}
    for label in (REFERENCE, *found.values()):
        if label not in decoders:
            raise UserError(f"the reference method {label!r} must be among the methods")
    for label, reference in found.items():
        if reference != REFERENCE:
            check_reference(type(decoders[label]), type(decoders[reference]))
    return found
