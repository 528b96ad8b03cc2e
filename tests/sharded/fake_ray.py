"""As much of Ray as a pool of workers uses, in this process. Calls are carried out when their results are asked for."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


class RayError(Exception):
    """As of Ray: what is raised in place of a result."""

    def __init__(self, text: str = "", cause: Exception | None = None) -> None:
        super().__init__(text)
        self.cause = cause


class FakeRay:
    """lost: called with the name of a method and its arguments; True loses the worker before it answers.

    As Ray does, it starts another worker in its place, and asks it again, as often as `max_task_retries` states.
    """

    exceptions = SimpleNamespace(RayError=RayError)

    def __init__(self, lost: Callable[..., bool] = lambda *_: False, *machines: tuple[int, int]) -> None:
        self.lost, self.machines, self.killed = lost, machines or ((2, 0),), list[Any]()
        self.options: dict[str, Any] = {}
        self.silent = False

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": sum(cpu for cpu, _ in self.machines), "GPU": sum(gpu for _, gpu in self.machines)}

    def nodes(self) -> list[dict[str, Any]]:
        here = [{"Alive": True, "Resources": {"CPU": float(cpu), "GPU": float(gpu)}} for cpu, gpu in self.machines]
        return [*here, {"Alive": False, "Resources": {"CPU": 99.0}}]

    def put(self, value: Any) -> Any:
        return _travelled(value)

    def remote(self, **options: Any) -> Callable[[type], Any]:
        self.options = options
        return lambda kind: SimpleNamespace(remote=lambda *given: _Actor(lambda: kind(*given)))

    def wait(self, waiting: list[Any], num_returns: int, timeout: float | None = None) -> tuple[list[Any], list[Any]]:
        return ([], waiting) if self.silent and timeout is not None else self._first(waiting, num_returns)

    def _first(self, waiting: list[Any], num_returns: int) -> tuple[list[Any], list[Any]]:
        return waiting[:num_returns], waiting[num_returns:]

    def get(self, asked: Any) -> Any:
        actor, name, given = asked.actor, asked.name, asked.given
        for _ in range(1 + self.options["max_task_retries"]):
            if self.lost(name, *given):
                actor.worker = actor._new()
                continue
            try:
                return _travelled(getattr(actor.worker, name)(*given))
            except Exception as error:
                raise RayError("a long traceback\nof several lines", error) from error
        raise RayError("the worker died")

    def kill(self, actor: Any) -> None:
        self.killed.append(actor)


class _Actor:
    def __init__(self, make: Callable[[], Any]) -> None:
        self._new, self.worker = make, make()

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *given: _Asked(self, name, tuple(map(_travelled, given))))


class _Asked:
    def __init__(self, actor: _Actor, name: str, given: tuple[Any, ...]) -> None:
        self.actor, self.name, self.given = actor, name, given


def _travelled(value: Any) -> Any:
    """Return the copy that another process would get."""
    return pickle.loads(pickle.dumps(value))
