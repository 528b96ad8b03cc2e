"""SPACE: a model fine-tuned so that mask tokens behind any text predict how it goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from specbench_ss.engine.architectures import Outline
from specbench_ss.engine.costs import OwnWork, of_layers
from specbench_ss.engine.decoder import Decoder, State
from specbench_ss.engine.sampling import sample_categorical
from specbench_ss.engine.target import FINAL, Output, Target
from specbench_ss.engine.tree import DraftTree, visibility
from specbench_ss.engine.verify import Verdict
from specbench_ss.errors import UserError
from specbench_ss.methods._shared.fine_tuned import OwnAutoregressive, OwnModel
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


class SPACE(OwnModel):
    """Masks behind the last accepted token draft the chain that the next pass verifies."""

    name = "space"
    summary = "SPACE: mask tokens behind every candidate draft the next ones; the model itself changes"
    paper = "Yi et al. 2024, arXiv:2402.11809"
    Options = SPACEOptions
    own_reference = "space-ar"
    model_options = SPACEAROptions

    def __init__(self, target: Target, options: SPACEOptions, mask: MaskToken) -> None:
        super().__init__(target, options)
        self.k = self.settle(options, mask)
        self.mask = target.adopt(mask, self.name)
        self.lossless = options.accept == "exact"
        self.masked = torch.empty(0)  # [k, h], final states of the masks behind the last accepted token
        self.q = torch.empty(0)  # [1 + k], of the candidates where they were drawn

    @classmethod
    def check(cls, options: Any, base: Outline) -> None:
        mask = check_model(options, base)
        if mask is not None:
            cls.settle(options, mask)

    @classmethod
    def check_own_model(cls, options: Any, base: Outline) -> None:
        check_model(options, base)

    @classmethod
    def own_model(cls, target: Target, options: Any) -> Target:
        return load_model(options, target)[0]

    @classmethod
    def load(cls, target: Target, options: Any) -> SPACE:
        own, mask, trained = load_model(options, target)
        found = cls(own, options, mask)
        found.learnt = trained
        return found

    @staticmethod
    def settle(options: SPACEOptions, mask: MaskToken) -> int:
        """Candidates a step. Raises UserError for more than were trained."""
        if not 0 <= options.k <= mask.masks:
            raise UserError(f"space: k must be 1 to {mask.masks}, or 0 for all, not {options.k}")
        return options.k or mask.masks

    @classmethod
    def examples(cls, target: Target) -> Mapping[str, Callable[[], Decoder]]:
        def made(k: int, accept: Literal["exact", "resample"] = "exact") -> Callable[[], Decoder]:
            mask = MaskToken(target.hidden_size, k, min(2, target.vocab_size - 1))
            torch.nn.init.normal_(mask.offset, std=0.3, generator=torch.Generator().manual_seed(k))
            return lambda: cls(target, SPACEOptions(accept=accept), mask)

        return {"default": made(MASKS), "two": made(2), "one": made(1), "resample": made(3, "resample")}

    @classmethod
    def reference_for(cls, options: Any) -> MethodSpec:
        """The same model, one token a step: the target's own decoding where that is the model."""
        return Decoder.reference_for(options) if is_target(options) else super().reference_for(options)

    def described(self) -> dict[str, Any]:
        mask = {"masks": self.mask.masks, "mask_id": self.mask.mask_id, "mask_hash": hash_weights(self.mask)}
        return {"k": self.k, "accept": self.options.accept, **mask, "model_hash": self.target.weights_hash}

    def tunable(self) -> Mapping[str, Sequence[Any]]:
        return {"k": range(1, self.mask.masks + 1)}

    def variant(self, options: Any) -> SPACE:
        return type(self)(self.target, options, self.mask)

    def max_rows(self) -> int:
        return (self.k + 1) ** 2

    def own_work(self) -> OwnWork:
        """Masks behind every row."""
        return OwnWork(node=self.k * of_layers(self.target))

    # -- the loop's calls ---------------------------------------------------------------------------------------

    def prefill(self, state: State, ids: Tensor) -> Output:
        """The prompt, and masks behind its last token, in one causal pass."""
        target, s, k = self.target, ids.shape[1], self.k
        last = min(s + k, target.context_length) - 1
        positions = torch.arange(s + k, device=target.device).clamp_max(last)[None]
        x = self.mask.embed(target, ids, positions, k)
        x = target.run(x, 0, target.n_layers, state.cache, None, target.rotary(positions, last))
        state.cache.advance(s)
        final = target.family.norm(x[:, s - 1 :])
        self.masked = final[0, 1:]
        return Output(target.logits(final[:, :1]), None, {FINAL: final[:, :1]})

    def propose(self, state: State) -> DraftTree:
        """The masks' likeliest tokens as a chain; drawn ones for the published rule."""
        logits = self.target.logits(self.masked)  # [k, V]
        if self.lossless or state.sampling.greedy:
            return DraftTree.chain(state.root, logits.argmax(-1))
        q = state.sampling.probs(logits)
        drawn = sample_categorical(q, state.rng)  # [k, 1]
        self.q = torch.cat((q.new_ones(1), q.gather(1, drawn)[:, 0]))
        return DraftTree.chain(state.root, drawn[:, 0])

    def forward(self, state: State, tree: DraftTree) -> Output:
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

    def accept(self, state: State, tree: DraftTree, output: Output) -> Verdict:
        """Exactly the model's distribution, but by the published rule where that was asked for."""
        if self.lossless:
            return super().accept(state, tree, output)
        return accept_resampled(output.logits[0], tree, self.q[: len(tree)], state.sampling, state.rng)

    def observe(self, state: State, verdict: Verdict, output: Output) -> None:
        """Only the masks behind the last accepted token draft the next chain."""
        assert output.extra is not None
        self.masked = self.target.family.norm(output.extra[verdict.path[-1]])


class SPACEAutoregressive(OwnAutoregressive):
    """One token a step of the model of `space`."""

    name = "space-ar"
    summary = "autoregressive decoding of the model of space: its reference"
    Options = SPACEAROptions
    of = SPACE
