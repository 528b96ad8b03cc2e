"""Settings that a drafter's folder advises, by device class, for options that the user does not state."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from specbench_ss.errors import UserError, did_you_mean
from specbench_ss.options import option_values, parse_options, value_text

KEY = "advice"  # in config.json of a drafter's folder
DEVICES = ("cpu", "cuda")  # classes that settings may be advised for: types of torch's devices
ANY = ""  # settings for all devices
O = TypeVar("O")  # noqa: E741


@dataclass(frozen=True, slots=True)
class Advice:
    """Advised values of options: by_device[device class or ANY][option]."""

    by_device: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def on(self, device: str) -> dict[str, Any]:
        """Return the settings for a device class: those for all devices, replaced key by key by its own."""
        return {**self.by_device.get(ANY, {}), **self.by_device.get(device, {})}

    def settle(self, options: O, device: str, without: Collection[str] = ()) -> tuple[O, dict[str, Any]]:
        """Return the options with advised values in place of defaults, and the values that were taken.

        The default of an option that can be advised means "as advised"; any other value was stated, and stays.
        without: options that are left alone.
        """
        defaults = {f.name: f.default for f in fields(options)}  # type: ignore[arg-type]
        own = option_values(options)
        taken = {
            name: value
            for name, value in self.on(device).items()
            if name not in without and own[name] == defaults[name] != value
        }
        return replace(options, **taken), taken  # type: ignore[type-var]


def read_advice(
    given: Any, options: type[Any], keys: Collection[str], owner: str, file: Path | str, others: Collection[str] = ()
) -> Advice:
    """Return what a drafter's folder advises for a method. Raises UserError, naming the file, for anything else.

    given: options with their values, and device classes with such a mapping each; None is no advice. keys: options of
    the method that may be advised; their default means that they are not stated. others: options of other methods that
    use the same folder, which are not read here.
    """
    if given is None:
        return Advice()
    if not isinstance(given, Mapping):
        raise UserError(f"{owner}: {file}: {KEY} must be a mapping, not {given!r}")
    by_device = {name: part for name, part in given.items() if isinstance(part, Mapping)}
    by_device[ANY] = {name: value for name, value in given.items() if name not in by_device}
    found = {}
    for device, part in by_device.items():
        place = f"{owner}: {file}: {KEY}{f' for {device}' if device else ''}"
        if device and device not in DEVICES:
            raise UserError(f"{place}: no such device class{did_you_mean(device, DEVICES)}; {', '.join(DEVICES)}")
        found[device] = _values(place, part, options, keys, others)
    return Advice(found)


def _values(
    place: str, part: Mapping[str, Any], options: type[Any], keys: Collection[str], others: Collection[str]
) -> dict[str, Any]:
    """Return advised values as the options' types have them."""
    for name in part:
        if name not in keys and name not in others:
            known = sorted({*keys, *others})
            listed = f"options: {', '.join(known)}" if known else "it takes none"
            raise UserError(f"{place}: no option {name!r}{did_you_mean(name, known)}; {listed}")
    own = {name: value_text(value) for name, value in part.items() if name in keys}
    try:
        parsed = parse_options(options, own, "")
    except UserError as error:
        raise UserError(f"{place}: {str(error).removeprefix(': ')}") from None
    return {name: getattr(parsed, name) for name in own}


def advice_text(label: str, taken: Mapping[str, Any], device: str) -> str:
    """Return the line that a run begins with: which settings a method has by its drafter's advice."""
    settings = ", ".join(f"{name}={value_text(value)}" for name, value in taken.items())
    return f"{label}: {settings} from its drafter's advice for {device}"
