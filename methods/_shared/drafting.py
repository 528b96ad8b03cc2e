"""Base classes of decoders that load a drafter from a folder."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from specbench_ss.engine.architectures import ModelInfo
from specbench_ss.engine.decoder import Decoder, DecodeState
from specbench_ss.engine.forward import ForwardPass
from specbench_ss.engine.kv_cache import Cache
from specbench_ss.engine.target import FINAL, Output, Target
from specbench_ss.engine.tree import indices
from specbench_ss.engine.verify import VerifyResult
from specbench_ss.methods._shared import target_copies
from specbench_ss.methods._shared.draft_vocabulary import (
    DraftVocabulary,
    draft_vocabulary,
    head_rows,
    read_shapes_and_vocab_maps,
    sizes_to_try,
)
from specbench_ss.methods._shared.drafter_network import DrafterNetwork, Rotary
from specbench_ss.models import checkpoint
from specbench_ss.models.frequent_tokens import read_frequent_tokens
from specbench_ss.models.load import hash_tensors

Read = Callable[..., dict[str, Tensor]]  # returns the tensors of a file, with values or as shapes only
VOCABULARY = "draft_vocab"  # the option, which advice may set for any tree


class DrafterDecoder(Decoder):
    """A decoder with a drafter and config.json from a folder. config: {} for random weights."""

    Options: ClassVar[Any]
    bundled_folder: ClassVar[str] = ""  # name of the drafter folder bundled with a model, "" = the method's name
    advisable: ClassVar[tuple[str, ...]] = ()  # options that config.json may advise
    other_options: ClassVar[tuple[str, ...]] = ()  # options of other methods that use the same folder
    weight_names: ClassVar[tuple[str, ...]] = ()  # files of the drafter alone, in a folder that may have more
    target_copies: ClassVar[target_copies.Copies] = {}  # tensors of the folder that the target has too

    def __init__(self, target: Target, options: Any, drafter: Any, config: dict[str, Any] | None = None) -> None:
        super().__init__(target, options)
        self.drafter = target.to_target_dtype_device(drafter, self.name)
        self.vocabulary = self.vocabulary_of(options, drafter, target).to(target.device)
        self.head_rows = head_rows(self.vocabulary, self.own_lm_heads(), target, self.name)
        self.config = config or {}
        self.training_info = checkpoint.read_training_info(self.config)

    @classmethod
    @abstractmethod
    def read(cls, options: Any, path: Path, base: ModelInfo, read: Read) -> tuple[Any, dict[str, Any]]:
        """Return the drafter of a folder and its config.json. Raise UserError if it does not fit the base."""

    @classmethod
    @abstractmethod
    def resolve_options(cls, options: Any, config: Mapping[str, Any], drafter: Any, base: ModelInfo) -> Any:
        """Resolve the options for this drafter. Raise UserError for what it cannot draft."""

    @classmethod
    def vocabulary_of(cls, options: Any, drafter: Any, base: ModelInfo) -> DraftVocabulary:
        """Return the tokens that the options and the drafter allow to draft. Raise UserError if unsupported."""
        own, frequent = (getattr(drafter, name, None) for name in ("vocab_ids", "frequent_tokens"))
        return draft_vocabulary(getattr(options, VOCABULARY, ""), base.vocab_size, cls.name, own, frequent)

    def vocabulary_sizes(self) -> dict[str, list[str]]:
        """Return the option `draft_vocab` with values for `search_space`, {} without frequent tokens."""
        return sizes_to_try(self.vocabulary, getattr(self.drafter, "frequent_tokens", None))

    def own_lm_heads(self) -> list[tuple[Tensor, Tensor | None]]:
        """Return weight and bias of the drafter's own LM heads; [] = it uses the target's."""
        return []

    def lm_head(self, states: Tensor) -> Tensor:
        """Return draft logits [.., draft vocabulary] of final states [.., h] by the target's LM head."""
        return self.head_rows[0](states) if self.head_rows else self.target.logits(states)

    def drafter_weights(self) -> Iterable[Tensor] | None:
        """Return the drafter's weights, with the selected rows in place of its own LM heads."""
        weights, own = super().drafter_weights(), {w.untyped_storage().data_ptr() for w, _ in self.own_lm_heads()}
        if weights is None or not self.head_rows or not own:
            return weights
        others = [weight for weight in weights if weight.untyped_storage().data_ptr() not in own]
        return [*others, *(rows.weight for rows in self.head_rows)]

    @classmethod
    def build(cls, target: Target, options: Any, drafter: Any, config: dict[str, Any], path: Path) -> Self:
        """Return the decoder with a drafter from `read`."""
        return cls(target, options, drafter, config)

    def apply_options(self, options: Any) -> Self:
        """Return the decoder with the same drafter and resolved options."""
        return type(self)(self.target, options, self.drafter, self.config)

    @classmethod
    def drafted_model_info(cls, base: ModelInfo, path: Path) -> ModelInfo:
        """Return the configuration of the model that the folder's drafter is for."""
        return base

    @classmethod
    def drafted_model(cls, target: Target, path: Path) -> Target:
        """Return the model that the folder's drafter is for."""
        return target

    @classmethod
    def advised_by(
        cls, options: Any, config: Mapping[str, Any], base: ModelInfo, path: Path
    ) -> tuple[Any, dict[str, Any]]:
        """Replace default options by the folder's advice; return them and the advice that was used.

        The size of the tree, `nodes` in a configuration with accuracies, is advice too. A tree that the user states is
        drafted as it is, from the advised draft vocabulary. Raise UserError for options that the folder may not advise.
        """
        given = config.get(checkpoint.KEY, {})
        if "nodes" in cls.advisable and config.get("accuracies") and config.get("nodes") and isinstance(given, Mapping):
            given = {"nodes": config["nodes"], **given}
        file = path / "config.json" if path.is_dir() else path
        advice = checkpoint.read_advice(given, cls.Options, cls.advisable, cls.name, file, cls.other_options)
        stated = getattr(options, "tree", "auto") != "auto"
        kept = [name for name in cls.advisable if stated and name != VOCABULARY]
        return advice.apply(options, base.device_type, without=kept)

    @classmethod
    def check(cls, options: Any, base: ModelInfo) -> dict[str, Any]:
        """Check the drafter's configuration, file and shapes, and the options; return the advised ones."""
        base.require_hidden_eq_embedding(cls.name)
        path = checkpoint.find_drafter(options.weights, cls.name, base, cls.bundled_folder)
        if path is None:
            return {}
        drafted = cls.drafted_model_info(base, path)
        with torch.device("meta"):
            drafter, config = cls.read(options, path, drafted, read_shapes_and_vocab_maps)
        drafter.frequent_tokens = read_frequent_tokens(path, drafted.vocab_size)
        cls.compare_with_target(config, path, drafted)
        options, advised = cls.advised_by(options, config, drafted, path)
        cls.vocabulary_of(options, drafter, drafted)
        cls.resolve_options(options, config, drafter, drafted)
        return advised

    @classmethod
    def compare_with_target(cls, config: Mapping[str, Any], path: Path, base: ModelInfo) -> tuple[str, ...]:
        """Warn of tensors that should be copies of the target's and are not; return the warnings."""
        if not cls.target_copies:
            return ()
        source = checkpoint.weights_in(path, cls.name, cls.weight_names)
        trained = "config.json states that it was trained"
        cause = "a drafter of another model, or a tensor without its values; if it is removed, the model's is used"
        why = trained if config.get("embed_requires_grad") else cause
        found = target_copies.differences(source, cls.target_copies, base)
        texts = tuple(f"{cls.name}: {text}: {why} ({path})" for text in found)
        for text in texts:
            warnings.warn(text, stacklevel=1)  # this line: one warning for check and load
        return texts

    @classmethod
    def load(cls, target: Target, options: Any) -> Self:
        """Load the drafter that the user named, or the one bundled with the model."""
        target.require_hidden_eq_embedding(cls.name)
        path = checkpoint.drafter_folder(options.weights, cls.name, target, cls.bundled_folder)
        model = cls.drafted_model(target, path)
        drafter, config = cls.read(options, path, model, checkpoint.read_tensors)
        drafter.frequent_tokens = read_frequent_tokens(path, model.vocab_size)
        rounding = checkpoint.check_base(config, target, cls.name)
        options, advised = cls.advised_by(options, config, target, path)
        differences = cls.compare_with_target(config, path, model)
        decoder = cls.build(model, options, drafter, config, path)
        decoder.advised, decoder.load_warnings = advised, (*rounding, *differences, *decoder.load_warnings)
        return decoder

    def with_options(self, options: Any) -> Self:
        """Return the same drafter with other options."""
        return self.apply_options(self.advised_by(options, self.config, self.target, Path("config.json"))[0])


class FeatureDecoder(DrafterDecoder):
    """A drafter with its own KV cache over hidden states of these target layers; FINAL = the normed last one."""

    def __init__(
        self,
        target: Target,
        options: Any,
        drafter: DrafterNetwork,
        config: dict[str, Any] | None,
        layers: Sequence[int],
    ) -> None:
        super().__init__(target, options, drafter, config)
        self.layers = tuple(layers)
        self.aux_hidden_state_layers = tuple(dict.fromkeys(layer for layer in layers if layer != FINAL))
        self.rotary = Rotary(drafter.config, target.device, drafter.rotary_embedding)
        self.drafter.finalize(self.rotary, target.prepack)
        self.cache = Cache(len(drafter.blocks), 0)
        self._features: list[Tensor] = []  # [1, n, h] of each layer: the prompt's, until `on_prefill`

    def own_lm_heads(self) -> list[tuple[Tensor, Tensor | None]]:
        heads: list[tuple[Tensor, Tensor | None]] = self.drafter.lm_heads()
        return heads

    def metadata(self) -> dict[str, Any]:
        drafter = {"layers": list(self.layers), "drafter_hash": hash_tensors(self.drafter.state_dict())}
        return drafter | self.vocabulary.metadata()

    def prefill(self, state: DecodeState, ids: Tensor) -> Output:
        """Run the prompt and keep the hidden states of all its positions."""
        output = self.target.prefill(ids, state.cache, self.aux_hidden_state_layers, every=True)
        self._features = [output.hidden_states[layer] for layer in self.layers]
        return output

    def accepted(self, result: VerifyResult, output: Output) -> tuple[Tensor, list[Tensor]]:
        """Return the n tokens of a step, the new root last, and the hidden states [1, n, h] before each."""
        path = indices(result.path, self.target.device)
        assert output.tree is not None
        tokens = torch.cat((output.tree.tokens[path[1:]], result.next_token))
        return tokens, [output.hidden_states[layer][:, path] for layer in self.layers]

    def rotary_at(self, first: int, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos, sin [1, n, head_dim] of n positions from `first` on."""
        return self.rotary(torch.arange(first, first + n, device=self.target.device)[None], dtype)

    def run_drafter(
        self,
        current: ForwardPass,
        inputs: Sequence[Tensor],
        masks: Sequence[Tensor | None],
        rotary: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Return the drafter's output [1, n, h] for inputs [1, n, h] that follow its cache. masks: one per layer."""
        mask = masks[0]
        if any(other is not mask for other in masks):  # concurrent requests do not share it
            out: Tensor = self.drafter(*inputs, current.rows(inputs[0].shape[1]), masks, rotary)
            return out

        def layers(*given: Any) -> Tensor:
            *rows, cache, mask, rotary = given
            out: Tensor = self.drafter(*rows, cache, [mask] * len(masks), rotary)
            return out

        return current.layers(self.drafter, layers, inputs, mask, rotary)
