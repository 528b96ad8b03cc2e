"""Whether the hub can be reached, asked once: its own client asks six times, for half a minute, with a line each."""

from __future__ import annotations

from huggingface_hub import constants, get_session, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from specbench_ss.errors import UserError, first_line

PATIENCE_S = 5.0


def check_reachable(repo: str) -> None:
    """Raise UserError for what is no repository's name, and for one not in the cache while the hub is out of reach.

    Of one that is in the cache nothing is asked of an unreachable hub any more. Any answer of the hub is good enough.
    """
    try:
        validate_repo_id(repo)
    except HFValidationError:
        raise UserError(f"{repo!r} is neither a folder here nor the name of a model at the hub") from None
    if constants.HF_HUB_OFFLINE:
        return
    try:
        get_session().head(constants.ENDPOINT, timeout=PATIENCE_S)
    except Exception as error:  # no network, no such host, a proxy that refuses: the client's own kinds
        if not isinstance(try_to_load_from_cache(repo, "config.json"), str):
            raise UserError(
                f"{repo!r} is no folder here, and the hub that may have it, {constants.ENDPOINT}, cannot be reached: "
                f"{first_line(error)}"
            ) from error
        constants.HF_HUB_OFFLINE = True
