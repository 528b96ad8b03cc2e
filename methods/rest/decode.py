"""REST: drafts retrieved from a datastore by the newest tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from annotated_types import Ge, Le

from specbench_ss.engine.architectures import ModelInfo
from specbench_ss.engine.decoder import Decoder, DecodeState
from specbench_ss.engine.target import Output, Target
from specbench_ss.engine.tree import MOST_NODES, DraftTree, to_device_async, topology_of
from specbench_ss.engine.verify import VerifyResult
from specbench_ss.errors import UserError
from specbench_ss.methods._shared.lossy_acceptance import accept_per_path
from specbench_ss.methods.rest.datastore import Datastore, Prefixes, best_prefixes, open_datastore, retrieve
from specbench_ss.models.checkpoint import read_advice
from specbench_ss.options import Bounded, option

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor


PUBLISHED_DRAFT = 64


@dataclass(frozen=True, slots=True)
class RESTOptions(Bounded):
    """Options of `rest`; defaults as published."""

    owner: ClassVar[str] = "rest"
    datastore: str = option(
        "",
        "Folder of `ssbench datastore build`, or an .idx file of REST. Empty: the datastore bundled with the model.",
    )
    draft: Annotated[int, Ge(0), Le(MOST_NODES)] = option(
        0, "Maximum number of drafted nodes. 0: as the datastore advises, else 64."
    )
    span: Annotated[int, Ge(1)] = option(16, "Longest suffix of the text, in tokens, that is looked up.")
    shortest: Annotated[int, Ge(1)] = option(2, "Shortest suffix of the text, in tokens, that is looked up.")
    occurrences: Annotated[int, Ge(1)] = option(5000, "Maximum number of occurrences read per chunk of the datastore.")
    length: Annotated[int, Ge(1)] = option(10, "Number of tokens read after each occurrence.")
    accept: Literal["exact", "per-path"] = option(
        "exact",
        "Acceptance rule. per-path: verify each path on its own, as published, which is lossy when sampling.",
    )

    def check_together(self) -> None:
        if self.shortest > self.span:
            raise UserError(f"rest: shortest must be at most span ({self.span}), not {self.shortest}")


class REST(Decoder):
    """REST decoder: a tree of the most frequent continuations of the longest suffix in the datastore."""

    name = "rest"
    summary = "retrieval: what followed the newest tokens in a datastore of text, as a tree"
    paper = "He et al. 2023, arXiv:2311.08252"
    Options = RESTOptions
    node_options = ("draft",)

    def __init__(self, target: Target, options: RESTOptions, store: Datastore) -> None:
        super().__init__(target, options)
        self.store = store
        self.draft = options.draft or PUBLISHED_DRAFT
        self.lossless = options.accept == "exact"

    @classmethod
    def check(cls, options: Any, base: ModelInfo) -> dict[str, Any]:
        return cls.with_advice(options, base, cls.open_store(options, base))[1]

    @classmethod
    def load(cls, target: Target, options: Any) -> REST:
        """Load the datastore that the user named, or the one bundled with the model, memory-mapped."""
        store = cls.open_store(options, target)
        options, advised = cls.with_advice(options, target, store)
        decoder = cls(target, options, store)
        decoder.training_info, decoder.advised = {"searched": store.about}, advised
        return decoder

    @classmethod
    def with_advice(cls, options: Any, base: ModelInfo, store: Datastore) -> tuple[Any, dict[str, Any]]:
        """Replace default options by the datastore's advice; return them and the advice that was used."""
        advice = read_advice(store.advice, cls.Options, ("draft",), cls.name, store.file)
        return advice.apply(options, base.device_type)

    @classmethod
    def open_store(cls, options: RESTOptions, base: ModelInfo) -> Datastore:
        """Open the datastore. Raise UserError if it is missing, damaged or of another tokenizer."""
        path = Path(options.datastore) if options.datastore else base.bundled_drafter(cls.name)
        if path is None:
            raise UserError(
                f"rest: no datastore for {base.name!r}; use `ssbench datastore build`, then --set rest.datastore=PATH"
            )
        store = open_datastore(path)
        store.check_fits(base, path)
        return store

    @classmethod
    def test_instances(cls, target: Target) -> Mapping[str, Callable[[], Decoder]]:
        """Return decoders on a datastore with every pair of tokens, and on one with few tokens."""
        from specbench_ss.methods.rest.datastore import in_memory

        rng, v = np.random.default_rng(0), target.vocab_size
        documents = [rng.integers(0, v, n).astype(np.int32) for n in (40 * v, 3 * v, 7, 1)]
        rich, poor = in_memory(documents), in_memory([np.arange(v, dtype=np.int32)])
        return {
            "default": lambda: cls(target, RESTOptions(), rich),
            "one-token": lambda: cls(target, RESTOptions(shortest=1, draft=20, length=3), rich),
            "one-node": lambda: cls(target, RESTOptions(draft=1), rich),
            "few-hits": lambda: cls(target, RESTOptions(span=2, length=4), poor),
            "per-path": lambda: cls(target, RESTOptions(accept="per-path", shortest=1, draft=20), rich),
        }

    def metadata(self) -> dict[str, Any]:
        o = self.options
        settings = {name: getattr(o, name) for name in ("span", "shortest", "occurrences", "length", "accept")}
        return {"draft": self.draft, **settings, "datastore": self.store.about}

    def search_space(self) -> Mapping[str, Sequence[Any]]:
        return {"draft": (4, 8, 16, 32, 64), "shortest": (2, 3, 4), "length": (4, 6, 10)}

    def with_options(self, options: Any) -> REST:
        options, _ = self.with_advice(options, self.target, self.store)
        return type(self)(self.target, options, self.store)

    def max_tokens_per_step(self) -> int:
        return self.draft + 1

    def propose(self, state: DecodeState) -> DraftTree:
        """Draft the most frequent continuations in the datastore; nothing if no suffix occurs."""
        o = self.options
        retrieved = retrieve(self.store, state.ids[-o.span :], o.span, o.shortest, o.occurrences, o.length)
        if retrieved is None:
            return DraftTree.root_only(state.root)
        return draft_tree(state.root, best_prefixes(retrieved.rows, self.draft))

    def accept(self, state: DecodeState, tree: DraftTree, output: Output) -> VerifyResult:
        """Verify exactly, or by the published rule if requested."""
        if self.lossless:
            return super().accept(state, tree, output)
        return accept_per_path(output.logits[0], tree, state.sampling, state.rng)


def draft_tree(root: Tensor, prefixes: Prefixes) -> DraftTree:
    """Return the tree of the prefixes under the root [1], with its mask from the host."""
    n, device = len(prefixes.tokens) + 1, root.device
    visible = np.ones((n, n), bool)
    visible[0, 1:] = False
    visible[1:, 1:] = prefixes.visible
    mask_depths = _to_device(visible, device), _to_device(np.append(0, prefixes.depths), device)
    tokens = torch.cat((root, _to_device(prefixes.tokens.astype(np.int64), device)))
    return DraftTree(tokens, topology_of((-1, *prefixes.parents.tolist())), None, mask_depths)


def _to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    return to_device_async(torch.from_numpy(array), device)
