"""Command `ssbench train`.

A trainer's own options come from its `Options` dataclass, which is loaded on demand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

import typer
from annotated_types import Ge
from typer.core import TyperCommand, TyperGroup

from specbench_ss.cli.commands import literal
from specbench_ss.cli.shared import interrupted, parameters, take_options
from specbench_ss.conversations import read_columns
from specbench_ss.options import make_options
from specbench_ss.runs.run_options import DEVICE, CommandOptions, Count, Seed, fields_of, option, same
from specbench_ss.storage import writing
from specbench_ss.training.trainer import TrainConfig, Trainer

DEFAULT = TrainConfig(Path(), ())


_text, _budget = partial(option, panel="Text"), partial(option, panel="Budget")
_how = partial(option, panel="How it is trained")


@dataclass(frozen=True)
class TrainOptions(CommandOptions):
    """Options common to all trainers; see `TrainConfig`."""

    data: list[str] = _text(
        MISSING,
        "Training conversations: JSONL files, folders of them, or one data set of the hub.",
        metavar="FILE|DIR|ID",
    )
    out: Path = option(
        MISSING,
        "Folder to write the weights to. The same command with the same folder continues an unfinished training.",
        metavar="DIR",
    )
    model: str = same("model")
    columns: list[str] | None = same("columns", panel="Text")
    length: int = _text(DEFAULT.length, "Length of a training row, in tokens.")
    eval_fraction: float = _text(DEFAULT.eval_fraction, "Fraction of the conversations used for validation.")
    regenerate_responses: bool = _text(
        DEFAULT.regenerate_responses,
        "Train on the target's own answers to the questions instead of those in the data.",
    )
    answer_limit: Count = _text(DEFAULT.answer_limit, "With --regenerate-responses: maximum answer length in tokens.")
    answer_temperature: Annotated[float, Ge(0)] = _text(
        DEFAULT.answer_temperature, "With --regenerate-responses: sampling temperature; 0 is greedy."
    )
    chat_template: str | None = same("chat_template", panel="Text")
    steps: Count | None = _budget(DEFAULT.steps, "Number of training steps, instead of --epochs.")
    epochs: float = _budget(DEFAULT.epochs, "Number of epochs.")
    batch_size: Count = _budget(DEFAULT.batch_size, "Rows per training step, over all processes.")
    anchors: Count = _budget(
        DEFAULT.anchors, "Draft positions per row (anchors): positions from which the drafter is trained to draft."
    )
    lr: float | None = _budget(DEFAULT.lr, "Peak learning rate. Default: the trainer's.")
    warmup: Count | None = _budget(
        DEFAULT.warmup,
        "Warm-up steps until the peak learning rate. Default: a tenth of all steps, at most 50; with --cooldown 50.",
    )
    cooldown: float | None = _budget(
        DEFAULT.cooldown,
        "Fraction of the steps, at the end, in which the learning rate falls to 0; before, it is constant. A finished "
        "training can be extended: the same command with more --steps continues from the start of the cooldown. "
        "Default: cosine decay from the start.",
    )
    seed: Seed = _how(DEFAULT.seed, "Seed of initial weights and of the order of the data.")
    dtype: Literal["auto", "float32", "bfloat16"] = _how(
        "auto",
        "Number format of the frozen model and of activations; weights are trained in float32 and saved as float16.",
    )
    device: str = same("device", panel="How it is trained", help=DEVICE)
    load_in_4bit: bool = _how(
        DEFAULT.load_in_4bit,
        "Load the frozen model in 4 bits (NF4). Requires a CUDA device and the extra 'train'.",
    )
    save_every: Count = _how(DEFAULT.save_every, "Steps between checkpoints.")
    eval_every: Count = _how(DEFAULT.eval_every, "Steps between evaluations on validation text.")
    push_to_hub: str | None = _how(
        DEFAULT.push_to_hub,
        "Upload the final weights to this repository of the Hugging Face hub.",
        metavar="OWNER/NAME",
    )
    trust_remote_code: bool = same("trust_remote_code", panel="How it is trained")


class _Trainers(TyperGroup):
    """The registered trainers as commands, each loaded on demand."""

    listed: Mapping[str, type[Trainer]] = MappingProxyType({})

    def list_commands(self, ctx: Any) -> list[str]:
        from specbench_ss import registry

        return list(registry.load_all(registry.TRAINERS))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Show only the trainers' summaries, without reading their options."""
        from specbench_ss import registry

        self.listed = registry.load_all(registry.TRAINERS)
        super().format_help(ctx, formatter)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        from specbench_ss import registry

        if cmd_name in self.listed:
            return literal(TyperCommand(cmd_name, help=_summary(self.listed[cmd_name])))
        return _command(registry.trainer_class(cmd_name), cmd_name)


app = typer.Typer(
    cls=_Trainers,
    help="Train a drafter for your model on your conversations. The same command continues an unfinished training.",
    no_args_is_help=True,
)


@app.callback()
def _group() -> None:
    pass


def _keep_memory(config: TrainConfig) -> None:
    """Keep freed memory when training on a CPU, which is faster."""
    from specbench_ss.models.devices import check_one_device, resolve_device
    from specbench_ss.training.distributed import disable_malloc_trim

    check_one_device(config.device, "training")
    if resolve_device(config.device) == "cpu":
        disable_malloc_trim()


def _summary(trainer: type[Trainer]) -> str:
    return f"{trainer.summary[:1].upper()}{trainer.summary[1:]}."


def _command(trainer: type[Trainer], name: str) -> Any:
    common = fields_of(TrainOptions)

    def run(ctx: Any, **given: Any) -> None:
        own = {option: value for option, value in given.items() if option not in common}
        config = _config(**{option: given[option] for option in common})
        chosen = make_options(trainer.Options, own, name)
        _keep_memory(config)
        from specbench_ss.training import session

        try:
            with writing(config.out, "free disk space and repeat the command to continue from the last checkpoint"):
                session.run(trainer, chosen, config)
        except KeyboardInterrupt as stop:
            saved = f": {stop};" if str(stop) else "; if a checkpoint was saved before,"
            raise interrupted(f"{saved} the same command goes on from it") from None

    take_options(run, TrainOptions, parameters(trainer.Options, f"Options of {name}"))
    single = typer.Typer(add_completion=False, rich_markup_mode="rich")
    single.command(name, help=_summary(trainer))(run)
    command: Any = literal(typer.main.get_command(single))
    command.context_settings = {"help_option_names": ["-h", "--help"]}
    return command


def _config(**given: Any) -> TrainConfig:
    values = vars(TrainOptions(**given))
    columns = read_columns(values["columns"] or ())
    return TrainConfig(**{**values, "data": tuple(values["data"]), "columns": columns})
