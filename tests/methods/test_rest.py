"""REST: what it retrieves is what stands in the text, whatever the datastore it is exact, and bad files are
reported."""

from __future__ import annotations

import json
import lzma
import struct
import sys
from collections import Counter
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from specbench_ss.bench import preflight
from specbench_ss.cli.main import main
from specbench_ss.engine.generate import StopParams, generate
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.target import Target
from specbench_ss.engine.tree import DraftTree
from specbench_ss.errors import UserError
from specbench_ss.methods.ar import Autoregressive
from specbench_ss.methods.rest.datastore import (
    SEPARATOR,
    Datastore,
    best_prefixes,
    build,
    in_memory,
    open_datastore,
    retrieve,
)
from specbench_ss.methods.rest.decode import REST, RESTOptions, draft_tree
from specbench_ss.models.load import load_model_info, load_target
from specbench_ss.options import MethodSpec
from specbench_ss.runs.config import RunConfig
from specbench_ss.storage import locked
from specbench_ss.training.data import load_rows
from specbench_ss.training.self_distill import ResponseCache
from tests.cli import failing
from tests.methods.exactness import assert_greedy_same, p_value
from tests.tiny import thorough, tiny_model

Docs = list[NDArray[np.int32]]
EMPTY = sha256().hexdigest()[:16]  # of no tokens


def random_docs(seed: int, count: int, words: int, length: int = 60) -> Docs:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, words, rng.integers(1, length)).astype(np.int32) for _ in range(count)]


# -- retrieval, against a plain search ------------------------------------------------------------------------------


def plain_search(docs: Docs, ids: list[int], span: int, shortest: int, length: int) -> tuple[int, list[list[int]]]:
    """The longest suffix that occurs within a document, and what follows it there, filled up with -1."""
    texts = [d.tolist() for d in docs]
    for n in range(min(span, len(ids)), shortest - 1, -1):
        ends = [(t, i + n) for t in texts for i in range(len(t) - n + 1) if t[i : i + n] == ids[-n:]]
        if ends:
            return n, sorted((t[e : e + length] + [-1] * length)[:length] for t, e in ends)
    return 0, []


def plain_best(rows: list[list[int]], most: int) -> list[tuple[int, ...]]:
    counts = Counter(tuple(r[:d]) for r in rows for d in range(1, len(r) + 1) if -1 not in r[:d])
    chosen = sorted(counts, key=lambda p: (-counts[p], len(p), p))[:most]
    return sorted(chosen, key=lambda p: (len(p), p))


def paths(tree: DraftTree) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens.tolist()[1:], tree.topology.parents[1:], strict=True):
        found.append((*found[parent], token))
    return found


@pytest.mark.parametrize("chunks", [1, 3])
def test_it_finds_what_a_plain_search_finds(chunks: int) -> None:
    docs = random_docs(0, 90, 9)
    parts = [in_memory(docs[i::chunks]).chunks[0] for i in range(chunks)]
    store = Datastore(tuple(parts), {})
    rng, lengths = np.random.default_rng(1), set()
    for trial in range(60):
        doc = docs[trial]
        query = [*rng.integers(0, 9, 12).tolist(), *doc[: rng.integers(0, len(doc) + 1)].tolist()]
        matched, rows = plain_search(docs, query, 8, 2, 5)
        found = retrieve(store, query, 8, 2, 10_000, 5)
        assert (0 if found is None else found.matched) == matched
        lengths.add(matched)
        if found is not None:
            assert found.rows.tolist() == rows
            prefixes = best_prefixes(found.rows, 12)
            tree = draft_tree(torch.tensor([query[-1]]), prefixes)
            assert paths(tree)[1:] == plain_best(rows, 12)
            plain = DraftTree.from_parents(tree.tokens, tree.topology.parents)
            assert all(torch.equal(a, b) for a, b in zip(tree.visibility(), plain.visibility(), strict=True))
    assert len(lengths) > 4


def test_nothing_crosses_the_end_of_a_document() -> None:
    store = in_memory([np.array(d, np.int32) for d in ([1, 2, 3], [4, 5], [3, 4, 6])])
    assert retrieve(store, [2, 3], 16, 2, 9, 3).rows.tolist() == [[-1, -1, -1]]  # type: ignore[union-attr]
    assert retrieve(store, [3, 4], 16, 2, 9, 3).rows.tolist() == [[6, -1, -1]]  # type: ignore[union-attr]
    assert retrieve(store, [5, 3], 16, 2, 9, 3) is None
    assert retrieve(store, [3], 16, 2, 9, 3) is None  # too short to be looked up
    assert len(best_prefixes(np.full((2, 3), -1, np.int32), 5).tokens) == 0


def test_of_many_occurrences_those_that_are_read_lie_all_over_the_text() -> None:
    docs = [np.array([7, 7, i % 5], np.int32) for i in range(1000)]
    found = retrieve(in_memory(docs), [7, 7], 2, 2, 50, 1)
    assert found is not None
    assert Counter(found.rows[:, 0].tolist()) == dict.fromkeys(range(5), 10)


# -- decoding -------------------------------------------------------------------------------------------------------


@thorough
def test_the_published_rule_is_reported_and_differs() -> None:
    target = Target(tiny_model("llama", vocab=7, layers=2))
    rows = REST.test_instances(target)["per-path"]()
    assert REST.lossless and not rows.lossless
    assert p_value(rows, [3, 4, 5], SamplingParams(0.8, top_p=0.9)) < 1e-6


def test_a_datastore_of_the_answer_drafts_it() -> None:
    """Depth, acceptance and the context's end: the model's own answer is looked up, to the last position there is."""
    target = Target(tiny_model("llama"))
    prompt = [5, 6, 7, 8, 9, 10, 11]
    answer = generate(Autoregressive(target), prompt, StopParams(500), SamplingParams()).tokens
    store = in_memory([np.array(prompt + answer, np.int32)])
    found = generate(REST(target, RESTOptions(length=6), store), prompt, StopParams(500), SamplingParams())
    assert found.tokens == answer and found.finish == "context"
    assert len(prompt) + len(answer) == target.context_length
    assert max(s.accepted_tokens for s in found.steps) == 6
    longest = [1 + i % 60 for i in range(target.context_length - 1)]
    assert len(generate(REST(target, RESTOptions(), store), longest, StopParams(9), SamplingParams()).tokens) == 1


def test_a_tree_is_the_same_in_every_process() -> None:
    """No order of hashes: equal counts go by length, then by token."""
    rows = np.array([[3, 1], [3, 2], [5, 1], [9, 9]], np.int32)
    assert best_prefixes(rows, 3).tokens.tolist() == [3, 5, 9]
    assert best_prefixes(rows, 5).parents.tolist() == [0, 0, 0, 1, 1]


# -- files ----------------------------------------------------------------------------------------------------------


class Words:
    """Tokenizer with the methods that a datastore uses."""

    eos_token_id = None

    def __init__(self, words: int) -> None:
        self.words = words

    def get_vocab(self) -> dict[str, int]:
        return {f"w{i}": i for i in range(self.words)}


@pytest.fixture
def base() -> Target:
    return Target(tiny_model("llama"), Words(61), "tiny")


def test_what_is_built_is_read_back_and_is_the_same_each_time(base: Target, tmp_path: Path) -> None:
    docs = random_docs(3, 40, 61)
    for name in ("a", "b"):
        header = build(iter(docs), base, "a test", tmp_path / name, chunk=300)
    assert len(header["chunks"]) > 3 and header["documents"] == 40
    assert header["tokens"] == sum(map(len, docs))
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()
    store = open_datastore(tmp_path / "a")
    store.check_fits(base, "a")
    query = docs[7][:9].tolist()
    assert retrieve(store, query, 16, 2, 99, 4).rows.tolist() == plain_search(docs, query, 16, 2, 4)[1]  # type: ignore[union-attr]
    loaded = REST.load(base, RESTOptions(datastore=str(tmp_path / "a")))
    assert loaded.metadata()["datastore"]["hash"] == header["hash"] and loaded.max_tokens_per_step() == 65
    assert loaded.with_options(RESTOptions(draft=5)).max_tokens_per_step() == 6


def test_a_document_longer_than_a_chunk_stands_in_pieces(base: Target, tmp_path: Path) -> None:
    header = build([np.arange(50, dtype=np.int32)], base, "a test", tmp_path / "a", chunk=21)
    assert header["chunks"] == [21, 21, 11] and header["tokens"] == 50


def test_a_failed_build_leaves_nothing(base: Target, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no token"):
        build([], base, "nothing", tmp_path / "a")
    with pytest.raises(UserError, match="token id 61 is beyond the vocabulary of 'tiny'"):
        build([np.array([3, 61], np.int32)], base, "foreign", tmp_path / "a")
    assert not list(tmp_path.iterdir())


def reported(path: Path, base: Target) -> str:
    """The one line for a bad datastore, before any weights are needed."""
    with pytest.raises(UserError) as error:
        REST.check(RESTOptions(datastore=str(path)), base)
    assert "\n" not in str(error.value) and str(error.value).startswith("rest: ")
    return str(error.value)


def test_bad_folders_are_reported(base: Target, tmp_path: Path) -> None:
    folder = tmp_path / "a"
    assert "no datastore" in reported(folder, base)
    header = build(iter(random_docs(3, 40, 61)), base, "a test", folder, small=0)
    assert "another tokenizer" in reported(folder, Target(base.model, Words(60), "other"))
    small = Target(tiny_model("llama", vocab=50), None, "small")
    assert "token id 60, the vocabulary of 'small' ends at 49" in reported(folder, small)
    tokens, suffixes = folder / "tokens-0.npy", folder / "suffixes-0.npy"
    reported_of_cut_files(tokens, base)
    entries = np.load(suffixes)
    np.save(suffixes, entries[::-1])
    assert "not in order" in reported(folder, base)
    np.save(suffixes, entries + len(entries))
    assert "not in order" in reported(folder, base)
    np.save(suffixes, entries[:-1])
    assert "damaged" in reported(folder, base)
    suffixes.unlink()
    assert "suffixes-0.npy" in reported(folder, base)
    reported_of_headers(folder, header, base)


def reported_of_cut_files(file: Path, base: Target, other: Path | None = None) -> None:
    """And a file that is cut, empty or none of numpy's, by its name and without numpy's own words.

    other: the file that is missed if there is none.
    """
    whole = file.read_bytes()
    strange = whole.replace(b"(", b"((", 1), whole.replace(b"<", b"?", 1), b"PK\x03\x04" + whole[4:]
    strange = strange if file.suffix == ".npy" else strange[2:]
    for content in (whole[:-40], whole[:100], whole[:9], whole[:3], b"", b"x" * 200, *strange):
        file.write_bytes(content)
        stated = f"rest: {file} is damaged: it is truncated, or not a .npy file; rebuild the datastore"
        assert reported(file.parent, base).startswith(stated)
    file.unlink()
    assert f"{other or file} cannot be read: no such file or directory; rebuild" in reported(file.parent, base)
    file.write_bytes(whole)


def reported_of_headers(folder: Path, header: dict[str, Any], base: Target) -> None:
    """And a header that is empty, of another version, wrong or missing."""
    for changed, stated in (
        ({"chunks": []}, "is empty"),
        ({"format": 9}, "format 9"),
        ({"hash": 3}, "hash is not a text"),
    ):
        (folder / "datastore.json").write_text(json.dumps(header | {"hash": EMPTY} | changed))
        assert stated in reported(folder, base)
    for content in (b"", b"{", b"[]", b"\xff{}", json.dumps(header).encode()[:-30]):
        (folder / "datastore.json").write_bytes(content)
        assert "datastore.json cannot be read as a JSON object; rebuild the datastore" in reported(folder, base)
    (folder / "datastore.json").unlink()
    assert "has no datastore.json" in reported(folder, base)


def test_a_small_datastore_is_its_tokens_and_damage_to_them_is_reported(base: Target, tmp_path: Path) -> None:
    folder = tmp_path / "a"
    header = build(iter(random_docs(3, 40, 61)), base, "a test", folder)
    assert sorted(p.name for p in folder.iterdir()) == ["datastore.json", "tokens-0.npy.xz"]
    packed, tokens = folder / "tokens-0.npy.xz", folder / "tokens-0.npy"
    reported_of_cut_files(packed, base)
    with lzma.open(packed) as stream:
        stored = np.load(stream)
    packed.unlink()
    np.save(tokens, stored)  # as former versions wrote it
    assert open_datastore(folder).about["hash"] == header["hash"]
    whole = tokens.read_bytes()
    reported_of_cut_files(tokens, base, other=packed)
    stored[5] += 1
    np.save(tokens, stored)
    assert "damaged: its tokens do not match" in reported(folder, base)
    for strange in (stored[:-1], stored.astype(np.int64)):
        np.save(tokens, strange)
        assert "not int32 or uint16" in reported(folder, base)
    tokens.write_bytes(whole)
    assert "another tokenizer" in reported(folder, Target(base.model, Words(60), "other"))
    small = Target(tiny_model("llama", vocab=50), None, "small")
    assert "token id 60, the vocabulary of 'small' ends at 49" in reported(folder, small)
    reported_of_headers(folder, header, base)


@pytest.mark.parametrize(("vocab", "kind"), [(61, np.uint16), (0xFFFF, np.uint16), (0x10000, np.int32)])
def test_what_is_sorted_when_opened_is_what_was_stored(
    vocab: int, kind: type[np.integer[Any]], base: Target, tmp_path: Path
) -> None:
    """The largest id is no separator, whatever the bits."""
    base.vocab_size = vocab
    docs = [*random_docs(3, 40, 61), np.array([3, vocab - 1, 4, vocab - 1], np.int32)]
    for name, small in (("small", 10**6), ("large", 0)):
        build(iter(docs), base, "a test", tmp_path / name, chunk=300, small=small)
    with lzma.open(tmp_path / "small" / "tokens-0.npy.xz") as stream:
        assert np.load(stream).dtype == kind
    one, other = (open_datastore(tmp_path / name) for name in ("small", "large"))
    assert one.about == other.about and len(one.chunks) > 3
    for a, b in zip(one.chunks, other.chunks, strict=True):
        assert np.array_equal(a.tokens, b.tokens) and np.array_equal(a.suffixes, b.suffixes)
    found = retrieve(one, [3, vocab - 1], 16, 2, 9, 3)
    assert found is not None and [4, vocab - 1, SEPARATOR] in found.rows.tolist()


def idx(path: Path, parts: list[Docs], width: str) -> Path:
    """REST's own file, written byte by byte: no separators, the suffix array counts tokens."""
    with path.open("wb") as file:
        for docs in parts:
            ids = np.concatenate(docs).tolist()
            order = sorted(range(len(ids)), key=lambda i: ids[i:])
            data = struct.pack(f"<{len(ids)}{width}", *ids)
            file.write(struct.pack("<I", len(data)) + data)
            file.write(struct.pack("<I", 4 * len(order)) + struct.pack(f"<{len(order)}i", *order))
    return path


@pytest.mark.parametrize(("width", "bits"), [("H", 2), ("i", 4)])
def test_rests_own_files_are_read(width: str, bits: int, base: Target, tmp_path: Path) -> None:
    parts = [random_docs(5, 20, 61), random_docs(6, 31, 61)]
    path = idx(tmp_path / "chat.idx", parts, width)
    store = open_datastore(path)
    store.check_fits(base, path)
    assert [c.tokens.dtype.itemsize for c in store.chunks] == [bits, bits]
    whole: Docs = [np.concatenate(docs) for docs in parts]
    for start in range(0, 400, 23):
        query = whole[start % 2][start : start + 5].tolist()
        found = retrieve(store, query, 16, 2, 5000, 6)
        matched, rows = plain_search(whole, query, 16, 2, 6)
        assert found is not None and found.matched == matched and found.rows.tolist() == rows
    decoder = REST.load(base, RESTOptions(datastore=str(path)))
    assert_greedy_same(decoder, Autoregressive(base), 20)


def test_bad_files_of_rest_are_reported(base: Target, tmp_path: Path) -> None:
    path = idx(tmp_path / "a.idx", [random_docs(5, 9, 61), random_docs(6, 9, 61)], "H")
    whole = path.read_bytes()
    for cut in (1, 5, len(whole) // 2):
        path.write_bytes(whole[:-cut])
        assert "is truncated: chunk" in reported(path, base)
    path.write_bytes(b"")
    assert "is empty" in reported(path, base)
    path.write_bytes(struct.pack("<I", 6) + b"abcdef" + struct.pack("<I", 4) + b"abcd")
    assert "no datastore of REST" in reported(path, base)
    idx(path, [random_docs(5, 9, 70)], "H")
    assert "the vocabulary of 'tiny' ends at 60" in reported(path, base)
    large = Target(base.model, None, "large")
    large.vocab_size = 70_000
    assert "16-bit ids" in reported(path, large)


# -- the command ----------------------------------------------------------------------------------------------------


@thorough
def test_the_command_builds_from_text_and_chats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("The train to Halvik leaves at nine. " * 9)
    chat = {"messages": [{"role": "user", "content": "When?"}, {"role": "assistant", "content": "At nine."}]}
    (tmp_path / "b.jsonl").write_text(f"{json.dumps(chat)}\n{json.dumps({'text': 'plain words'})}\n")
    out = tmp_path / "store"
    command = ["datastore", "build", "--data", str(tmp_path / "a.txt"), "--data", str(tmp_path / "b.jsonl")]
    assert main([*command, "--lab", "3", "--out", str(out)]) == 0
    assert "6 documents" in capsys.readouterr().out
    lab = load_model_info("lab")
    store = open_datastore(out)
    asked = lab.encode_chat(chat["messages"][:1])
    found = retrieve(store, asked, 16, 2, 9, 5)
    assert found is not None and found.matched == len(asked)
    assert lab.decode_text([x for x in found.rows[0].tolist() if x >= 0]).startswith("At nine.")
    preflight.check_methods(RunConfig((MethodSpec("rest", {"datastore": str(out)}),)))
    assert main(["datastore", "info", str(out), "--model", "lab"]) == 0
    assert "fits lab" in capsys.readouterr().out
    for bad, stated in (
        ([*command, "--out", str(out)], "is not empty"),
        (["datastore", "build", "--out", str(tmp_path / "x")], "no text given"),
        (["datastore", "build", "--data", str(tmp_path / "none.txt"), "--out", str(tmp_path / "x")], "cannot read"),
        (["datastore", "info", str(tmp_path / "x")], "no datastore"),
    ):
        assert main(bad) == 2
        assert stated in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


@thorough
def test_the_command_keeps_the_models_own_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SSBENCH_CACHE", str(tmp_path / "cache"))
    asked = [{"prompt": f"What is {i} and {i}?"} for i in range(60)]
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    command = [
        "datastore",
        "build",
        "--data",
        str(tmp_path / "asked.jsonl"),
        "--regenerate-responses",
        "--answer-limit",
        "6",
    ]
    assert main([*command, "--out", str(tmp_path / "store")]) == 0
    store, lab = open_datastore(tmp_path / "store"), load_target("lab")
    text = load_rows(tmp_path / "asked.jsonl", lab.tokenizer, 512, own=ResponseCache(lab, 6))
    parts = (text.train, text.validation)
    assert store.about["tokens"] == sum(part.counts.completion_tokens for part in parts)
    assert store.about["documents"] == sum(part.counts.documents for part in parts) == 60
    assert store.about["made_of"] == "own answers to asked.jsonl"
    first = text.train.ids[0][text.train.mask[0] & (text.train.documents[0] == 0)]
    assert store.chunks[0].tokens[: len(first) + 1].tolist() == [*first.tolist(), SEPARATOR]
    capsys.readouterr()
    assert main([*command, "--lab", "3", "--out", str(tmp_path / "x")]) == 2
    assert "--regenerate-responses requires --data" in capsys.readouterr().err


def test_the_lab_brings_its_own() -> None:
    lab = load_model_info("lab")
    REST.check(RESTOptions(), lab)
    assert REST.open_store(RESTOptions(), lab).advice
    with pytest.raises(UserError, match="use `ssbench datastore build`"):
        REST.check(RESTOptions(), Target(tiny_model("llama")))


def test_a_large_vocabulary_keeps_its_ids(base: Target, tmp_path: Path) -> None:
    """Ids above 65,535 are what 16 bits cannot hold."""
    docs: Docs = [np.array([70_000, 4, 70_001, 4464, 4], np.int32)]
    base.vocab_size = 80_000
    build(docs, base, "large", tmp_path / "a")
    found = retrieve(open_datastore(tmp_path / "a"), [70_000, 4], 16, 2, 9, 2)
    assert found is not None and found.rows.tolist() == [[70_001, 4464]]
    (chunk,) = in_memory(docs).chunks
    assert chunk.tokens.dtype == chunk.suffixes.dtype == np.int32


def test_without_the_package_that_sorts_suffixes_one_line_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And with --methods all the other methods run."""
    monkeypatch.setitem(sys.modules, "pydivsufsort", None)
    words = "rest: cannot load pydivsufsort, which sorts suffixes: "
    run = ["run", "--limit", "1", "--tasks", "qa", "--max-new-tokens", "4", "--device", "cpu", "--warmup", "0"]
    assert words in failing([*run, "--methods", "rest", "--out", str(tmp_path / "rest")], capsys)
    assert words in failing(["datastore", "build", "--lab", "2", "--out", str(tmp_path / "store")], capsys)
    assert main([*run, "--methods", "all", "--dry-run"]) == 0
    reported = capsys.readouterr()
    assert (
        f"rest is left out: {words}" in reported.err
        and "method     pld" in reported.out
        and "method     rest" not in reported.out
    )


@thorough
def test_two_builds_of_one_folder_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build = ["datastore", "build", "--lab", "1", "--out", str(tmp_path / "out")]
    with locked(tmp_path / "out"):
        assert "in use" in failing(build, capsys)
    assert not list(tmp_path.iterdir()) and main(build) == 0
