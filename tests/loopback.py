"""An HTTP server of this machine, for tests of what asks one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from typing import Any


class Quiet:
    """Writes no log."""

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def listening(handler: Callable[..., Any]) -> Iterator[str]:
    """Give the address of a server, which ends with the block."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()
