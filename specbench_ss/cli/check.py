"""Command `ssbench check`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated

import typer

from specbench_ss import registry
from specbench_ss.cli.shared import Plugin
from specbench_ss.conformance import ARCHITECTURES, FEW, CheckRunner, Result
from specbench_ss.engine.decoder import Decoder
from specbench_ss.engine.target import Target
from specbench_ss.errors import UserError
from specbench_ss.options import MethodSpec, checked_value, split_methods
from specbench_ss.runs.run_options import Timeout
from specbench_ss.time_limit import TimeIsOver, time_limit


def command(
    methods: Annotated[
        str | None,
        typer.Argument(
            metavar="METHODS",
            help="Methods to check, separated by commas. A method given with options runs only with these options.",
        ),
    ] = None,
    all_: Annotated[bool, typer.Option("--all", help="Check all registered methods.")] = False,
    plugin: Plugin = None,
    thorough: Annotated[
        bool,
        typer.Option(
            "--thorough",
            help="Check every test instance of a method on models of every architecture. By default the first one "
            "runs on three architectures and the others on one each.",
        ),
    ] = False,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Time limit of one request of a check.")] = 60.0,
) -> int:
    """Check that methods pass the conformance checks, on tiny random models on the CPU.

    The exit code is 1 if one fails.
    """
    checked_value("--timeout", Timeout, timeout)
    specs = _wanted(methods, all_, [name for file in registry.load_plugins(plugin or ()) for name in file.methods])
    references = references_of(specs)
    alone = len(specs) == 1
    failed = [spec.label for spec in specs if not _passes(spec, spec.name in references, thorough, alone, timeout)]
    if len(specs) > 1:
        others = f"; failed: {', '.join(failed)}" if failed else ""
        print(f"{len(specs) - len(failed)} of {len(specs)} methods pass all checks{others}")
    return 1 if failed else 0


def _wanted(methods: str | None, all_: bool, of_files: list[str]) -> list[MethodSpec]:
    """Return the methods that are asked for, or else those that the plugin files define."""
    if methods and all_:
        raise UserError("give methods or --all, not both")
    if all_:
        return [MethodSpec(name) for name in registry.load_all(registry.METHODS)]
    specs = [MethodSpec.parse(text) for text in split_methods(methods or "")] or [MethodSpec(n) for n in of_files]
    if not specs:
        raise UserError("nothing to check: give a method, --all, or --plugin FILE.py")
    for spec in specs:
        registry.method_options(spec)
        if "weights" in spec.options:
            raise UserError(f"{spec.label}: leave out the weights: checks use tiny models with random ones")
    return specs


def _passes(spec: MethodSpec, reference: bool, thorough: bool, alone: bool, timeout: float) -> bool:
    """Check one method and print a line for each check; failures by the same error are printed once, at the end.

    A method with nothing to check does not stop the others.
    """
    try:
        kit = _kit(spec, reference, thorough, timeout)
    except UserError as error:
        if alone:
            raise
        print(f"{spec.label}: {error}")
        return False
    instances = ", ".join(dict.fromkeys(subject.instance for subject in kit.subjects))
    print(f"{spec.label}, test instances: {instances}")
    seconds, failed = 0.0, dict[str, list[Result]]()  # by the error
    for result in kit.results():
        seconds += result.seconds
        if result.failure is None:
            print(_line(result))
        else:
            failed.setdefault(result.failure.problem, []).append(result)
    for problem, results in failed.items():
        print(_failure(problem, results))
    for where, why in kit.left_out.items():
        print(f"  skipped  {where}: {why}")
    print(f"  {_effort(kit)}, {seconds:.1f} s")
    return not failed


def _line(result: Result) -> str:
    text = {"exempt": result.exempt, "untested": result.untested}.get(result.verdict, result.check.text)
    if result.tried:
        text += f" (some instances are exempt: {result.exempt})" if result.exempt else ""
        text += f" (partly untested: {result.untested})" if result.untested else ""
    return f"  {result.verdict:<8} {result.name:<13} {text}"


def _failure(problem: str, results: Sequence[Result]) -> str:
    """Return the lines of one failure: of the checks that it stopped, and of the first of them its example."""
    failure = results[0].failure
    assert failure is not None
    lines = [f"instance {failure.instance}", f"example  {failure.example}"]
    if len(results) == 1:
        first, lines = _line(results[0]), [*lines, f"found    {problem}"]
    else:
        first = f"  failed   {len(results)} checks stopped by the same error: {problem}"
        lines = [f"checks   {', '.join(result.name for result in results)}", *lines]
    return "\n".join([first, *(f"{'':11}{line}" for line in lines)])


def _kit(spec: MethodSpec, reference: bool, thorough: bool, timeout: float) -> CheckRunner:
    over = f"{spec.label}: its test instances are not made within {timeout:g} s"
    try:
        with time_limit(timeout, lambda: f"{over}, which cannot be interrupted"):
            return CheckRunner(instances_of(spec), ARCHITECTURES if thorough else FEW, reference, thorough, timeout)
    except TimeIsOver:
        raise UserError(over) from None


def _effort(kit: CheckRunner) -> str:
    answers, steps = (sum(getattr(subject, name) for subject in kit.subjects) for name in ("answers", "steps"))
    longest = max(subject.longest for subject in kit.subjects)
    return f"{answers:,} outputs, {steps:,} steps, at most {longest} query tokens per step"


def instances_of(spec: MethodSpec) -> Callable[[Target], Mapping[str, Callable[[], Decoder]]]:
    """Return the method's examples; if options are given, only the first example's weights with these options.

    What is returned raises UserError where the options do not fit, or need weights that only a model of the user's has.
    """
    kind, options = registry.method_class(spec.name), registry.method_options(spec)
    if not spec.options:
        return kind.test_instances

    def asked(target: Target) -> Mapping[str, Callable[[], Decoder]]:
        first = next(iter(kind.test_instances(target).values()), None)
        if first is None:
            raise UserError(f"{spec.name} has no test instances")
        return {spec.label: lambda: first().with_options(options)}

    return asked


def references_of(specs: Sequence[MethodSpec]) -> set[str]:
    """Return the methods that others must equal in output; none where all of `specs` are lossless."""
    if all(registry.method_class(spec.name).lossless for spec in specs):
        return set()
    return {_reference(kind) for kind in registry.load_all(registry.METHODS).values()} - {""}


def _reference(kind: type[Decoder]) -> str:
    try:
        return kind.baseline_for(kind.Options()).name
    except TypeError:  # options without defaults
        return ""
