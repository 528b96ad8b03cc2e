"""The pages name only what exists: commands of ssbench with their options, methods with theirs, targets of links."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest

from lab.results import FOLDER, rewrite
from specbench_ss import registry
from specbench_ss.cli import commands
from specbench_ss.errors import UserError
from specbench_ss.options import MethodSpec, split_methods

ROOT = Path(__file__).parents[1]
HISTORY = {"log.md", "archive.md"}  # commands of former versions
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```|^(?: {4}|\t).*?$", re.MULTILINE | re.DOTALL)
ENDS = ("|", "&&", ";", ">", "2>", "&")  # after these words another command or a file follows
FREE = ("all", "my-", "METHOD", "X")  # beginnings of methods that an example leaves to the reader


def pages() -> list[Path]:
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "specbench_ss").rglob("README.md")]
    return sorted(page for page in found if page.name not in HISTORY)


def each(pages: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("page", pages, ids=lambda page: str(page.relative_to(ROOT)))


def shown_commands(page: Path) -> Iterator[list[str]]:
    """Yield the words after `ssbench` of each command in a block of code."""
    text = page.read_text(encoding="utf-8")
    code = "\n".join(block.group() for block in CODE.finditer(text)).replace("\\\n", " ")
    for line in code.splitlines():
        if not re.match(r"\s*(?:[A-Z_]+=\S+ )*ssbench ", line) or "..." in line or "…" in line:
            continue
        words = shlex.split(line, comments=True)
        words = words[words.index("ssbench") + 1 :]
        yield words[: next((i for i, word in enumerate(words) if word in ENDS), len(words))]


def parse(words: list[str]) -> dict[str, object]:
    """Return the options of a command as text. Raise a click error for a command or option that does not exist."""
    command, rest = commands._ssbench(), words
    context = command.make_context("ssbench", ["methods"], resilient_parsing=True)
    while hasattr(command, "commands") or hasattr(command, "list_commands"):
        if not rest or rest[0].startswith("-"):
            return {}
        _, command, rest = command.resolve_command(context, rest)
        context = type(context)(command, parent=context, info_name=rest[0] if rest else "")
    values, _, _ = command.make_parser(context).parse_args(list(rest))
    return dict(values)


def check_methods(text: str) -> None:
    """Raise an error for a method that is not registered, or without the option that the text gives it."""
    for spec in split_methods(text):
        if not spec.startswith(FREE):
            read = MethodSpec.parse(spec)
            options = registry.method_class(read.name).Options
            assert set(read.options) <= {field.name for field in fields(options)}, spec


@each([page for page in pages() if "ssbench " in page.read_text(encoding="utf-8")])
def test_commands_exist_with_their_options(page: Path) -> None:
    for words in shown_commands(page):
        options = parse(words)
        if isinstance(methods := options.get("methods"), str):
            check_methods(methods)


@each(pages())
def test_links_have_a_target(page: Path) -> None:
    lost = list[str]()
    for link in LINK.findall(CODE.sub("", page.read_text(encoding="utf-8"))):
        place, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", place):
            continue
        target = (page.parent / place).resolve() if place else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            lost.append(link)
    assert not lost


@cache
def anchors(page: Path) -> frozenset[str]:
    """Return the anchors of a page's headings, as hosting sites make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    found, names = dict[str, int](), set[str]()
    for heading in re.findall(r"^#+ (.+?)\s*$", text, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        name = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        count = found[name] = found.get(name, -1) + 1
        names.add(f"{name}-{count}" if count else name)
    return frozenset(names)


def test_an_option_that_does_not_exist_is_found() -> None:
    assert len(list(shown_commands(ROOT / "README.md"))) > 15
    with pytest.raises(Exception, match="--no-such"):
        parse(["run", "--no-such", "1"])
    with pytest.raises(AssertionError):
        check_methods("ss[no_such=1]")


def test_tables_of_results_have_the_values_of_their_files() -> None:
    """Otherwise run `python -m lab results`."""
    assert not rewrite(FOLDER, check=True)


def test_a_table_with_another_value_is_found_and_written_again(tmp_path: Path) -> None:
    name, source = "gpu.md", "gpu-roofline.jsonl.gz"
    text = (FOLDER / name).read_text(encoding="utf-8").partition("gpu-qwen0.5b.csv.bz2 -->")
    page, rest = tmp_path / name, text[2]
    shutil.copy(FOLDER / source, tmp_path)
    page.write_text(rest.replace("|1.36|1.11|", "|1.35|1.11|"), encoding="utf-8")
    assert rewrite(tmp_path, check=True) == [page]
    assert page.read_text(encoding="utf-8") != rest
    rewrite(tmp_path, check=False)
    assert page.read_text(encoding="utf-8") == rest


@pytest.mark.parametrize(
    ("row", "source", "keyword"),
    [
        ("|`medusa`|1|", "no-such.csv", "not there"),
        ("|`no-such`|1|", "all-methods.csv", "no values"),
        ("|`sd`|1|2|", "all-methods.csv", "no values"),
    ],
)
def test_a_table_without_values_is_refused(tmp_path: Path, row: str, source: str, keyword: str) -> None:
    shutil.copy(FOLDER / "all-methods.csv", tmp_path)
    (tmp_path / "page.md").write_text(f"<!-- values: {source} -->\n\n|method|τ|\n|---|---|\n{row}\n", encoding="utf-8")
    with pytest.raises(UserError, match=keyword):
        rewrite(tmp_path, check=True)
