"""The repository's vocabulary: words and openings that its prose and its identifiers do not use (docs/glossary.md)."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
WORDS = """
told tell tells telling said says say saying hear hears heard know knows untold anew beside besides deserve deserves
disturbed void held lean sameness overshoot unreplayed unjudged remade law laws whoever
"""
PHRASES = (
    "in vain", "in words", "made again", "gone on with", "plain decoding", "operator by operator", "cannot be told",
    "not distinguishable", "near-tie", "taken apart",
)  # fmt: skip
OPENINGS = ("What", "Which", "Whether", "How", "Where", "When", "That", "Whoever")
BANNED = re.compile(
    rf"(?<![a-z])(?<!file\.)(?:{'|'.join(map(re.escape, (*WORDS.split(), *PHRASES)))})(?![a-z])", re.IGNORECASE
)
QUOTED = ("lab", "tests")  # folders whose string literals are text for models, or expected output


def python_files() -> list[Path]:
    folders = ("specbench_ss", "methods", "suites", "reports", "benchmarks", "lab", "tests")
    found = {path.resolve() for name in folders for path in (ROOT / name).rglob("*.py")}
    return sorted(found - {Path(__file__).resolve()})


def documents() -> list[Path]:
    folders = (ROOT / name for name in ("docs", "benchmarks", "lab", "specbench_ss"))
    return sorted([*ROOT.glob("*.md"), *(path for folder in folders for path in folder.rglob("*.md"))])


def parts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and text of each identifier, comment and string of a file."""
    literal, text = path.relative_to(ROOT).parts[0] not in QUOTED, path.read_text(encoding="utf-8")
    if not BANNED.search(text):
        return
    before = ""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        documented = token.type == tokenize.STRING and token.string.lstrip("rRfFbB").startswith('"""')
        of_a_file = before == "." and token.string == "tell"  # io.IOBase.tell
        if (
            documented
            or token.type == tokenize.COMMENT
            or (token.type == tokenize.NAME and not of_a_file)
            or token.type == tokenize.STRING
            and literal
        ):
            yield token.start[0], token.string
        before = token.string


def problems(path: Path) -> list[str]:
    """Return where a file of code uses other words."""
    name, source = path.relative_to(ROOT), path.read_text(encoding="utf-8")
    found = [(line, f"{match.group()} in {text[:80]}") for line, text in parts(path) for match in BANNED.finditer(text)]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = (ast.get_docstring(node) or "-").split()[0]
            if first.startswith(OPENINGS):
                found.append((getattr(node, "lineno", 1), f"a docstring begins with {first}"))
    return [f"{name}:{line}: {text}" for line, text in found]


def test_code_uses_the_words_of_the_field() -> None:
    assert not [problem for path in python_files() for problem in problems(path)]


def test_documents_use_the_words_of_the_field() -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in documents()}
    assert not [f"{path}: {match.group()}" for path, text in texts.items() for match in BANNED.finditer(text)]
