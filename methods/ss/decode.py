"""Speculative Streaming: one fused pass verifies the last draft and drafts the next."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self, cast

import msgspec
import torch
from torch import Tensor

from specbench_ss import user_files
from specbench_ss.engine.architectures import ModelInfo
from specbench_ss.engine.costs import ExtraWork, of_attention, of_layers
from specbench_ss.engine.decoder import Decoder, DecodeState
from specbench_ss.engine.target import FINAL, Output, Target
from specbench_ss.engine.tree import DraftTree
from specbench_ss.engine.verify import VerifyResult
from specbench_ss.errors import UserError
from specbench_ss.methods._shared.heads import MOST_FUSED
from specbench_ss.methods.ss.config import Settings, SSOptions, StreamConfig, check_trained, full_size, resolve
from specbench_ss.methods.ss.layers import Layout, StreamConditioning, Streams, stream_positions, stream_visibility
from specbench_ss.methods.ss.tree import conditioned_tree, draft_tree, drawn_tree, nodes_to_score, prune
from specbench_ss.models import checkpoint
from specbench_ss.models.checkpoint import KEY, Advice
from specbench_ss.models.load import hash_weights
from specbench_ss.models.tiny import randomise
from specbench_ss.options import value_text

NODES = (4, 6, 8, 12, 16, 24, 32, 48, 64)  # drafted, or kept: one step is about a third more
CANDIDATES = (1, 2, 3, 4, 6)
MOST_NODES = 128  # of a tree drafted whole: larger ones have never paid at batch 1
WEIGHTS = "model.safetensors"
LEARNT = ("root", "parent")  # of the streams: which of the folders beside a model has them
TWO_LAYERS = StreamConfig(gamma=3, n_msa_layers=2, init_rank=2)
ROTATED = StreamConfig(gamma=3, n_msa_layers=2, adapter_rank=0, stream_init="rotation", rotation_step=0.4)
ROOTED = StreamConfig(gamma=3, n_msa_layers=2, root_rank=4)
CONDITIONED = StreamConfig(gamma=3, n_msa_layers=2, root_rank=4, parent_rank=4)
SAME_POSITION = StreamConfig(gamma=3, n_msa_layers=2, stream_position="same")
BESIDE_MLP = StreamConfig(gamma=3, n_msa_layers=2, keep_mlp=True)
EARLY_PRUNING = StreamConfig(gamma=2, n_msa_layers=1, prune_layer=1)
Forms = Mapping[str, tuple[StreamConfig, Mapping[str, Any]]]


class _Config(msgspec.Struct):
    """The part of config.json about streams."""

    streams: StreamConfig


class SpeculativeStreaming(Decoder):
    """gamma streams beside every verified node predict the gamma tokens after the next one."""

    name = "ss"
    summary = "Speculative Streaming, lossless: streams in the frozen base, tree, pruning, fused pass"
    paper = "Bhendawade et al., arXiv:2402.11131 and ACL"
    Options: ClassVar[type[Any]] = SSOptions
    companion: ClassVar[str] = "ss"  # the method whose folder beside a model has the weights
    mode: ClassVar[str] = "lossless"
    most_fused: ClassVar[int] = MOST_FUSED
    advisable: ClassVar[tuple[str, ...]] = ("k", "n_draft", "n_keep", "prune", "gamma", *LEARNT)
    node_options = ("n_draft", "n_keep")
    forms: ClassVar[Forms] = {  # trees, chains, pruning early and late, and the ways in which streams begin and attend
        "tree": (TWO_LAYERS, {"k": 2, "n_keep": 6}),
        "unpruned": (TWO_LAYERS, {"k": 2, "prune": "off"}),
        "chain": (TWO_LAYERS, {"mode": "chain"}),
        "best-nodes": (TWO_LAYERS, {"k": 3, "n_draft": 9, "n_keep": 5}),
        "threshold": (TWO_LAYERS, {"k": 2, "prune_threshold": 0.05}),
        "one-kept": (TWO_LAYERS, {"k": 2, "n_keep": 1}),
        "early-pruning": (EARLY_PRUNING, {"k": 3, "n_keep": 4}),
        "rotation": (ROTATED, {"k": 2, "n_keep": 6}),
        "top-p": (TWO_LAYERS, {"k": 2, "n_keep": 6, "stream_attention_top_p": 3}),
        "root": (ROOTED, {"k": 2, "n_keep": 6}),
        "root-chain": (ROOTED, {"mode": "chain", "gamma": 2}),
        "parent": (CONDITIONED, {"k": 3, "n_draft": 9, "n_keep": 6}),
        "parent-chain": (CONDITIONED, {"mode": "chain", "gamma": 2}),
        "same-position": (SAME_POSITION, {"k": 2, "n_keep": 6}),
        "beside-mlp": (BESIDE_MLP, {"k": 2, "n_keep": 6}),
        "fewer-streams": (TWO_LAYERS, {"gamma": 1, "k": 3}),
        "drawn": (TWO_LAYERS, {"k": 3, "n_draft": 9, "n_keep": 5, "sample": "on"}),
    }

    def __init__(self, target: Target, options: SSOptions, streams: Streams, advice: Advice | None = None) -> None:
        super().__init__(target, options)
        target.require_layer_access(self.name)
        self.lo = streams.config.check_layers(target.n_layers, self.name)
        self.settings = self.resolve_options(options, streams.config, target)
        self.advice = advice or Advice()  # of the folder, for variants
        self.streams = target.to_target_dtype_device(streams, self.name)
        self.gamma = self.settings.gamma
        self.next_streams = torch.empty(0)  # [gamma, h], final stream states at the last accepted node
        self.fuses = self.settings.most_rows() <= self.most_fused  # whether verified rows and streams share the LM head
        self.maps = StreamConditioning(target, self.streams)
        self._fused: Tensor | None = None  # [m, gamma, V], what the step at hand made of its streams; None = nothing
        self._ahead: Tensor | None = None  # [gamma, V], of next_streams without their root; None = not made yet

    @classmethod
    def check(cls, options: Any, base: ModelInfo) -> None:
        base.require_layer_access(cls.name)
        options, _ = cls.with_kind(options, base)
        folder = checkpoint.drafter_here(options.weights, cls.name, base, cls.companion_of(options))
        if folder is None:
            return
        config, shape = cls.read_shape(folder)
        for token, rank in (("root", shape.root_rank), ("parent", shape.parent_rank)):
            if rank:
                base.require_hidden_eq_embedding(f"{cls.name}[{token}=on]")
        with torch.device("meta"):
            cls.read_streams(folder, shape, base, checkpoint.read_shapes)
        options, _ = cls.advice_of(folder, config).settle(options, base.device_type, without=LEARNT)
        cls.resolve_options(cls.step_options(options), shape, base)

    @classmethod
    def load(cls, target: Target, options: Any) -> SpeculativeStreaming:
        """Streams from the folder that the user named, or those that came with the model."""
        options, kind = cls.with_kind(options, target)
        folder = checkpoint.drafter_folder(options.weights, cls.name, target, cls.companion_of(options))
        config, shape = cls.read_shape(folder)
        checkpoint.check_base(config, target, cls.name)
        streams = cls.read_streams(folder, shape, target, checkpoint.read_tensors)
        advice = cls.advice_of(folder, config)
        options, advised = advice.settle(options, target.device_type, without=LEARNT)
        found = cls(cls.model_of(target, folder), options, streams, advice)
        found.training_info, found.advised = checkpoint.read_training_info(config), kind | advised
        found.maps.prepare()
        return found

    @classmethod
    def with_nodes(cls, given: Mapping[str, str], nodes: int) -> dict[str, str]:
        """Return the options with so many drafted nodes, none of which is pruned unless `n_keep` is given."""
        return {"n_keep": str(nodes + 1), **super().with_nodes(given, nodes)}

    @classmethod
    def test_instances(cls, target: Target) -> Mapping[str, Callable[[], Decoder]]:
        """Return random streams in every form; sliding windows do not have eq. 3."""
        model = cls.example_model(target)

        def make(config: StreamConfig, options: Mapping[str, Any]) -> Decoder:
            return cls(model, cls.Options(**options), random_streams(model, config))

        forms = {n: f for n, f in cls.forms.items() if not (f[0].main_attends_streams and any(target.windows))}
        return {name: partial(make, *form) for name, form in forms.items()}

    @classmethod
    def example_model(cls, target: Target) -> Target:
        """Return the model that examples decode with."""
        return target

    @classmethod
    def companion_of(cls, options: Any) -> str:
        """The folder beside a model that has the weights: lossless streams that learn more have their own."""
        if cls.mode != "lossless" or "on" not in (options.root, options.parent):
            return cls.companion
        return "ss-parent" if options.parent == "on" else "ss-root"

    @classmethod
    def with_kind(cls, options: Any, base: ModelInfo) -> tuple[Any, dict[str, Any]]:
        """Return the options with `root` and `parent` as advised, and those of them that were taken.

        They name one folder beside the model, so that advice on both is left aside where either is stated, or weights.
        """
        beside = base.bundled_drafter(cls.companion)
        stated = options.weights or any(getattr(options, name, "auto") != "auto" for name in LEARNT)
        if beside is None or stated or not set(LEARNT) & set(cls.advisable):
            return options, {}
        others = [name for name in cls.advisable if name not in LEARNT]
        return cls.advice_of(beside, checkpoint.read_config(beside)).settle(options, base.device_type, without=others)

    @classmethod
    def advice_of(cls, folder: Path, config: Mapping[str, Any]) -> Advice:
        """Return the advice of a folder. Raises UserError for options that it may not advise."""
        others = SpeculativeStreaming.advisable
        return checkpoint.read_advice(
            config.get(KEY), cls.Options, cls.advisable, cls.name, folder / "config.json", others
        )

    @classmethod
    def model_of(cls, target: Target, folder: Path) -> Target:
        """The model that these streams decode with."""
        return target

    @classmethod
    def step_options(cls, options: Any) -> SSOptions:
        """The method's options as those of a step."""
        return cast("SSOptions", options)

    @classmethod
    def resolve_options(cls, options: SSOptions, config: StreamConfig, base: ModelInfo) -> Settings:
        """What a step does. Raises UserError where that cannot be."""
        lo = config.check_layers(base.n_layers, cls.name)
        check_trained(options, config, cls.name)
        settings = resolve(options, config, base, cls.name)
        if config.main_attends_streams and any(base.windows[lo:]):
            raise UserError(f"{cls.name}: main_attends_streams is not defined for layers with a sliding window")
        return settings

    @classmethod
    def read_shape(cls, folder: Path) -> tuple[dict[str, Any], StreamConfig]:
        """config.json of a folder, and the streams it describes. Raises UserError where it describes none of ours."""
        config, file = checkpoint.read_config(folder), folder / "config.json"
        try:
            user_files.convert(config, _Config)
            shape = StreamConfig(**config["streams"])
        except (ValueError, TypeError) as error:  # TypeError: a key of another version
            raise UserError(f"{cls.name}: {file} does not describe streams: {error}") from None
        if shape.mode != cls.mode:
            other = "ss" if shape.mode == "lossless" else "ss-shared"
            raise UserError(f"{cls.name}: the streams in {folder} are of mode {shape.mode}: use {other}")
        return config, shape

    @classmethod
    def read_streams(
        cls, folder: Path, shape: StreamConfig, base: ModelInfo, read: Callable[[Path], dict[str, Tensor]]
    ) -> Streams:
        """The streams of a folder. Raises UserError where they are damaged or of another base."""
        streams = Streams(shape, base.hidden_size)
        file = folder / WEIGHTS
        checkpoint.load_into(streams, {k: v.float() for k, v in read(file).items()}, f"{cls.name}: {file}")
        return streams

    def metadata(self) -> dict[str, Any]:
        s = self.settings
        switches = {"prune": value_text(s.prune), "sample": value_text(s.sample)}
        return (
            asdict(s)
            | switches
            | {"streams": self.streams.config.as_dict(), "streams_hash": hash_weights(self.streams)}
        )

    def search_space(self) -> Mapping[str, Sequence[Any]]:
        """The size and the form of the tree; of a chain its length alone."""
        s, gammas = self.settings, range(1, self.streams.config.gamma + 1)
        if self.options.mode == "chain":
            return {"gamma": gammas}
        full = full_size(s.gamma, s.k)
        nodes = 1 + (min(s.n_draft, full) or full)
        found: dict[str, Sequence[Any]] = {
            "n_draft": [n for n in NODES if n < full] + [0] * (full <= MOST_NODES),
            "gamma": gammas,
            "k": [n for n in CANDIDATES if s.n_draft or full_size(s.gamma, n) <= MOST_NODES],
        }
        if nodes > min(s.n_keep, max(NODES)):  # else pruning finds nothing to do
            found["prune"] = ("off", "on")
        if s.prune:
            found["n_keep"] = [n for n in NODES if n < nodes]
        return found

    def with_options(self, options: Any) -> Self:
        options, _ = self.advice.settle(options, self.target.device_type, without=LEARNT)
        other = type(self)(self.target, options, self.streams, self.advice)
        other.maps = self.maps
        return other

    # -- rows and masks -----------------------------------------------------------------------------------------

    def drafter_weights(self) -> Iterable[Tensor] | None:
        """The streams', and what tokens that are known late are multiplied by."""
        own, late = super().drafter_weights(), self.maps.multiplied() if self.fuses else []
        return None if own is None else [*own, *late]

    def extra_work(self) -> ExtraWork:
        """The streams of every row, and the layers below pruning of nodes that are pruned."""
        below = of_layers(self.target, slice(0, self.settings.prune_layer)) if self.settings.prune else 0
        return ExtraWork(node=self.stream_work(), dropped=below)

    def stream_work(self) -> int:
        """Entries of the matrices that one row's streams pass: attention, adapters, MLPs where they pass these."""
        target, c = self.target, self.streams.config
        upper, adapters = slice(c.check_layers(target.n_layers), None), 2 * target.hidden_size * c.adapter_rank
        with_mlp = c.keep_mlp or not c.adapter_rank
        own = of_layers(target, upper) if with_mlp else of_attention(target, upper)
        return self.gamma * (own + c.n_msa_layers * adapters) + 2 * target.hidden_size * c.init_rank

    def max_tokens_per_step(self) -> int:
        return self.settings.most_rows()

    def _with_streams(self, main: Tensor, positions: Tensor, carriers: slice) -> tuple[Tensor, Tensor]:
        """Insert gamma streams beside the carrying rows of main [1, m, h]: rows [1, m + c*gamma, h] and positions."""
        streams = self.streams.insert(main[:, carriers], self.gamma)
        places = stream_positions(self.target, positions[carriers], self.gamma, self.streams.config.stream_position)
        return torch.cat((main, streams), 1), torch.cat((positions, places))

    # -- the loop's calls ---------------------------------------------------------------------------------------

    def prefill(self, state: DecodeState, ids: Tensor) -> Output:
        """The prompt, streams beside its last token only."""
        if self.streams.config.main_attends_streams:
            return self._prefill_attending(state, ids)
        target, cache, s, g = self.target, state.cache, ids.shape[1], self.gamma
        out = target.prefill(ids, cache, (self.lo,))
        last = torch.tensor([s - 1], device=target.device)
        rows, places = self._with_streams(out.hidden_states[self.lo], last, slice(None))
        mask = target.causal_mask(g, s)
        rotary = target.rotary(places[None, 1:], s + g)
        x = self.streams.run(target, rows[:, 1:], Layout(0, g), cache, mask, rotary)
        self.next_streams = target.family.norm(x[0])
        return out

    def _prefill_attending(self, state: DecodeState, ids: Tensor) -> Output:
        """Eq. 3: the last token's main row sees its streams, so both pass the MSA layers together."""
        target, cache, s, g = self.target, state.cache, ids.shape[1], self.gamma
        positions = torch.arange(s, device=target.device)
        x = target.embed(ids, positions[None])
        x = target.run(x, 0, self.lo, cache, None, target.rotary(positions[None], s))
        rows, places = self._with_streams(x, positions, slice(s - 1, s))
        causal = torch.ones(s, s, dtype=torch.bool, device=target.device).tril()
        mask = target.block_mask(stream_visibility(causal, g, positions[-1:], attends=True), 0)
        x = self.streams.run(target, rows, Layout(s, g), cache, mask, target.rotary(places[None], s + g))
        cache.commit(s)
        final = target.family.norm(x[:, s - 1 :])  # the last main row, then its streams
        self.next_streams = final[0, 1:]
        return Output(target.logits(final[:, :1]), None, {FINAL: final[:, :1]})

    def on_prefill(self, state: DecodeState) -> None:
        """Nothing was made of the prompt's streams yet."""
        self._ahead = None

    def propose(self, state: DecodeState) -> DraftTree:
        """The tree that the last step's streams predict, under the token the main stream decided."""
        logits, s = self._stream_logits(state.root[0]), self.settings  # [gamma, V]
        if s.sample and not state.sampling.greedy:
            return drawn_tree(state.root, state.sampling.probs(logits), s.k, s.n_draft, state.rng)
        if self.streams.config.parent_rank:
            return conditioned_tree(state.root, logits, self.maps.changes, s.k, s.n_draft)
        return draft_tree(state.root, logits, s.k, s.n_draft)

    def forward(self, state: DecodeState, tree: DraftTree) -> Output:
        """Lower layers over the tree; prune; insert streams; MSA layers over kept nodes and their streams."""
        target, cache, at = self.target, state.cache, self.settings.prune_layer
        past, n = cache.get_seq_length(), len(tree)
        visible, depths = tree.visibility()
        positions = depths + past
        rotary = target.rotary(positions[None], past + tree.topology.deepest)
        mask = target.block_mask(visible, past) if n > 1 else None
        x = target.embed(tree.tokens[None], positions[None])
        x = target.run(x, 0, at, cache, mask, rotary)
        keep = self._pruned(tree, x)
        kept = tree
        if keep is not None:
            kept = tree.gather_nodes(keep)
            x, positions, visible = x[:, keep], positions[keep], kept.visibility()[0]
            if at < self.lo:
                rotary = target.rotary(positions[None], past + kept.topology.deepest)
                mask = target.block_mask(visible, past)
        x = target.run(x, at, self.lo, cache, mask, rotary)
        m, g = len(kept), self.gamma
        rows, places = self._with_streams(x, positions, slice(None))
        attends = self.streams.config.main_attends_streams
        msa_mask = target.block_mask(stream_visibility(visible, g, None, attends), past)
        longest = past + kept.topology.deepest + g
        layout = Layout(m, g, self.settings.top_p)
        x = self.streams.run(target, rows, layout, cache, msa_mask, target.rotary(places[None], longest))
        logits, final = self._logits(x, m)
        ranges = [(0, at, range(n) if keep is None else keep), (at, target.n_layers, range(m))]
        return Output(logits, kept, {FINAL: final}, ranges, x[0, m:].unflatten(0, (m, g)))

    def _logits(self, x: Tensor, m: int) -> tuple[Tensor, Tensor]:
        """Logits [1, m, V] and final states [1, m, h] of the first m of these rows; of few rows, of all at once.

        The LM head is a large matrix that is read for any number of rows: a product of verified rows and streams
        together spares reading it once more for the draft.
        """
        fused = self.fuses and x.shape[1] <= self.most_fused
        final = self.target.family.norm(x if fused else x[:, :m])
        logits = self.target.logits(final)
        self._fused = logits[0, m:].unflatten(0, (m, -1)) if fused else None
        return logits[:, :m], final[:, :m]

    def _stream_logits(self, root: Tensor) -> Tensor:
        """Logits [gamma, V] of the next streams, which know their root: those of the last step where it made them."""
        if self._ahead is None:
            return self.target.logits(self.streams.condition_on_tokens(self.target, self.next_streams, root[None]))
        return self.maps.known(self._ahead, root)

    def _pruned(self, tree: DraftTree, x: Tensor) -> Tensor | None:
        """Nodes that stay after the pruning layer, int64 on the device; None where all do."""
        s = self.settings
        if not s.prune or tree.draft_probs is not None or (len(tree) <= s.n_keep and s.threshold == 0):
            return None
        if min(s.n_keep, len(tree)) == 1:
            return tree.tokens.new_zeros(1)
        inner, parents = nodes_to_score(tree)
        exits = self.target.logits(self.target.family.norm(self.streams.early_exit(x[0, inner])))  # [inner, V]
        return prune(tree, parents, exits, s.n_keep, s.threshold)

    def update(self, state: DecodeState, verdict: VerifyResult, output: Output) -> None:
        """Only the streams of the last accepted node draft the next tree."""
        assert output.extra is not None
        last = verdict.path[-1]
        self.next_streams = self.target.family.norm(output.extra[last])
        self._ahead = None if self._fused is None else self._fused[last]


def random_streams(target: Target, config: StreamConfig) -> Streams:
    """Return streams that draft something."""
    module = Streams(config, target.hidden_size)
    randomise(module, 2)
    return module
