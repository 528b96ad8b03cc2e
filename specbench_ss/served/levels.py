"""The suite sent to a server with several requests in flight."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from specbench_ss.benchmark.levels import Levels
from specbench_ss.benchmark.quiet_timing import quiet_collector
from specbench_ss.benchmark.schedule import Sample
from specbench_ss.benchmark.session import Session
from specbench_ss.errors import error_text
from specbench_ss.results.served_counts import counted
from specbench_ss.runs.level import Level
from specbench_ss.runs.rows import Row
from specbench_ss.runs.run_directory import RunDir
from specbench_ss.served.client import Server
from specbench_ss.served.counters import Counters
from specbench_ss.served.filling import filled, grown
from specbench_ss.served.protocol import AnswerError

Messages = list[dict[str, str]]
Asked = tuple[Row, Messages]


class ServedLevels(Levels[Messages]):
    """Sends them to servers.

    settings: of an answer, by its seed. failed: told of every request, in the order in which they end, and raises where
    the server is gone.
    """

    def __init__(
        self,
        session: Session,
        run_dir: RunDir,
        servers: Mapping[str, Server],
        settings: Callable[[int], dict[str, Any]],
        ended: Callable[[Row], None],
        timeout: float | None,
    ) -> None:
        super().__init__(session, run_dir)
        self.servers, self.settings, self.ended, self.timeout = servers, settings, ended, timeout

    def prompt(self, sample: Sample) -> Messages:
        """Return the conversation up to the question."""
        return sample.question.messages(self.session.history(sample))

    def level(self, label: str, concurrency: int, repeat: int) -> None:
        """Make one level and commit it."""
        self.session.events.on_sample_start(label, f"{concurrency} in flight")
        server, asked = self.servers[label], list(self.asked(label, concurrency, repeat))
        with _in_flight(server, concurrency) as pool:
            before = server.counters()
            started, began = time.time(), server.clock()
            with quiet_collector():
                sent = [pool.submit(self._answered, server, row, said) for row, said in asked if said is not None]
                rows = [self._told(future) for future in as_completed(sent)]
            ended, wall_s = time.time(), server.clock() - began
        after = None if before is None else server.counters()
        rows += [row for row, messages in asked if messages is None]  # whose history is missing
        rows.sort(key=lambda row: row.index)
        level = Level(label, concurrency, repeat, started, ended, wall_s, len(rows))
        self.run_dir.append_level(_counted(level, rows, before, after), rows)

    def _answered(self, server: Server, row: Row, messages: Messages) -> Row:
        """Return the row of one request, filled; a failed one where there is no answer. Runs in a thread."""
        row.started = time.time()
        try:
            answer = server.ask(messages, self.settings(row.seed), self.timeout)
        except AnswerError as e:
            row.status, row.error, row.started = "failed", error_text(e), None
            return row
        row.ended = time.time()
        return filled(row, answer, None)

    def _told(self, future: Future[Row]) -> Row:
        row = future.result()
        self.session.events.on_sample(row)
        self.ended(row)
        return row


@contextmanager
def _in_flight(server: Server, concurrency: int) -> Iterator[ThreadPoolExecutor]:
    """Give threads; where the block fails, what was not sent is not sent, and what is in flight is cut off."""
    pool = ThreadPoolExecutor(concurrency)
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        server.close()
        raise
    pool.shutdown()


def _counted(level: Level, rows: Sequence[Row], before: Counters | None, after: Counters | None) -> Level:
    """Return the level with the counts of drafts: the server's own, or those that it told with each answer."""
    good = [row for row in rows if row.ok]
    made = grown(before, after, sum(row.tokens or 0 for row in good), len(good))
    if made is not None and len(good) == len(rows):
        return replace(level, drafts=made.drafts, drafted=made.drafted, accepted=made.accepted)
    return replace(level, drafted=counted(good, "drafted"), accepted=counted(good, "accepted"))
