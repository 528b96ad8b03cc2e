"""Find out what a row of an experiment lacks: a method, its weights, a published model, a device or a setting.

So a row runs as soon as its missing piece is there, without any change here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from specbench_ss import registry
from specbench_ss.errors import UserError
from specbench_ss.options import REFERENCE, MethodSpec
from specbench_ss.results.report import Part, Request
from specbench_ss.runs.config import RunConfig

METHODS = {  # the papers' names -> ours; a name that no plugin has yet is a missing piece
    "Baseline": REFERENCE,
    "2-Model SD": "sd",
    "Medusa": "medusa",
    "Medusa-2": "medusa2",
    "Hydra": "hydra",
    "Eagle": "eagle",
    "PLD": "pld",
    "REST": "rest",
    "SPACE": "space",
    "LookAhead": "lookahead",
    "SS-Lossless": "ss",
    "SS-Shared": "ss-shared",
}


def of_method(text: str, request: Request) -> str:
    """Say what NAME[option=value] lacks on the request's model; '' for nothing."""
    spec = MethodSpec.parse(text)
    if spec.name not in registry.names(registry.METHODS):
        return f"method {spec.name}"
    method = registry.method_class(spec.name)
    known = {f.name for f in fields(method.Options)}
    unknown = [name for name in spec.options if name not in known]
    if unknown:
        return f"option {unknown[0]} of method {spec.name}"
    given = "weights" in spec.options or any(s.startswith(f"{spec.name}.weights=") for s in request.settings)
    folder = getattr(method, "companion", spec.name)
    if "weights" in known and not given and not comes_along(request.model, folder):
        return f"weights of method {spec.name} for {request.model} (--set {spec.name}.weights=PATH)"
    return ""


def comes_along(model: str, name: str) -> bool:
    """Say whether a folder of this name came with the model: where methods look for their weights too."""
    from specbench_ss.models.resolve import companions

    folder = companions(model)
    return folder is not None and (folder / name).is_dir()


def of_model(name: str) -> str:
    """Say what a row on a published model lacks. It is never '', since the user has to name the model."""
    import torch

    from specbench_ss.reports.paper.paper_models import MODELS, at_hand

    hub = MODELS[name].hub
    if not at_hand(name):
        return f"the weights {hub}"
    return f"--model {hub} and its drafters by --set" if torch.cuda.is_available() else "a CUDA device"


def model_parts(names: Sequence[str], request: Request) -> list[Part]:
    """Return the rows on published models."""
    return [Part(name, of_model(name)) for name in names if not request.model.endswith(name)]


def training_text(request: Request) -> str:
    """Say what training on the request's model lacks: only the lab has text in its chat form."""
    from specbench_ss.models.resolve import is_lab

    return "" if is_lab(request.model) else f"training text for {request.model}: only the lab brings its own"


TREES = (  # what the papers draft: 4 streams with 3 candidates are 120 nodes, of which 32 are kept (ACL app. H)
    *(f"{name}.{option}" for name in ("ss", "ss-shared") for option in ("gamma=4", "k=3", "n_draft=0", "n_keep=32",
      "prune=on", "stream_attention_top_p=64")),
    *(f"{name}.tree=published" for name in ("medusa", "medusa2", "hydra", "eagle")),
)  # fmt: skip


def as_published(request: Request, methods: Sequence[str]) -> Request:
    """Return the request with the papers' trees of these methods, where it asks for them and says nothing else."""
    names = {MethodSpec.parse(text).name for text in methods}
    trees = tuple(text for text in TREES if text.partition(".")[0] in names)
    return replace(request, settings=(*trees, *request.settings)) if request.published else request


def papers_streams(request: Request, methods: Sequence[str]) -> tuple[str, ...]:
    """Return the setting by which `ss` has the papers' streams, where a model's folder may advise others.

    The lab's advises none. What the user gives with --set comes first.
    """
    from specbench_ss.models.resolve import is_lab

    drafts = any(MethodSpec.parse(text).name == "ss" for text in methods)
    given = any(text.startswith(("ss.parent=", "ss.root=", "ss.weights=")) for text in request.settings)
    if not drafts or given or is_lab(request.model) or not comes_along(request.model, "ss"):
        return ()
    return ("ss.parent=off",)


def told_trees(request: Request) -> list[str]:
    """Return the note that a table made so carries; nothing for the trees that came with the weights."""
    return ["ours: with the papers' draft trees"] if request.published else []


def config_for(request: Request, methods: Sequence[str], **settings: Any) -> RunConfig:
    """Return a run of these methods, the reference first, with the request's settings.

    Raises UserError for a bad --set.
    """
    from specbench_ss.bench.build_config import method_specs

    asked = ",".join([REFERENCE, *dict.fromkeys(m for m in methods if m != REFERENCE)])
    specs = method_specs(asked, (*papers_streams(request, methods), *request.settings))
    given = {name: getattr(request, name) for name in ("model", "device", "dtype", "seed", "data", "chat_template")}
    limit = settings.pop("limit", None) if request.limit is None else request.limit
    settings.pop("limit", None)
    return RunConfig(methods=specs, limit=limit, **given, **settings)


def nothing_runs(name: str, parts: Sequence[Part]) -> UserError:
    """Return an error with one line that says what each row of an experiment lacks."""
    lacking = "; ".join(dict.fromkeys(f"{p.name} needs {p.missing}" for p in parts if p.missing))
    return UserError(f"{name}: no row can run: {lacking}")
