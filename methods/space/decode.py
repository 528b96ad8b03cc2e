"""SPACE: a model fine-tuned so that mask tokens behind any text predict how it goes on."""

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
        "Folder with the LoRA and the mask, or with a whole fine-tuned model. Empty: those that came with the model.",
    )
    mask_id: int = option(
        0,
        "Token that is the mask of a whole fine-tuned model (published: 32002). With `weights` empty: of "
        "the target itself, which is then the fine-tuned model. 0: there is none.",
    )
    k: int = option(0, "Candidates of a step. 0: as many as masks were trained (published: 5).")
    nodes: Annotated[int, Ge(0)] = option(0, "At most this many candidates, whatever `k` is. 0: no limit.")
    accept: Literal["exact", "resample"] = option(
        "exact",
        "Rule by which candidates are accepted. resample: after a refusal draw from the model's "
        "distribution, as published, which is lossy where tokens are sampled.",
    )


@dataclass(frozen=True, slots=True)
class SPACEAROptions:
    """Options of `space-ar`: which model it is."""

    weights: str = option("", "Folder as for `space`. Empty: the one that came with the model.")
    mask_id: int = option(0, "Token that is the mask of a whole fine-tuned model, as for `space`.")


class SPACE(FineTunedDecoder):
    """Masks behind the last accepted token draft the chain that the next pass verifies."""

    name = "space"
    summary = "SPACE: mask tokens behind every candidate draft the next ones; the model itself changes"
    paper = "Yi et al. 2024, arXiv:2402.11809"
    Options = SPACEOptions
    node_options = ("nodes", "k")
    own_reference = "space-ar"
    model_options = SPACEAROptions

    def __init__(self, target: Target, options: SPACEOptions, mask: MaskToken) -> None:
        super().__init__(target, options)
        self.k = self.resolve_options(options, mask)
        self.mask = target.to_target_dtype_device(mask, self.name)
        self.lossless = options.accept == "exact"
        self.masked = torch.empty(0)  # [k, h], final states of the masks behind the last accepted token
        self.q = torch.empty(0)  # [1 + k], of the candidates where they were drawn

    @classmethod
    def check(cls, options: Any, base: ModelInfo) -> None:
        mask = check_model(options, base)
        if mask is not None:
            cls.resolve_options(options, mask)

    @classmethod
    def check_own_model(cls, options: Any, base: ModelInfo) -> None:
        check_model(options, base)

    @classmethod
    def own_model(cls, target: Target, options: Any) -> Target:
        return load_model(options, target)[0]

    @classmethod
    def load(cls, target: Target, options: Any) -> SPACE:
        own, mask, trained = load_model(options, target)
        found = cls(own, options, mask)
        found.training_info = trained
        return found

    @staticmethod
    def resolve_options(options: SPACEOptions, mask: MaskToken) -> int:
        """Candidates a step. Raises UserError for more than were trained."""
        if not 0 <= options.k <= mask.masks:
            raise UserError(f"space: k must be 1 to {mask.masks}, or 0 for all, not {options.k}")
        k = options.k or mask.masks
        return min(k, options.nodes or k)

    @classmethod
    def test_instances(cls, target: Target) -> Mapping[str, Callable[[], Decoder]]:
        def made(k: int, accept: Literal["exact", "resample"] = "exact") -> Callable[[], Decoder]:
            mask = MaskToken(target.hidden_size, k, min(2, target.vocab_size - 1))
            torch.nn.init.normal_(mask.offset, std=0.3, generator=torch.Generator().manual_seed(k))
            return lambda: cls(target, SPACEOptions(accept=accept), mask)

        return {"default": made(MASKS), "two": made(2), "one": made(1), "resample": made(3, "resample")}

    @classmethod
    def baseline_for(cls, options: Any) -> MethodSpec:
        """The same model, one token a step: the target's own decoding where that is the model."""
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
        """Masks behind every row."""
        return ExtraWork(node=self.k * of_layers(self.target))

    # -- the loop's calls ---------------------------------------------------------------------------------------

    def prefill(self, state: DecodeState, ids: Tensor) -> Output:
        """The prompt, and masks behind its last token, in one causal pass."""
        target, s, k = self.target, ids.shape[1], self.k
        last = min(s + k, target.context_length) - 1
        positions = torch.arange(s + k, device=target.device).clamp_max(last)[None]
        x = self.mask.embed(target, ids, positions, k)
        x = target.run(x, 0, target.n_layers, state.cache, None, target.rotary(positions, last))
        state.cache.commit(s)
        final = target.family.norm(x[:, s - 1 :])
        self.masked = final[0, 1:]
        return Output(target.logits(final[:, :1]), None, {FINAL: final[:, :1]})

    def propose(self, state: DecodeState) -> DraftTree:
        """The masks' likeliest tokens as a chain; drawn ones for the published rule."""
        logits = self.target.logits(self.masked)  # [k, V]
        if self.lossless or state.sampling.greedy:
            return DraftTree.chain(state.root, logits.argmax(-1))
        q = state.sampling.probs(logits)
        drawn = sample_categorical(q, state.rng)  # [k, 1]
        self.q = torch.cat((q.new_ones(1), q.gather(1, drawn)[:, 0]))
        return DraftTree.chain(state.root, drawn[:, 0])

    def forward(self, state: DecodeState, tree: DraftTree) -> Output:
        """The chain, then every node's masks; of these rows only the chain's can stay in the cache."""
        target, past, n = self.target, state.cache.get_seq_length(), len(tree)
        shape = rows_of(n, self.k)
        visible, depths = visibility(shape, target.device)
        last = min(past + shape.depth, target.context_length - 1)
        positions = (depths + past).clamp_max(last)[None]
        x = self.mask.embed(target, tree.tokens[None], positions, n * self.k)
        rotary = target.rotary(positions, last)
        x = target.run(x, 0, target.n_layers, state.cache, target.block_mask(visible, past), rotary)
        final = target.family.norm(x[:, :n])
        return Output(target.logits(final), tree, {FINAL: final}, extra=x[0, n:].unflatten(0, (n, self.k)))

    def accept(self, state: DecodeState, tree: DraftTree, output: Output) -> VerifyResult:
        """Exactly the model's distribution, but by the published rule where that was asked for."""
        if self.lossless:
            return super().accept(state, tree, output)
        return accept_resampled(output.logits[0], tree, self.q[: len(tree)], state.sampling, state.rng)

    def update(self, state: DecodeState, verdict: VerifyResult, output: Output) -> None:
        """Only the masks behind the last accepted token draft the next chain."""
        assert output.extra is not None
        self.masked = self.target.family.norm(output.extra[verdict.path[-1]])


class SPACEAutoregressive(FineTunedAutoregressive):
    """One token a step of the model of `space`."""

    name = "space-ar"
    summary = "autoregressive decoding of the model of space: its reference"
    Options = SPACEAROptions
    of = SPACE
