"""`ssbench models check`: whether a pair works, reported before weights are downloaded, against a hub of our own."""

from __future__ import annotations

import functools
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from specbench_ss.cli.main import main
from specbench_ss.models.checkpoint import fetch, read_shapes


class Hub(http.server.SimpleHTTPRequestHandler):
    """Repositories OWNER/NAME are folders; counts the bytes that leave it."""

    sent = 0

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/"):
            found = self._about("/".join(path.removeprefix("/api/models/").split("/")[:2]))
            return self._send(404 if found is None else 200, json.dumps(found or {}).encode(), {}, body)
        file = Path(self.directory, path.strip("/").replace("/resolve/main", ""))
        if not file.is_file():
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound"}, body)
        content = file.read_bytes()
        headers = {"ETag": f'"{file.name}-{len(content)}"', "X-Repo-Commit": "0" * 40}
        if body and (span := self.headers.get("Range")):
            first, last = span.removeprefix("bytes=").split("-")
            return self._send(206, content[int(first) : int(last or len(content)) + 1], headers, body)
        return self._send(200, content, headers, body)

    def _about(self, name: str) -> dict[str, object] | None:
        folder = Path(self.directory, name)
        if not folder.is_dir():
            return None
        files = [{"rfilename": f.name, "size": f.stat().st_size} for f in sorted(folder.iterdir())]
        return {"id": name, "sha": "0" * 40, "siblings": files}

    def _send(self, code: int, content: bytes, headers: dict[str, str], body: bool) -> None:
        self.send_response(code)
        for key, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(key, value)
        self.end_headers()
        if body:
            Hub.sent += len(content)
            self.wfile.write(content)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    root = tmp_path / "hub"
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Hub, directory=str(root)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
    pages = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", pages)
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    yield root
    server.shutdown()


def ssbench(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr)."""
    capsys.readouterr()
    code = main(list(arguments))
    stated = capsys.readouterr()
    return code, stated.out, stated.err


def heads(folder: Path, hidden: int = 256, vocab: int = 4096) -> Path:
    """Medusa heads of the first layout, filled with noise that would be seen if it were fetched."""
    folder.mkdir(parents=True)
    tensors = {}
    for i in range(2):
        tensors[f"{i}.0.linear.weight"] = torch.randn(hidden, hidden)
        tensors[f"{i}.0.linear.bias"] = torch.randn(hidden)
        tensors[f"{i}.1.weight"] = torch.randn(vocab, hidden)
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    (folder / "config.json").write_text('{"medusa_num_heads": 2}')
    return folder


def test_headers_alone_are_fetched_and_read_as_the_file_does(hub: Path, tmp_path: Path) -> None:
    whole = heads(hub / "someone" / "heads") / "medusa_lm_head.safetensors"
    before = Hub.sent
    found = fetch("someone/heads", tmp_path / "skeleton")
    assert Hub.sent - before < 200_000 < whole.stat().st_size == found.weights["medusa_lm_head.safetensors"]
    ours = read_shapes(found.folder / "medusa_lm_head.safetensors")
    assert json.loads((found.folder / "config.json").read_text()) == {"medusa_num_heads": 2}
    assert {k: v.shape for k, v in ours.items()} == {k: v.shape for k, v in read_shapes(whole).items()}
    assert found.unread == ()


def test_values_that_were_not_fetched_are_not_read(hub: Path, tmp_path: Path) -> None:
    """Of a list next to a large matrix: of a whole file, of a header alone, and of a pickle that torch maps or not."""
    folder = hub / "someone" / "words"
    folder.mkdir(parents=True)
    made = {"d2t": torch.arange(5), "lm_head.weight": torch.ones(5, 3)}
    save_file(made, folder / "model.safetensors")
    skeleton = fetch("someone/words", tmp_path / "skeleton").folder
    torch.save(made, tmp_path / "new.bin")
    torch.save(made, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    for file in (folder / "model.safetensors", tmp_path / "new.bin", tmp_path / "old.bin"):
        with torch.device("meta"):  # as methods check a drafter
            read = read_shapes(file, valued=lambda name: name == "d2t")
        assert torch.equal(read["d2t"], made["d2t"]) and read["lm_head.weight"].is_meta
    assert read_shapes(skeleton / "model.safetensors", valued=lambda name: name == "d2t")["d2t"].is_meta


def test_a_pair_that_works(hub: Path, capsys: pytest.CaptureFixture[str]) -> None:
    heads(hub / "someone" / "heads")
    code, out, _ = ssbench(capsys, "models", "check", "lab", "medusa[weights=someone/heads]")
    assert code == 0
    assert "medusa_lm_head.safetensors 8.9 MB" in out
    assert "not checked: values of weights" in out
    assert "works: medusa on lab (same output as the model)" in out


def test_a_pair_that_does_not(hub: Path, capsys: pytest.CaptureFixture[str]) -> None:
    heads(hub / "someone" / "wide", hidden=128)
    code, out, err = ssbench(capsys, "models", "check", "lab", "medusa", "--set", "medusa.weights=someone/wide")
    assert code == 2
    assert "works" not in out
    assert err.startswith("ssbench: ") and err.count("\n") == 1
    assert "128" in err and "256" in err and "someone/wide" in err


def test_what_only_a_pickle_has_is_not_reported(hub: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = hub / "someone" / "old"
    folder.mkdir(parents=True)
    torch.save({"0.0.linear.weight": torch.zeros(4, 4)}, folder / "medusa_lm_head.pt")
    (folder / "config.json").write_text("{}")
    code, out, _ = ssbench(capsys, "models", "check", "lab", "medusa[weights=someone/old]")
    assert code == 1
    assert "undecided" in out and "medusa_lm_head.pt" in out


def test_what_comes_with_the_model_and_what_is_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = ssbench(capsys, "models", "check", "lab", "ss")
    assert code == 0 and "not checked: values of weights" not in out
    code, _, err = ssbench(capsys, "models", "check", "lab", f"ss[weights={tmp_path / 'none'}]")
    assert code == 2 and "no such file or folder" in err


def test_a_repository_that_is_not_there(hub: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hub.mkdir()
    code, _, err = ssbench(capsys, "models", "check", "lab", "medusa[weights=someone/nothing]")
    assert code == 2
    assert "the hub has no readable 'someone/nothing'" in err
