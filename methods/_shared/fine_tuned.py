"""Fine-tuned targets: whole models, peft LoRA, and their own autoregressive baseline.

These methods are compared with autoregressive decoding of the fine-tuned model, NAME-ar, which a run includes. A
fine-tuned model gives other answers, so its speedup over the target's decoding would not measure the method.
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
from specbench_ss.engine.decoder import Decoder
from specbench_ss.engine.target import Target
from specbench_ss.engine.weights import holds_numbers
from specbench_ss.errors import UserError
from specbench_ss.methods.ar import Autoregressive
from specbench_ss.models.checkpoint import drafter_folder, find_drafter, read_shapes, read_tensors
from specbench_ss.models.load import config_of, hash_weights, load_model
from specbench_ss.models.resolve import check_model, weight_files
from specbench_ss.options import MethodSpec
from specbench_ss.storage import ordinary_mode
from specbench_ss.user_files import read_json

if TYPE_CHECKING:
    from torch import Tensor, nn


_model_cache: WeakValueDictionary[Hashable, Target] = WeakValueDictionary()


def cached_model(key: Hashable, build: Callable[[], Target]) -> Target:
    """Return the model with this key; build it unless one is in use."""
    model = _model_cache.get(key)
    if model is None:
        model = _model_cache[key] = build()
    return model


def copy_on_write(target: Target) -> Any:
    """Return the target's model in full precision, to be changed and passed to `Target.with_model`.

    Weights that the target has in full precision share its memory: replace a weight by a copy before you change it.
    Raise UserError if the target is quantized and its weights cannot be read again.
    """
    if target.quantization is None:
        return copy.deepcopy(target.model, {id(p): p for p in target.model.parameters()})
    if target.quantization.reread is None:
        raise UserError(
            f"cannot merge a LoRA into the quantized {target.name!r}; load it with load_model(quantize=...)"
        )
    model = target.quantization.reread()
    _share_weights(model, target.model)
    return model


def _share_weights(model: Any, source: Any) -> None:
    """Replace weights of a model by those of `source` that have the same name and values."""
    for name, source_module in source.named_modules():
        for key, weight in source_module.named_parameters(recurse=False):
            module = model.get_submodule(name)
            if holds_numbers(weight) and torch.equal(weight, getattr(module, key)):
                setattr(module, key, weight)


class FineTunedDecoder(Decoder):
    """Mixin, before a method's other bases, for methods that decode with a fine-tuned model, `self.target`."""

    baseline_name: ClassVar[str]  # the method name of its autoregressive baseline
    baseline_options: ClassVar[type[Any]]  # options of the baseline, which name the model

    @classmethod
    def baseline_for(cls, options: Any) -> MethodSpec:
        """Return autoregressive decoding of the same model."""
        same = {f.name: getattr(options, f.name) for f in fields(cls.baseline_options)}
        return MethodSpec(cls.baseline_name, {name: str(value) for name, value in same.items() if value})

    def metadata(self) -> dict[str, Any]:
        """Return the metadata with the hash of the fine-tuned model."""
        return super().metadata() | {"model_hash": self.target.weights_hash}


class FineTunedAutoregressive(Autoregressive):
    """Autoregressive decoding of a method's fine-tuned model: the baseline of that method."""

    lossless = False
    method: ClassVar[Any]  # a DrafterDecoder with a model of its own

    @classmethod
    def check(cls, options: Any, base: ModelInfo) -> None:
        """Check the model's files."""
        folder = find_drafter(options.weights, cls.method.name, base)
        if folder is not None:
            cls.method.drafted_model_info(base, folder)

    @classmethod
    def load(cls, target: Target, options: Any) -> Decoder:
        """Load the model that the options name."""
        folder = drafter_folder(options.weights, cls.method.name, target)
        return cls(cls.method.drafted_model(target, folder), options)

    @classmethod
    def test_instances(cls, target: Target) -> Mapping[str, Callable[[], Decoder]]:
        """Return an instance on a changed copy of the target."""
        return {"default": lambda: cls(fine_tuned(target), cls.Options())}

    def clone(self) -> Decoder:
        """Return another decoder of the same model."""
        return type(self)(self.target, self.options)

    def metadata(self) -> dict[str, Any]:
        """Return the model's hash."""
        return {"model_hash": self.target.weights_hash}


def has_model_files(folder: Path) -> bool:
    """Return True if a folder has the weight files of a whole model."""
    return folder.is_dir() and (folder / "config.json").is_file() and bool(weight_files(folder))


def read_model_info(folder: Path, base: ModelInfo) -> ModelInfo:
    """Return the configuration of a folder's model, with the base's tokenizer. Raise UserError if it is unusable."""
    check_model(str(folder))
    return ModelInfo(config_of(str(folder)), base.tokenizer, base.name, base.folder)


def load_target_like(target: Target, folder: Path) -> Target:
    """Return the model in a folder as a target with the same device, dtype and tokenizer.

    It is loaded once as long as it is in use.
    """
    stamp = tuple((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in weight_files(folder))
    return cached_model((target, folder, stamp), lambda: _load_target_like(target, folder))


def _load_target_like(target: Target, folder: Path) -> Target:
    model = load_model(str(folder), target.dtype, target.device_names)
    loaded = target.with_model(model, hash_weights(model))
    check_target(loaded)
    return loaded


def fine_tuned(target: Target) -> Target:
    """Return the target with a random low-rank change of every linear layer, as by a LoRA: for test instances."""
    model, generator = copy.deepcopy(copy_on_write(target)), torch.Generator().manual_seed(3)
    for module in model.model.modules() if hasattr(model, "model") else model.modules():
        if isinstance(module, torch.nn.Linear):
            d_out, d_in = module.weight.shape
            a, b = torch.randn(d_out, 2, generator=generator), torch.randn(2, d_in, generator=generator)
            module.weight.data += 0.03 * (a @ b).to(module.weight)
    return target.with_model(model, hash_weights(model))


ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
UNSUPPORTED = ("use_dora", "alora_invocation_tokens")  # peft variants beyond plain LoRA
PREFIX, DOWN, UP = "base_model.model.", ".lora_A.weight", ".lora_B.weight"  # added by peft to a module's name


@contextmanager
def quiet_peft() -> Iterator[None]:
    """Suppress peft's FutureWarning about a deprecated name in transformers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def with_lora(target: Target, rank: int) -> Target:
    """Return the target with untrained LoRA in every linear layer but the LM head; base weights are shared."""
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
    """Return the LoRA matrices of a peft model in a fixed order."""
    return [p for name, p in model.named_parameters() if "lora_" in name]


def save_lora(folder: Path, tuned: Target) -> None:
    """Write adapter_model.safetensors (float16) and adapter_config.json of a target from `with_lora`."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    model = tuned.model
    tensors = {k: v.detach().to("cpu", torch.float16).contiguous() for k, v in get_peft_model_state_dict(model).items()}
    save_file(tensors, folder / ADAPTER)
    ordinary_mode(folder)
    config = model.peft_config["default"].to_dict()
    config["base_model_name_or_path"] = ""  # a local path is useless on other machines
    config["inference_mode"] = True
    serializable = {k: sorted(v) if isinstance(v, set) else v for k, v in config.items()}
    (folder / ADAPTER_CONFIG).write_text(json.dumps(serializable, indent=1, default=str) + "\n")


def check_lora(folder: Path, method: str) -> None:
    """Raise UserError if the folder's LoRA is missing, damaged or more than LoRA of linear layers."""
    config = read_json(folder / ADAPTER_CONFIG)
    if config.get("peft_type") != "LORA":
        raise UserError(f"{method}: {folder / ADAPTER_CONFIG} has another peft_type than 'LORA'")
    if unsupported := [name for name in UNSUPPORTED if config.get(name)]:
        raise UserError(f"{method}: {folder / ADAPTER_CONFIG} asks for {unsupported[0]}, which is more than LoRA")
    adapted_modules(folder, method)


def check_fits(folder: Path, model: nn.Module, method: str) -> None:
    """Raise UserError if the LoRA is for a model of other modules or sizes. model: may be on the meta device."""
    modules = dict(model.named_modules())
    for name, shape in adapted_modules(folder, method).items():
        weight = getattr(modules.get(name), "weight", None)
        if weight is None:
            raise UserError(f"{method}: {folder / ADAPTER} adapts {name}, which the model does not have")
        if tuple(weight.shape) not in (shape, shape[::-1]):  # some models have their matrices transposed
            expected, found = ("x".join(map(str, size)) for size in (weight.shape, shape))
            raise UserError(f"{method}: {folder / ADAPTER} adapts {name} of {found} weights; the model has {expected}")


def is_plain_lora(folder: Path) -> bool:
    """Return True if an adapter is only LoRA of linear layers. Raise UserError if it cannot be read."""
    config = read_json(folder / ADAPTER_CONFIG)
    is_lora = config.get("peft_type") == "LORA" and config.get("bias", "none") == "none"
    return is_lora and (folder / ADAPTER).is_file() and not _non_lora_names(read_shapes(folder / ADAPTER))


def _non_lora_names(names: Iterable[str]) -> list[str]:
    return [name for name in names if not name.endswith((DOWN, UP))]


def without_weights(config: Any) -> nn.Module:
    """Return the causal language model of a configuration on torch's meta device."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    with init_empty_weights():
        model: nn.Module = auto.from_config(config)
    return model


def merged_target(target: Target, folder: Path, method: str) -> Target:
    """Return the target with the folder's LoRA merged in; weights without LoRA share the target's memory.

    It is merged once as long as it is in use. Raise UserError if the files are no plain LoRA of this model.
    """
    names = list(adapted_modules(folder, method))
    content = b"".join((folder / name).read_bytes() for name in (ADAPTER, ADAPTER_CONFIG))
    digest = hashlib.sha256(content).hexdigest()[:16]
    return cached_model((target, digest), lambda: _merged(target, folder, names, digest, method))


def _merged(target: Target, folder: Path, names: Sequence[str], digest: str, method: str) -> Target:
    from peft import PeftModel

    read_tensors(folder / ADAPTER)  # checks that all numbers are finite, which peft does not
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
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UserError(f"{method}: the LoRA in {folder} does not fit: {reason}") from error
    return target.with_model(merged, f"{target.weights_hash}+{digest}")


def adapted_modules(folder: Path, method: str) -> dict[str, tuple[int, int]]:
    """Return the modules that a saved LoRA changes, with the rows and columns of their weights.

    Raise UserError for anything but LoRA of linear layers: merging it would change the base's own weights.
    """
    saved, config = read_shapes(folder / ADAPTER), read_json(folder / ADAPTER_CONFIG)
    others = _non_lora_names(saved)
    bias = config.get("bias", "none")
    if others or bias != "none":
        found = f"{others[0]}" if others else f"bias {bias!r}"
        raise UserError(f"{method}: {folder} contains more than LoRA of linear layers: {found}")
    names = {key.removesuffix(DOWN).removesuffix(UP) for key in saved}
    ranks = None if config.get("rank_pattern") else config.get("r")
    return {name.removeprefix(PREFIX): _adapted(saved, name, ranks, folder, method) for name in sorted(names)}


def _adapted(saved: Mapping[str, Tensor], name: str, rank: Any, folder: Path, method: str) -> tuple[int, int]:
    """Return rows and columns of the weight that a pair of matrices adapts. rank: as configured, None if it varies."""
    down, up = saved.get(name + DOWN), saved.get(name + UP)
    if down is None or up is None:
        raise UserError(f"{method}: {folder / ADAPTER} is damaged: it lacks {name}{DOWN if down is None else UP}")
    if down.ndim != 2 or up.ndim != 2 or down.shape[0] != up.shape[1]:
        raise UserError(f"{method}: {folder / ADAPTER} is damaged: the matrices of {name} have mismatching shapes")
    if rank not in (None, down.shape[0]):
        raise UserError(f"{method}: {name} has rank {down.shape[0]}, but {folder / ADAPTER_CONFIG} has r = {rank!r}")
    return up.shape[0], down.shape[1]
