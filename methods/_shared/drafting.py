"""Base classes of decoders that load a drafter from a folder."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from specbench_ss.engine.architectures import ModelInfo
from specbench_ss.engine.decoder import Decoder, DecodeState
from specbench_ss.engine.target import FINAL, Output, Target
from specbench_ss.engine.tree import indices
from specbench_ss.engine.verify import VerifyResult
from specbench_ss.methods._shared.draft_vocabulary import (
    DraftVocabulary,
    draft_vocabulary,
    head_rows,
    read_shapes_and_vocab_maps,
)
from specbench_ss.methods._shared.drafter_network import DrafterNetwork, Rotary
from specbench_ss.methods._shared.target_copies import Copies, warn_of_differences
from specbench_ss.models import checkpoint
from specbench_ss.models.frequent_tokens import read_frequent_tokens
from specbench_ss.models.load import hash_tensors

Read = Callable[..., dict[str, Tensor]]  # returns the tensors of a file, with values or as shapes only
VOCABULARY = "draft_vocab"  # the option, which advice may set for any tree


class DrafterDecoder(Decoder):
    """A decoder with a drafter and config.json from a folder. config: {} for random weights.

    constructor_args: further arguments of the constructor, also of decoders with the same drafter and other options.
    """

    Options: ClassVar[Any]
    bundled_folder: ClassVar[str] = ""  # name of the drafter folder bundled with a model, "" = the method's name
    advisable: ClassVar[tuple[str, ...]] = ()  # options that config.json may advise
    other_options: ClassVar[tuple[str, ...]] = ()  # options of other methods that use the same folder
    weight_names: ClassVar[tuple[str, ...]] = ()  # files of the drafter alone, in a folder that may have more
    target_copies: ClassVar[Copies] = {}  # tensors of the folder that the target has too
    constructor_args: tuple[Any, ...] = ()

    def __init__(self, target: Target, options: Any, drafter: Any, config: dict[str, Any] | None = None) -> None:
        super().__init__(target, options)
        self.drafter = target.to_target_dtype_device(drafter, self.name)
        self.vocabulary = vocabulary_of(options, drafter, target, self.name).to(target.device)
        self.head_rows = head_rows(self.vocabulary, lm_heads(drafter), target, self.name)
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

    def lm_head(self, states: Tensor) -> Tensor:
        """Return draft logits [.., draft vocabulary] of final states [.., h] by the target's LM head."""
        return self.head_rows[0](states) if self.head_rows else self.target.logits(states)

    def drafter_weights(self) -> Iterable[Tensor] | None:
        """Return the drafter's weights, with the selected rows in place of its own LM heads."""
        weights, own = super().drafter_weights(), {w.untyped_storage().data_ptr() for w, _ in lm_heads(self.drafter)}
        if weights is None or not self.head_rows or not own:
            return weights
        others = [weight for weight in weights if weight.untyped_storage().data_ptr() not in own]
        return [*others, *(rows.weight for rows in self.head_rows)]

    # -- loading ------------------------------------------------------------------------------------------------

    @classmethod
    def require(cls, base: ModelInfo) -> None:
        """Raise UserError for a model that the method does not support."""
        base.require_hidden_eq_embedding(cls.name)

    @classmethod
    def resolve_weights(cls, options: Any, base: ModelInfo) -> tuple[Any, str, dict[str, Any]]:
        """Return the options with `weights`, the bundled folder if that is empty, and advice that selects it."""
        return options, cls.bundled_folder, {}

    @classmethod
    def build(cls, target: Target, options: Any, drafter: Any, config: dict[str, Any], path: Path) -> Self:
        """Return the decoder with a drafter from `read`."""
        return cls(target, options, drafter, config)

    @classmethod
    def drafted_model_info(cls, base: ModelInfo, path: Path) -> ModelInfo:
        """Return the configuration of the model that the folder's drafter is for."""
        return base

    @classmethod
    def drafted_model(cls, target: Target, path: Path) -> Target:
        """Return the model that the folder's drafter is for."""
        return target

    @classmethod
    def not_advised(cls, options: Any) -> tuple[str, ...]:
        """Return the options that keep their values: with a tree that the user gives, all but the vocabulary."""
        given = getattr(options, "tree", "auto") != "auto"
        return tuple(name for name in cls.advisable if given and name != VOCABULARY)

    @classmethod
    def advised_by(
        cls, options: Any, config: Mapping[str, Any], base: ModelInfo, path: Path
    ) -> tuple[Any, dict[str, Any]]:
        """Replace default options by the folder's advice; return them and the advice that was used.

        The size of the tree, `nodes` in a configuration with accuracies, is advice too. Raise UserError for options
        that the folder may not advise.
        """
        given = config.get(checkpoint.KEY, {})
        if "nodes" in cls.advisable and config.get("accuracies") and config.get("nodes") and isinstance(given, Mapping):
            given = {"nodes": config["nodes"], **given}
        file = path / "config.json" if path.is_dir() else path
        advice = checkpoint.read_advice(given, cls.Options, cls.advisable, cls.name, file, cls.other_options)
        return advice.apply(options, base.device_type, without=cls.not_advised(options))

    @classmethod
    def check(cls, options: Any, base: ModelInfo) -> dict[str, Any]:
        """Check the drafter's configuration, file and shapes, and the options; return the advised ones."""
        cls.require(base)
        options, bundled, selected = cls.resolve_weights(options, base)
        path = checkpoint.find_drafter(options.weights, cls.name, base, bundled)
        if path is None:
            return {}
        drafted = cls.drafted_model_info(base, path)
        with torch.device("meta"):
            drafter, config = cls.read(options, path, drafted, read_shapes_and_vocab_maps)
        drafter.frequent_tokens = read_frequent_tokens(path, drafted.vocab_size)
        warn_of_differences(cls.name, path, config, cls.target_copies, cls.weight_names, drafted)
        options, advised = cls.advised_by(options, config, drafted, path)
        vocabulary_of(options, drafter, drafted, cls.name)
        cls.resolve_options(options, config, drafter, drafted)
        return selected | advised

    @classmethod
    def load(cls, target: Target, options: Any) -> Self:
        """Load the drafter that the user named, or the one bundled with the model."""
        cls.require(target)
        options, bundled, selected = cls.resolve_weights(options, target)
        path = checkpoint.drafter_folder(options.weights, cls.name, target, bundled)
        drafted = cls.drafted_model_info(target, path)
        drafter, config = cls.read(options, path, drafted, checkpoint.read_tensors)
        drafter.frequent_tokens = read_frequent_tokens(path, drafted.vocab_size)
        rounding = checkpoint.check_base(config, target, cls.name)
        options, advised = cls.advised_by(options, config, target, path)
        model = cls.drafted_model(target, path)
        differences = warn_of_differences(cls.name, path, config, cls.target_copies, cls.weight_names, model)
        decoder = cls.build(model, options, drafter, config, path)
        decoder.advised = selected | advised
        decoder.load_warnings = (*rounding, *differences, *decoder.load_warnings)
        return decoder

    def with_options(self, options: Any) -> Self:
        """Return the same drafter with other options."""
        options, _ = self.advised_by(options, self.config, self.target, Path("config.json"))
        return type(self)(self.target, options, self.drafter, self.config, *self.constructor_args)


def vocabulary_of(options: Any, drafter: Any, base: ModelInfo, method: str) -> DraftVocabulary:
    """Return the tokens that the options and the drafter allow to draft. Raise UserError if unsupported."""
    own, frequent = (getattr(drafter, name, None) for name in ("vocab_ids", "frequent_tokens"))
    return draft_vocabulary(getattr(options, VOCABULARY, ""), base.vocab_size, method, own, frequent)


def lm_heads(drafter: Any) -> list[tuple[Tensor, Tensor | None]]:
    """Return weight and bias of a drafter's own LM heads; [] = it uses the target's."""
    return drafter.lm_heads() if hasattr(drafter, "lm_heads") else []


class FeatureDecoder(DrafterDecoder):
    """A drafter over hidden states of these target layers; FINAL = the normed last one."""

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
        self._features: list[Tensor] = []  # [1, n, h] of each layer: the prompt's, until `on_prefill`

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
