"""Download of files that are verified by sha256."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from specbench_ss.errors import UserError, os_errors
from specbench_ss.storage import replacing

if TYPE_CHECKING:
    import httpx

ATTEMPTS = 4
_RETRY_STATUS = (408, 425, 429, 500, 502, 503, 504)
_TIMEOUT_S = 30.0


def download(url: str, sha256: str, path: Path, *, pause: float = 1.0) -> Path:
    """Download `url` to the file `path`. On an error, `path` stays unchanged. Raise UserError.

    sha256: of the content. pause: seconds before the first retry, doubled for each further one.
    """
    with os_errors(f"cannot write {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            _fetch(url, file, pause)
            file.seek(0)
            actual = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
            if actual != sha256:
                raise UserError(f"{url} has sha256 {actual}, expected {sha256}; the download was discarded")
    return path


def _fetch(url: str, part: BinaryIO, pause: float) -> None:
    """Stream the body into `part`, with up to `ATTEMPTS` attempts on transient errors."""
    import httpx
    import tenacity

    # httpx's own transport retries only cover connecting, and a custom transport would ignore proxy settings.
    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception(_may_pass),
        stop=tenacity.stop_after_attempt(ATTEMPTS),
        wait=tenacity.wait_exponential(multiplier=pause),
        reraise=True,
    )
    try:
        with httpx.Client(follow_redirects=True, timeout=_TIMEOUT_S) as client:
            retrying(_stream, client, url, part)
    except httpx.HTTPStatusError as error:
        response = error.response
        raise UserError(f"{url} answers HTTP {response.status_code} {response.reason_phrase}".rstrip()) from None
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise UserError(f"{url!r} is not a URL to download from: {error}") from None
    except httpx.RemoteProtocolError as error:
        raise UserError(f"the download of {url} was interrupted: {error}") from None
    except httpx.HTTPError as error:
        raise UserError(f"cannot reach {url}: {error or type(error).__name__}") from None


def _stream(client: httpx.Client, url: str, part: BinaryIO) -> None:
    part.seek(0)
    part.truncate()
    with client.stream("GET", url) as response:
        response.raise_for_status()
        for chunk in response.iter_bytes():
            part.write(chunk)


def _may_pass(error: BaseException) -> bool:
    """Return True for a transient error."""
    import httpx

    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code in _RETRY_STATUS
    return isinstance(error, httpx.TransportError) and not isinstance(error, httpx.UnsupportedProtocol)
