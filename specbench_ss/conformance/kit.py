"""Conformance kit: every law on every configuration of a method, on tiny models.

The first shape is tried on every architecture, the others on one each; `thorough` tries all shapes on all of them.
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

from specbench_ss.conformance.harness import Check, CheckFailed, Subject, TinyModel, Untested, holds
from specbench_ss.conformance.laws import CONTEXT, EXACT_CHECKS, WORDS
from specbench_ss.conformance.sampling_laws import SAMPLING_CHECKS
from specbench_ss.engine.decoder import Decoder
from specbench_ss.engine.target import Target
from specbench_ss.errors import UserError, first_line, known_words
from specbench_ss.models.tiny import ARCHITECTURES, WHOLE, tiny_target

ORDER = (  # as they are best read: what breaks an early one often breaks later ones too
    "draft", "answers", "target", "rows", "counts", "cache", "model", "logits", "greedy", "seed", "ends", "context",
    "lengths", "memory", "together", "long", "distribution", "blocks", "tunable", "description",
)  # fmt: skip
LAWS: tuple[Check, ...] = tuple(sorted((*EXACT_CHECKS, *SAMPLING_CHECKS), key=lambda law: ORDER.index(law.name)))
FEW = ("llama", "opt", "mistral-window")  # rotary and learned positions; a sliding window

SMALL = (7, 11)  # words; the more only for shapes that cannot do with the fewer

Shapes = Mapping[str, Callable[[], Decoder]]
Factory = Callable[[Target], "Decoder | Shapes"]  # a Decoder class is one as well


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of one law.

    broken: the violation; None where there is none. exempt: why some or all shapes are
    not held to the law; '' where all are. tried: number of shapes that were. seconds: time that it took. untested: what
    could not be tested, by shape; '' if nothing.
    """

    law: Check
    broken: CheckFailed | None
    exempt: str
    tried: int
    seconds: float
    untested: str = ""

    @property
    def name(self) -> str:
        """Return the name of the law, as `ssbench check` lists it."""
        return self.law.name

    @property
    def verdict(self) -> str:
        """Return 'ok', 'broken', 'exempt' or 'untested'."""
        if self.broken:
            return "broken"
        return "ok" if self.tried else "untested" if self.untested else "exempt"


class CheckRunner:
    """Tests one method. left_out: {shape or model: why it cannot be tried}. timeout: seconds that a trial may take.

    Raises UserError where the method has no shape for any of the small models, and for an unknown architecture.
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
            known = {subject.shape for subject in self.small}
            found = self._subjects(TinyModel(tiny_target("opt", words, layers=2)))
            self.small += [subject for subject in found if subject.shape not in known]
        if not self.small:
            raise UserError(f"nothing to check: {next(iter(self.left_out.values()), 'there are no examples')}")
        self.large: list[Subject] = []
        for i, kind in enumerate(architectures):
            found = self._subjects(TinyModel(tiny_target(kind)))
            self.large += [s for s in found if s.whole or s.number % len(architectures) == i]

    def _subjects(self, place: TinyModel) -> list[Subject]:
        found = list[Subject]()
        try:
            shapes = shapes_of(self.factory, place.target)
        except UserError as error:
            self.left_out[place.target.name] = str(error)
            return found
        except (Exception, SystemExit) as error:
            raise UserError(f"it gives no examples for a tiny model: {first_line(error)}") from error
        for number, (shape, make) in enumerate(shapes.items()):
            subject = Subject(shape, place, make, self.own_model, number, self.thorough or number == 0)
            try:
                subject.decoder()
            except UserError as error:
                self.left_out[str(subject)] = str(error)
                continue
            except (Exception, SystemExit):  # a law's business
                pass
            found.append(subject)
        return found

    @cached_property
    def long(self) -> list[Subject]:
        """The first shape on a model with a long context and thousands of words; made when a law asks for it."""
        found, left_out = list[Subject](), self.left_out
        place = TinyModel(tiny_target("llama", WORDS, layers=2, context=CONTEXT))
        self.left_out = {}  # what is left out here was told of the others, or is not worth telling
        with contextlib.suppress(UserError):
            found = self._subjects(place)
        self.left_out = left_out
        return found[:1]

    @property
    def subjects(self) -> list[Subject]:
        """Return every shape on every model that it is tried on."""
        return [*self.small, *self.large, *self.__dict__.get("long", ())]

    def results(self, wanted: Sequence[Check] = LAWS) -> Iterator[Result]:
        """Yield the result of one law after the other. A law ends at the first shape that breaks it."""
        for law in wanted:
            if not isinstance(law, Check):
                raise UserError(f"laws are a list of Law, a part of specbench_ss.conformance.LAWS, not {wanted!r}")
            with one_thread():
                found = self._result(law)
            yield found

    def _result(self, law: Check) -> Result:
        began = time.perf_counter()
        broken, tried, exempt, untested = None, 0, dict[str, None](), dict[str, None]()
        kinds = [kind for kind in ("large", "small", "long") if kind in law.on]
        for subject in (subject for kind in kinds for subject in getattr(self, kind)):
            why = self._exempt(law, subject)
            if why:
                exempt[why] = None
                continue
            subject.untested.clear()
            try:
                broken = holds(law, subject, self.timeout)
                tried += 1
            except Untested:
                pass
            if subject.untested:
                untested[f"{subject.shape}: {', '.join(subject.untested)}"] = None
            if broken:
                break
        return Result(law, broken, "; ".join(exempt), tried, time.perf_counter() - began, "; ".join(untested))

    @staticmethod
    def _exempt(law: Check, subject: Subject) -> str:
        try:
            return law.exempt(subject)
        except Exception:  # what it raises is found by the law itself
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


def shapes_of(factory: Factory, target: Target) -> Shapes:
    """Return the shapes of a factory: a class's `examples`, or the decoder or shapes that a function returns."""
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
    laws: Sequence[Check] = LAWS,
    own_model: bool = False,
    thorough: bool = False,
    timeout: float | None = None,
    all: bool = False,
) -> list[Result]:
    """Hold a decoding method to the laws, on tiny random models, on the CPU, in float32.

    factory: a Decoder class, whose `examples(target)` are all tried, or a function from a target to a decoder (or to
    shapes by label, as `examples` gives them). own_model: hold a method that is not lossless to its own `next_logits`,
    as a method that others are compared with should be. thorough: try every shape on every architecture.
    timeout: seconds after which a trial that has not ended breaks its law; in the main thread alone. all: try every
    law whatever came of those before it, instead of raising LawBroken.

    Returns the result of each law. Warns of laws that had nothing to test. Raises LawBroken for the first law that does
    not hold, and UserError where there is nothing to check, or where no Decoder, no list of laws or an unknown
    architecture is given.
    """
    for name, given in (("architectures", architectures), ("laws", laws)):
        if isinstance(given, str) or not isinstance(given, Iterable):
            raise UserError(f"{name}= is a list, not {given!r}")
    results = list[Result]()
    for result in CheckRunner(factory, architectures, own_model, thorough, timeout).results(laws):
        if result.broken is not None and not all:
            raise result.broken
        if result.verdict == "untested" and not all:
            warnings.warn(f"law {result.name!r} was not tested on {result.untested}", stacklevel=2)
        results.append(result)
    return results
