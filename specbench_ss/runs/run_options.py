"""Options of `ssbench run`, one field each: command line, YAML file and `specbench_ss.run()` derive from them.

The command's signature is made by `cli.shared.take_options`, the function's by `keywords`; `given_options` reads YAML
and Python. Other commands take the fields that they share by `same`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_type_hints

from annotated_types import Ge, Gt, Le, Lt

from specbench_ss.engine.numerics import Dtype
from specbench_ss.engine.sampling import TOKEN, VerificationRule
from specbench_ss.errors import UserError, did_you_mean
from specbench_ss.models.quantize import Quantize
from specbench_ss.options import LONGEST, MOST_SEED, checked_value, value_text
from specbench_ss.stats.intervals import TIMING_FLOOR

Engine = Literal["auto", "eager", "graph"]
GenerationConfigUse = Literal["auto", "none"]
Seed = Annotated[int, Ge(0), Le(MOST_SEED)]
Count = Annotated[int, Ge(1)]
AtLeast0 = Annotated[int, Ge(0)]
Timeout = Annotated[float, Gt(0), Le(LONGEST)]
Seconds = Annotated[float, Gt(0), Lt(math.inf)]

# modes: a model in this process, models in workers of Ray, or servers
PROCESS, RAY, SERVER = "process", "ray", "server"
MODES = {RAY: "--executor ray", SERVER: "--endpoint, the address of a server, or --servers"}
MODEL_MODES, ALL_MODES = (PROCESS, RAY), (PROCESS, RAY, SERVER)
COMMAND, FILE, PYTHON = "command line", "YAML file", "run()"

MOST_REPEATS = 16  # with --target-ci, unless asked otherwise
TIMEOUT_S = 120.0  # of servers, unless asked otherwise
FINDINGS = (
    "failed", "mismatch", "biased", "untestable", "impossible", "invalid", "unstable", "noisy",
    "numerical-tie", "length-differs", "text-differs", "lossy", "inferior", "short-steps",
    "outlier", "uncompared", "incomplete", "warnings", "not-checked",
)  # fmt: skip
DEVICE = "Device to run on: auto (a GPU where there is one), cpu, cuda or cuda:N."


def option(
    default: Any,
    help: str,
    *,
    panel: str = "",
    metavar: str | None = None,
    modes: Sequence[str] = ALL_MODES,
    places: Sequence[str] = (COMMAND, FILE, PYTHON),
    as_text: bool = False,
    position: bool = False,
    short: str = "",
    parser: Callable[[str], Any] | None = None,
) -> Any:
    """Return a dataclass field that is an option; its type carries bounds and choices.

    panel: heading in the command's help; '' is that of options without one.
    modes: those of a run that the option has a meaning in.
    places: where the option can be given.
    as_text: numbers and lists in YAML and Python stand for their text, with commas.
    position: it is an argument, without a flag.
    short: one-letter flag, as in `-v`.
    parser: reads the text of the command line.
    """
    about: dict[str, Any] = {"help": help, "panel": panel, "metavar": metavar, "position": position, "short": short}
    about |= {"modes": tuple(modes), "places": tuple(places), "as_text": as_text, "parser": parser}
    return field(default=default, metadata=about)


def read_share(text: str) -> float:
    """Return a share that is given as '0.03' or '3%'. Raises ValueError for other text."""
    return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)


_what = partial(option, panel="What to run")
_how = partial(option, panel="How to decode and measure")
_record = partial(option, panel="What to record in addition", modes=MODEL_MODES)
_served = partial(option, panel="Servers", modes=(SERVER,))
_workers = partial(option, panel="Workers, on this machine or many", modes=(RAY,))
_where = partial(option, panel="Where to")


def same(name: str, panel: str = "", **changes: Any) -> Any:
    """Return a field with the default and the help of that field of RunOptions, in a panel of another command."""
    like = fields_of(RunOptions)[name]
    default = changes.pop("default", like.default)
    return field(default=default, metadata={**like.metadata, "panel": panel, **changes})


def fields_of(options: type[Any]) -> dict[str, Field[Any]]:
    """Return the fields of a dataclass by name."""
    return {f.name: f for f in fields(options)}


def flag(name: str) -> str:
    """Return an option's name as on the command line."""
    return f"--{name.replace('_', '-')}"


@dataclass(frozen=True)
class CommandOptions:
    """Options whose values are of their fields' types and within their bounds."""

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self), include_extras=True)
        for name, f in fields_of(type(self)).items():
            shown = name if f.metadata["position"] else flag(name)
            object.__setattr__(self, name, checked_value(shown, hints[name], getattr(self, name)))

    def as_given(self) -> dict[str, Any]:
        """Return the options whose value is not their default."""
        values = ((f, getattr(self, f.name)) for f in fields(self))
        return {f.name: value for f, value in values if value != f.default}


@dataclass(frozen=True)
class RunOptions(CommandOptions):
    """Every option of a run. Options of the command alone have other `places`."""

    methods: str | None = _what(
        None,
        "Methods to compare, separated by commas, with options in brackets: ss,medusa[nodes=8]. "
        "all: every method that can decode with the model. The autoregressive baseline `ar` is always added.",
        metavar="A,B[option=value]",
        modes=MODEL_MODES,
        as_text=True,
    )
    suite: str = _what(
        "specbench",
        "Suite of prompts; `ssbench suites` lists them. jsonl:FILE reads your own prompts; "
        "NAME:FILE is the same as NAME with --data FILE.",
        metavar="NAME[:FILE]",
    )
    model: str = _what(
        "lab",
        "Target model: lab (it comes with ssbench), a model of `ssbench models fetch`, the folder or hub id of a "
        "Hugging Face causal language model, or a GGUF file.",
        modes=MODEL_MODES,
    )
    tasks: str | None = _what(None, "Use only the questions of these tasks of the suite.", metavar="A,B", as_text=True)
    limit: AtLeast0 | None = _what(
        None, "Use at most this many questions of each task; 0: all of them. Default: as the suite defines."
    )
    set: list[str] | None = _what(
        None,
        "Set one option of a method, for every variant of it. May be given several times.",
        metavar="METHOD.OPTION=VALUE",
        modes=MODEL_MODES,
    )
    preset: str | None = _what(
        None,
        "Preset files written by `ssbench tune`. Options in --set and METHOD[...] have priority over them.",
        metavar="FILE,FILE",
        modes=MODEL_MODES,
        as_text=True,
    )
    plugin: list[str] | None = option(
        None,
        "Python file that defines methods of your own. May be given several times.",
        metavar="FILE.py",
        modes=MODEL_MODES,
    )
    data: Path | None = _what(
        None,
        "File or folder to read the suite's questions from, in place of its own data; or "
        "hub:OWNER/NAME[:CONFIG[:SPLIT]], a data set of the Hugging Face hub.",
    )
    columns: list[str] | None = _what(
        None,
        "Name of a column in your data if it differs from the default, as in --columns prompt=question.",
        metavar="NAME=COLUMN",
    )
    endpoint: list[str] | None = _served(
        None,
        "Measure a server in place of --methods: the address of its OpenAI-compatible API, as "
        "http://localhost:8000/v1. May be given several times: the others are compared with the first server.",
        metavar="URL",
    )
    servers: Path | None = _served(
        None,
        "Start the servers of a YAML file one after another on one port and measure them; the first is the baseline. "
        "With --methods, also measure methods and compare them with the servers. docs/servers.md has its format.",
        metavar="FILE.yaml",
    )
    label: list[str] | None = _served(
        None, "Name of a server in the results; one for each --endpoint, in the same order.", metavar="NAME"
    )
    endpoint_model: list[str] | None = _served(
        None,
        "Name of the model on the server; once, or once for each. Default: the only one that it lists.",
        metavar="NAME",
    )
    api_key_env: list[str] | None = _served(
        None,
        "Environment variable with the server's key; once, or once for each. No key is stored.",
        metavar="VARIABLE",
    )
    concurrency: str | None = _served(
        None,
        "Also send the whole suite with this many requests in flight, once for each number. One in flight is always "
        "measured.",
        metavar="N,N",
        as_text=True,
    )
    rate: str | None = _served(
        None,
        "Also send the whole suite with Poisson arrivals at this many requests per second, once for each number, "
        "however many are in flight.",
        metavar="N,N",
        as_text=True,
    )
    goodput: str | None = _served(
        None,
        "Limits of a request in milliseconds: ttft, tpot and e2el (whole request), as ttft:500,tpot:50. The goodput of "
        "a level is its requests per second within all of them.",
        metavar="NAME:MS,NAME:MS",
        as_text=True,
    )
    extra_body: str | None = option(
        None,
        "JSON object with further fields of every request, as '{\"ignore_eos\": true}'.",
        panel="Servers",
        metavar="JSON",
    )
    endpoint_timeout: Timeout | None = _served(
        None,
        f"Timeout between streamed chunks of an answer.  [default: {TIMEOUT_S:g}]",
        metavar="SECONDS",
    )
    nodes: Count | None = _how(
        None,
        "Node budget: most drafted nodes that a step verifies, the same for every method. An option nodes=N, or the "
        "option that limits the nodes of a method (pld.length, ss.n_draft), has priority over it.",
        modes=MODEL_MODES,
    )
    repeats: Count = _how(1, "Number of times that every method decodes each prompt.")
    sessions: Count = _how(
        1,
        "Number of fresh processes, one after the other, that each load the model and make all --repeats. Intervals "
        "then cover how much processes differ; use at least 3. Not with --target-ci, --batch-size, servers or Ray.",
        modes=(PROCESS,),
    )
    target_ci: Annotated[float, Gt(TIMING_FLOOR), Lt(1)] | None = _how(
        None,
        "Repeat until the half-width of every speedup's 95% CI is at most this share of it, as 0.02 or 2%, or until "
        "more repeats cannot narrow it. --repeats is the minimum. With --dry-run: state how many questions this needs, "
        "based on the newest run with the same settings in the folder of --out.",
        metavar="HALF-WIDTH",
        parser=read_share,
    )
    max_repeats: Count | None = _how(None, f"With --target-ci: maximum number of repeats.  [default: {MOST_REPEATS}]")
    budget: Seconds | None = _how(
        None, "With --target-ci: start no repeat that would exceed this decoding time.", metavar="SECONDS"
    )
    warmup: AtLeast0 = _how(
        2, "Warm-up prompts that every method decodes before the measurement; they are not recorded."
    )
    max_new_tokens: Count | None = _how(None, "Maximum length of an output, in tokens. Default: the suite's limit.")
    stop: list[str] | None = _how(
        None,
        "Stop string; the token that completes it is the last one kept. It may be a special token. May be given "
        "several times.",
        metavar="TEXT",
    )
    temperature: Annotated[float, Ge(0), Lt(math.inf)] = _how(0.0, "Sampling temperature; 0 decodes greedily.")
    top_p: Annotated[float, Gt(0), Le(1)] = _how(
        1.0, "Sample only among the most likely tokens that together have this probability; 1 switches this off."
    )
    top_k: AtLeast0 = _how(0, "Sample only among this many most likely tokens; 0 switches this off.", modes=MODEL_MODES)
    verification: VerificationRule = _how(
        TOKEN,
        "At a temperature above 0: accept sampled chains token by token, or as a block (Sun et al. 2024). Trees and "
        "deterministic drafts are accepted token by token.",
        modes=MODEL_MODES,
    )
    seed: Seed = _how(0, "Seed of the order of methods and of sampling.")
    dtype: Dtype = _how(
        "auto",
        "Data type of weights and computation. float16-weights: float16 weights, float32 computation, on CPUs. auto: "
        "bfloat16 on a GPU; on a CPU what the processor's instructions make fastest (lab: float32).",
        modes=MODEL_MODES,
    )
    device: str = _how(
        "auto",
        f"{DEVICE} `cuda:0,cuda:1` or `cuda:all` splits the model's layers over several GPUs of this machine.",
        modes=MODEL_MODES,
    )
    history: Literal["reference", "own"] = _how(
        "reference",
        "Earlier answers in a multi-turn conversation: those of the baseline, the same for all methods, or each "
        "method's own.",
    )
    quantize: Quantize = _how(
        "none",
        "Quantization of the model's linear layers without the LM head. int8, int4: torchao, int4 only on CUDA. nf4: "
        "bitsandbytes, 4 bits. Drafters keep --dtype.",
        modes=MODEL_MODES,
    )
    engine: Engine = _how(
        "auto",
        "Execution engine. eager; graph: CUDA graphs for decode steps, each checked against an eager pass when it is "
        "captured. auto: graph on a single CUDA device if the model supports it, else eager. Batches run eagerly.",
        modes=MODEL_MODES,
    )
    batch_size: str | None = _how(
        None,
        "Also decode the whole suite with this many requests in a batch, once for each number. Batch size 1 is always "
        "measured; rankings and intervals are of batch size 1.",
        metavar="N,N",
        modes=(PROCESS,),
        as_text=True,
    )
    order: Literal["suite", "interleaved"] = _how(
        "suite",
        "Order of the prompts. suite: as the suite lists them. interleaved: tasks in turn, so that an interrupted run "
        "has results of each.",
    )
    run_code: bool = _how(
        False,
        "Execute the code in outputs of suites that test it (humaneval, mbpp), in a subprocess with limits, and score "
        "it as pass@1. Without it these suites have no quality.",
    )
    trust_remote_code: bool = _how(
        False,
        "Allow Python code that comes with the model to run. Only for models whose authors you trust.",
        modes=MODEL_MODES,
    )
    chat_template: str | None = _how(
        None,
        "Chat template to use instead of the tokenizer's own: plain, vicuna, llama-2, or a Jinja file.",
        metavar="NAME|FILE",
        modes=MODEL_MODES,
    )
    chat_template_kwargs: str | None = _how(
        None,
        """JSON object with variables of the chat template, as '{"enable_thinking": false}'; a field of requests """
        "to servers.",
        metavar="JSON",
    )
    generation_config: GenerationConfigUse = _how(
        "auto",
        "Logits processors of the model's own generation_config.json (repetition_penalty, suppress_tokens, "
        "min_new_tokens, bad_words_ids of one token): auto applies them to every method, none to no method.",
        modes=MODEL_MODES,
    )
    timeout: Timeout | None = _how(
        None, "Time limit of a sample; a longer one fails. Default: no limit.", metavar="SECONDS"
    )
    telemetry: Annotated[float, Ge(0), Lt(math.inf)] = _record(
        0.1,
        "Sampling interval of CPU and memory use, and of an NVIDIA GPU's use, clocks, power and energy, during a "
        "sample. 0: no telemetry.",
        metavar="SECONDS",
    )
    rerun_noisy: AtLeast0 | None = _record(
        None,
        "Maximum re-runs of a sample whose timing is noisy (other processes, throttling, clock changes). Default: 2 on "
        "a GPU, else 0. Noisy samples are always marked.",
    )
    record_drafts: str = _record(
        "first",
        "Samples whose drafts are recorded step by step, in an untimed second pass: the first question of each task, "
        "or this share of the questions, 0 to 1.",
        metavar="first|SHARE",
        as_text=True,
    )
    trace: bool = _record(
        False,
        "Profile one request of each method after its warm-up, and write a trace of its operators and kernels for "
        "Perfetto (https://ui.perfetto.dev).",
        modes=(PROCESS,),
    )
    executor: Literal["local", "ray"] = _workers(
        "local",
        "Process that decodes. local: this one. ray: workers of a Ray cluster; each worker decodes a question with all "
        "methods, so that methods are compared on one device.",
        modes=MODEL_MODES,
    )
    workers: Count | None = _workers(
        None,
        "With --executor ray: number of workers. Default: one for each GPU of the cluster, or one for each machine.",
    )
    ray_address: str | None = _workers(
        None,
        "With --executor ray: the cluster to use. Default: the one that RAY_ADDRESS names, else one that is started "
        "on this machine for the run.",
        metavar="HOST:PORT|auto",
    )
    out: Path | None = _where(None, "Directory that the results are written to.  [default: runs/TIME-MODEL-SUITE]")
    resume: bool = _where(False, "Continue the unfinished run in --out; failed samples are re-run.")
    config: Path | None = _where(
        None,
        "Read options of this command from a YAML file. Options of the command line have priority.",
        metavar="FILE.yaml",
        places=(COMMAND,),
    )
    dry_run: bool = _where(False, "Check all options, print the plan of the run, and stop.", places=(COMMAND, FILE))
    open: bool = _where(False, "Open the report in a browser after the run.", places=(COMMAND, FILE))
    verbose: bool = _where(
        False, "Print results by task, every check with its details, and notes.", places=(COMMAND,), short="-v"
    )
    quiet: bool = _where(False, "Print only the headline and the path of the report.", places=(COMMAND,), short="-q")
    json: bool = _where(
        False, "Print one JSON object: the headline, the summary over all tasks, checks and paths.", places=(COMMAND,)
    )
    fail_on: str | None = option(
        None,
        f"Findings for which the command exits with code 1, after all results are written: {', '.join(FINDINGS)}.",
        metavar="A,B",
        places=(COMMAND, FILE),
        as_text=True,
    )

    @property
    def has_both(self) -> bool:
        """Return True for two runs: of methods, and of servers that are started."""
        return self.methods is not None and self.servers is not None

    def part(self, modes: Sequence[str]) -> Self:
        """Return the options that have a meaning in one of these modes, and the defaults of all others."""
        known, given = fields_of(type(self)), self.as_given()
        return type(self)(**{name: given[name] for name in given if {*modes} & {*known[name].metadata["modes"]}})

    @property
    def mode(self) -> str:
        """Return the mode of the run."""
        if self.endpoint or self.servers:
            return SERVER
        return RAY if self.executor == "ray" else PROCESS

    def check_modes(self) -> None:
        """Raise UserError for an option that has no meaning in this mode."""
        known = fields_of(type(self))
        for name in self.as_given():
            modes = known[name].metadata["modes"]
            if self.mode in modes:
                continue
            if self.mode == PROCESS:
                raise UserError(f"{flag(name)} needs {MODES[modes[0]]}")
            raise UserError(
                f"{flag(name)} does not go with {MODES[self.mode].partition(',')[0]}: leave one of them out"
            )


def names(options: type[CommandOptions], place: str) -> list[str]:
    """Return the options that can be given at a place, in order of definition."""
    return [f.name for f in fields(options) if place in f.metadata["places"]]


def keywords(options: type[CommandOptions], first: str) -> inspect.Signature:
    """Return the signature of a function that takes the options as keywords, the first one also by position."""
    hints, known, made = get_type_hints(options), fields_of(options), list[inspect.Parameter]()
    for name in names(options, PYTHON):
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD if name == first else inspect.Parameter.KEYWORD_ONLY
        made.append(inspect.Parameter(name, kind, default=known[name].default, annotation=hints[name]))
    return inspect.Signature(made)


def given_options(
    options: type[CommandOptions], given: Mapping[Any, Any], place: str, source: str | Path
) -> dict[str, Any]:
    """Return values that YAML or Python has in the form that the command line has them in.

    None and an empty list are as if not given. Raises UserError, naming the source, for an unknown option, and for a
    `set` or a list that cannot be read.
    """
    known, allowed, hints = fields_of(options), names(options, place), get_type_hints(options)
    values: dict[str, Any] = {}
    for key, value in given.items():
        name = str(key).replace("-", "_")
        if name not in allowed:
            raise UserError(f"{source}: no option {str(key)!r}{did_you_mean(name, allowed)}")
        if value is None or (isinstance(value, (list, tuple)) and not value):
            continue
        if name == "set":
            values[name] = _set_items(value, source)
        elif known[name].metadata["as_text"]:
            values[name] = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else _as_text(value)
        elif hints[name] == list[str] | None:
            values[name] = _texts(value, source, name)
        else:
            values[name] = value
    return values


def _as_text(value: Any) -> Any:
    return str(value) if isinstance(value, (str, int, float, Path)) else value


def _set_items(value: Any, source: str | Path) -> list[str]:
    """Return {ss: {k: 1}}, {ss.k: 1} or ['ss.k=1'] as ['ss.k=1']."""
    if not isinstance(value, Mapping):
        return _texts(value, source, "set")
    items: list[str] = []
    for name, options in value.items():
        if isinstance(options, Mapping):
            items += [f"{name}.{key}={value_text(v)}" for key, v in options.items()]
        elif "." in str(name) and not isinstance(options, (list, tuple)):
            items.append(f"{name}={value_text(options)}")
        else:
            raise UserError(f"{source}: 'set' has {name!r}; give method.option: value, or method: {{option: value}}")
    return items


def _texts(value: Any, source: str | Path, name: str) -> list[str]:
    listed = [value] if isinstance(value, (str, Path)) and name != "set" else value
    if isinstance(listed, (list, tuple)) and all(isinstance(item, (str, Path)) for item in listed):
        return [str(item) for item in listed]
    form = "method.option=value, or method: {option: value}" if name == "set" else "texts"
    raise UserError(f"{source}: {name!r} must be a list of {form}")
