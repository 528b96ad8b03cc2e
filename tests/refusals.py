"""Inputs that the command line refuses, for test_refusals.py: built once a session, by the name of a function."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from specbench_ss.models.resolve import LAB
from tests.fabricated import fabricate

CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there"}]}
Builder = Callable[[Path], Path | None]
BUILDERS: dict[str, Builder] = {}


def build(name: str, folder: Path) -> Path:
    """Return what `{name}` stands for, built in `folder` unless it was before."""
    place = folder / name
    if place.exists() or place.is_symlink():
        return place
    family, _, damage = name.partition(":")
    if damage:
        return damaged(family, damage, place)
    return BUILDERS[name](place) or next(folder.glob(f"{name}*"))


def builder(function: Builder) -> Builder:
    BUILDERS[function.__name__] = function
    return function


def file_with(name: str, text: str, suffix: str = "") -> None:
    def write(path: Path) -> Path:
        path = path.with_name(name + suffix)
        path.write_text(text)
        return path

    BUILDERS[name] = write


file_with("a_file", "text\n")
file_with("not_gzip", "text\n", ".jsonl.gz")
file_with("not_gguf", "text of no model\n", ".gguf")
file_with("cut_gguf", "GGUF\x03\0\0\0\x09", ".gguf")
file_with("bad_template", "{% for %}", ".jinja")
file_with("empty_file", "", ".jsonl")
file_with("bad_lines", '{"prompt": \n', ".jsonl")
file_with("questions", '{"prompt": "Hi"}\n', ".jsonl")
file_with("bad_role", json.dumps({"messages": [{"role": "king", "content": "Hi"}]}) + "\n", ".jsonl")
file_with("no_columns", '{"a": 1}\n', ".jsonl")
file_with("chats", f"{json.dumps(CHAT)}\n" * 20, ".jsonl")


@builder
def a_device(path: Path) -> Path:
    path.symlink_to("/dev/zero")
    return path


@builder
def full_folder(path: Path) -> Path:
    path.mkdir()
    (path / "notes.md").write_text("mine")
    return path


# Run directories: one finished run, and copies with one thing changed.


@builder
def run(path: Path) -> Path:
    return fabricate(path, questions=1)


def changed_run(name: str, change: Callable[[Path], object]) -> None:
    def make(path: Path) -> Path:
        shutil.copytree(build("run", path.parent), path)
        change(path)
        return path

    BUILDERS[name] = make


def in_manifest(*keys: str, value: Any = None) -> Callable[[Path], object]:
    """Set what stands at `keys`, or remove it."""

    def change(path: Path) -> None:
        manifest = inner = json.loads((path / "manifest.json").read_text())
        for key in keys[:-1]:
            inner = inner[key]
        del inner[keys[-1]]
        if value is not None:
            inner[keys[-1]] = value
        (path / "manifest.json").write_text(json.dumps(manifest))

    return change


def written(name: str, text: str) -> Callable[[Path], object]:
    return lambda path: (path / name).write_text(text)


def first_line(name: str, text: str) -> Callable[[Path], object]:
    return lambda path: (path / name).write_text(text + "\n" + (path / name).read_text())


def first_question(path: Path) -> None:
    questions = json.loads((path / "questions.json").read_text())
    questions[0]["turns"] = 3
    (path / "questions.json").write_text(json.dumps(questions))


changed_run("run_no_rows", written("samples.jsonl", ""))
changed_run("run_bad_manifest", written("manifest.json", "{"))
changed_run("run_list_manifest", written("manifest.json", "[]"))
changed_run("run_old_format", in_manifest("format", value=1))
changed_run("run_no_model", in_manifest("model"))
changed_run("run_no_methods", in_manifest("methods"))
changed_run("run_no_created", in_manifest("created"))
changed_run("run_no_gpus", in_manifest("environment", "gpus"))
changed_run("run_other_model", in_manifest("model", "hash", value="f" * 64))
changed_run("run_other_sampling", in_manifest("config", "temperature", value=0.5))
changed_run("run_other_suite", in_manifest("suite", "name", value="apps"))
changed_run("run_other_length", in_manifest("suite", "max_new_tokens", value=7))
changed_run("run_bad_row", first_line("samples.jsonl", "{}"))
changed_run("run_bad_step", first_line("steps.jsonl", "{}"))
changed_run("run_bad_sameness", first_line("output_match.jsonl", "{}"))
changed_run("run_bad_questions", first_question)


@builder
def run_other_methods(path: Path) -> Path:
    return fabricate(path, questions=1, labels=("ar", "sd"))


@builder
def run_other_questions(path: Path) -> Path:
    return fabricate(path, questions=1, categories=("rag",))


# Model folders: the lab's base, with one thing changed. Their weights are never read further than the fault.


def changed_base(name: str, change: Callable[[Path], object]) -> None:
    def make(path: Path) -> Path:
        shutil.copytree(LAB / "base", path)
        change(path)
        return path

    BUILDERS[name] = make


def without(name: str) -> Callable[[Path], object]:
    return lambda path: (path / name).unlink()


def in_config(**values: Any) -> Callable[[Path], object]:
    def change(path: Path) -> None:
        (path / "config.json").write_text(json.dumps(json.loads((path / "config.json").read_text()) | values))

    return change


def cut_weights(path: Path) -> None:
    [file] = path.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def lacking_weights(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    save_file(dict(list(tensors.items())[1:]), path / "model.safetensors", {"format": "pt"})


class RunsCode:
    def __reduce__(self) -> Any:
        return print, ("code of the file",)


def pickled_weights(path: Path) -> None:
    (path / "model.safetensors").unlink()
    torch.save({"model.norm.weight": RunsCode()}, path / "pytorch_model.bin")


changed_base("base_no_weights", without("model.safetensors"))
changed_base("base_no_config", without("config.json"))
changed_base("base_bad_config", written("config.json", "{"))
changed_base("base_list_config", written("config.json", "[]"))
changed_base("base_no_tokenizer", without("tokenizer.json"))
changed_base("base_no_template", without("chat_template.jinja"))
changed_base("base_unknown_type", in_config(model_type="none"))
changed_base("base_cut", cut_weights)
changed_base("base_empty", written("model.safetensors", ""))
changed_base("base_lacks", lacking_weights)
changed_base("base_pickle", pickled_weights)


def changed_datastore(name: str, change: Callable[[Path], object]) -> None:
    def make(path: Path) -> Path:
        shutil.copytree(LAB / "rest", path)
        change(path)
        return path

    BUILDERS[name] = make


def cut_tokens(path: Path) -> None:
    (path / "tokens-0.npy.xz").write_bytes((path / "tokens-0.npy.xz").read_bytes()[:1000])


def old_datastore(path: Path) -> None:
    header = json.loads((path / "datastore.json").read_text())
    (path / "datastore.json").write_text(json.dumps(header | {"format": 0}))


changed_datastore("datastore_cut", cut_tokens)
changed_datastore("datastore_format", old_datastore)
changed_datastore("datastore_no_tokens", without("tokens-0.npy.xz"))


# Drafters of the lab, damaged.


def weights_of(folder: Path) -> Path:
    """Return the file with the drafter's own tensors: not a LoRA's that lies next to them."""
    return min(folder.glob("*.safetensors"), key=lambda file: file.name.startswith("adapter"))


def damaged(family: str, damage: str, place: Path) -> Path:
    if damage == "missing":
        return place
    shutil.copytree(LAB / family, place)
    DAMAGES[damage](place)
    return place


def no_weights(path: Path) -> None:
    for file in path.glob("*.safetensors"):
        file.unlink()


def cut_drafter(path: Path) -> None:
    file = weights_of(path)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def renamed_tensor(path: Path) -> None:
    file = weights_of(path)
    (name, tensor), *others = load_file(file).items()
    save_file({"x." + name: tensor, **dict(others)}, file)


def other_shape(path: Path) -> None:
    file = weights_of(path)
    save_file({name: torch.cat([tensor, tensor], -1) for name, tensor in load_file(file).items()}, file)


def pickled_drafter(path: Path) -> None:
    file = weights_of(path)
    name = "pytorch_model.bin" if file.stem == "model" else f"{file.stem}.pt"
    torch.save({"weight": RunsCode()}, file.with_name(name))
    file.unlink()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "no_config": without("config.json"),
    "config_not_json": written("config.json", "{"),
    "config_is_list": written("config.json", "[]"),
    "no_weights": no_weights,
    "cut": cut_drafter,
    "pickle": pickled_drafter,
    "renamed": renamed_tensor,
    "shape": other_shape,
    "other_base": in_config(base_hash="0" * 64),
}
