"""Drafter folders: safetensors, a JSON configuration, the base model's hash and advised settings.

A folder of these reads as the whole repository does wherever only names and shapes matter. So it is known before a
download of gigabytes whether a model and a drafter fit together. It uses the network only because the user named a
hub id.
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar
from zipfile import is_zipfile

import torch
from huggingface_hub import HfApi, snapshot_download
from msgspec import Meta, Struct
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from specbench_ss import user_files
from specbench_ss.engine.architectures import ModelInfo
from specbench_ss.engine.target import Target
from specbench_ss.errors import UserError, did_you_mean, first_line
from specbench_ss.models.resolve import check_reachable
from specbench_ss.options import option_values, parse_options, value_text
from specbench_ss.storage import ordinary_mode, write_text
from specbench_ss.user_files import read_json

Amount = Annotated[float, Meta(ge=0)]


class Searched(Struct):
    """A text that drafts are searched in."""

    tokens: Amount | None = None
    made_of: str | None = None


class TrainingInfo(Struct):
    """The budget of a training; more may be recorded."""

    tokens: Amount | None = None
    steps: Amount | None = None
    parameters: Amount | None = None
    lr: float = 0.0
    regenerate_responses: Any = None
    searched: Searched | None = None


HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HUB_FILES = ["*.json", "*.safetensors", "*.pt", "*.bin"]
HEADER_ONLY = "header_only"  # in the header of a safetensors file: there are no values behind it

Keep = Callable[[str], bool]


def read_tensors(path: Path, keep: Keep | None = None) -> dict[str, Tensor]:
    """Return the tensors of a .safetensors or .pt/.bin file, or those whose names `keep` accepts.

    Of .pt and .bin files only tensors are read, never code. Raises UserError where the file cannot be read, and where
    a tensor holds NaN or infinity: a drafter with one would draft something all the same.
    """
    tensors = _read(path, "cpu", keep)
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise UserError(f"{path} is damaged: tensor {name} holds NaN or infinity")
    return tensors


def read_shapes(path: Path, keep: Keep | None = None, valued: Keep | None = None) -> dict[str, Tensor]:
    """Return the same tensors without their values, on torch's meta device.

    Only the headers of large files are read. valued: accepts the names of small tensors that are wanted with their
    values, where the file has any.
    """
    shapes = _read(path, "meta", keep)
    wanted = {name for name in shapes if valued is not None and valued(name)}
    if not wanted or _header_only(path):
        return shapes
    with torch.device("cpu"):  # whatever else a method's `check` makes on another device
        return shapes | read_tensors(path, wanted.__contains__)


def _header_only(path: Path) -> bool:
    if path.suffix != ".safetensors":
        return False

    with safe_open(path, framework="pt") as file:
        return HEADER_ONLY in (file.metadata() or {})


def _read(path: Path, device: str, keep: Keep | None) -> dict[str, Tensor]:
    if not path.is_file():
        raise UserError(f"no weight file {path}")
    try:
        if path.suffix == ".safetensors":
            return _read_safetensors(path, device, keep)
        mapped = keep is not None and device == "cpu" and is_zipfile(path)  # then what is not kept is not read
        loaded = torch.load(path, map_location=device, weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        raise UserError(f"{path} holds more than tensors, which may run code: it is not loaded") from error
    except Exception as error:  # truncated, or not a weight file
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UserError(f"cannot read weights {path}: {first}") from error
    if not isinstance(loaded, dict) or not all(
        isinstance(k, str) and isinstance(v, torch.Tensor) for k, v in loaded.items()
    ):
        raise UserError(f"{path} holds no dictionary of tensors")
    return {name: tensor for name, tensor in loaded.items() if keep is None or keep(name)}


def _read_safetensors(path: Path, device: str, keep: Keep | None) -> dict[str, Tensor]:
    """Read a safetensors file.

    A tensor with several names is stored once; `save_model` puts the others in the header.
    """
    with safe_open(path, framework="pt") as file:
        stored = {name: name for name in file.keys()}  # noqa: SIM118
        names = stored | {k: v for k, v in (file.metadata() or {}).items() if v in stored and k not in stored}
        wanted = {name: origin for name, origin in names.items() if keep is None or keep(name)}
        if device == "meta":
            return {k: torch.empty(file.get_slice(v).get_shape(), device="meta") for k, v in wanted.items()}
        return {k: file.get_tensor(v) for k, v in wanted.items()}


def read_config(folder: Path) -> dict[str, Any]:
    """Return config.json of a drafter's folder. Raises UserError where it is missing or not a JSON object."""
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"no config.json in {folder}")
    return read_json(path)


def write_checkpoint(
    folder: Path,
    module: nn.Module,
    config: dict[str, Any],
    name: str = "model.safetensors",
    called: Callable[[str], str] = lambda name: name,
) -> None:
    """Write the module's parameters in float16, its integer tables unchanged, and its config.

    called: returns the name in the file for the module's tensor of a given name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    state = {called(k): v.detach().to("cpu").contiguous() for k, v in module.state_dict().items()}
    save_file({k: v.half() if v.is_floating_point() else v for k, v in state.items()}, folder / name)
    ordinary_mode(folder)
    write_config(folder, config)


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Write a drafter's config.json."""
    write_text(folder / "config.json", json.dumps(config, indent=1) + "\n")


def load_into(
    module: nn.Module, tensors: dict[str, Tensor], what: str, called: Callable[[str], str] = lambda name: name
) -> None:
    """Copy tensors into the module. Raises UserError that names a tensor whose name or shape does not match.

    called: returns a file's name for the module's tensor of a given name.
    """
    own = module.state_dict()
    expected = {called(name): tensor for name, tensor in own.items()}
    for kind, names in (("lacks", expected.keys() - tensors.keys()), ("has unknown", tensors.keys() - expected.keys())):
        if names:
            raise UserError(f"{what} {kind} tensors: {', '.join(sorted(names)[:3])} ({len(names)} in all)")
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape:
            raise UserError(
                f"{what}: tensor {name} has shape {tuple(tensor.shape)}, the model needs {tuple(expected[name].shape)}"
            )
    found = {name: tensors[called(name)] for name in own}
    module.load_state_dict({name: t.to("meta") if own[name].is_meta else t for name, t in found.items()})


def drafter_here(given: str, method: str, base: ModelInfo, companion: str = "") -> Path | None:
    """Return the file or folder that the user named, or else the drafter that is shipped with the base.

    A name that is no path may be that of another folder that is shipped with the base, as `draft-2m` is with the lab.
    companion: the method whose shipped drafter is taken, by default `method` itself. None is returned for a hub id,
    which is OWNER/NAME where no file or folder has that name. Raises UserError where there is no drafter.
    """
    if given:
        path = Path(given)
        if path.exists():
            return path
        if len(path.parts) == 1 and (shipped := base.bundled_drafter(given)) is not None:
            return shipped
        if HUB_ID.fullmatch(given) is None:
            raise UserError(f"{method}: no such file or folder: {given}")
        return None
    shipped = base.bundled_drafter(companion or method)
    if shipped is None:
        others = companion and base.bundled_drafter(method) is not None  # it has weights of another kind
        kind = f" of the kind {companion!r}" if others else ""
        said = f"{method}: no weights{kind} for model {base.name!r}"
        raise UserError(f"{said}; give them with --set {method}.weights=PATH")
    return shipped


def drafter_folder(given: str, method: str, base: ModelInfo, companion: str = "") -> Path:
    """Return the drafter's file or folder as `drafter_here` does; a hub id is downloaded."""
    return drafter_here(given, method, base, companion) or _from_hub(given, method)


def weight_file(path: Path, names: Sequence[str], method: str) -> tuple[Path, dict[str, Any]]:
    """Return the weight file of a drafter's folder, the first of these names that is there, and the folder's config.

    A `path` that is itself a file has no config. Raises UserError where there is no such file.
    """
    if not path.is_dir():
        return path, {}
    file = next((path / name for name in names if (path / name).is_file()), None)
    if file is None:
        raise UserError(f"{method}: no weights in {path}; looked for {', '.join(names)}")
    return file, read_config(path)


def _from_hub(name: str, method: str) -> Path:
    """Return the local folder of a hub repository, which is downloaded if need be."""
    check_reachable(name)
    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES))
    except Exception as error:  # no such repository, no network: a dozen kinds
        raise UserError(
            f"{method}: no file or folder {name!r}, and the hub does not give one: {first_line(error)}"
        ) from error


def read_training_info(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `trained` of a drafter's config: the budget of its training, or that it is not known."""
    trained = config.get("trained")
    try:
        user_files.convert(trained, TrainingInfo)
    except ValueError:
        return {"tokens": None}
    return dict(trained) if isinstance(trained, Mapping) else {"tokens": None}


def belongs_to(target: Target) -> dict[str, str]:
    """Return what a drafter's config records of the base that it was trained for. `check_base` compares it."""
    return {"base_hash": target.weights_hash, "base_dtype": str(target.dtype)}


def check_base(config: dict[str, Any], target: Target, what: str, kind: str = "base") -> None:
    """Raise UserError where the drafter was trained for another base: its config holds the hash of that base.

    kind: what the target is to it, in words.
    """
    trained_for = config.get("base_hash")
    comparable = config.get("base_dtype") in (None, str(target.dtype))  # rounding changes the hash
    if comparable and trained_for and target.weights_hash and trained_for != target.weights_hash:
        raise UserError(
            f"{what} was trained for another {kind} (hash {trained_for}, this one is {target.weights_hash})"
        )


KEY = "advice"  # in config.json of a drafter's folder
DEVICES = ("cpu", "cuda")  # classes that settings may be advised for: types of torch's devices
ANY = ""  # settings for all devices
O = TypeVar("O")  # noqa: E741


@dataclass(frozen=True, slots=True)
class Advice:
    """Advised values of options: by_device[device class or ANY][option]."""

    by_device: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def on(self, device: str) -> dict[str, Any]:
        """Return the settings for a device class: those for all devices, replaced key by key by its own."""
        return {**self.by_device.get(ANY, {}), **self.by_device.get(device, {})}

    def settle(self, options: O, device: str, without: Collection[str] = ()) -> tuple[O, dict[str, Any]]:
        """Return the options with advised values in place of defaults, and the values that were taken.

        The default of an option that can be advised means "as advised"; any other value was stated, and stays.
        without: options that are left alone.
        """
        defaults = {f.name: f.default for f in fields(options)}  # type: ignore[arg-type]
        own = option_values(options)
        taken = {
            name: value
            for name, value in self.on(device).items()
            if name not in without and own[name] == defaults[name] != value
        }
        return replace(options, **taken), taken  # type: ignore[type-var]


def read_advice(
    given: Any, options: type[Any], keys: Collection[str], owner: str, file: Path | str, others: Collection[str] = ()
) -> Advice:
    """Return what a drafter's folder advises for a method. Raises UserError, naming the file, for anything else.

    given: options with their values, and device classes with such a mapping each; None is no advice. keys: options of
    the method that may be advised; their default means that they are not stated. others: options of other methods that
    use the same folder, which are not read here.
    """
    if given is None:
        return Advice()
    if not isinstance(given, Mapping):
        raise UserError(f"{owner}: {file}: {KEY} must be a mapping, not {given!r}")
    by_device = {name: part for name, part in given.items() if isinstance(part, Mapping)}
    by_device[ANY] = {name: value for name, value in given.items() if name not in by_device}
    found = {}
    for device, part in by_device.items():
        place = f"{owner}: {file}: {KEY}{f' for {device}' if device else ''}"
        if device and device not in DEVICES:
            raise UserError(f"{place}: no such device class{did_you_mean(device, DEVICES)}; {', '.join(DEVICES)}")
        found[device] = _values(place, part, options, keys, others)
    return Advice(found)


def _values(
    place: str, part: Mapping[str, Any], options: type[Any], keys: Collection[str], others: Collection[str]
) -> dict[str, Any]:
    """Return advised values as the options' types have them."""
    for name in part:
        if name not in keys and name not in others:
            known = sorted({*keys, *others})
            listed = f"options: {', '.join(known)}" if known else "it takes none"
            raise UserError(f"{place}: no option {name!r}{did_you_mean(name, known)}; {listed}")
    own = {name: value_text(value) for name, value in part.items() if name in keys}
    try:
        parsed = parse_options(options, own, "")
    except UserError as error:
        raise UserError(f"{place}: {str(error).removeprefix(': ')}") from None
    return {name: getattr(parsed, name) for name in own}


def advice_text(label: str, taken: Mapping[str, Any], device: str) -> str:
    """Return the line of a run on the advised settings that a method uses."""
    return f"{label}: {_settings(taken)} from its drafter's advice for {device}"


def advice_card(config: Mapping[str, Any]) -> str:
    """Return the paragraph of a drafter's card on its advised settings; '' if config.json has none."""
    advice = config.get(KEY, {})
    classes = {name: part for name, part in advice.items() if isinstance(part, Mapping)}
    general = {name: value for name, value in advice.items() if name not in classes}
    parts = [_settings(general)] if general else []
    parts += [f"{_settings(part)} on {device}" for device, part in classes.items()]
    return f"Advised settings (options of a run have priority): {'; '.join(parts)}.\n" if parts else ""


def _settings(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value_text(value)}" for name, value in values.items())


SAYS = (".json", ".jinja", ".txt", ".model")  # configuration and tokenizer: small, downloaded
PICKLES = (".pt", ".bin", ".pth")  # layout and content are one: only known once downloaded


@dataclass(frozen=True, slots=True)
class RepoMetadata:
    """folder: holds the small files and headers. weights: {file: bytes} on the hub. unread: files of unknown shapes."""

    folder: Path
    weights: dict[str, int]
    unread: tuple[str, ...]


def fetch(repo: str, folder: Path) -> RepoMetadata:
    """Fill the folder from the hub. Raises UserError where the hub does not give the repository."""
    check_reachable(repo)
    api = HfApi()
    try:
        files = {f.rfilename: f.size or 0 for f in api.model_info(repo, files_metadata=True).siblings or []}
        weights = {name: size for name, size in files.items() if name.endswith((".safetensors", *PICKLES))}
        for name in files:
            if name.endswith(SAYS):
                api.hf_hub_download(repo, name, local_dir=folder)
            elif name.endswith(".safetensors"):
                write_header(folder / name, api.parse_safetensors_file_metadata(repo, name))
    except Exception as error:  # no such repository, no network, a damaged header: a dozen kinds
        raise UserError(f"the hub does not give {repo!r}: {first_line(error)}") from error
    return RepoMetadata(folder, weights, tuple(name for name in weights if name.endswith(PICKLES)))


def write_header(path: Path, about: Any) -> None:
    """Write a safetensors file of these tensors with a hole in place of the values, which takes no disk space."""
    header: dict[str, Any] = {
        name: {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": list(t.data_offsets)}
        for name, t in about.tensors.items()
    }
    header["__metadata__"] = {**(about.metadata or {}), HEADER_ONLY: "yes"}
    text = json.dumps(header).encode()
    end = max((t.data_offsets[1] for t in about.tensors.values()), default=0)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
