"""Drafter folders: safetensors, a JSON configuration, the base model's hash and advised settings.

Headers and configurations alone show whether model and drafter fit, before gigabytes are downloaded. The network is
used only if the user named a hub id.
"""

from __future__ import annotations

import json
import pickle
import re
import warnings
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
from specbench_ss.models.bundled import VECTORS_HASH, vectors_hash
from specbench_ss.models.catalog import HUB
from specbench_ss.models.resolve import INDEXES, WHOLE, check_reachable, weight_files
from specbench_ss.options import option_values, parse_options, value_text
from specbench_ss.storage import ordinary_mode, write_text
from specbench_ss.user_files import read_json

Amount = Annotated[float, Meta(ge=0)]


class Searched(Struct):
    """A text in which drafts are searched."""

    tokens: Amount | None = None
    made_of: str | None = None


class TrainingInfo(Struct):
    """The budget of a training; more may be recorded.

    tokens: repeats counted, padding not. token_positions: rows times their length, where tokens were not counted.
    """

    tokens: Amount | None = None
    token_positions: Amount | None = None
    steps: Amount | None = None
    parameters: Amount | None = None
    lr: float = 0.0
    regenerate_responses: Any = None
    searched: Searched | None = None


HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HUB_FILES = ["*.json", "*.safetensors", "*.pt", "*.bin"]
HEADER_ONLY = "header_only"  # metadata key of a safetensors file without values

Keep = Callable[[str], bool]


def read_tensors(path: Path, keep: Keep | None = None) -> dict[str, Tensor]:
    """Return the tensors of a .safetensors or .pt/.bin file, or those whose names `keep` accepts.

    Of a folder all weight files are read, in one part or several with an index. Pickles are loaded with weights_only
    (no code). Raises UserError for a missing or unreadable file, for quantized weights, and for NaN or infinity, with
    which a drafter would still draft.
    """
    tensors = _read(path, "cpu", keep)
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise UserError(f"{path} is damaged: tensor {name} has NaN or infinity")
    return tensors


def read_shapes(path: Path, keep: Keep | None = None, valued: Keep | None = None) -> dict[str, Tensor]:
    """Return the same tensors without their values, on torch's meta device, from the headers of large files.

    valued: accepts the names of small tensors to return with values, if the file has any.
    """
    shapes = _read(path, "meta", keep)
    wanted = {name for name in shapes if valued is not None and valued(name)}
    if not wanted or _header_only(path):
        return shapes
    with torch.device("cpu"):  # regardless of the device of a method's `check`
        return shapes | read_tensors(path, wanted.__contains__)


def _header_only(path: Path) -> bool:
    if path.is_dir():
        return any(map(_header_only, weight_files(path)))
    if path.suffix != ".safetensors":
        return False

    with safe_open(path, framework="pt") as file:
        return HEADER_ONLY in (file.metadata() or {})


def _read(path: Path, device: str, keep: Keep | None) -> dict[str, Tensor]:
    if path.is_dir():
        parts = weight_files(path) if keep is None else weight_files(path, keep)
        return {name: tensor for part in parts for name, tensor in _read(part, device, keep).items()}
    if not path.is_file():
        raise UserError(f"no weight file {path}")
    try:
        if path.suffix == ".safetensors":
            return _read_safetensors(path, device, keep)
        mapped = keep is not None and device == "cpu" and is_zipfile(path)  # reads only what is kept
        loaded = torch.load(path, map_location=device, weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        raise UserError(f"{path} has more than tensors and may run code; convert it to safetensors") from error
    except Exception as error:  # truncated, or not a weight file
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UserError(f"cannot read weights {path}: {first}") from error
    if not isinstance(loaded, dict) or not all(
        isinstance(k, str) and isinstance(v, torch.Tensor) for k, v in loaded.items()
    ):
        raise UserError(f"{path} is not a dictionary of tensors")
    tensors = {name: tensor for name, tensor in loaded.items() if keep is None or keep(name)}
    for name, tensor in tensors.items():
        one_byte = tensor.itemsize == 1 and tensor.dtype != torch.bool
        _check_not_quantized(
            path, name, str(tensor.dtype), one_byte and (tensor.ndim > 1 or tensor.is_floating_point())
        )
    return tensors


def _check_not_quantized(path: Path, name: str, dtype: str, one_byte: bool) -> None:
    if one_byte:
        raise UserError(f"{path}: tensor {name} is {dtype}; quantized weights are not supported")


def _read_safetensors(path: Path, device: str, keep: Keep | None) -> dict[str, Tensor]:
    """Read a safetensors file.

    A tensor with several names is stored once; `save_model` puts the others in the header.
    """
    with safe_open(path, framework="pt") as file:
        stored = {name: name for name in file.keys()}  # noqa: SIM118
        names = stored | {k: v for k, v in (file.metadata() or {}).items() if v in stored and k not in stored}
        wanted = {name: origin for name, origin in names.items() if keep is None or keep(name)}
        for name, origin in wanted.items():
            stored_as = file.get_slice(origin)
            dtype, matrix = stored_as.get_dtype(), len(stored_as.get_shape()) > 1  # a list may be a table, as t2d
            _check_not_quantized(path, name, dtype, dtype.startswith("F8") or (dtype in ("I8", "U8") and matrix))
        if device == "meta":
            return {k: torch.empty(file.get_slice(v).get_shape(), device="meta") for k, v in wanted.items()}
        return {k: file.get_tensor(v) for k, v in wanted.items()}


def read_config(folder: Path) -> dict[str, Any]:
    """Return config.json of a drafter's folder, or of a weight file's.

    Raises UserError if it is missing or not a JSON object.
    """
    folder = folder.parent if folder.is_file() else folder
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
    """Write the module's parameters and its config as `write_tensors` does.

    called: maps a tensor's name in the module to its name in the file.
    """
    write_tensors(folder, {called(k): v for k, v in module.state_dict().items()}, config, name)


def write_tensors(
    folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any], name: str = "model.safetensors"
) -> None:
    """Write tensors, those of numbers in float16 and integer tables unchanged, and config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {k: v.detach().to("cpu").contiguous() for k, v in tensors.items()}
    save_file({k: v.half() if v.is_floating_point() else v for k, v in state.items()}, folder / name)
    ordinary_mode(folder)
    write_config(folder, config)


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Write a drafter's config.json."""
    write_text(folder / "config.json", json.dumps(config, indent=1) + "\n")


def load_into(
    module: nn.Module, tensors: dict[str, Tensor], what: str, called: Callable[[str], str] = lambda name: name
) -> None:
    """Copy tensors into the module. Raises UserError for a tensor whose name or shape does not match.

    called: maps a tensor's name in the module to its name in the file.
    """
    state = module.state_dict()
    expected = {called(name): tensor for name, tensor in state.items()}
    for kind, names in (("lacks", expected.keys() - tensors.keys()), ("has unknown", tensors.keys() - expected.keys())):
        if names:
            raise UserError(f"{what} {kind} tensors: {', '.join(sorted(names)[:3])} ({len(names)} in all)")
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape:
            raise UserError(
                f"{what}: tensor {name} has shape {tuple(tensor.shape)}, the model needs {tuple(expected[name].shape)}"
            )
    renamed = {name: tensors[called(name)] for name in state}
    module.load_state_dict({name: t.to("meta") if state[name].is_meta else t for name, t in renamed.items()})


def find_drafter(given: str, method: str, base: ModelInfo, companion: str = "") -> Path | None:
    """Return the drafter's file or folder, by default the one bundled with the base; None for a hub id.

    `given` is a path, the name of a bundled drafter (`draft-2m` of the lab) or a hub id OWNER/NAME. companion: method
    of the default drafter, if not `method`. Raises UserError if there is no drafter.
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
        other_kind = companion and base.bundled_drafter(method) is not None
        kind = f" of the kind {companion!r}" if other_kind else ""
        message = f"{method}: no weights{kind} for model {base.name!r}"
        raise UserError(f"{message}; use --set {method}.weights=PATH")
    return shipped


def drafter_folder(given: str, method: str, base: ModelInfo, companion: str = "") -> Path:
    """Return the drafter's file or folder as `find_drafter` does; download a hub id."""
    return find_drafter(given, method, base, companion) or _from_hub(given, method)


def weights_in(path: Path, method: str, names: Sequence[str] = ()) -> Path:
    """Return what `read_tensors` reads of a drafter: of a folder the first of these files, else the folder.

    A file is returned as it is. Raises UserError for a folder without weights.
    """
    if not path.is_dir():
        return path
    source = next((path / name for name in names if (path / name).is_file()), path)
    if source == path and not weight_files(path):
        raise UserError(f"{method}: no weights in {path}; looked for {', '.join((*names, *WHOLE, *INDEXES))}")
    return source


def _from_hub(name: str, method: str) -> Path:
    """Return the local folder of a hub repository; download it if necessary and possible."""
    check_reachable(name)
    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES))
    except Exception as error:  # no repository, no network: many classes
        raise UserError(f"{method}: no file or folder {name!r}, and the hub failed: {first_line(error)}") from error


def read_training_info(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `trained` of a drafter's config: its training budget, or an unknown one."""
    trained = config.get("trained")
    try:
        user_files.convert(trained, TrainingInfo)
    except ValueError:
        return {"tokens": None}
    return dict(trained) if isinstance(trained, Mapping) else {"tokens": None}


def belongs_to(target: Target) -> dict[str, str]:
    """Return the identity of the base for a drafter's config; `check_base` compares it."""
    hashes = {"base_hash": target.weights_hash, VECTORS_HASH: vectors_hash(target.model.named_parameters())}
    return {**hashes, "base_dtype": str(target.dtype)}


OTHER_ROUNDING = (
    "weights differ from those that the drafters were trained for: by rounding, or by a fine-tune that keeps biases "
    "and final norm; drafts may be accepted less often"
)


def check_base(config: dict[str, Any], target: Target, what: str, kind: str = "base") -> tuple[str, ...]:
    """Compare the target with the base in the drafter's config.

    kind: role of the target, for the message. Returns the warnings that were given, at most one: the hashes of the
    weights differ, and those of biases and final norm are equal. Raises UserError for another base.
    """
    trained_for, vectors = config.get("base_hash"), config.get(VECTORS_HASH)
    comparable = config.get("base_dtype") in (None, str(target.dtype))  # rounding changes the hash
    if not comparable or not trained_for or not target.weights_hash or trained_for == target.weights_hash:
        return ()
    if vectors and vectors == vectors_hash(target.model.named_parameters()):
        warnings.warn(OTHER_ROUNDING, stacklevel=1)  # this line: one warning for all drafters
        return (OTHER_ROUNDING,)
    raise UserError(f"{what} was trained for another {kind} (hash {trained_for}, this one is {target.weights_hash})")


def public_name(base: ModelInfo) -> str:
    """Return the name by which others find a model, mostly its hub id; '' for the lab, local folders and files."""
    page, local = str(base.origin.get("page", "")), base.is_lab or base.folder is not None or "gguf" in base.origin
    return page.removeprefix(HUB) if page.startswith(HUB) else "" if local else base.name


KEY = "advice"  # in config.json of a drafter's folder
DEVICES = ("cpu", "cuda")  # device classes of advised settings: types of torch's devices
ANY = ""  # settings for all devices
O = TypeVar("O")  # noqa: E741


@dataclass(frozen=True, slots=True)
class Advice:
    """Advised values of options: by_device[device class or ANY][option]."""

    by_device: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def on(self, device: str) -> dict[str, Any]:
        """Return the settings for a device class; they override those for all devices."""
        return {**self.by_device.get(ANY, {}), **self.by_device.get(device, {})}

    def apply(self, options: O, device: str, without: Collection[str] = ()) -> tuple[O, dict[str, Any]]:
        """Return the options with advised values in place of defaults, and these values.

        Options that differ from their default keep their value. without: options that are never changed.
        """
        defaults = {f.name: f.default for f in fields(options)}  # type: ignore[arg-type]
        values = option_values(options)
        advised = {
            name: value
            for name, value in self.on(device).items()
            if name not in without and values[name] == defaults[name] != value
        }
        return replace(options, **advised), advised  # type: ignore[type-var]


def read_advice(
    given: Any, options: type[Any], keys: Collection[str], owner: str, file: Path | str, others: Collection[str] = ()
) -> Advice:
    """Return the advice of a drafter's folder for a method. Raises UserError, with the file, for anything invalid.

    given: options with their values, and device classes with such a mapping each, or None. keys: options of the method
    that may be advised. others: options of other methods with the same folder, which are ignored.
    """
    if given is None:
        return Advice()
    if not isinstance(given, Mapping):
        raise UserError(f"{owner}: {file}: {KEY} must be a mapping, not {given!r}")
    by_device = {name: part for name, part in given.items() if isinstance(part, Mapping)}
    by_device[ANY] = {name: value for name, value in given.items() if name not in by_device}
    values = {}
    for device, part in by_device.items():
        place = f"{owner}: {file}: {KEY}{f' for {device}' if device else ''}"
        if device and device not in DEVICES:
            raise UserError(f"{place}: unknown device class{did_you_mean(device, DEVICES)}; use {', '.join(DEVICES)}")
        values[device] = _values(place, part, options, keys, others)
    return Advice(values)


def _values(
    place: str, part: Mapping[str, Any], options: type[Any], keys: Collection[str], others: Collection[str]
) -> dict[str, Any]:
    """Return advised values, parsed by the options' types."""
    for name in part:
        if name not in keys and name not in others:
            known = sorted({*keys, *others})
            listed = f"options: {', '.join(known)}" if known else "it has none"
            raise UserError(f"{place}: no option {name!r}{did_you_mean(name, known)}; {listed}")
    texts = {name: value_text(value) for name, value in part.items() if name in keys}
    try:
        parsed = parse_options(options, texts, "")
    except UserError as error:
        raise UserError(f"{place}: {str(error).removeprefix(': ')}") from None
    return {name: getattr(parsed, name) for name in texts}


def advice_text(advised: Mapping[str, Any]) -> str:
    """Return a method's advised settings as text: 'k=3, n_draft=4 (advised by the drafter's folder)'."""
    return f"{_settings(advised)} (advised by the drafter's folder)"


def advice_card(config: Mapping[str, Any]) -> str:
    """Return the model card's paragraph on advised settings, or ''."""
    advice = config.get(KEY, {})
    classes = {name: part for name, part in advice.items() if isinstance(part, Mapping)}
    general = {name: value for name, value in advice.items() if name not in classes}
    parts = [_settings(general)] if general else []
    parts += [f"{_settings(part)} on {device}" for device, part in classes.items()]
    return f"Advised settings (options of a run have priority): {'; '.join(parts)}.\n" if parts else ""


def _settings(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value_text(value)}" for name, value in values.items())


OWN_FIELDS = (
    "base", "base_hash", VECTORS_HASH, "base_dtype", "trained", "accuracies", "accuracies_of", "nodes", KEY,
)  # fmt: skip


def own_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a drafter's config.json that are this project's: base, training, accuracies and advice."""
    return {name: config[name] for name in OWN_FIELDS if name in config}


SMALL_FILES = (".json", ".jinja", ".txt", ".model")  # configuration and tokenizer: downloaded
PICKLES = (".pt", ".bin", ".pth")  # shapes are unknown before the download


@dataclass(frozen=True, slots=True)
class RepoMetadata:
    """folder: small files and headers. weights: {file: bytes} on the hub. unread: files of unknown shapes."""

    folder: Path
    weights: dict[str, int]
    unread: tuple[str, ...]


def fetch(repo: str, folder: Path) -> RepoMetadata:
    """Download a repository's small files and headers into the folder. Raises UserError if the hub fails."""
    check_reachable(repo)
    api = HfApi()
    try:
        files = {f.rfilename: f.size or 0 for f in api.model_info(repo, files_metadata=True).siblings or []}
        weights = {name: size for name, size in files.items() if name.endswith((".safetensors", *PICKLES))}
        for name in files:
            if name.endswith(SMALL_FILES):
                api.hf_hub_download(repo, name, local_dir=folder)
            elif name.endswith(".safetensors"):
                write_header(folder / name, api.parse_safetensors_file_metadata(repo, name))
    except Exception as error:  # no repository, no network, a damaged header: many classes
        raise UserError(f"the hub has no readable {repo!r}: {first_line(error)}") from error
    return RepoMetadata(folder, weights, tuple(name for name in weights if name.endswith(PICKLES)))


def write_header(path: Path, metadata: Any) -> None:
    """Write the header of a safetensors file with a sparse hole for the values, which takes no disk space."""
    header: dict[str, Any] = {
        name: {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": list(t.data_offsets)}
        for name, t in metadata.tensors.items()
    }
    header["__metadata__"] = {**(metadata.metadata or {}), HEADER_ONLY: "yes"}
    text = json.dumps(header).encode()
    end = max((t.data_offsets[1] for t in metadata.tensors.values()), default=0)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
