"""Speculative Streaming: one fused pass verifies a draft and drafts the next."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import torch
from torch import Tensor

from specbench_ss import user_files
from specbench_ss.engine.architectures import ModelInfo
from specbench_ss.engine.costs import ExtraWork, of_attention, of_layers
from specbench_ss.engine.decoder import Decoder, DecodeState
from specbench_ss.engine.forward import ForwardPass
from specbench_ss.engine.target import FINAL, Output, Target
from specbench_ss.engine.tree import DeviceTopology, DraftTree, TreeTensors
from specbench_ss.engine.verify import VerifyResult
from specbench_ss.errors import UserError
from specbench_ss.methods._shared.draft_vocabulary import with_frequent_tokens
from specbench_ss.methods._shared.drafting import VOCABULARY, DrafterDecoder, Read, vocabulary_of
from specbench_ss.methods._shared.heads import MOST_FUSED
from specbench_ss.methods.ss.config import (
    Settings,
    SharedAROptions,
    SSOptions,
    StreamConfig,
    check_trained,
    full_size,
    resolve,
)
from specbench_ss.methods.ss.layers import Layout, StreamConditioning, Streams, stream_positions, stream_visibility
from specbench_ss.methods.ss.tree import conditioned_tree, draft_tree, nodes_to_score, prune, sampled_tree
from specbench_ss.models import checkpoint
from specbench_ss.models.checkpoint import KEY
from specbench_ss.models.load import hash_weights
from specbench_ss.models.tiny import randomise
from specbench_ss.options import value_text

NODES = (4, 6, 8, 12, 16, 24, 32, 48, 64)  # drafted or kept, for tuning
CANDIDATES = (1, 2, 3, 4, 6)
LARGEST_FULL_TREE = 128  # of a full tree: larger ones were never faster at batch 1
WEIGHTS = "model.safetensors"
CONDITIONING = ("root", "parent")  # options that select one of the bundled folders
TWO_LAYERS = StreamConfig(gamma=3, n_msa_layers=2, init_rank=2)
ROTATED = StreamConfig(gamma=3, n_msa_layers=2, adapter_rank=0, stream_init="rotation", rotation_step=0.4)
ROOT_CONDITIONED = StreamConfig(gamma=3, n_msa_layers=2, root_rank=4)
PARENT_CONDITIONED = StreamConfig(gamma=3, n_msa_layers=2, root_rank=4, parent_rank=4)
SAME_POSITION = StreamConfig(gamma=3, n_msa_layers=2, stream_position="same")
WITH_MLP = StreamConfig(gamma=3, n_msa_layers=2, keep_mlp=True)
EARLY_PRUNING = StreamConfig(gamma=2, n_msa_layers=1, prune_layer=1)
Forms = Mapping[str, tuple[StreamConfig, Mapping[str, Any]]]


class _Config(msgspec.Struct):
    """Fields of config.json about streams."""

    streams: StreamConfig


class SpeculativeStreaming(DrafterDecoder):
    """Decoder whose gamma streams at every verified node predict the gamma tokens after the next one."""

    name = "ss"
    summary = "Speculative Streaming, lossless: streams in the frozen base, tree, pruning, fused pass"
    paper = "Bhendawade et al. 2024, arXiv:2402.11131; 2025, EMNLP main 986"
    Options: ClassVar[type[Any]] = SSOptions
    bundled_folder: ClassVar[str] = "ss"  # name of the folder bundled with a model
    mode: ClassVar[str] = "lossless"
    most_fused: ClassVar[int] = MOST_FUSED
    advisable: ClassVar[tuple[str, ...]] = ("k", "n_draft", "n_keep", "prune", "gamma", VOCABULARY, *CONDITIONING)
    other_options = advisable  # of all modes
    node_options: ClassVar[tuple[str, ...]] = ("nodes", "n_draft", "n_keep")
    forms: ClassVar[Forms] = {  # trees, chains, early and late pruning, initializations and masks of streams
        "tree": (TWO_LAYERS, {"k": 2, "n_keep": 6}),
        "unpruned": (TWO_LAYERS, {"k": 2, "prune": "off"}),
        "chain": (TWO_LAYERS, {"mode": "chain"}),
        "best-nodes": (TWO_LAYERS, {"k": 3, "n_draft": 9, "n_keep": 5}),
        "threshold": (TWO_LAYERS, {"k": 2, "prune_threshold": 0.05}),
        "one-kept": (TWO_LAYERS, {"k": 2, "n_keep": 1}),
        "early-pruning": (EARLY_PRUNING, {"k": 3, "n_keep": 4}),
        "rotation": (ROTATED, {"k": 2, "n_keep": 6}),
        "top-p": (TWO_LAYERS, {"k": 2, "n_keep": 6, "stream_attention_top_p": 3}),
        "root": (ROOT_CONDITIONED, {"k": 2, "n_keep": 6}),
        "root-chain": (ROOT_CONDITIONED, {"mode": "chain", "gamma": 2}),
        "parent": (PARENT_CONDITIONED, {"k": 3, "n_draft": 9, "n_keep": 6}),
        "parent-chain": (PARENT_CONDITIONED, {"mode": "chain", "gamma": 2}),
        "same-position": (SAME_POSITION, {"k": 2, "n_keep": 6}),
        "with-mlp": (WITH_MLP, {"k": 2, "n_keep": 6}),
        "fewer-streams": (TWO_LAYERS, {"gamma": 1, "k": 3}),
        "drawn": (TWO_LAYERS, {"k": 3, "n_draft": 9, "n_keep": 5, "sample": "on"}),
    }
    drafter: Streams
    restricted: ClassVar[tuple[str, ...]] = ("best-nodes", "parent", "drawn")  # forms that draw from part of the tokens

    def __init__(
        self,
        target: Target,
        options: SSOptions,
        drafter: Streams,
        config: dict[str, Any] | None = None,
        conditioning: StreamConditioning | None = None,
    ) -> None:
        target.require_layer_access(self.name)
        self.settings = self.resolve_options(options, {}, drafter, target)
        super().__init__(target, options, drafter, config)
        self.first_msa_layer = drafter.config.check_layers(target.n_layers, self.name)
        if self.head_rows and self.settings.prune:
            self.vocabulary.columns  # noqa: B018 - computed now, not in a graph
        self.gamma = self.settings.gamma
        self._last_streams = torch.empty(0)  # [gamma, h], stream states at the last accepted node, before the norm
        # one LM-head matmul for main and stream rows
        self.fuses = not self.head_rows and self.settings.most_tokens() <= self.most_fused
        if conditioning is None or conditioning.vocabulary.selected != self.vocabulary.selected:
            conditioning = StreamConditioning(target, drafter, self.vocabulary)
        self.conditioning, self.constructor_args = conditioning, (conditioning,)
        conditioning.prepare()
        self._stream_rows: Tensor | None = None  # [m, gamma, V], stream logits of this step; None = not fused
        self._drafted = TreeTensors()
        self._next_logits: Tensor | None = None  # [gamma, V], of next_streams, unconditioned; None = not fused

    # -- loading ------------------------------------------------------------------------------------------------

    @classmethod
    def require(cls, base: ModelInfo) -> None:
        base.require_layer_access(cls.name)

    @classmethod
    def resolve_weights(cls, options: Any, base: ModelInfo) -> tuple[Any, str, dict[str, Any]]:
        """Set `root` and `parent` as the bundled folder advises; conditioned lossless streams have their own folders.

        The two options select one bundled folder, so advice on both is ignored if either or `weights` is given.
        """
        bundled, advised = base.bundled_drafter(cls.bundled_folder), dict[str, Any]()
        given = options.weights or any(getattr(options, name, "auto") != "auto" for name in CONDITIONING)
        if bundled is not None and not given and set(CONDITIONING) & set(cls.advisable):
            config, file = checkpoint.read_config(bundled), bundled / "config.json"
            advice = checkpoint.read_advice(config.get(KEY), cls.Options, cls.advisable, cls.name, file)
            others = [name for name in cls.advisable if name not in CONDITIONING]
            options, advised = advice.apply(options, base.device_type, without=others)
        if cls.mode != "lossless" or "on" not in (options.root, options.parent):
            return options, cls.bundled_folder, advised
        return options, "ss-parent" if options.parent == "on" else "ss-root", advised

    @classmethod
    def not_advised(cls, options: Any) -> tuple[str, ...]:
        """Return the options that a folder's advice does not change: with a node budget, all of the tree."""
        of_tree = tuple(name for name in cls.advisable if name != VOCABULARY)
        return of_tree if isinstance(options, SSOptions) and options.nodes else CONDITIONING

    @classmethod
    def test_instances(cls, target: Target) -> Mapping[str, Callable[[], Decoder]]:
        """Return random streams in every form; eq. 3 is undefined for sliding windows."""
        model = cls.example_model(target)

        def build(config: StreamConfig, options: Mapping[str, Any]) -> Decoder:
            streams = with_frequent_tokens(random_streams(model, config), target.vocab_size)
            return cls(model, cls.Options(**options), streams)

        part = {"draft_vocab": str(target.vocab_size * 3 // 4)}
        restricted = {f"{n}-draft-vocabulary": (cls.forms[n][0], {**cls.forms[n][1], **part}) for n in cls.restricted}
        every = {**cls.forms, **restricted}
        forms = {n: f for n, f in every.items() if not (f[0].main_attends_streams and any(target.windows))}
        return {name: partial(build, *form) for name, form in forms.items()}

    @classmethod
    def example_model(cls, target: Target) -> Target:
        """Return the model of the test instances."""
        return target

    @classmethod
    def resolve_options(cls, options: Any, config: Mapping[str, Any], drafter: Streams, base: ModelInfo) -> Settings:
        """Return the settings of a step. Raise UserError if they are unsupported."""
        options, shape = options.step() if isinstance(options, SharedAROptions) else options, drafter.config
        first_msa_layer = shape.check_layers(base.n_layers, cls.name)
        check_trained(options, shape, cls.name)
        settings = resolve(options, shape, base, cls.name)
        if shape.main_attends_streams and any(base.windows[first_msa_layer:]):
            raise UserError(f"{cls.name}: main_attends_streams is not defined for layers with a sliding window")
        vocabulary_of(options, drafter, base, cls.name).require(settings.k, cls.name)
        return settings

    @classmethod
    def read(cls, options: Any, path: Path, base: ModelInfo, read: Read) -> tuple[Streams, dict[str, Any]]:
        """Return the streams of a folder and its config.json. Raise UserError if they are damaged or do not fit."""
        config, file = checkpoint.read_config(path), path / "config.json"
        try:
            user_files.convert(config, _Config)
            shape = StreamConfig(**config["streams"])
        except (ValueError, TypeError) as error:  # TypeError: an unknown key
            raise UserError(f"{cls.name}: {file} does not describe streams: {error}") from None
        if shape.mode != cls.mode:
            other = "ss" if shape.mode == "lossless" else "ss-shared"
            raise UserError(f"{cls.name}: the streams in {path} are of mode {shape.mode}: use {other}")
        for token, rank in (("root", shape.root_rank), ("parent", shape.parent_rank)):
            if rank:
                base.require_hidden_eq_embedding(f"{cls.name}[{token}=on]")
        streams, weights = Streams(shape, base.hidden_size), path / WEIGHTS
        checkpoint.load_into(streams, {k: v.float() for k, v in read(weights).items()}, f"{cls.name}: {weights}")
        return streams, config

    def metadata(self) -> dict[str, Any]:
        s = self.settings
        switches = {"prune": value_text(s.prune), "sample": value_text(s.sample)}
        return (
            asdict(s)
            | switches
            | self.vocabulary.metadata()
            | {"streams": self.drafter.config.as_dict(), "streams_hash": hash_weights(self.drafter)}
        )

    def search_space(self) -> Mapping[str, Sequence[Any]]:
        """Return size and shape of the tree, or the length of a chain."""
        s, gammas = self.settings, range(1, self.drafter.config.gamma + 1)
        if self.options.mode == "chain":
            return {"gamma": gammas, **self.vocabulary.search_space()}
        full = full_size(s.gamma, s.k)
        nodes = 1 + (min(s.n_draft, full) or full)
        space: dict[str, Sequence[Any]] = {
            "n_draft": [n for n in NODES if n < full] + [0] * (full <= LARGEST_FULL_TREE),
            "gamma": gammas,
            "k": [n for n in CANDIDATES if s.n_draft or full_size(s.gamma, n) <= LARGEST_FULL_TREE],
        }
        if nodes > min(s.n_keep, max(NODES)):  # else there is nothing to prune
            space["prune"] = ("off", "on")
        if self.options.nodes:  # the user's limit stays
            del space["n_draft"]
        if s.prune:
            space["n_keep"] = [n for n in NODES if n < nodes]
        return space | self.vocabulary.search_space()

    # -- rows and masks -----------------------------------------------------------------------------------------

    def drafter_weights(self) -> Iterable[Tensor] | None:
        """Return the weights of the streams and of the token conditioning."""
        weights, tables = super().drafter_weights(), self.conditioning.matrices() if self.fuses else []
        return None if weights is None else [*weights, *tables]

    def extra_work(self) -> ExtraWork:
        """Return the FLOPs of every node's streams, and of the layers below pruning for pruned nodes."""
        below = of_layers(self.target, slice(0, self.settings.prune_layer)) if self.settings.prune else 0
        return ExtraWork(node=self.stream_work(), dropped=below)

    def stream_work(self) -> int:
        """Return the weight elements multiplied per node for its streams: attention, adapters and MLPs."""
        target, c = self.target, self.drafter.config
        upper, adapters = slice(c.check_layers(target.n_layers), None), 2 * target.hidden_size * c.adapter_rank
        with_mlp = c.keep_mlp or not c.adapter_rank
        layers = of_layers(target, upper) if with_mlp else of_attention(target, upper)
        return self.gamma * (layers + c.n_msa_layers * adapters) + 2 * target.hidden_size * c.init_rank

    def max_tokens_per_step(self) -> int:
        return self.settings.most_tokens()

    def _with_streams(self, main: Tensor, positions: Tensor, carriers: slice) -> tuple[Tensor, Tensor]:
        """Append gamma streams of the carrier rows of main [1, m, h]: return [1, m + c*gamma, h] and positions."""
        streams = self.drafter.insert(main[:, carriers], self.gamma, self.drafter.packed(self.target.prepack))
        ahead = stream_positions(self.target, positions[carriers], self.gamma, self.drafter.config.stream_position)
        return torch.cat((main, streams), 1), torch.cat((positions, ahead))

    # -- decoding -----------------------------------------------------------------------------------------------

    def prefill(self, state: DecodeState, ids: Tensor) -> Output:
        """Run the prompt, with streams at its last token only."""
        if self.drafter.config.main_attends_streams:
            return self._prefill_attending(state, ids)
        target, cache, s, g = self.target, state.cache, ids.shape[1], self.gamma
        out = target.prefill(ids, cache, (self.first_msa_layer,))
        last = torch.tensor([s - 1], device=target.device)
        rows, all_positions = self._with_streams(out.hidden_states[self.first_msa_layer], last, slice(None))
        current, mask = target.pass_type(target, cache, s + g), target.causal_mask(g, s)
        rotary = current.rotary(all_positions[None, 1:])
        self._last_streams = self.drafter.run(current, rows[:, 1:], Layout(0, g), mask, rotary)[0]
        return out

    def _prefill_attending(self, state: DecodeState, ids: Tensor) -> Output:
        """Run the prompt under eq. 3: the last main row attends to its streams, so both run together."""
        target, cache, s, g = self.target, state.cache, ids.shape[1], self.gamma
        current, positions = target.pass_type(target, cache, s + g), torch.arange(s, device=target.device)
        x = target.embed(ids, positions[None])
        (x,) = current.run(x, 0, self.first_msa_layer, None, current.rotary(positions[None]))
        rows, all_positions = self._with_streams(x, positions, slice(s - 1, s))
        causal = torch.ones(s, s, dtype=torch.bool, device=target.device).tril()
        mask = target.block_mask(stream_visibility(causal, g, positions[-1:], attends=True), 0)
        x = self.drafter.run(current, rows, Layout(s, g), mask, current.rotary(all_positions[None]))
        cache.commit(s)
        final, self._last_streams = target.family.norm(x[:, s - 1 : s]), x[0, s:]
        return Output(target.logits(final), None, {FINAL: final})

    def on_prefill(self, state: DecodeState) -> None:
        """Drop stream logits of the last request."""
        self._next_logits = None

    def propose(self, state: DecodeState) -> DraftTree:
        """Draft the tree that the last step's streams predict under the root."""
        s, fused = self.settings, self._next_logits is not None
        states = self._last_streams if self._next_logits is None else self._next_logits
        if s.sample and not state.sampling.greedy:
            probs = state.sampling.probs(self._stream_logits(fused, state.root, states))
            return self.vocabulary.target_tree(sampled_tree(state.root, probs, s.k, s.n_draft, state.rng))
        draft = partial(self._draft, fused)
        return self._drafted.tree(self.target.run_pass((self, fused), draft, None, (state.root, states)))

    def _draft(self, fused: bool, _: ForwardPass, root: Tensor, states: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors of the tree under the root [1]. fused, states: as of `_stream_logits`."""
        logits, s = self._stream_logits(fused, root, states), self.settings  # [gamma, draft vocabulary]
        if self.drafter.config.parent_rank:
            tree = conditioned_tree(root, logits, self.conditioning.corrections, s.k, s.n_draft)
        else:
            tree = draft_tree(root, logits, s.k, s.n_draft)
        return self._drafted.tensors(self.vocabulary.target_tree(tree))

    def _stream_logits(self, fused: bool, root: Tensor, states: Tensor) -> Tensor:
        """Return logits [gamma, draft vocabulary] of the next streams, conditioned on the root [1].

        states: their logits of the last pass, unconditioned, if `fused`; else stream states [gamma, h] before the norm.
        """
        if fused:
            return self.conditioning.corrected(states, root) if self.conditioning.rank else states
        final = self.target.family.norm(states)
        return self.lm_head(self.drafter.condition_on_tokens(self.target, final, root))

    def forward(self, state: DecodeState, tree: DraftTree) -> Output:
        """Run the lower layers over the tree, prune, insert streams, run the MSA layers over kept nodes and streams."""
        target, cache, s, n, g = self.target, state.cache, self.settings, len(tree), self.gamma
        deepest = tree.topology.deepest
        longest = cache.get_seq_length() + deepest + g
        prunes = s.prune and tree.draft_probs is None and not (n <= s.n_keep and s.threshold == 0)
        inputs = (tree.tokens, *tree.visibility(), tree.parents()) if prunes else (tree.tokens, *tree.visibility())
        step, m = partial(self._step, prunes, deepest), min(s.n_keep, n) if prunes else n
        if fallback := "stream_attention_top_p" if s.top_p else "prune_threshold" if prunes and s.threshold > 0 else "":
            if target.graphs is not None:  # padded keys, or kept nodes, have no fixed number
                target.graphs.record_fallback(fallback, cache)
            outputs = step(target.pass_type(target, cache, longest), *inputs)
        else:
            name, rows = (self, prunes, deepest), max(n, m * (1 + g))
            outputs = target.run_pass(name, step, cache, inputs, n=n, longest=longest, rows=rows)
        logits, final, streams, *others = outputs
        self._stream_rows = others.pop(0) if self._fused_rows(logits.shape[1]) else None
        if not prunes:
            return Output(logits, tree, {FINAL: final}, None, streams)
        keep, tokens, visible, depths, parents = others
        topology = DeviceTopology(parents, min(deepest, len(tokens) - 1), tree.topology)
        verified = DraftTree(tokens, topology, None, (visible, depths))
        lower, upper = (0, s.prune_layer, keep), (s.prune_layer, target.n_layers, range(len(tokens)))
        return Output(logits, verified, {FINAL: final}, [lower, upper], streams)

    def _step(
        self,
        prunes: bool,
        deepest: int,
        current: ForwardPass,
        tokens: Tensor,
        visible: Tensor,
        depths: Tensor,
        parents: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Return the tensors of one fused pass over n nodes, of which m are kept.

        They are logits [1, m, V], final states [1, m, h], stream states [m, gamma, h] before the norm; stream logits
        [m, gamma, V] of few rows; and, if it prunes, the kept nodes [m] and their tokens, mask, depths and parents.
        """
        target, at, g = self.target, self.settings.prune_layer, self.gamma
        positions, pruned = current.positions(depths), tuple[Tensor, ...]()
        mask, rotary = current.mask(visible), current.rotary(positions)
        (x,) = current.run(target.embed(tokens[None], positions), 0, at, mask, rotary)
        if prunes:
            assert parents is not None
            tree = DraftTree(tokens, DeviceTopology(parents, deepest), None, (visible, depths))
            keep = self._kept(tree, x, on_host=current.on_host)
            tree = tree.gather_nodes(keep)
            visible, depths = tree.visibility()
            x, positions, pruned = x[:, keep], positions[:, keep], (keep, tree.tokens, visible, depths, tree.parents())
            if at < self.first_msa_layer:
                mask, rotary = current.mask(visible), current.rotary(positions)
        (x,) = current.run(x, at, self.first_msa_layer, mask, rotary)
        m = x.shape[1]
        rows, all_positions = self._with_streams(x, positions[0], slice(None))
        attends = self.drafter.config.main_attends_streams
        mask = current.mask(stream_visibility(visible, g, None, attends))
        assert mask is not None
        layout, rotary = Layout(m, g, self.settings.top_p), current.rotary(all_positions[None])
        x = self.drafter.run(current, rows, layout, mask, rotary)
        # the LM head is read from memory for any number of rows, so one matmul for nodes and streams saves a read
        fused = self._fused_rows(m)
        final = target.family.norm(x if fused else x[:, :m])
        logits = target.logits(final)
        of_streams = (logits[0, m:].unflatten(0, (m, g)),) if fused else ()
        return (logits[:, :m], final[:, :m], x[0, m:].unflatten(0, (m, g)), *of_streams, *pruned)

    def _fused_rows(self, m: int) -> bool:
        """Return True if the LM head reads m nodes and their streams together."""
        return self.fuses and m * (1 + self.gamma) <= self.most_fused

    def _kept(self, tree: DraftTree, x: Tensor, on_host: bool) -> Tensor:
        """Return the nodes kept after the pruning layer, int64 on the device. on_host: the host may read tensors."""
        s = self.settings
        if min(s.n_keep, len(tree)) == 1:
            return tree.tokens.new_zeros(1)
        inner, parents = nodes_to_score(tree, leaves=not on_host)
        exits = self.lm_head(self.target.family.norm(self.drafter.early_exit(x[0, inner])))  # [inner, draft vocabulary]
        return prune(self.vocabulary.draft_columns(tree), parents, exits, s.n_keep, s.threshold)

    def update(self, state: DecodeState, result: VerifyResult, output: Output) -> None:
        """Keep the streams of the last accepted node, which draft the next tree."""
        assert output.extra is not None
        last = result.path[-1]
        self._last_streams = output.extra[last]
        self._next_logits = None if self._stream_rows is None else self._stream_rows[last]


def random_streams(target: Target, config: StreamConfig) -> Streams:
    """Return streams with random weights."""
    module = Streams(config, target.hidden_size)
    randomise(module, 2)
    return module
