"""Methods with a model of their own: a fine-tune of the target, in its place, with the target's tokenizer.

What they are held against is that model's own plain decoding, NAME-ar, which a run includes: another model answers
otherwise, and its speed-up over the target's decoding would say nothing about the method.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar

import torch

from specbench_ss.engine.architectures import Outline
from specbench_ss.engine.checks import check_target
from specbench_ss.engine.decoder import Decoder, State
from specbench_ss.engine.target import Target
from specbench_ss.engine.tree import DraftTree
from specbench_ss.methods._shared.models_in_use import copy_to_change, one_in_use
from specbench_ss.models.load import config_of, hash_weights, load_model
from specbench_ss.models.resolve import check_model, weight_files
from specbench_ss.options import MethodSpec


class OwnModel(Decoder):
    """Mixed in before a method's other bases. `self.target` is the method's own model.

    own_reference: the name of its plain decoding; model_options: the options of that, which say which model it is.
    """

    own_reference: ClassVar[str]
    model_options: ClassVar[type[Any]]

    @classmethod
    def reference_for(cls, options: Any) -> MethodSpec:
        """The same model, one token a step."""
        same = {f.name: getattr(options, f.name) for f in fields(cls.model_options)}
        return MethodSpec(cls.own_reference, {name: str(value) for name, value in same.items() if value})

    def described(self) -> dict[str, Any]:
        """And the hash of the model that it changed the target into."""
        return super().described() | {"model_hash": self.target.weights_hash}


class OwnAutoregressive(Decoder):
    """Plain decoding of the model of such a method: its reference, itself another model than the target."""

    autoregressive = True
    lossless = False

    @classmethod
    @abstractmethod
    def model_of(cls, target: Target, options: Any) -> Target:
        """The method's own model."""

    @classmethod
    def load(cls, target: Target, options: Any) -> Decoder:
        """On its own model."""
        return cls(cls.model_of(target, options), options)

    def beside(self) -> Decoder:
        """On the same model."""
        return type(self)(self.target, self.options)

    def described(self) -> dict[str, Any]:
        """Which model."""
        return {"model_hash": self.target.weights_hash}

    def max_rows(self) -> int:
        """The root."""
        return 1

    def propose(self, state: State) -> DraftTree:
        """Nothing."""
        return DraftTree.root_only(state.root)


def holds_model(folder: Path) -> bool:
    """Whether a folder has the weight files of a whole model."""
    return folder.is_dir() and (folder / "config.json").is_file() and bool(weight_files(folder))


def outline_beside(folder: Path, base: Outline) -> Outline:
    """The whole model in a folder, by its configuration, with the base's tokenizer. Raises UserError."""
    check_model(str(folder))
    return Outline(config_of(str(folder)), base.tokenizer, base.name, base.folder)


def target_beside(target: Target, folder: Path) -> Target:
    """The whole model in a folder as a target, on the same device, with the same type and tokenizer.

    One, as long as it is in use.
    """
    stamp = tuple((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in weight_files(folder))
    return one_in_use((target, folder, stamp), lambda: _beside(target, folder))


def _beside(target: Target, folder: Path) -> Target:
    model = load_model(str(folder), target.dtype, target.device_names)
    own = target.with_model(model, hash_weights(model))
    check_target(own)
    return own


def fine_tuned(target: Target) -> Target:
    """The target with a random low-rank change of every linear layer, as a LoRA makes it: for examples."""
    model, generator = copy.deepcopy(copy_to_change(target)), torch.Generator().manual_seed(3)
    for module in model.model.modules() if hasattr(model, "model") else model.modules():
        if isinstance(module, torch.nn.Linear):
            out, into = module.weight.shape
            a, b = torch.randn(out, 2, generator=generator), torch.randn(2, into, generator=generator)
            module.weight.data += 0.03 * (a @ b).to(module.weight)
    return target.with_model(model, hash_weights(model))
