"""Target model, driven layer by layer with our own masks and KV cache."""

from __future__ import annotations

import copy
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
from specbench_ss.engine.cuda_graphs import CudaGraphRunner, StaticPass
from specbench_ss.engine.device_map import layer_devices, place_blocks, to_device
from specbench_ss.engine.forward import EagerPass, ForwardPass, GraphPass, Rotary
from specbench_ss.engine.generic_model import check_against_hf
from specbench_ss.engine.kv_cache import BatchedKVCache, Cache, PrefixCache, RaggedTensor
from specbench_ss.engine.layers.attention import NAME, set_attention
from specbench_ss.engine.layers.fused import describe, final_norm, fused_blocks
from specbench_ss.engine.layers.linear import PrepackedLinear, packing
from specbench_ss.engine.logits_processors import processors_of
from specbench_ss.engine.numerics import HALF_WEIGHTS
from specbench_ss.engine.timing import settle_cuda
from specbench_ss.engine.tree import DraftTree, topology_of
from specbench_ss.engine.weights import Quantization, round_matrices
from specbench_ss.errors import UserError

MOST_LOGITS = 1 << 22  # of one chunk of `answer_logits`: 16 MiB
MOST_REPLAYED = 8  # tokens behind cached ones that `prefill` runs as a CUDA graph
FINAL = -1  # key of the final, normed state (the input of the LM head) in `hidden_states`

AnyCache = Cache | PrefixCache | BatchedKVCache | None
Module = TypeVar("Module", bound="torch.nn.Module")


@dataclass(slots=True)
class Output:
    """Result of a forward pass over n query tokens. The next pass overwrites its tensors where CUDA graphs are used.

    Attributes:
        logits: [1, n, V] of the nodes of `tree`.
        hidden_states: {layer: [1, n, h]}, the input of that layer, or the normed state for FINAL.
        rows: offset of each node of `tree` among the cache rows of this pass, per layer range [(lo, hi, offsets)]; a
            list, or int64 [n] on the device. None = node i is row i in every layer.
        extra: a tensor that the method's `forward` passes to its `update`, or None.
    """

    logits: Tensor
    tree: DraftTree | None = None
    hidden_states: dict[int, Tensor] = field(default_factory=dict)
    rows: Sequence[tuple[int, int, Sequence[int] | Tensor]] | None = None
    extra: Tensor | None = None


def _is_causal_lm(model: Any) -> bool:
    return isinstance(model, torch.nn.Module) and hasattr(model, "config")


class Target(ModelInfo):
    """A Hugging Face decoder-only causal LM, in eval mode, driven layer by layer.

    `prefill` and `forward_tree` run the target; `run_pass` runs a method's own pass behind the cached rows, or a
    function of tensors alone. Each gets one of the forms of `engine/forward.py`.

    graphs: replays decode passes as CUDA graphs; None = they run eagerly.
    pass_type: of passes that are not replayed, as of a prompt.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        name: str = "",
        folder: Path | None = None,
        attention: str | None = None,
        fp16_weights: bool = False,
    ) -> None:
        """Prepare a causal LM for decoding.

        The model is changed in place and used from then on: set to eval mode without gradients, its attention
        implementation replaced, on a CPU its matrices prepacked. Give a deep copy of a model that has other uses.

        Args:
            attention: attention implementation for models without layer access; skips the check against HF.
            fp16_weights: round the matrices of this float32 model to float16, in place (faster GEMMs on a CPU).
        """
        if not _is_causal_lm(model):
            raise UserError(
                f"Target takes a Hugging Face causal LM, not {model!r}; use load_model(NAME) for a model by name"
            )
        name = name or getattr(model.config, "name_or_path", "") or type(model).__name__
        super().__init__(model.config, tokenizer, name, folder)
        weight = model.get_input_embeddings().weight
        if weight.device.type == "cuda":
            settle_cuda()

        self.model = model.eval().requires_grad_(False)
        self.fp16_weights = fp16_weights
        self.quantization: Quantization | None = None
        if fp16_weights:
            round_matrices(model, name)
        self.weights_hash = ""
        self.family = family_of(model)
        self.windows = [block.window for block in self.family.blocks]
        self.attention = self._attention(attention)  # name in transformers
        set_attention(model, self.attention)
        self.device: torch.device = weight.device
        self.device_type = self.device.type
        self.dtype: torch.dtype = weight.dtype
        self.n_layers = len(self.family.blocks)
        self.parameter_count = sum(p.numel() for p in model.parameters())
        self.prepack = packing(weight, self.parameter_count * weight.element_size(), fp16_weights)
        self._finalize()
        self.family.blocks = place_blocks(self.family.blocks, self.family.modules(), self.device)
        self.layer_devices = layer_devices(self.family.blocks, self.device)  # device -> its layers, main device first
        self.is_multi_device = len(self.layer_devices) > 1
        self.eos_ids = self._eos_ids()
        self.processors, self.settings_not_applied = processors_of(model, self.eos_ids)
        self.graphs: CudaGraphRunner | None = None
        self.pass_type: type[EagerPass] = EagerPass
        self.derived: WeakSet[Target] = WeakSet()  # changed models of methods that use this target
        self._root = (
            torch.zeros(1, dtype=torch.int64, device=self.device),
            torch.ones(1, 1, dtype=torch.bool, device=self.device),
        )  # depth and visibility of a tree of one node
        self._cache: Cache | None = None
        self.longest_request = 0  # tokens that the reusable cache reserves at least, set while a run goes on
        self._rotary: tuple[Tensor, Tensor] | None = None
        if self.family.rotary is not None:
            self._grow_rotary(min(self.context_length, 4096))

    def _finalize(self) -> None:
        """Use fused layers and a prepacked LM head where supported, and describe them in `kernel_summary`."""
        head, layer_access = self.family.head, self.family.generic is None
        if layer_access:
            self.family.blocks = fused_blocks(self.family, self.prepack, self.device)
            self.family.norm = final_norm(self.family)
        linear = layer_access or type(head) is torch.nn.Linear
        self._head = PrepackedLinear(head.weight, head.bias, self.prepack) if linear else head
        self.kernel_summary = describe(self.family.blocks, self._head)

    def _attention(self, attention: str | None) -> str:
        """Return the attention implementation; a model without layer access is first checked against HF."""
        if self.family.generic is None:
            return NAME
        if attention is None:
            base = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
            attention = check_against_hf(base, lambda small, attention: Target(small, attention=attention))
        for block in self.family.blocks:
            block.masks_itself = attention != "eager"
        return attention

    def _eos_ids(self) -> frozenset[int]:
        generation = getattr(self.model, "generation_config", None)
        eos = getattr(generation, "eos_token_id", None)
        eos = getattr(self.config, "eos_token_id", None) if eos is None else eos
        listed = eos if isinstance(eos, list) else [] if eos is None else [eos]
        if not all(isinstance(token, int) for token in listed):
            raise UserError(f"model {self.name!r} has the eos_token_id {str(eos):.40}, which is no token id")
        eos_ids = set(listed)
        if self.tokenizer is not None and self.tokenizer.eos_token_id is not None:
            eos_ids.add(self.tokenizer.eos_token_id)
        return frozenset(eos_ids)

    @property
    def quantised(self) -> str:
        """Return a description of the quantization of linear layers, or ''."""
        return self.quantization.description if self.quantization else ""

    @property
    def engine(self) -> str:
        """Return the engine's name as for `--engine`: eager or graph."""
        return "eager" if self.graphs is None else "graph"

    @property
    def no_graph_reason(self) -> str:
        """Return the reason why its layers cannot run as CUDA graphs, or ''."""
        if not self.has_layer_access:
            return "are called whole"
        return "have sliding windows" if any(self.windows) else ""

    @property
    def number_format(self) -> str:
        """Return the name of the number format as for `--dtype`."""
        return HALF_WEIGHTS if self.fp16_weights else str(self.dtype).removeprefix("torch.")

    @property
    def device_names(self) -> str:
        """Return the devices of all layers as for `--device`."""
        return ",".join(map(str, self.layer_devices))

    def to_target_dtype_device(self, module: Module, name: str) -> Module:
        """Return a drafter's module, frozen, on this device and in this number format (rounded for fp16 weights).

        name: of the method, for errors. Raises UserError for a weight outside the range of float16.
        """
        module = module.to(self.device, self.dtype).eval().requires_grad_(False)
        if self.fp16_weights:
            round_matrices(module, name)
        return module

    def with_model(self, model: Any, weights_hash: str) -> Target:
        """Return a target of another model with this one's tokenizer, name, number format, quantization and graphs.

        A quantized target quantizes the model in place (UserError if that fails). Warns if its layers do not support
        CUDA graphs.
        """
        parameter_count, quantization = (
            sum(p.numel() for p in model.parameters()),
            self.quantization and self.quantization.quantize(model),
        )
        other = Target(model, self.tokenizer, self.name, self.folder, fp16_weights=self.fp16_weights)
        other.parameter_count, other.quantization = parameter_count, quantization
        other.is_lab, other.bundled_drafters, other.weights_hash = self.is_lab, self.bundled_drafters, weights_hash
        other.processors, other.settings_not_applied = self.processors, self.settings_not_applied
        self.derived.add(other)
        other.inherit_cuda_graphs(self)
        return other

    def with_head(self, head: Callable[[Tensor], Tensor]) -> Target:
        """Return a target on the same weights with another LM head for inference: states [.., h] -> logits [.., n]."""
        other = copy.copy(self)
        other._head, other._cache, other.derived = head, None, WeakSet()
        other.graphs = self.graphs and self.graphs.draft_runner()
        return other

    def inherit_cuda_graphs(self, base: Target) -> None:
        """Use CUDA graphs if the model this one replaces does; warn if its layers do not support them."""
        if base.graphs is None:
            return
        if self.no_graph_reason:
            message = f"steps of a changed copy of {self.name!r} run eagerly: its layers "
            warnings.warn(message + self.no_graph_reason, stacklevel=3)
            return
        self.graphs, self.kernel_summary = base.graphs.new_runner(), base.kernel_summary

    # -- the layer driver ---------------------------------------------------------------------------------------

    def new_cache(self, capacity: int) -> Cache:
        """Return an empty cache with this many rows per layer."""
        return Cache(self.n_layers, capacity, joined=not self.is_multi_device)

    def request_cache(self, capacity: int, most: int = 0, grows: bool = False) -> Cache:
        """Return the target's reusable cache, emptied, with this many rows.

        most: up to so many rows a larger cache doubles. grows: allow more rows than those.
        """
        if self._cache is None:
            self._cache = self.new_cache(0)
        self._cache.grows = grows
        self._cache.set_limit(None)
        if self.graphs is None:
            self._cache.reserve(capacity, most)
        else:
            self.graphs.reserve(self._cache, capacity, most)
        return self._cache

    def drop_cache(self) -> None:
        """Free the target's reusable cache, as after an interrupted request."""
        self._cache = None
        if self.graphs is not None:
            self.graphs.evict()

    def _grow_rotary(self, length: int) -> None:
        assert self.family.rotary is not None
        like = self.model.get_input_embeddings().weight[:1, None]
        self._rotary = rotary_table(self.family.rotary, length, like)

    def rotary(self, positions: Tensor, longest: int | None = None) -> Rotary:
        """Return the position inputs of layers at positions [B, q]; longest: upper bound on the host, if known.

        With layer access: cos, sin [1 or B, q, head_dim]. Methods pass them on unchanged.
        """
        if self.family.generic is not None:
            return self.family.generic.arguments(positions)
        if self.family.rotary is None:
            return None
        self._reserve_rotary(self.context_length - 1 if longest is None else longest)
        assert self._rotary is not None
        return self._rotary[0][positions], self._rotary[1][positions]

    def _reserve_rotary(self, longest: int) -> None:
        """Make the table of rotary embeddings long enough for this position, if the context has it."""
        longest = min(longest, self.context_length - 1)
        if self._rotary is not None and longest >= (have := len(self._rotary[0])):
            self._grow_rotary(min(self.context_length, max(longest + 1, 2 * have)))

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Embed ids [B, q] at positions [B, q]; return [B, q, h]."""
        return self.family.embed(ids, positions)

    def run(
        self,
        x: Tensor,
        lo: int,
        hi: int,
        cache: Any,
        mask: Tensor | None,
        rotary: Rotary,
        wanted: tuple[int, ...] = (),
    ) -> tuple[Tensor, ...]:
        """Run x [B, q, h] through layers lo..hi-1; return the result and the inputs of the wanted layers (`inputs_of`).

        mask: additive [1 or B, 1, q, kv], None = nothing masked.
        """
        q, states = x.shape[1], list[torch.Tensor]()
        masks: dict[tuple[int, int], Tensor | None] = {}  # layers of the same window and length share a mask
        for i in range(lo, hi):
            if i in wanted:
                states.append(x)
            if self.is_multi_device:
                x = self.to_layer_device(x, i)
            block, layer_mask = self.family.blocks[i], mask
            if block.window is not None and cache is not None:
                key = (block.window, cache.get_seq_length(i))
                if key not in masks:
                    masks[key] = self.windowed(mask, block.window, q, cache, i)
                layer_mask = masks[key]
            x = block(x, cache, layer_mask, rotary)
        if hi in wanted:
            states.append(x)
        return tuple(map(self.to_layer_device, (x, *states))) if self.is_multi_device else (x, *states)

    def inputs_of(self, layers: Iterable[int], hi: int | None = None) -> tuple[int, ...]:
        """Return those of these layers whose inputs a pass through layers 0..hi-1 (None: all) has, ascending.

        The input of layer n_layers is that of the final norm.
        """
        most = self.n_layers if hi is None or hi == self.n_layers else hi - 1
        return tuple(sorted({i for i in layers if 0 <= i <= most}))

    def run_pass(
        self,
        name: tuple[Hashable, ...],
        function: Callable[..., tuple[Tensor, ...]],
        cache: Any,
        inputs: Sequence[Tensor],
        dims: Sequence[Sequence[int]] = (),
        n: int = 1,
        longest: int = 0,
        rows: int = 0,
    ) -> tuple[Tensor, ...]:
        """Run function(pass, *inputs), whose passes follow the cached rows, as one CUDA graph if enabled.

        longest: largest position, on the host. Other arguments: `CudaGraphRunner.run_pass`.
        """
        if self.graphs is not None:
            self._reserve_rotary(longest)
            table = 0 if self._rotary is None else len(self._rotary[0])  # it is replaced when it grows
            in_graph = partial(self._in_graph, function)
            outputs = self.graphs.run_pass((*name, table), in_graph, cache, inputs, dims, n, rows)
            if outputs is not None:
                return outputs
        return function(self.pass_type(self, cache, longest), *inputs)

    def _in_graph(
        self, function: Callable[..., tuple[Tensor, ...]], within: StaticPass, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        """Run the function within a graph."""
        return function(GraphPass(self, within), *inputs)

    def empty(self, cache: Cache, rows: int) -> None:
        """Empty a drafter's cache for the next request of up to `rows` rows.

        With CUDA graphs its memory is zeroed, since padded keys are read: NaN of the last request must not remain.
        """
        if self.graphs is None:
            cache.reserve(rows)
        else:
            self.graphs.reserve(cache, rows, zeroed=True)

    def to_layer_device(self, x: Tensor, layer: int | None = None) -> Tensor:
        """Move rows to the device of a layer, or to the main device for None."""
        if not self.is_multi_device:
            return x
        return to_device(x, self.device if layer is None else self.family.blocks[layer].device)

    def windowed(self, mask: Tensor | None, window: int | None, q: int, cache: AnyCache, layer: int) -> Tensor | None:
        """Return the mask with the layer's sliding window folded in, if the window matters.

        A query token sees the prefix and its ancestors, so its offset after the prefix is the number of visible new
        tokens minus one; keys `window` or more positions back are masked. mask [1, 1, q, past + q].
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
        offsets = (mask[0, 0, :, past:] == 0).sum(-1) - 1 + past  # [q]
        keys = torch.cat((torch.arange(past, device=mask.device), offsets))  # [past + q]
        return mask.masked_fill(offsets[:, None] - keys >= window, torch.finfo(self.dtype).min)

    @property
    def unembed(self) -> Tensor:
        """Return the LM head's weight, [V, h]."""
        weight: Tensor = self.family.head.weight
        return weight

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits [.., V] of final, normed states [.., h]."""
        if torch.is_inference_mode_enabled():
            prepacked: Tensor = self._head(x)
            return prepacked
        out: Tensor = self.family.head(x)
        return out

    def causal_mask(self, q: int, past: int) -> Tensor:
        """Return the additive mask [1, 1, q, past + q] of q new tokens in a chain after `past` tokens."""
        return self.block_mask(torch.ones(q, q, dtype=torch.bool, device=self.device).tril(), past)

    def block_mask(self, visible: Tensor, past: int) -> Tensor:
        """Return the additive mask [1, 1, q, past + k] of visible [q, k]; the whole prefix is visible."""
        mask = torch.zeros(1, 1, visible.shape[0], past + visible.shape[1], device=self.device, dtype=self.dtype)
        mask[0, 0, :, past:].masked_fill_(~visible, torch.finfo(self.dtype).min)
        return mask

    # -- whole passes -------------------------------------------------------------------------------------------

    def prefill(self, ids: Tensor, cache: Cache, aux_layers: Iterable[int] = (), every: bool = False) -> Output:
        """Run the prompt ids [1, S] after the cached tokens; logits and hidden states [1, 1, .] at the last position.

        every: hidden states [1, S, .] at every position.
        """
        q, past = ids.shape[1], cache.get_seq_length()
        if self.graphs is not None and past and q <= MOST_REPLAYED and not every:  # as of a draft model
            output = self.forward_tree(DraftTree(ids[0], topology_of(tuple(range(-1, q - 1)))), cache, aux_layers)
            cache.commit(q)
            last = {layer: t[:, -1:] for layer, t in output.hidden_states.items()}
            return Output(output.logits[:, -1:].clone(), None, last)
        current, wanted = self.pass_type(self, cache, past + q), self.inputs_of(aux_layers)
        positions = torch.arange(past, past + q, device=self.device)[None]
        mask = self.causal_mask(q, past) if past and q > 1 else None
        x, rotary = self.embed(ids, positions), current.rotary(positions)
        x, *states = current.run(x, 0, self.n_layers, mask, rotary, wanted)
        cache.commit(q)
        positions_kept = slice(None) if every else slice(-1, None)
        final = self.family.norm(x[:, positions_kept])
        aux_states = {layer: t[:, positions_kept] for layer, t in zip(wanted, states, strict=True)}
        return Output(self.logits(final[:, -1:]), None, aux_states | {FINAL: final})

    def forward_tree(
        self,
        tree: DraftTree,
        cache: Cache,
        aux_layers: Iterable[int] = (),
        extra_rows: Callable[[Tensor], Tensor] | None = None,
    ) -> Output:
        """Run the n nodes of a tree after the cached tokens; the cache keeps all rows until the loop compacts it.

        extra_rows: maps the final, normed states [n, h] to more rows [r, h], whose logits [r, V] become
        `Output.extra`: one LM-head matmul serves both.
        """
        wanted, with_logits = self.inputs_of(aux_layers), extra_rows is None
        nodes = (tree.tokens,) if len(tree) == 1 else (tree.tokens, *tree.visibility())
        final, logits, *states = self.run_pass(
            (0, self.n_layers, wanted, with_logits, len(nodes)),
            partial(self._tree_pass, wanted, with_logits),
            cache,
            nodes,
            ((0,), (0, 1), (0,))[: len(nodes)],
            len(tree),
            cache.get_seq_length() + tree.topology.deepest,
        )
        aux_states, extra = dict(zip(wanted, states, strict=True)) | {FINAL: final}, None
        if extra_rows is not None:
            logits = self.logits(torch.cat((final, extra_rows(final[0])[None]), 1))
            logits, extra = logits[:, : len(tree)], logits[0, len(tree) :]
        return Output(logits, tree, aux_states, extra=extra)

    def _tree_pass(
        self,
        wanted: tuple[int, ...],
        with_logits: bool,
        current: ForwardPass,
        tokens: Tensor,
        visible: Tensor | None = None,
        depths: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Return final states [1, n, h], logits (or final states again) and the inputs of the wanted layers.

        visible, depths: of the nodes; None for a root.
        """
        if visible is None or depths is None:
            depths, visible = self._root
        positions = current.positions(depths)
        x = self.embed(tokens[None], positions)
        x, *states = current.run(x, 0, self.n_layers, current.mask(visible), current.rotary(positions), wanted)
        final: Tensor = self.family.norm(x)
        return (final, self.logits(final) if with_logits else final, *states)

    def answer_logits(self, prompt: Sequence[int], answer: Sequence[int]) -> Iterator[Tensor]:
        """Yield float32 logits [n, V] at successive tokens of an answer, from one fresh, untimed pass.

        In chunks, since those of a long answer over a large vocabulary take much memory.
        """
        ids = torch.tensor([[*prompt, *answer[:-1]]], device=self.device)
        output = self.prefill(ids, self.new_cache(ids.shape[1]), every=True)
        states = output.hidden_states[FINAL][:, len(prompt) - 1 :]
        for part in states.split(max(1, MOST_LOGITS // self.vocab_size), dim=1):
            yield self.logits(part)[0].float()

    def next_logits(self, ids: Sequence[int], cache: Cache | None = None) -> Tensor:
        """Return float32 logits [V] after these ids, from a fresh, untimed pass. cache: an empty one to use."""
        with torch.inference_mode():
            cache = cache or self.new_cache(len(ids))
            return self.prefill(torch.tensor([list(ids)], device=self.device), cache).logits[0, -1].float()
