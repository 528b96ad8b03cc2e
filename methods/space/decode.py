"""SPACE: a model fine-tuned so that mask tokens after any text predict its next tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge
from torch import Tensor

from specbench_ss.engine.architectures import ModelInfo
from specbench_ss.engine.costs import ExtraWork, of_layers
from specbench_ss.engine.decoder import Decoder, DecodeState
from specbench_ss.engine.forward import ForwardPass
from specbench_ss.engine.sampling import sample_categorical
from specbench_ss.engine.target import FINAL, Output, Target
from specbench_ss.engine.tree import DraftTree, visibility
from specbench_ss.engine.verify import VerifyResult
from specbench_ss.errors import UserError
from specbench_ss.methods._shared.fine_tuned import FineTunedAutoregressive, FineTunedDecoder
from specbench_ss.methods._shared.lossy_acceptance import accept_resampled
from specbench_ss.methods.space.model import MASKS, MaskToken, check_model, is_target, load_model, rows_of
from specbench_ss.models.load import hash_weights
from specbench_ss.options import MethodSpec, option


@dataclass(frozen=True, slots=True)
class SPACEOptions:
    """Options of `space`."""

    weights: str = option(
        "",
        "Folder with the LoRA and the mask, or with a whole fine-tuned model. Empty: those bundled with the model.",
    )
    mask_id: int = option(
        0,
        "Mask token of a whole fine-tuned model (published: 32002). With `weights` empty: of the target, "
        "which is then the fine-tuned model. 0: none.",
    )
    k: int = option(0, "Drafted tokens per step. 0: the number of trained masks (published: 5).")
    nodes: Annotated[int, Ge(0)] = option(0, "Maximum number of drafted tokens per step. 0: no limit.")
    accept: Literal["exact", "resample"] = option(
        "exact",
        "Acceptance rule. resample: after a rejection sample from the model's distribution, as published, "
        "which is lossy when sampling.",
    )


@dataclass(frozen=True, slots=True)
class SPACEAROptions:
    """Options of `space-ar`."""

    weights: str = option("", "Folder as for `space`. Empty: the one bundled with the model.")
    mask_id: int = option(0, "Mask token of a whole fine-tuned model, as for `space`.")


class SPACE(FineTunedDecoder):
    """SPACE decoder: masks after the last accepted token draft the chain that the next pass verifies."""

    name = "space"
    summary = "SPACE: mask tokens behind every candidate draft the next ones; the model itself changes"
    paper = "Yi et al. 2024, arXiv:2402.11809"
    Options = SPACEOptions
    node_options = ("nodes", "k")
    baseline_name = "space-ar"
    baseline_options = SPACEAROptions

    def __init__(self, target: Target, options: SPACEOptions, mask: MaskToken) -> None:
        super().__init__(target, options)
        self.k = self.resolve_options(options, mask)
        self.mask = target.to_target_dtype_device(mask, self.name)
        self.lossless = options.accept == "exact"
        self.mask_states = torch.empty(0)  # [k, h], final states of the masks after the last accepted token
        self.q = torch.empty(0)  # [1 + k], probabilities of sampled candidates

    @classmethod
    def check(cls, options: Any, base: ModelInfo) -> None:
        mask = check_model(options, base)
        if mask is not None:
            cls.resolve_options(options, mask)

    @classmethod
    def load(cls, target: Target, options: Any) -> SPACE:
        model, mask, training_info = load_model(options, target)
        decoder = cls(model, options, mask)
        decoder.training_info = training_info
        return decoder

    @staticmethod
    def resolve_options(options: SPACEOptions, mask: MaskToken) -> int:
        """Return the number of drafted tokens per step. Raise UserError if it exceeds the trained number."""
        if not 0 <= options.k <= mask.masks:
            raise UserError(f"space: k must be 1 to {mask.masks}, or 0 for all, not {options.k}")
        k = options.k or mask.masks
        return min(k, options.nodes or k)

    @classmethod
    def test_instances(cls, target: Target) -> Mapping[str, Callable[[], Decoder]]:
        def build(k: int, accept: Literal["exact", "resample"] = "exact") -> Callable[[], Decoder]:
            mask = MaskToken(target.hidden_size, k, min(2, target.vocab_size - 1))
            torch.nn.init.normal_(mask.offset, std=0.3, generator=torch.Generator().manual_seed(k))
            return lambda: cls(target, SPACEOptions(accept=accept), mask)

        return {"default": build(MASKS), "two": build(2), "one": build(1), "resample": build(3, "resample")}

    @classmethod
    def baseline_for(cls, options: Any) -> MethodSpec:
        """Return autoregressive decoding of the same model, which may be the target's own."""
        return Decoder.baseline_for(options) if is_target(options) else super().baseline_for(options)

    def metadata(self) -> dict[str, Any]:
        mask = {"masks": self.mask.masks, "mask_id": self.mask.mask_id, "mask_hash": hash_weights(self.mask)}
        return {"k": self.k, "accept": self.options.accept, **mask, "model_hash": self.target.weights_hash}

    def search_space(self) -> Mapping[str, Sequence[Any]]:
        return {"k": range(1, self.mask.masks + 1)}

    def with_options(self, options: Any) -> SPACE:
        return type(self)(self.target, options, self.mask)

    def max_tokens_per_step(self) -> int:
        return (self.k + 1) ** 2

    def extra_work(self) -> ExtraWork:
        """Return the FLOPs of the masks after every node."""
        return ExtraWork(node=self.k * of_layers(self.target))

    # -- decoding -----------------------------------------------------------------------------------------------

    def prefill(self, state: DecodeState, ids: Tensor) -> Output:
        """Run the prompt and masks after its last token in one causal pass."""
        target, s, k = self.target, ids.shape[1], self.k
        last = min(s + k, target.context_length) - 1
        positions = torch.arange(s + k, device=target.device).clamp_max(last)[None]
        x = self.mask.embed(target, ids, positions, k)
        current = target.pass_type(target, state.cache, last)
        (x,) = current.run(x, 0, target.n_layers, None, current.rotary(positions))
        state.cache.commit(s)
        final = target.family.norm(x[:, s - 1 :])
        self.mask_states = final[0, 1:]
        return Output(target.logits(final[:, :1]), None, {FINAL: final[:, :1]})

    def propose(self, state: DecodeState) -> DraftTree:
        """Draft a chain of the masks' likeliest tokens, or of sampled ones for the published rule."""
        logits = self.target.logits(self.mask_states)  # [k, V]
        if self.lossless or state.sampling.greedy:
            return DraftTree.chain(state.root, logits.argmax(-1))
        q = state.sampling.probs(logits)
        sampled = sample_categorical(q, state.rng)  # [k, 1]
        self.q = torch.cat((q.new_ones(1), q.gather(1, sampled)[:, 0]))
        return DraftTree.chain(state.root, sampled[:, 0])

    def forward(self, state: DecodeState, tree: DraftTree) -> Output:
        """Verify the chain with every node's masks after it; only the chain can stay in the cache."""
        n, cache = len(tree), state.cache
        last = min(cache.get_seq_length() + rows_of(n, self.k).depth, self.target.context_length - 1)
        rows = n * (1 + self.k)
        logits, final, masks = self.target.run_pass(
            (self, n), self._pass, cache, (tree.tokens,), longest=last, rows=rows
        )
        return Output(logits, tree, {FINAL: final}, extra=masks)

    def _pass(self, current: ForwardPass, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits [1, n, V] and final states [1, n, h] of a chain's tokens [n], and states of masks [n, k, h]."""
        target, n = self.target, len(tokens)
        visible, depths = visibility(rows_of(n, self.k), target.device)
        positions = current.positions(depths).clamp_max(target.context_length - 1)
        x = self.mask.embed(target, tokens[None], positions, n * self.k)
        (x,) = current.run(x, 0, target.n_layers, current.mask(visible), current.rotary(positions))
        final = target.family.norm(x[:, :n])
        return target.logits(final), final, x[0, n:].unflatten(0, (n, self.k))

    def accept(self, state: DecodeState, tree: DraftTree, output: Output) -> VerifyResult:
        """Verify exactly, or by the published rule if requested."""
        if self.lossless:
            return super().accept(state, tree, output)
        return accept_resampled(output.logits[0], tree, self.q[: len(tree)], state.sampling, state.rng)

    def update(self, state: DecodeState, result: VerifyResult, output: Output) -> None:
        """Keep the states of the masks after the last accepted token."""
        assert output.extra is not None
        self.mask_states = self.target.family.norm(output.extra[result.path[-1]])


class SPACEAutoregressive(FineTunedAutoregressive):
    """Autoregressive decoding with the model of `space`."""

    name = "space-ar"
    summary = "autoregressive decoding of the model of space: its reference"
    Options = SPACEAROptions

    @classmethod
    def check(cls, options: Any, base: ModelInfo) -> None:
        check_model(options, base)

    @classmethod
    def load(cls, target: Target, options: Any) -> Decoder:
        return cls(load_model(options, target)[0], options)
