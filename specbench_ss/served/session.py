"""One process's share of a run of served engines: the schedule and the commits are those of every run."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from specbench_ss.benchmark.events import Events
from specbench_ss.benchmark.quiet_timing import quiet_collector, warm_up
from specbench_ss.benchmark.schedule import Sample
from specbench_ss.benchmark.session import Session
from specbench_ss.benchmark.warm_prompts import warm_messages
from specbench_ss.decoding.generation import Step
from specbench_ss.errors import UserError, error_text
from specbench_ss.runs.config import RunConfig, RunTarget
from specbench_ss.runs.environment import busy
from specbench_ss.runs.rows import Row, Sameness
from specbench_ss.runs.run_directory import RunDir
from specbench_ss.runs.suite import Suite, SuiteData
from specbench_ss.served.answer import Answer
from specbench_ss.served.client import Server
from specbench_ss.served.filling import filled, grown
from specbench_ss.served.levels import ServedLevels
from specbench_ss.served.protocol import AnswerError
from specbench_ss.served.request import settings

IN_A_ROW = 3  # failed requests after which a server is asked whether it is there at all


class ServedSession(Session):
    """Asks servers, whose answers are compared with those of the first one. servers: by label, in order."""

    run_dir: RunDir

    def __init__(
        self,
        config: RunConfig,
        suite: Suite,
        data: SuiteData,
        servers: Mapping[str, Server],
        run_dir: RunDir,
        events: Events,
        where: RunTarget,
    ) -> None:
        super().__init__(config, data, list(servers), run_dir, events, where.goal)
        self.suite = suite
        self.servers, self.timeout = servers, where.timeout
        self._failed: Counter[str] = Counter()

    @property
    def baseline(self) -> str:
        return self.labels[0]

    def same_as(self, label: str) -> str:
        return self.baseline

    def busy(self) -> str:
        return busy() if any(server.loopback for server in self.servers.values()) else ""

    def warm_up(self) -> None:
        prompts = warm_messages(self.data.questions, self.config.warmup)
        warm_up(self.servers, prompts, self._warm_sample, self.warn_and_keep, self._unwarmed)

    def _unwarmed(self, label: str, error: BaseException) -> None:
        """Warn of a server that failed; each of its samples is asked for all the same."""
        self.warn_and_keep(f"{label} failed during warm-up: {error_text(error)}")

    def _warm_sample(self, label: str, messages: list[dict[str, str]], max_new_tokens: int) -> float:
        """Seconds per token of one unrecorded request."""
        self.events.on_warm_up(label)
        asked = self.settings(self.config.seed)
        asked["max_tokens"] = min(max_new_tokens, asked["max_tokens"])
        answer = self.servers[label].ask(messages, asked, self.timeout)
        return answer.wall_s / answer.tokens

    def made(self, blank: Row, sample: Sample) -> tuple[Row, list[Step]]:
        server, asked = self.servers[sample.method], sample.question.messages(self.history(sample))
        before = server.counters()
        blank.started = time.time()
        with quiet_collector():
            answer = self._answer(server, asked, blank.seed)
        blank.ended = time.time()
        after = None if before is None else server.counters()
        self._failed[sample.method] = 0
        return filled(blank, answer, grown(before, after, answer.tokens)), []

    def settings(self, seed: int) -> dict[str, Any]:
        """Return how one answer is to be decoded."""
        return settings(self.config, self.data.max_new_tokens, seed)

    def _answer(self, server: Server, asked: Sequence[Mapping[str, str]], seed: int) -> Answer:
        try:
            return server.ask(asked, self.settings(seed), self.timeout)
        except AnswerError:
            self._failed[server.label] += 1
            raise

    def _ended(self, row: Row) -> None:
        """Hear of a request of a level."""
        self._failed[row.method] = 0 if row.ok else self._failed[row.method] + 1
        if not row.ok:
            self.after_failure(row)

    def after_failure(self, row: Row) -> None:
        server = self.servers[row.method]
        if self._failed[row.method] >= IN_A_ROW and not server.alive():
            raise UserError(
                f"{row.method} at {server.shown_url} failed {self._failed[row.method]} times in a row and does not "
                f"answer any more: what is in {self.run_dir.path} is whole, and --resume goes on"
            )

    def verdict(self, sample: Sample, row: Row, reference: Row) -> Sameness:
        """Compare two answers as texts: a server sends no tokens, and does not promise the same ones."""
        mine, theirs = row.text or "", reference.text or ""
        if mine == theirs:
            return Sameness(*row.key, verdict="identical")
        at = next(
            (i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), min(len(mine), len(theirs))
        )
        return Sameness(*row.key, verdict="other text", reason=f"from character {at} on")

    def afterwards(self, samples: Sequence[Sample]) -> None:
        ServedLevels(self, self.run_dir, self.servers, self.settings, self._ended, self.timeout).make()
