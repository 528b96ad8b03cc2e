"""Shared mode of Speculative Streaming: a LoRA is trained with the streams."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from specbench_ss.engine.architectures import ModelInfo
from specbench_ss.engine.costs import ExtraWork
from specbench_ss.engine.decoder import Decoder, DecodeState
from specbench_ss.engine.kv_cache import Cache
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.target import MOST_LOGITS, Output, Target
from specbench_ss.engine.tree import DraftTree
from specbench_ss.methods._shared.drafting import VOCABULARY, Read
from specbench_ss.methods._shared.fine_tuned import FineTunedDecoder, check_lora, fine_tuned, merged_target
from specbench_ss.methods.ss.config import SharedAROptions, SSOptions, StreamConfig
from specbench_ss.methods.ss.decode import Forms, SpeculativeStreaming
from specbench_ss.methods.ss.layers import Streams
from specbench_ss.options import MethodSpec

MOST_TOKENS = 256  # of an answer in one pass with streams
SHARED = StreamConfig(gamma=3, n_msa_layers=2, adapter_rank=0, mode="shared", lora_rank=4)
ATTENDING = replace(SHARED, main_attends_streams=True)


class SharedStreaming(FineTunedDecoder, SpeculativeStreaming):
    """Streaming in the fine-tuned model; main rows and streams share its LoRA. Under eq. 3 streams affect the model."""

    name = "ss-shared"
    summary = "Speculative Streaming, shared: LoRA and streams trained together; the model itself changes"
    bundled_folder = "ss-shared"
    mode = "shared"
    baseline_name = "ss-shared-ar"
    baseline_options = SharedAROptions
    # without gamma, which under eq. 3 is part of the model
    advisable: ClassVar[tuple[str, ...]] = ("k", "n_draft", "n_keep", "prune", VOCABULARY)
    forms: ClassVar[Forms] = {
        "eq-3": (ATTENDING, {"k": 2, "n_keep": 6}),
        "tree": (SHARED, {"k": 2, "n_keep": 6}),
        "chain": (SHARED, {"mode": "chain"}),
        "eq-3-chain": (ATTENDING, {"mode": "chain", "gamma": 2}),
    }
    restricted: ClassVar[tuple[str, ...]] = ("tree",)

    def search_space(self) -> Mapping[str, Sequence[Any]]:
        """Return the search space of `ss`, without gamma under eq. 3, where it is part of the model."""
        space = dict(super().search_space())
        if self.drafter.config.main_attends_streams:
            space.pop("gamma", None)
        return space

    def next_logits(self, prompt: Sequence[int], answer: Sequence[int], cache: Cache | None = None) -> Tensor:
        """Return the next logits as in decoding: streams at answer rows and at the last prompt row only."""
        if not self.drafter.config.main_attends_streams:
            return super().next_logits(prompt, answer, cache)
        return self._fresh(prompt, answer, cache)[-1].float()

    def answer_logits(self, prompt: Sequence[int], answer: Sequence[int]) -> Iterator[Tensor]:
        """Yield the logits at successive tokens of an answer; of a long answer at its first tokens."""
        if not self.drafter.config.main_attends_streams:
            yield from self.target.answer_logits(prompt, answer)
            return
        most = max(1, min(MOST_TOKENS, MOST_LOGITS // self.target.vocab_size))
        yield self._fresh(prompt, answer[: min(most, len(answer)) - 1]).float()

    def _fresh(self, prompt: Sequence[int], answer: Sequence[int], cache: Cache | None = None) -> Tensor:
        """Return logits [len(answer) + 1, V] after the prompt and after each token of the answer."""
        s, device = self.settings, self.target.device
        options = SSOptions(gamma=s.gamma, k=1, prune="off", stream_attention_top_p=s.top_p)
        unpruned = SharedStreaming(self.target, options, self.drafter, self.config, self.conditioning)
        cache = cache or self.target.new_cache(len(prompt) + (len(answer) + 1) * (1 + s.gamma))
        state = DecodeState([*prompt, *answer], len(prompt), torch.empty(0), cache, SamplingParams())
        first = unpruned.prefill(state, torch.tensor([list(prompt)], device=device)).logits[0, -1:]
        if not answer:
            return first
        tokens = torch.tensor(list(answer), device=device)
        return torch.cat((first, unpruned.forward(state, DraftTree.chain(tokens[:1], tokens[1:])).logits[0]))

    @classmethod
    def example_model(cls, target: Target) -> Target:
        """Return a model other than the target."""
        return fine_tuned(target)

    @classmethod
    def read(cls, options: Any, path: Path, base: ModelInfo, read: Read) -> tuple[Streams, dict[str, Any]]:
        streams, config = super().read(options, path, base, read)
        check_lora(path, "ss-shared")
        return streams, config

    @classmethod
    def drafted_model(cls, target: Target, path: Path) -> Target:
        return merged_target(target, path, "ss-shared")


class SharedAutoregressive(SharedStreaming):
    """Autoregressive decoding with the model of `ss-shared`; under eq. 3 its streams run too, but draft nothing."""

    name = "ss-shared-ar"
    summary = "autoregressive decoding of the model of ss-shared, with its streams under eq. 3: its reference"
    autoregressive = True
    lossless = False
    Options = SharedAROptions
    advisable = node_options = ()
    forms: ClassVar[Forms] = {"eq-3": (ATTENDING, {}), "plain": (SHARED, {})}
    restricted = ()
    most_fused = 0  # nothing is drafted

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.attending = self.drafter.config.main_attends_streams

    @classmethod
    def baseline_for(cls, options: Any) -> MethodSpec:
        """Return the default baseline: the method is itself the baseline of `ss-shared`."""
        return Decoder.baseline_for(options)

    def search_space(self) -> Mapping[str, Sequence[Any]]:
        return {}

    def max_tokens_per_step(self) -> int:
        return 1 + (self.gamma if self.attending else 0)

    def extra_work(self) -> ExtraWork:
        """Return the FLOPs of the streams under eq. 3."""
        return ExtraWork(node=self.stream_work() if self.attending else 0)

    def prefill(self, state: DecodeState, ids: Tensor) -> Output:
        return super().prefill(state, ids) if self.attending else Decoder.prefill(self, state, ids)

    def propose(self, state: DecodeState) -> DraftTree:
        return DraftTree.root_only(state.root)

    def forward(self, state: DecodeState, tree: DraftTree) -> Output:
        return super().forward(state, tree) if self.attending else Decoder.forward(self, state, tree)

    def update(self, state: DecodeState, result: Any, output: Output) -> None:
        """Keep no state."""
