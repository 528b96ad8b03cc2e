"""Drafters that others published on the Hugging Face hub, with the pages that name them: `published_drafters.yaml`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from specbench_ss.models.bundled import bundled_drafters
from specbench_ss.models.catalog import HUB
from specbench_ss.models.gguf import gguf_file
from specbench_ss.models.resolve import find_folder
from specbench_ss.options import MethodSpec
from specbench_ss.user_files import mapping

FILE = Path(__file__).with_suffix(".yaml")
WEIGHTS_OF = {"eagle2": "eagle"}  # methods that use the weights of another one


@dataclass(frozen=True, slots=True)
class PublishedDrafter:
    """A drafter of a target, both hub ids.

    method: its name here. layout: of its files, as in docs/models.md. page: where its id was read. licence: as a page
    states it, or ''.
    """

    target: str
    method: str
    drafter: str
    layout: str
    page: str
    licence: str = ""

    @property
    def note(self) -> str:
        """Return a sentence for the user of a method that takes this drafter."""
        return f"{self.method} has no bundled weights for {self.target}: using {self.drafter} ({self.page})"


@cache
def published_drafters() -> tuple[PublishedDrafter, ...]:
    """Return all known drafters by target and method, the preferred one of each method first."""
    content = mapping(FILE.read_bytes(), FILE)
    sources = content["sources"]
    return tuple(
        PublishedDrafter(target, method, drafter, **{"page": HUB + drafter, **sources[source]})
        for target, methods in content["drafters"].items()
        for method, drafters in methods.items()
        for drafter, source in drafters.items()
    )


def published_drafter(model: str, method: str) -> PublishedDrafter | None:
    """Return the preferred drafter of a method for a hub id, whose case does not matter; None if none is known."""
    wanted = (model.lower(), WEIGHTS_OF.get(method, method))
    return next((found for found in published_drafters() if (found.target.lower(), found.method) == wanted), None)


def with_published_drafter(spec: MethodSpec, model: str) -> tuple[MethodSpec, str]:
    """Give a method without weights the published ones of its model; return it, and a note, '' if it stays as it is."""
    found = _drafter_to_fetch(spec, model)
    if found is None:
        return spec, ""
    others = {name: value for name, value in spec.options.items() if name != "weights"}
    return replace(spec, options={"weights": found.drafter, **others}), found.note


def _drafter_to_fetch(spec: MethodSpec, model: str) -> PublishedDrafter | None:
    """Return the published drafter for a method that has no weights, neither given nor bundled.

    None for a model that did not come from the hub: then nothing is downloaded unless the user names it.
    """
    found = None if spec.options.get("weights") else published_drafter(model, spec.name)
    if found is None or find_folder(model) is not None or gguf_file(model) is not None:
        return None
    bundled = bundled_drafters(model)
    return None if bundled is not None and (bundled / spec.name).is_dir() else found
