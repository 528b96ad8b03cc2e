"""Asking the judge and keeping every verdict as it comes: what was paid for is never asked again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from specbench_ss.errors import UserError
from specbench_ss.judging.endpoint import Reply
from specbench_ss.judging.plan import Plan
from specbench_ss.judging.prompts import Message, rating
from specbench_ss.runs.rows import JudgeVerdict, answer_hash
from specbench_ss.runs.run_directory import judging

Ask = Callable[[list[Message]], Reply]
Commit = Callable[[JudgeVerdict], None]


def judge(path: Path, plan: Plan, ask: Ask, workers: int, told: Callable[[int, int], None]) -> int:
    """Commit a verdict for every answer of the plan; return how many replies had no rating.

    told: is given how many replies there are, and of how many. Raises UserError as `ask` does, once the requests that
    were under way have ended; every verdict that came is kept.
    """
    unrated = done = 0
    calls = len(plan.to_send)
    with judging(path) as commit:
        for digest in (digest for digest in plan.keys if digest in plan.known):
            known = plan.known[digest]
            _commit(plan, digest, known.score, Reply(known.text, None, None), commit)
        try:
            for digest, reply in _replies(plan, ask, workers):
                score, done = rating(reply.text), done + 1
                unrated += score is None
                _commit(plan, digest, score, reply, commit)
                told(done, calls)
        except UserError as error:
            raise UserError(f"{error}; {done} of {calls} verdicts are kept: the same command goes on") from None
    return unrated


def _replies(plan: Plan, ask: Ask, workers: int) -> Iterator[tuple[str, Reply]]:
    """Yield digests with their replies as these come. After the first error nothing more is sent."""
    with ThreadPoolExecutor(workers) as pool:
        asked = {pool.submit(ask, plan.messages[digest]): digest for digest in plan.to_send}
        seen = set()
        try:
            for future in as_completed(asked):
                seen.add(future)
                if error := future.exception():
                    pool.shutdown(cancel_futures=True)  # waits for what is under way: it is paid for
                    rest = [f for f in asked if f not in seen and not f.cancelled() and not f.exception()]
                    yield from ((asked[other], other.result()) for other in rest)
                    raise error
                yield asked[future], future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _commit(plan: Plan, digest: str, score: float | None, reply: Reply, commit: Commit) -> None:
    """Commit one reply for every sample with this answer. Its tokens stand with the first of them."""
    for i, key in enumerate(plan.keys[digest]):
        tokens = (None, None) if i else (reply.input_tokens, reply.output_tokens)
        verdict = JudgeVerdict(*key, plan.judge.name, plan.prompts, digest, score, reply.text, *tokens)
        verdict.host, verdict.max_tokens = plan.judge.host, plan.judge.max_tokens
        verdict.answer = answer_hash(plan.texts[key])
        commit(verdict)
