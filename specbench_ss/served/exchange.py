"""Time limits of one request and its response.

httpx limits each read of a socket, so a server that sends a byte now and then is never late for it.
"""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any


class Exchange:
    """Shut the connection of a request down when the response is overdue.

    progress_s: longest time between signs of progress, which `renew` reports.
    total_s: longest time of the whole response.
    clock: seconds, for the times that are measured.

    `trace` is the request's trace extension of httpx: it yields the socket and the moment of sending. The request needs
    a connection of its own.
    """

    def __init__(
        self, progress_s: float, total_s: float = math.inf, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.progress_s, self.total_s, self.clock = progress_s, total_s, clock
        self.overdue, self._whole = False, False
        self.sent_at = clock()
        self._end = time.monotonic() + total_s
        self._until = min(time.monotonic() + progress_s, self._end)
        self._socket: socket.socket | None = None
        self._changed, self._over = threading.Event(), False
        self._watch = threading.Thread(target=self._keep_time, name="exchange", daemon=True)

    def __enter__(self) -> Exchange:
        self._watch.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over = True
        self._changed.set()
        self._watch.join()

    def trace(self, event: str, info: Mapping[str, Any]) -> None:
        """Take in an event of httpcore: a new connection, TLS around it, or the request that is sent next."""
        if event.endswith((".connect_tcp.complete", ".start_tls.complete")):  # a handshake has one limit for all of it
            self._socket = info["return_value"].get_extra_info("socket")
            if self.overdue:
                self._shut_down()
        elif event.endswith(".send_request_headers.started"):
            self.sent_at = self.clock()
            self._end = time.monotonic() + self.total_s
            self.renew()

    def elapsed(self) -> float:
        """Return the seconds since the request was sent."""
        return self.clock() - self.sent_at

    def renew(self) -> None:
        """Begin the time until the next sign of progress again."""
        self._until = min(time.monotonic() + self.progress_s, self._end)

    def finish(self, seconds: float) -> None:
        """Set the time that is left once the response is whole. It is never overdue then."""
        self._whole = True
        self._until = min(self._until, time.monotonic() + seconds)
        self._changed.set()

    @property
    def total_is_next(self) -> bool:
        """Return True if the limit of the whole response comes before that of the next progress."""
        return self._until >= self._end or self.total_s < self.progress_s

    def _keep_time(self) -> None:
        while not self._over:
            left = self._until - time.monotonic()
            if left <= 0:
                self.overdue = not self._whole
                self._shut_down()
                return
            if self._changed.wait(min(left, threading.TIMEOUT_MAX)):
                self._changed.clear()

    def _shut_down(self) -> None:
        """End the connection, so that a read or a write that waits for it returns."""
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
