"""The target model, driven layer by layer with our own masks and KV cache."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast
from weakref import WeakSet

import torch
from torch import Tensor

from specbench_ss.engine.architectures import ModelInfo, family_of, rotary_table
from specbench_ss.engine.attention import NAME, Heads, set_attention
from specbench_ss.engine.attention import describe as attention_in_words
from specbench_ss.engine.cpu_kernels import (
    PrepackedLinear,
    Quantization,
    describe,
    fused_blocks,
    measure_one_row,
    packing,
    products_of,
    round_matrices,
)
from specbench_ss.engine.cuda_graphs import CudaGraphRunner
from specbench_ss.engine.device_map import layer_devices, place_blocks, to_device
from specbench_ss.engine.generic_model import check_against_hf
from specbench_ss.engine.kv_cache import BatchedKVCache, Cache, PrefixCache, RaggedTensor
from specbench_ss.engine.numerics import HALF_WEIGHTS
from specbench_ss.engine.timing import settle_cuda
from specbench_ss.engine.tree import DraftTree
from specbench_ss.errors import UserError

Rotary = Any  # what `Target.rotary` gives to the layers: cos and sin, `generic_model.Arguments`, or None
MOST_LOGITS = 1 << 22  # that `answer_logits` has at a time: 16 MiB
FINAL = -1  # the tap of the final, normed state that the LM head reads

AnyCache = Cache | PrefixCache | BatchedKVCache | None
Module = TypeVar("Module", bound="torch.nn.Module")


@dataclass(slots=True)
class Output:
    """What a forward pass over n rows gives.

    logits [1, n, V] of the rows of `tree`; taps {layer: [1, n, h]} (input of that layer, or FINAL);
    rows: for each node of `tree`, its offset among the rows this pass wrote into the cache, by layer range
    [(lo, hi, offsets)], offsets being a list, or int64 [n] on the device; None = node i is row i in every layer.
    extra: a tensor that the method's `forward` hands to its `update`; None where there is none.
    """

    logits: Tensor
    tree: DraftTree | None = None
    hidden_states: dict[int, Tensor] = field(default_factory=dict)
    rows: Sequence[tuple[int, int, Sequence[int] | Tensor]] | None = None
    extra: Tensor | None = None


def _is_causal_lm(model: Any) -> bool:
    return isinstance(model, torch.nn.Module) and hasattr(model, "config")


class Target(ModelInfo):
    """A Hugging Face decoder-only causal LM, in eval mode, driven layer by layer."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        name: str = "",
        folder: Path | None = None,
        attention: str | None = None,
        fp16_weights: bool = False,
        part_of: int = 0,
    ) -> None:
        """attention: drive a model that is not taken apart with this one, without a proof that it is driven rightly.

        part_of: bytes of a larger model's weights that this one stands for, as far as room for copies is concerned.
        rounded: round the matrices of this float32 model, in place, to float16 numbers, which a CPU multiplies faster.
        """
        if not _is_causal_lm(model):
            raise UserError(
                f"Target(model, tokenizer) takes a Hugging Face causal language model, not {model!r}; "
                "load_model('lab') gives a target by name"
            )
        name = name or getattr(model.config, "name_or_path", "") or type(model).__name__
        super().__init__(model.config, tokenizer, name, folder)
        weight = model.get_input_embeddings().weight
        if weight.device.type == "cuda":
            settle_cuda()

        self.model = model.eval().requires_grad_(False)
        self.fp16_weights = fp16_weights
        self.quantization: Quantization | None = (
            None  # how weights of linear layers are held, where not as they are computed
        )
        if fp16_weights:
            round_matrices(model, name)
        self.weights_hash = ""
        self.family = family_of(model)
        self.windows = [block.window for block in self.family.blocks]
        self.attention = self._attention(attention)  # as transformers calls it
        set_attention(model, self.attention)
        self.device: torch.device = weight.device
        self.device_type = self.device.type
        self.dtype: torch.dtype = weight.dtype
        self.n_layers = len(self.family.blocks)
        self.parameter_count = sum(p.numel() for p in model.parameters())
        self.prepack = packing(weight, part_of or self.parameter_count * weight.element_size(), fp16_weights)
        self._finalize()
        self.family.blocks = place_blocks(self.family.blocks, self.family.modules(), self.device)
        self.layer_devices = layer_devices(
            self.family.blocks, self.device
        )  # device -> its layers, the first device first
        self.divided = len(self.layer_devices) > 1
        self.eos_ids = self._eos_ids()
        self.graphs: CudaGraphRunner | None = None  # how steps are replayed, where they are
        self.derived: WeakSet[Target] = WeakSet()  # models that methods put in this one's place, while they are used
        self._cache: Cache | None = None
        self._rotary: tuple[Tensor, Tensor] | None = None
        if self.family.rotary is not None:
            self._grow_rotary(min(self.context_length, 4096))

    def _finalize(self) -> None:
        """Compute lean from now on, where the model is taken apart or its LM head is a plain matrix."""
        head, apart = self.family.head, self.family.whole is None
        if apart:
            self.family.blocks = fused_blocks(self.family, self.prepack, self.device)
        plain = apart or type(head) is torch.nn.Linear
        self._head = PrepackedLinear(head.weight, head.bias, self.prepack) if plain else head
        measure_one_row(products_of(self.family.blocks, self._head))
        self.computed = describe(self.family.blocks, self._head)
        if self.attention == NAME and self.has_layer_access:  # others measure when they first attend
            told = attention_in_words(Heads(str(self.device), self.dtype, *self.attention_heads))
            self.computed += f"; {told}" if told else ""

    def _attention(self, given: str | None) -> str:
        """The attention to compute with. A model that is not taken apart proves that it is driven rightly with it."""
        if self.family.whole is None:
            return NAME
        if given is None:
            base = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
            given = check_against_hf(base, lambda small, attention: Target(small, attention=attention))
        for block in self.family.blocks:
            block.masks_itself = given != "eager"
        return given

    def _eos_ids(self) -> frozenset[int]:
        generation = getattr(self.model, "generation_config", None)
        given = getattr(generation, "eos_token_id", None)
        given = getattr(self.config, "eos_token_id", None) if given is None else given
        ids = set(given if isinstance(given, list) else [] if given is None else [given])
        if self.tokenizer is not None and self.tokenizer.eos_token_id is not None:
            ids.add(self.tokenizer.eos_token_id)
        return frozenset(ids)

    @property
    def quantised(self) -> str:
        """How weights of linear layers are held, in words, where that is not as they are computed; else ''."""
        return self.quantization.words if self.quantization else ""

    @property
    def engine(self) -> str:
        """Name of the engine that makes its steps, as `--engine` has it: eager or graph."""
        return "eager" if self.graphs is None else "graph"

    @property
    def not_replayable(self) -> str:
        """What about its layers keeps their passes from being replayed, in words; '' where nothing does."""
        if not self.has_layer_access:
            return "are run whole, as transformers wrote them"
        return "have sliding windows" if any(self.windows) else ""

    @property
    def number_format(self) -> str:
        """Name of the number format, as `--dtype` has it."""
        return HALF_WEIGHTS if self.fp16_weights else str(self.dtype).removeprefix("torch.")

    @property
    def device_names(self) -> str:
        """Name of the device, or of all devices that layers lie on, as `--device` has it."""
        return ",".join(map(str, self.layer_devices))

    def to_target_dtype_device(self, module: Module, name: str) -> Module:
        """Return a drafter's module, frozen, on this device and in this number format: rounded where that is.

        name: of the method, for errors. Raises UserError for a number that the format does not hold.
        """
        module = module.to(self.device, self.dtype).eval().requires_grad_(False)
        if self.fp16_weights:
            round_matrices(module, name)
        return module

    def with_model(self, model: Any, weights_hash: str) -> Target:
        """Return a target of other weights in the same form: its tokenizer, name and number format are this one's.

        Where this one's linear layers are held in fewer bits, so are the model's from now on: it is changed in place.
        Its steps are replayed where this one's are; a warning says where its layers cannot be. Raises UserError where
        weights cannot be held so.
        """
        parameters, held = (
            sum(p.numel() for p in model.parameters()),
            self.quantization and self.quantization.of_another(model),
        )
        other = Target(model, self.tokenizer, self.name, self.folder, fp16_weights=self.fp16_weights)
        other.parameter_count, other.quantization = parameters, held
        other.is_lab, other.bundled_drafters, other.weights_hash = self.is_lab, self.bundled_drafters, weights_hash
        self.derived.add(other)
        other.inherit_cuda_graphs(self)
        return other

    def inherit_cuda_graphs(self, base: Target) -> None:
        """Have steps replayed where those of the model are in whose place this one is; a warning says where not."""
        if base.graphs is None:
            return
        if self.not_replayable:
            told = f"steps of a model in place of {self.name!r} are run eagerly: its layers "
            warnings.warn(told + self.not_replayable, stacklevel=3)
            return
        self.graphs, self.computed = base.graphs.of_another(), base.computed

    # -- the layer driver ---------------------------------------------------------------------------------------

    def new_cache(self, capacity: int) -> Cache:
        """An empty cache for this many rows a layer."""
        return Cache(self.n_layers, capacity, joined=not self.divided)

    def request_cache(self, capacity: int, grows: bool = False) -> Cache:
        """The target's own cache, emptied, with room for this many rows: memory is reused from prompt to prompt.

        grows: whether it takes more rows than that.
        """
        if self._cache is None:
            self._cache = self.new_cache(0)
        self._cache.grows = grows
        self._cache.set_limit(None)
        if self.graphs is None:
            self._cache.reserve(capacity)
        else:
            self.graphs.reserve(self._cache, capacity)
        return self._cache

    def drop_cache(self) -> None:
        """Forget the target's own cache and its memory, as after an answer that was broken off at any place."""
        self._cache = None
        if self.graphs is not None:
            self.graphs.evict()

    def _grow_rotary(self, length: int) -> None:
        assert self.family.rotary is not None
        like = self.model.get_input_embeddings().weight[:1, None]
        self._rotary = rotary_table(self.family.rotary, length, like)

    def rotary(self, positions: Tensor, longest: int | None = None) -> Rotary:
        """What layers are given at positions [B, q]; longest: host-side bound on them, if known.

        cos, sin [1 or B, q, head_dim] in a model that is taken apart; methods hand it on as it is.
        """
        if self.family.whole is not None:
            return self.family.whole.arguments(positions)
        if self.family.rotary is None:
            return None
        assert self._rotary is not None
        need, have = self.context_length if longest is None else longest + 1, self._rotary[0].shape[0]
        if need > have:
            self._grow_rotary(min(self.context_length, max(need, 2 * have)))
        return self._rotary[0][positions], self._rotary[1][positions]

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        """ids [B, q], positions [B, q] -> [B, q, h]."""
        return self.family.embed(ids, positions)

    def run(
        self,
        x: Tensor,
        lo: int,
        hi: int,
        cache: AnyCache,
        mask: Tensor | None,
        rotary: Rotary,
        aux_layers: Iterable[int] = (),
        aux_states: dict[int, Tensor] | None = None,
    ) -> Tensor:
        """x [B, q, h] through layers lo..hi-1. mask: additive [1 or B, 1, q, kv], None = nothing to hide."""
        if hi == lo:
            return x
        wanted = tuple(sorted({i for i in aux_layers if lo <= i < hi})) if aux_states is not None else ()
        layers = partial(self._layers, lo, hi, wanted)
        out, *seen = self.run_layers((lo, hi, wanted), layers, x, lo, cache, mask, rotary)
        if aux_states is not None:
            aux_states.update(zip(wanted, seen, strict=True))
        return out

    def run_layers(
        self,
        name: Hashable,
        layers: Callable[..., tuple[Tensor, ...]],
        x: Tensor,
        layer: int,
        cache: Any,
        mask: Tensor | None,
        rotary: Rotary,
        pad: bool = True,
    ) -> tuple[Tensor, ...]:
        """Rows x [1, q, h] through layers, the model's or a drafter's, the first of which has this number in the cache.

        Replayed, or made with the rows of other requests, where steps are. layers(x, cache, mask, rotary) returns
        tensors [1, q, ..], and depends on nothing else but `name`. rotary: cos, sin [1, q, head_dim]. pad: whether rows
        may be added behind those of x.
        """
        made = self.graphs and self.graphs.run(name, layers, x, layer, cache, mask, rotary, pad)
        return made or layers(x, cache, mask, rotary)

    def run_graphed(
        self, name: Hashable, function: Callable[..., tuple[Tensor, ...]], *given: Tensor
    ) -> tuple[Tensor, ...]:
        """Return what a function of tensors alone gives, replayed where steps are (`StaticPasses.call`)."""
        return function(*given) if self.graphs is None else self.graphs.call(name, function, *given)

    def empty(self, cache: Cache, rows: int) -> None:
        """Empty a drafter's cache for the next request, which has up to so many rows there.

        Where steps are replayed its memory is zeroed: padded keys are read there, and a draft's NaN ends no answer.
        """
        if self.graphs is None:
            cache.reserve(rows)
        else:
            self.graphs.reserve(cache, rows, zeroed=True)

    def _layers(
        self, lo: int, hi: int, wanted: tuple[int, ...], x: Tensor, cache: Any, mask: Tensor | None, rotary: Rotary
    ) -> tuple[Tensor, ...]:
        """As `run`; behind the result, the input of each wanted layer, ascending."""
        q, seen = x.shape[1], list[torch.Tensor]()
        folded: dict[tuple[int, int], Tensor | None] = {}  # layers of the same window and length share a mask
        for i in range(lo, hi):
            if i in wanted:
                seen.append(x)
            if self.divided:
                x = self.to_layer_device(x, i)
            block, own = self.family.blocks[i], mask
            if block.window is not None and cache is not None:
                key = (block.window, cache.get_seq_length(i))
                if key not in folded:
                    folded[key] = self.windowed(mask, block.window, q, cache, i)
                own = folded[key]
            x = block(x, cache, own, rotary)
        return tuple(map(self.to_layer_device, (x, *seen))) if self.divided else (x, *seen)

    def to_layer_device(self, x: Tensor, layer: int | None = None) -> Tensor:
        """Return rows on the device of a layer, or on the first device, where all that is no layer lies."""
        if not self.divided:
            return x
        return to_device(x, self.device if layer is None else self.family.blocks[layer].device)

    def windowed(self, mask: Tensor | None, window: int | None, q: int, cache: AnyCache, layer: int) -> Tensor | None:
        """The mask with a sliding window folded in, where a layer has one and it matters.

        A row sees the prefix and its ancestors, so its place after the prefix is the number of new rows it sees,
        minus one; a key `window` or more places back is hidden. mask [1, 1, q, past + q], square over the new rows.
        """
        if window is None or cache is None:
            return mask
        if isinstance(cache, BatchedKVCache):
            return cast("Tensor", cache.windowed(self.windowed, cast("RaggedTensor", mask), window, q, layer))
        past = cache.get_seq_length(layer)
        if past + q <= window:
            return mask
        if mask is None:
            mask = self.causal_mask(q, past)
        places = (mask[0, 0, :, past:] == 0).sum(-1) - 1 + past  # [q]
        keys = torch.cat((torch.arange(past, device=mask.device), places))  # [past + q]
        return mask.masked_fill(places[:, None] - keys >= window, torch.finfo(self.dtype).min)

    @property
    def unembed(self) -> Tensor:
        """The LM head's weight, [V, h]."""
        weight: Tensor = self.family.head.weight
        return weight

    def logits(self, x: Tensor) -> Tensor:
        """LM head over final, normed states [.., h] -> [.., V]."""
        if torch.is_inference_mode_enabled():
            inferred: Tensor = self._head(x)
            return inferred
        out: Tensor = self.family.head(x)
        return out

    def causal_mask(self, q: int, past: int) -> Tensor:
        """Additive [1, 1, q, past + q]: q new rows in a chain after `past` rows."""
        return self.block_mask(torch.ones(q, q, dtype=torch.bool, device=self.device).tril(), past)

    def block_mask(self, visible: Tensor, past: int) -> Tensor:
        """Additive [1, 1, q, past + k] from visible [q, k]: everything before is seen, then as given."""
        mask = torch.zeros(1, 1, visible.shape[0], past + visible.shape[1], device=self.device, dtype=self.dtype)
        mask[0, 0, :, past:].masked_fill_(~visible, torch.finfo(self.dtype).min)
        return mask

    # -- whole passes -------------------------------------------------------------------------------------------

    def prefill(self, ids: Tensor, cache: Cache, aux_layers: Iterable[int] = (), every: bool = False) -> Output:
        """The prompt ids [1, S] after whatever the cache holds; logits and taps [1, 1, .] at its last position.

        every: taps [1, S, .] of every position.
        """
        q, past = ids.shape[1], cache.get_seq_length()
        positions = torch.arange(past, past + q, device=self.device)[None]
        mask = self.causal_mask(q, past) if past and q > 1 else None
        aux_states: dict[int, Tensor] = {}
        x = self.embed(ids, positions)
        x = self.run(x, 0, self.n_layers, cache, mask, self.rotary(positions, past + q), aux_layers, aux_states)
        cache.commit(q)
        shown = slice(None) if every else slice(-1, None)
        final = self.family.norm(x[:, shown])
        aux_states = {layer: t[:, shown] for layer, t in aux_states.items()} | {FINAL: final}
        return Output(self.logits(final[:, -1:]), None, aux_states)

    def forward_tree(
        self,
        tree: DraftTree,
        cache: Cache,
        aux_layers: Iterable[int] = (),
        beside: Callable[[Tensor], Tensor] | None = None,
    ) -> Output:
        """The n nodes of a tree after what the cache holds; the cache keeps all rows until the loop compacts it.

        beside: makes of the final, normed states [n, h] more rows [r, h], whose logits [r, V] are `Output.extra`: the
        LM head is a large matrix, and is read once for all.
        """
        past, n = cache.get_seq_length(), len(tree)
        visible, depths = tree.visibility()
        positions = (depths + past)[None]
        mask = self.block_mask(visible, past) if n > 1 else None
        aux_states: dict[int, Tensor] = {}
        x = self.embed(tree.tokens[None], positions)
        rotary = self.rotary(positions, past + tree.topology.deepest)
        x = self.run(x, 0, self.n_layers, cache, mask, rotary, aux_layers, aux_states)
        final = aux_states[FINAL] = self.family.norm(x)
        if beside is None:
            return Output(self.logits(final), tree, aux_states)
        logits = self.logits(torch.cat((final, beside(final[0])[None]), 1))
        return Output(logits[:, :n], tree, aux_states, extra=logits[0, n:])

    def answer_logits(self, prompt: Sequence[int], answer: Sequence[int]) -> Iterator[Tensor]:
        """Yield float32 logits [n, V] at successive tokens of an answer, from one fresh pass, not timed.

        A few positions at a time: those of a long answer over a large vocabulary would take much memory.
        """
        ids = torch.tensor([[*prompt, *answer[:-1]]], device=self.device)
        output = self.prefill(ids, self.new_cache(ids.shape[1]), every=True)
        states = output.hidden_states[FINAL][:, len(prompt) - 1 :]
        for part in states.split(max(1, MOST_LOGITS // self.vocab_size), dim=1):
            yield self.logits(part)[0].float()

    def next_logits(self, ids: Sequence[int], cache: Cache | None = None) -> Tensor:
        """float32 logits [V] after these ids, from a fresh forward pass, not timed. cache: an empty one to use."""
        with torch.inference_mode():
            cache = cache or self.new_cache(len(ids))
            return self.prefill(torch.tensor([list(ids)], device=self.device), cache).logits[0, -1].float()
