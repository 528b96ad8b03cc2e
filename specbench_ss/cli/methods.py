"""Commands `ssbench methods` and `ssbench new-method`."""

from __future__ import annotations

import re
from keyword import iskeyword
from pathlib import Path
from typing import Annotated, Any

import typer
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from specbench_ss import registry
from specbench_ss.bench.build_config import listed
from specbench_ss.cli.shared import Plugin
from specbench_ss.engine.decoder import Decoder
from specbench_ss.errors import UserError, os_errors
from specbench_ss.options import METHOD_ALIASES, REFERENCE, describe_options, registered_name


def command(
    names: Annotated[
        str | None, typer.Argument(metavar="METHODS", help="Show only these methods, separated by commas.")
    ] = None,
    plugin: Plugin = None,
) -> None:
    """List the decoding methods and their options."""
    registry.load_plugins(plugin or ())
    chosen = [registered_name(name) for name in listed(names)]
    methods = {name: registry.method_class(name) for name in chosen} or registry.load_all(registry.METHODS)
    for name, method in methods.items():
        output, others = promise(method, method.Options()), [a for a, of in METHOD_ALIASES.items() if of == name]
        print(f"{name:<10} {method.summary} [{output}]{f' ({method.paper})' if method.paper else ''}")
        if others:
            print(f"{'':<12}also: {', '.join(others)}")
        options = describe_options(method.Options)
        if method.node_options and all(option.name != "nodes" for option in options):
            print(f"{'':<12}nodes=N: node budget, at most N drafted nodes per step; it sets {method.node_options[0]}")
        for option in options:
            print(f"{'':<12}{option.name}=<{option.type}>  {option.help} (default {option.default or 'empty'})")


def promise(method: type[Decoder], options: Any) -> str:
    """Return what a method guarantees about its output."""
    if not method.lossless:
        return "may change the output"
    reference = method.baseline_for(options).label
    return "same output as the model" if reference == REFERENCE else f"same output as {reference}"


TEMPLATES = Path(__file__).parents[1] / "templates" / "new_method"
NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
EXAMPLE = "copies what followed the last occurrence of the newest tokens"  # the template's method
TAKEN = ("Decoder", "Options", "DecodeState", "DraftTree", "UserError")  # class names that a method's file uses itself


def new_method(
    name: Annotated[
        str,
        typer.Argument(help="Name of the new method, as it is given to --methods: small letters, digits and hyphens."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder to write the package to; it must be empty or not exist.  [default: ssbench-NAME]",
            file_okay=False,
        ),
    ] = None,
) -> None:
    """Write a plugin package with a small decoding method, its test with the conformance kit, and a README."""
    folder = out or Path(f"ssbench-{name}")
    check_name(name)
    write_package(name, folder)
    print(f"{folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")
    print(f"as written it {EXAMPLE}: change `propose`, `summary` and the options")
    print(f"next: ssbench check --plugin {folder / module_name(name)}.py, or pip install -e {folder}")


def check_name(name: str) -> None:
    """Raise UserError for a name that no method can have, or that is taken."""
    if iskeyword(name):
        raise UserError(f"{name!r} is a Python keyword; give the method another name")
    if not NAME.fullmatch(name):
        raise UserError(
            f"{name!r} is no name of a method: use small letters, digits and single hyphens, a letter first"
        )
    if name in registry.names(registry.METHODS) or name in METHOD_ALIASES:
        raise UserError(f"there is a method {name!r} already; give another name")


def module_name(name: str) -> str:
    """Return the name of a method's module."""
    return f"ssbench_{name.replace('-', '_')}"


def check_empty(folder: Path) -> None:
    """Raise UserError for a folder with content, and for a file."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is not empty; give another folder with --out")


def write_package(name: str, folder: Path) -> None:
    """Fill in every template. Raise UserError if the folder is not empty or cannot be written."""
    module = module_name(name)
    camel = "".join(part.capitalize() for part in name.split("-"))
    kind = f"{camel}Method" if camel in TAKEN or iskeyword(camel) else camel
    values = {"name": name, "module": module, "kind": kind, "example": EXAMPLE}
    templates = Environment(
        loader=FileSystemLoader(TEMPLATES), undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False
    )
    with os_errors(f"cannot write {folder}"):
        check_empty(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for template in templates.list_templates():
            file = folder / template.removesuffix(".jinja").replace("module", module)
            file.write_text(templates.get_template(template).render(values), encoding="utf-8")
