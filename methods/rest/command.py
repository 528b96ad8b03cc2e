"""`ssbench datastore`: datastores for the method `rest`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specbench_ss.errors import UserError

if TYPE_CHECKING:
    from specbench_ss.engine.architectures import ModelInfo
    from specbench_ss.methods.rest.datastore import Documents

app = typer.Typer(
    help="Build or inspect a datastore, from which the method rest retrieves drafts.", no_args_is_help=True
)


@app.callback()
def _group() -> None:
    pass


@app.command()
def build(
    out: Annotated[Path, typer.Option("--out", help="Folder to write the datastore to.", file_okay=False)],
    model: Annotated[
        str, typer.Option("--model", help="Model whose tokenizer is used: lab, a folder or a hub id.")
    ] = "lab",
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            metavar="FILE|DIR|ID",
            help="Plain text (.txt), or conversations in the formats of `ssbench train`. Repeatable.",
        ),
    ] = None,
    lab: Annotated[
        int,
        typer.Option(
            "--lab", min=0, metavar="N", help="Add this many training conversations from the lab's generators."
        ),
    ] = 0,
    regenerate_responses: Annotated[
        bool,
        typer.Option(
            "--regenerate-responses",
            help="Use only the model's own greedy answers to the questions of --data. They are generated once and "
            "cached, as for `ssbench train --regenerate-responses`.",
        ),
    ] = False,
    answer_limit: Annotated[
        int, typer.Option("--answer-limit", min=1, help="With --regenerate-responses: maximum answer length in tokens.")
    ] = 256,
    length: Annotated[
        int,
        typer.Option(
            "--length", min=2, help="With --regenerate-responses: maximum tokens of a question and its answer."
        ),
    ] = 512,
    draft: Annotated[
        int,
        typer.Option("--draft", min=0, help="Number of draft nodes that the datastore advises to rest. 0: no advice."),
    ] = 0,
    chat_template: Annotated[
        str | None,
        typer.Option(
            "--chat-template",
            metavar="NAME|FILE",
            help="Chat template to use instead of the tokenizer's own: plain, vicuna, llama-2, or a Jinja file.",
        ),
    ] = None,
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code",
            help="Run Python code bundled with the model. Only for models whose authors you trust.",
        ),
    ] = False,
) -> None:
    """Tokenize text and sort its suffixes. The same text gives the same files, byte for byte."""
    from specbench_ss.methods.rest.datastore import build as write
    from specbench_ss.storage import locked

    _check_sources(out, data, lab, regenerate_responses)
    names = [*(Path(name).name for name in data or ()), *([f"{lab} conversations of the lab"] if lab else [])]
    made_of, loading = ", ".join(names), {"trust_remote_code": trust_remote_code, "chat_template": chat_template}
    with locked(out):
        if regenerate_responses:
            made_of = f"own answers to {made_of}"
            base, documents = _own_answers(model, data or (), answer_limit, length, loading)
        else:
            base, documents = _texts(model, data or (), lab, loading)
        header = write(documents, base, made_of, out, draft=draft)
    size = sum(file.stat().st_size for file in out.iterdir()) / 1e6
    print(f"written: {out}: {header['tokens']:,} tokens of {header['documents']:,} documents, {size:.1f} MB")
    print(f"use it: ssbench run --model {model} --methods rest --set rest.datastore={out}")


def _check_sources(out: Path, data: Sequence[str] | None, lab: int, regenerate_responses: bool) -> None:
    """Raise UserError if there is no text, the sources exclude each other, or the folder cannot be used."""
    from specbench_ss.runs.run_dir import check_place

    if not data and not lab:
        raise UserError("datastore: no text given; use --data FILE or --lab N")
    if regenerate_responses and (lab or not data):
        raise UserError("datastore: --regenerate-responses requires --data and does not support --lab")
    if out.exists() and any(out.iterdir()):
        raise UserError(f"datastore: --out {out} is not empty; give another folder")
    check_place(out)


def _own_answers(
    model: str, data: Sequence[str], answer_limit: int, length: int, loading: Mapping[str, Any]
) -> tuple[ModelInfo, Documents]:
    """Return the loaded model, and its own answers to the questions of the data."""
    from specbench_ss.methods.rest import text
    from specbench_ss.models.devices import resolve_device, resolve_dtype
    from specbench_ss.models.load import load_target

    dtype = str(resolve_dtype("auto", resolve_device("auto"))).removeprefix("torch.")  # as in `ssbench train`
    base = load_target(model, dtype=dtype, **loading)
    return base, text.regenerate_responses(base, data, answer_limit, length)


def _texts(model: str, data: Sequence[str], lab: int, loading: Mapping[str, Any]) -> tuple[ModelInfo, Documents]:
    """Return the model without its weights, and the documents of the data and the lab."""
    from specbench_ss.methods.rest import text
    from specbench_ss.models.load import load_model_info

    base = load_model_info(model, **loading)
    texts = chain(text.file_texts(base.tokenizer, data), text.lab_texts(base.tokenizer, lab))
    return base, text.documents(base.tokenizer, texts)


@app.command()
def info(
    datastore: Annotated[
        Path, typer.Argument(help="Folder of a datastore, or an .idx file as published by the authors of REST.")
    ],
    model: Annotated[str | None, typer.Option("--model", help="Also check that the datastore fits this model.")] = None,
) -> None:
    """Show the contents of a datastore."""
    from specbench_ss.methods.rest.datastore import open_datastore
    from specbench_ss.models.load import load_model_info

    store = open_datastore(datastore)
    if model is not None:
        store.check_fits(load_model_info(model), datastore)
    bits = {8 * chunk.tokens.dtype.itemsize for chunk in store.chunks}
    for name, value in store.about.items():
        print(f"{name.replace('_', ' '):<10} {f'{value:,}' if isinstance(value, int) else value}")
    print(f"{'chunks':<10} {len(store.chunks)}, ids of {', '.join(map(str, sorted(bits)))} bits")
    if model is not None:
        print(f"{'model':<10} fits {model}")
