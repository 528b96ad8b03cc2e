"""Command `ssbench train`.

A trainer's own options come from its `Options` dataclass, which is loaded when the trainer is named.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from specbench_ss.cli import shared
from specbench_ss.cli.main import literal
from specbench_ss.cli.shared import interrupted
from specbench_ss.errors import UserError
from specbench_ss.options import MOST_SEED, Bounds, bounds_of, make_options
from specbench_ss.storage import writing
from specbench_ss.training.trainer import TrainConfig, Trainer

DEFAULT = TrainConfig(Path(), ())
TEXT, BUDGET, HOW = "Text", "Budget", "How it is trained"


def options(
    data: Annotated[
        list[str],
        typer.Option(
            metavar="FILE|DIR|ID",
            help="Conversations to learn from: JSONL files, folders of them, or one data set of the hub.",
            rich_help_panel=TEXT,
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            help="Folder to write the weights to. The same command with the same folder continues an "
            "unfinished training.",
            file_okay=False,
        ),
    ],
    model: Annotated[str, typer.Option(help=shared.MODEL)] = DEFAULT.model,
    columns: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=COLUMN",
            help="Name of a column in your data where it differs from the usual one, as in --columns prompt=question.",
            rich_help_panel=TEXT,
        ),
    ] = None,
    length: Annotated[
        int, typer.Option(help="Length of a training row, in tokens.", rich_help_panel=TEXT)
    ] = DEFAULT.length,
    eval_fraction: Annotated[
        float,
        typer.Option(
            help="Share of the conversations that is kept for evaluation and not learnt from.", rich_help_panel=TEXT
        ),
    ] = DEFAULT.eval_fraction,
    own_answers: Annotated[
        bool,
        typer.Option(
            "--own-answers",
            help="Let the target answer the questions itself, and learn from these answers instead of "
            "those in the data.",
            rich_help_panel=TEXT,
        ),
    ] = DEFAULT.own_answers,
    answer_limit: Annotated[
        int, typer.Option(min=1, help="With --own-answers: the longest answer, in tokens.", rich_help_panel=TEXT)
    ] = DEFAULT.answer_limit,
    answer_temperature: Annotated[
        float,
        typer.Option(min=0, help="With --own-answers: the sampling temperature; 0 is greedy.", rich_help_panel=TEXT),
    ] = DEFAULT.answer_temperature,
    chat_template: Annotated[
        str | None, typer.Option(metavar="NAME|FILE", help=shared.CHAT_TEMPLATE, rich_help_panel=TEXT)
    ] = DEFAULT.chat_template,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Number of training steps, instead of --epochs.", rich_help_panel=BUDGET)
    ] = DEFAULT.steps,
    epochs: Annotated[
        float, typer.Option(help="How often the whole text is learnt from.", rich_help_panel=BUDGET)
    ] = DEFAULT.epochs,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Rows in a training step, of all processes together.", rich_help_panel=BUDGET)
    ] = DEFAULT.batch_size,
    anchors: Annotated[
        int,
        typer.Option(min=1, help="Positions of each row at which the drafter learns to draft.", rich_help_panel=BUDGET),
    ] = DEFAULT.anchors,
    lr: Annotated[
        float | None,
        typer.Option(help="Peak learning rate. Default: that of the method's trainer.", rich_help_panel=BUDGET),
    ] = DEFAULT.lr,
    warmup: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Warm-up steps until the peak learning rate. Default: a tenth of all steps, at most 50; with "
            "--cooldown 50.",
            rich_help_panel=BUDGET,
        ),
    ] = DEFAULT.warmup,
    cooldown: Annotated[
        float | None,
        typer.Option(
            help="Share of the steps, at the end, in which the learning rate falls to 0. Until then it stays at its "
            "peak, and a finished training can be made longer: the same command with more --steps goes on from where "
            "the fall began. Default: the learning rate falls along a cosine from the start.",
            rich_help_panel=BUDGET,
        ),
    ] = DEFAULT.cooldown,
    seed: Annotated[
        int,
        typer.Option(
            min=0, max=MOST_SEED, help="Seed of initial weights and of the order of the data.", rich_help_panel=HOW
        ),
    ] = DEFAULT.seed,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        typer.Option(
            help="Number format of the frozen model and of the arithmetic; the weights that are learnt "
            "are always float32.",
            rich_help_panel=HOW,
        ),
    ] = "auto",
    device: Annotated[str, typer.Option(help=shared.DEVICE, rich_help_panel=HOW)] = DEFAULT.device,
    load_in_4bit: Annotated[
        bool,
        typer.Option(
            "--load-in-4bit",
            help="Load the frozen model in 4 bits (NF4). This needs a CUDA device and the extra 'train'.",
            rich_help_panel=HOW,
        ),
    ] = DEFAULT.load_in_4bit,
    save_every: Annotated[
        int, typer.Option(min=1, help="Steps from one checkpoint to the next.", rich_help_panel=HOW)
    ] = DEFAULT.save_every,
    eval_every: Annotated[
        int, typer.Option(min=1, help="Steps from one evaluation on held-out text to the next.", rich_help_panel=HOW)
    ] = DEFAULT.eval_every,
    push_to_hub: Annotated[
        str | None,
        typer.Option(
            metavar="OWNER/NAME",
            help="Upload the finished weights to this repository of the Hugging Face hub.",
            rich_help_panel=HOW,
        ),
    ] = DEFAULT.push_to_hub,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help=shared.TRUST, rich_help_panel=HOW)
    ] = DEFAULT.trust_remote_code,
) -> None:
    """Declare the options that every trainer has."""


class _Trainers(TyperGroup):
    """The registered trainers as commands. Each is loaded when it is named."""

    listed: Mapping[str, type[Trainer]] = MappingProxyType({})

    def list_commands(self, ctx: Any) -> list[str]:
        from specbench_ss import registry

        return list(registry.load_all(registry.TRAINERS))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Of each trainer only its summary is shown: its options are not read for that."""
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
    """Train on a CPU without giving memory back: this process measures nothing."""
    from specbench_ss.models.devices import check_one_device, resolve_device
    from specbench_ss.training.distributed import keep_freed_memory

    check_one_device(config.device, "training")
    if resolve_device(config.device) == "cpu":
        keep_freed_memory()


def _summary(trainer: type[Trainer]) -> str:
    return f"{trainer.summary[:1].upper()}{trainer.summary[1:]}."


def _command(trainer: type[Trainer], name: str) -> Any:
    own = _own_options(trainer.Options, name)

    def run(**given: Any) -> None:
        chosen = {p.name: given.pop(p.name) for p in own}
        config = _config(given)
        chosen_options = make_options(trainer.Options, chosen, name)
        _keep_memory(config)
        from specbench_ss.training import session

        try:
            with writing(config.out, "make room: the same command goes on from the last checkpoint"):
                session.run(trainer, chosen_options, config)
        except KeyboardInterrupt as stop:
            saved = f": {stop};" if str(stop) else "; if a checkpoint was saved before,"
            raise interrupted(f"{saved} the same command goes on from it") from None

    common = list(inspect.signature(options, eval_str=True).parameters.values())
    keywords = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*common, *own)]
    run.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in keywords}
    single = typer.Typer(add_completion=False, rich_markup_mode="rich")
    single.command(name, help=_summary(trainer))(run)
    command: Any = literal(typer.main.get_command(single))
    command.context_settings = {"help_option_names": ["-h", "--help"]}
    return command


def _own_options(kind: type[Any], name: str) -> list[inspect.Parameter]:
    hints, bounds = get_type_hints(kind), bounds_of(kind)
    own = [f for f in dataclasses.fields(kind) if f.init]
    return [_parameter(f, hints[f.name], bounds.get(f.name), f"Options of {name}") for f in own]


def _parameter(field: dataclasses.Field[Any], kind: Any, bounds: Bounds | None, panel: str) -> inspect.Parameter:
    """Turn a field of an Options dataclass into an option. metadata: help, and flag in place of the field's name."""
    help = " ".join([str(field.metadata.get("help", "")), *([f"({bounds})"] if bounds else [])])
    flags: list[str] = [field.metadata["flag"]] if "flag" in field.metadata else []
    option: Callable[..., Any] = typer.Option
    annotation = Annotated[kind, option(*flags, help=help, rich_help_panel=panel)]
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=annotation)


def _config(given: dict[str, Any]) -> TrainConfig:
    pairs = [text.partition("=") for text in given.pop("columns") or []]
    for name, equals, column in pairs:
        if not (name and equals and column):
            raise UserError(f"cannot read --columns {name}{equals}{column}: expected NAME=COLUMN")
    data = tuple(given.pop("data"))
    return TrainConfig(data=data, columns=tuple((name, column) for name, _, column in pairs), **given)
