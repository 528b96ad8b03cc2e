"""Conformance kit: every check on every configuration of a method, on tiny models.

The first instance is tried on every architecture, the others on one each; `thorough` tries all instances on all.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch

from specbench_ss.conformance.exact_checks import CONTEXT, EXACT_CHECKS, WORDS
from specbench_ss.conformance.harness import STUCK, Check, CheckFailed, Subject, TinyModel, Untested, first_failure
from specbench_ss.conformance.sampling_checks import SAMPLING_CHECKS
from specbench_ss.engine.decoder import Decoder
from specbench_ss.engine.target import Target
from specbench_ss.errors import PluginError, UserError, known_words, plugin_code
from specbench_ss.models.tiny import ARCHITECTURES, WHOLE, tiny_target

ORDER = (  # of the output; later checks build on earlier ones
    "draft", "outputs", "target", "rows", "counts", "cache", "model", "logits", "greedy", "seed", "ends", "context",
    "lengths", "memory", "together", "long", "distribution", "blocks", "search_space", "description",
)  # fmt: skip
CHECKS: tuple[Check, ...] = tuple(sorted((*EXACT_CHECKS, *SAMPLING_CHECKS), key=lambda check: ORDER.index(check.name)))
FEW = ("llama", "opt", "mistral-window")  # rotary and learned positions; a sliding window

SMALL = (7, 11)  # vocabulary sizes; the larger one only for instances that do not support the smaller one

Instances = Mapping[str, Callable[[], Decoder]]
Factory = Callable[[Target], "Decoder | Instances"]  # a Decoder class is one as well


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of one check.

    failure: the violation; None if there is none. exempt: why the check does not apply to some or all instances; '' if
    it applies to all. tried: number of instances that were tested in all cases, on all of their models. seconds: time
    that it took. untested: what could not be tested, by instance; '' if nothing.
    """

    check: Check
    failure: CheckFailed | None
    exempt: str
    tried: int
    seconds: float
    untested: str = ""

    @property
    def name(self) -> str:
        """Return the name of the check, as `ssbench check` lists it."""
        return self.check.name

    @property
    def verdict(self) -> str:
        """Return 'ok', 'failed', 'exempt' or 'untested'."""
        if self.failure:
            return "failed"
        return "ok" if self.tried else "untested" if self.untested else "exempt"


class CheckRunner:
    """Tests one method. left_out: {instance or model: why it cannot be tried}. timeout: seconds of one request.

    Raises UserError where the method has no instance for any of the small models, and for an unknown architecture.
    """

    def __init__(
        self,
        factory: Factory,
        architectures: Sequence[str] = FEW,
        own_model: bool = False,
        thorough: bool = False,
        timeout: float | None = None,
    ) -> None:
        self.timeout = timeout
        self.left_out: dict[str, str] = {}
        self.factory, self.own_model, self.thorough = factory, own_model, thorough
        for kind in architectures:
            if kind not in (*ARCHITECTURES, *WHOLE):
                raise UserError(f"no architecture {kind!r}{known_words(str(kind), ARCHITECTURES)}")
        self.small: list[Subject] = []
        for words in SMALL:
            self.left_out.clear()
            known = {subject.instance for subject in self.small}
            found = self._subjects(TinyModel(tiny_target("opt", words, layers=2)))
            self.small += [subject for subject in found if subject.instance not in known]
        if not self.small:
            raise UserError(f"nothing to check: {next(iter(self.left_out.values()), 'it has no test instances')}")
        self.large: list[Subject] = []
        for i, kind in enumerate(architectures):
            found = self._subjects(TinyModel(tiny_target(kind)))
            self.large += [s for s in found if s.whole or s.number % len(architectures) == i]

    def _subjects(self, tiny_model: TinyModel) -> list[Subject]:
        found = list[Subject]()
        try:
            with plugin_code("it has no test instance for a tiny model"):
                instances = dict(instances_of(self.factory, tiny_model.target))
        except UserError as error:
            self.left_out[tiny_model.target.name] = str(error)
            return found
        for number, (instance, make) in enumerate(instances.items()):
            subject = Subject(instance, tiny_model, make, self.own_model, number, self.thorough or number == 0)
            try:
                with contextlib.suppress(PluginError), plugin_code(instance):  # a check's business
                    subject.decoder()
            except UserError as error:
                self.left_out[str(subject)] = str(error)
                continue
            found.append(subject)
        return found

    @cached_property
    def long(self) -> list[Subject]:
        """Return the first instance on a model with a long context and thousands of words."""
        found, left_out = list[Subject](), self.left_out
        tiny_model = TinyModel(tiny_target("llama", WORDS, layers=2, context=CONTEXT))
        self.left_out = {}  # those of the other models are reported already
        with contextlib.suppress(UserError):
            found = self._subjects(tiny_model)
        self.left_out = left_out
        return found[:1]

    @property
    def subjects(self) -> list[Subject]:
        """Return every instance on every model that it is tried on."""
        return [*self.small, *self.large, *self.__dict__.get("long", ())]

    def results(self, wanted: Sequence[Check] = CHECKS) -> Iterator[Result]:
        """Yield the result of one check after the other. A check ends at the first instance that breaks it.

        Two checks that reach the time limit at the same place are the last: the others would wait there as well.
        """
        problems = set[str]()
        for check in wanted:
            if not isinstance(check, Check):
                raise UserError(f"checks= is a list of parts of specbench_ss.conformance.CHECKS, not {wanted!r}")
            with one_thread():
                found = self._result(check)
            yield found
            problem = found.failure.problem if found.failure else ""
            if problem in problems and problem.startswith(STUCK):
                self.left_out["other checks"] = f"two had {problem}"
                return
            problems.add(problem)

    def _result(self, check: Check) -> Result:
        began = time.perf_counter()
        failure, exempt, untested = None, dict[str, None](), dict[str, None]()
        tried = dict[str, bool]()  # instance -> whether it was tested in all cases so far
        kinds = [kind for kind in ("large", "small", "long") if kind in check.on]
        for subject in (subject for kind in kinds for subject in getattr(self, kind)):
            why = self._exempt(check, subject)
            if why:
                exempt[why] = None
                continue
            subject.untested.clear()
            try:
                failure = first_failure(check, subject, self.timeout)
                tried.setdefault(subject.instance, True)
            except Untested:
                tried[subject.instance] = False
            if subject.untested:
                untested[f"instance {subject.instance}: {', '.join(subject.untested)}"] = None
            if failure:
                break
        seconds = time.perf_counter() - began
        return Result(check, failure, "; ".join(exempt), sum(tried.values()), seconds, "; ".join(untested))

    @staticmethod
    def _exempt(check: Check, subject: Subject) -> str:
        with contextlib.suppress(UserError), plugin_code(subject.instance):  # which the check itself finds
            return check.exempt(subject)
        return ""


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread: products as small as these take longer on several, and very long on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def instances_of(factory: Factory, target: Target) -> Instances:
    """Return a factory's instances: a class's `test_instances`, or the decoder or instances of a function."""
    if isinstance(factory, type):
        return cast("type[Decoder]", factory).test_instances(target)
    made = factory(target)
    if isinstance(made, Mapping):
        return made

    def make() -> Decoder:
        decoder = factory(target)
        assert isinstance(decoder, Decoder)
        return decoder

    return {made.name: make}


def check_decoder(
    factory: Factory,
    *,
    architectures: Sequence[str] = FEW,
    checks: Sequence[Check] = CHECKS,
    own_model: bool = False,
    thorough: bool = False,
    timeout: float | None = None,
    all: bool = False,
) -> list[Result]:
    """Test a decoding method by the conformance checks, on tiny random models, on the CPU, in float32.

    factory: a Decoder class, all of whose `test_instances(target)` are tested, or a function from a target to a decoder
    (or to instances by label, as `test_instances` returns them). own_model: test a method that is not lossless against
    its own `next_logits`, as a method should be that others are compared with. thorough: try every instance on every
    architecture. timeout: seconds of one request, after which a trial fails; in the main thread alone. all: try
    every check whatever the result of those before it, instead of raising CheckFailed.

    Returns the result of each check. Warns of checks that had nothing to test. Raises CheckFailed for the first check
    that fails, and UserError if there is nothing to check, or if no Decoder, no list of checks or an unknown
    architecture is given.
    """
    for name, given in (("architectures", architectures), ("checks", checks)):
        if isinstance(given, str) or not isinstance(given, Iterable):
            raise UserError(f"{name}= is a list, not {given!r}")
    results = list[Result]()
    for result in CheckRunner(factory, architectures, own_model, thorough, timeout).results(checks):
        if result.failure is not None and not all:
            raise result.failure
        if result.verdict == "untested" and not all:
            warnings.warn(f"check {result.name!r} was not tested on {result.untested}", stacklevel=2)
        results.append(result)
    return results
