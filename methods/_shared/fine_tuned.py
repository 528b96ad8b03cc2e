"""Fine-tuned targets: whole models, LoRA as peft writes it, and their own autoregressive decoding as baseline.

What these methods are held against is that model's own autoregressive decoding, NAME-ar, which a run includes:
another model answers otherwise, and its speedup over the target's decoding would say nothing about the method.
"""

from __future__ import annotations

import copy
import hashlib
import json
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakValueDictionary

import torch

from specbench_ss.engine.architectures import ModelInfo
from specbench_ss.engine.checks import check_target
from specbench_ss.engine.cpu_kernels import holds_numbers
from specbench_ss.engine.decoder import Decoder
from specbench_ss.engine.target import Target
from specbench_ss.errors import UserError
from specbench_ss.methods.ar import Autoregressive
from specbench_ss.models.checkpoint import read_shapes, read_tensors
from specbench_ss.models.load import config_of, hash_weights, load_model
from specbench_ss.models.resolve import check_model, weight_files
from specbench_ss.options import MethodSpec
from specbench_ss.storage import ordinary_mode
from specbench_ss.user_files import read_json

if TYPE_CHECKING:
    from torch import Tensor, nn


_in_use: WeakValueDictionary[Hashable, Target] = WeakValueDictionary()


def cached_model(key: Hashable, make: Callable[[], Target]) -> Target:
    """The model with this key, made where nobody uses it yet."""
    own = _in_use.get(key)
    if own is None:
        own = _in_use[key] = make()
    return own


def copy_on_write(target: Target) -> Any:
    """The target's model, in full precision, to be changed and given to `Target.with_model`.

    Its weights are the target's own memory, all that the target holds in full precision: one that is to be changed is
    replaced by a copy. Raises UserError where the target's are held in fewer bits and cannot be read again.
    """
    if target.quantization is None:
        return copy.deepcopy(target.model, {id(p): p for p in target.model.parameters()})
    if target.quantization.reread is None:
        raise UserError(
            f"no LoRA can be merged into {target.name!r}, whose weights are quantised ({target.quantised}) and cannot "
            "be read again as they were: load it with load_model(quantize=...)"
        )
    model = target.quantization.reread()
    _share(model, target.model)
    return model


def _share(model: Any, other: Any) -> None:
    """Let a model's weights be the other's memory, where the other holds the same numbers under the same name."""
    for name, module in other.named_modules():
        own = dict(module.named_parameters(recurse=False))
        for key, weight in own.items():
            mine = model.get_submodule(name)
            if holds_numbers(weight) and torch.equal(weight, getattr(mine, key)):
                setattr(mine, key, weight)


class FineTunedDecoder(Decoder):
    """Mixed in before a method's other bases. `self.target` is the method's own model.

    own_reference: the name of its autoregressive decoding. model_options: options of that, which name the model.
    """

    own_reference: ClassVar[str]
    model_options: ClassVar[type[Any]]

    @classmethod
    def baseline_for(cls, options: Any) -> MethodSpec:
        """The same model, one token a step."""
        same = {f.name: getattr(options, f.name) for f in fields(cls.model_options)}
        return MethodSpec(cls.own_reference, {name: str(value) for name, value in same.items() if value})

    def metadata(self) -> dict[str, Any]:
        """And the hash of the model that it changed the target into."""
        return super().metadata() | {"model_hash": self.target.weights_hash}


class FineTunedAutoregressive(Autoregressive):
    """Autoregressive decoding of the model of a method: its reference, itself another model than the target.

    of: the method, which loads its model by `own_model` and checks its files by `check_own_model`.
    """

    lossless = False
    of: ClassVar[Any]

    @classmethod
    def check(cls, options: Any, base: ModelInfo) -> None:
        """Check the model's files."""
        cls.of.check_own_model(options, base)

    @classmethod
    def load(cls, target: Target, options: Any) -> Decoder:
        """Load the model that the options name."""
        return cls(cls.of.own_model(target, options), options)

    @classmethod
    def test_instances(cls, target: Target) -> Mapping[str, Callable[[], Decoder]]:
        """On a changed copy of the target."""
        return {"default": lambda: cls(fine_tuned(target), cls.Options())}

    def clone(self) -> Decoder:
        """On the same model."""
        return type(self)(self.target, self.options)

    def metadata(self) -> dict[str, Any]:
        """Which model."""
        return {"model_hash": self.target.weights_hash}


def holds_model(folder: Path) -> bool:
    """Whether a folder has the weight files of a whole model."""
    return folder.is_dir() and (folder / "config.json").is_file() and bool(weight_files(folder))


def outline_beside(folder: Path, base: ModelInfo) -> ModelInfo:
    """The whole model in a folder, by its configuration, with the base's tokenizer. Raises UserError."""
    check_model(str(folder))
    return ModelInfo(config_of(str(folder)), base.tokenizer, base.name, base.folder)


def target_beside(target: Target, folder: Path) -> Target:
    """The whole model in a folder as a target, on the same device, with the same type and tokenizer.

    One, as long as it is in use.
    """
    stamp = tuple((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in weight_files(folder))
    return cached_model((target, folder, stamp), lambda: _beside(target, folder))


def _beside(target: Target, folder: Path) -> Target:
    model = load_model(str(folder), target.dtype, target.device_names)
    own = target.with_model(model, hash_weights(model))
    check_target(own)
    return own


def fine_tuned(target: Target) -> Target:
    """The target with a random low-rank change of every linear layer, as a LoRA makes it: for examples."""
    model, generator = copy.deepcopy(copy_on_write(target)), torch.Generator().manual_seed(3)
    for module in model.model.modules() if hasattr(model, "model") else model.modules():
        if isinstance(module, torch.nn.Linear):
            out, into = module.weight.shape
            a, b = torch.randn(out, 2, generator=generator), torch.randn(2, into, generator=generator)
            module.weight.data += 0.03 * (a @ b).to(module.weight)
    return target.with_model(model, hash_weights(model))


ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
BEYOND = ("use_dora", "alora_invocation_tokens")  # with which peft makes up what the file does not hold
PREFIX, DOWN, UP = "base_model.model.", ".lora_A.weight", ".lora_B.weight"  # peft's names around a module's own


@contextmanager
def quiet_peft() -> Iterator[None]:
    """Within: not a word of peft's asking transformers by a name that is going out of use."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def with_lora(target: Target, rank: int) -> Target:
    """The target with untrained LoRA in every linear layer but the LM head; the base's weights are the same memory."""
    from peft import LoraConfig, get_peft_model

    model = copy.deepcopy(target.model, {id(p): p for p in target.model.parameters()})
    lora = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", bias="none", task_type="CAUSAL_LM")
    with quiet_peft():
        adapted = get_peft_model(model, lora)
    tuned = Target(adapted, target.tokenizer, target.name, target.folder)
    for p in lora_parameters(tuned.model):
        p.requires_grad_(True)
    return tuned


def lora_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The LoRA matrices of a peft model, in a fixed order."""
    return [p for name, p in model.named_parameters() if "lora_" in name]


def save_lora(folder: Path, tuned: Target) -> None:
    """adapter_model.safetensors (float16) and adapter_config.json of a target made by `with_lora`."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    model = tuned.model
    tensors = {k: v.detach().to("cpu", torch.float16).contiguous() for k, v in get_peft_model_state_dict(model).items()}
    save_file(tensors, folder / ADAPTER)
    ordinary_mode(folder)
    config = model.peft_config["default"].to_dict()
    config["base_model_name_or_path"] = ""  # a path of the machine that trained it says nothing elsewhere
    config["inference_mode"] = True
    plain = {k: sorted(v) if isinstance(v, set) else v for k, v in config.items()}
    (folder / ADAPTER_CONFIG).write_text(json.dumps(plain, indent=1, default=str) + "\n")


def check_lora(folder: Path, method: str) -> None:
    """Raises UserError where the folder's LoRA is missing, damaged or more than LoRA of linear layers."""
    config = read_json(folder / ADAPTER_CONFIG)
    if config.get("peft_type") != "LORA":
        raise UserError(f"{method}: {folder / ADAPTER_CONFIG} is no LoRA's: its peft_type is not 'LORA'")
    if beyond := [name for name in BEYOND if config.get(name)]:
        raise UserError(f"{method}: {folder / ADAPTER_CONFIG} asks for {beyond[0]}, which is more than LoRA")
    adapted_modules(folder, method)


def check_fits(folder: Path, model: nn.Module, method: str) -> None:
    """Raises UserError where the LoRA is of a model of other modules or sizes. model: may be without weights."""
    modules = dict(model.named_modules())
    for name, shape in adapted_modules(folder, method).items():
        weight = getattr(modules.get(name), "weight", None)
        if weight is None:
            raise UserError(f"{method}: {folder / ADAPTER} adapts {name}, which the model does not have")
        if tuple(weight.shape) not in (shape, shape[::-1]):  # some models have their matrices transposed
            own, other = ("x".join(map(str, size)) for size in (weight.shape, shape))
            raise UserError(f"{method}: {folder / ADAPTER} adapts {name} of {other} weights; the model's is of {own}")


def is_plain_lora(folder: Path) -> bool:
    """Whether an adapter is LoRA of linear layers and nothing else. Raises UserError where it cannot be read."""
    config = read_json(folder / ADAPTER_CONFIG)
    plain = config.get("peft_type") == "LORA" and config.get("bias", "none") == "none"
    return plain and (folder / ADAPTER).is_file() and not _beside_lora(read_shapes(folder / ADAPTER))


def _beside_lora(names: Iterable[str]) -> list[str]:
    return [name for name in names if not name.endswith((DOWN, UP))]


def without_weights(config: Any) -> nn.Module:
    """The causal language model of a configuration, on torch's meta device."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    with init_empty_weights():
        model: nn.Module = auto.from_config(config)
    return model


def merged_target(target: Target, folder: Path, method: str) -> Target:
    """The target with the folder's LoRA merged in; whatever the LoRA does not touch is the target's own memory.

    One for what the files hold, as long as it is in use. Raises UserError where they are no plain LoRA of this model.
    """
    names = list(adapted_modules(folder, method))
    content = b"".join((folder / name).read_bytes() for name in (ADAPTER, ADAPTER_CONFIG))
    digest = hashlib.sha256(content).hexdigest()[:16]
    return cached_model((target, digest), lambda: _merged(target, folder, names, digest, method))


def _merged(target: Target, folder: Path, names: Sequence[str], digest: str, method: str) -> Target:
    from peft import PeftModel

    read_tensors(folder / ADAPTER)  # which must hold finite numbers; peft does not look
    check_fits(folder, target.model, method)
    model = copy_on_write(target)
    modules = dict(model.named_modules())
    for name in names:
        weight = modules[name].weight
        modules[name].weight = torch.nn.Parameter(weight.detach().clone(), requires_grad=False)
    try:
        with quiet_peft():
            merged = PeftModel.from_pretrained(model, str(folder)).merge_and_unload()
    except (ValueError, RuntimeError, OSError, KeyError, TypeError) as error:
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UserError(f"{method}: the LoRA in {folder} does not fit: {first}") from error
    return target.with_model(merged, f"{target.weights_hash}+{digest}")


def adapted_modules(folder: Path, method: str) -> dict[str, tuple[int, int]]:
    """Names of the modules that a saved LoRA changes, with the rows and columns of their weights.

    Raises UserError for anything but LoRA of linear layers: merged, it would change the base's own weights.
    """
    saved, config = read_shapes(folder / ADAPTER), read_json(folder / ADAPTER_CONFIG)
    strange = _beside_lora(saved)
    bias = config.get("bias", "none")
    if strange or bias != "none":
        what = f"{strange[0]}" if strange else f"bias {bias!r}"
        raise UserError(f"{method}: {folder} holds more than LoRA of linear layers: {what}")
    names = {key.removesuffix(DOWN).removesuffix(UP) for key in saved}
    ranks = None if config.get("rank_pattern") else config.get("r")
    return {name.removeprefix(PREFIX): _adapted(saved, name, ranks, folder, method) for name in sorted(names)}


def _adapted(saved: Mapping[str, Tensor], name: str, rank: Any, folder: Path, method: str) -> tuple[int, int]:
    """Rows and columns of what a pair of matrices adapts. rank: as configured, None where it is not one for all."""
    down, up = saved.get(name + DOWN), saved.get(name + UP)
    if down is None or up is None:
        raise UserError(f"{method}: {folder / ADAPTER} is damaged: it lacks {name}{DOWN if down is None else UP}")
    if down.ndim != 2 or up.ndim != 2 or down.shape[0] != up.shape[1]:
        raise UserError(f"{method}: {folder / ADAPTER} is damaged: the two matrices of {name} do not fit each other")
    if rank not in (None, down.shape[0]):
        raise UserError(f"{method}: {name} has rank {down.shape[0]}, and {folder / ADAPTER_CONFIG} says r = {rank!r}")
    return up.shape[0], down.shape[1]
