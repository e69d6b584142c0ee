"""Every call of the hub has a deadline. An error of the Hugging Face libraries is one line."""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from peer import clock
from peer.errors import DISK_FULL, UNREACHED, RunError, UserError, one_line

SILENCE = 30.0  # seconds without a byte from the hub; huggingface_hub's own clients wait for ever
ASK_SECONDS = 20.0  # for questions that are asked before the work
LONGEST_REASON = 300  # characters
HTTP_CLIENTS = {"aiohttp", "http", "httpcore", "httpcore2", "httpx", "httpx2", "requests", "urllib3"}
NETWORK_ERRORS = ConnectionError, TimeoutError, socket.gaierror, ssl.SSLError
ASK_LATER = {408, 429}  # statuses of HTTP, and those from 500 on
Result = TypeVar("Result")


def client() -> Any:
    """huggingface_hub's client, whose session never waits longer than :data:`SILENCE` for a byte."""
    from huggingface_hub import HfApi, get_session

    get_session().timeout = SILENCE
    return HfApi(library_name="noloco-peer")


def within(work: Callable[[], Result], seconds: float = ASK_SECONDS) -> Result:
    """The result of ``work``; raises ``TimeoutError`` after ``seconds``, and the work ends when it hears nothing."""
    worker = clock.worker("hub")
    try:
        return clock.result(worker.submit(work), seconds)
    finally:
        worker.shutdown(wait=False)


@contextmanager
def library_errors(
    where: str, advice: str = "", passing: tuple[type[Exception], ...] = (), later: str = "; start again to go on"
) -> Iterator[None]:
    """Raises :class:`RunError` if the network, the hub or a mounted file server fails, if a disk is full, and for other
    errors that may pass (``passing``). Otherwise :class:`UserError`. ``later`` ends the line about the network, and
    ``advice`` that of an error which stays.
    """
    try:
        yield
    except (UserError, RunError):
        raise
    except Exception as error:  # noqa: BLE001 - the libraries and their clients have types of their own
        said = reason(error)
        if may_pass(error):
            raise RunError(f"{where}: the network or the Hugging Face hub does not answer: {said}{later}") from None
        if _is_full(error):
            raise RunError(f"{where}: {said}; free some space") from None
        kind = RunError if isinstance(error, passing) else UserError
        raise kind(f"{where}: {said}{advice}") from None


def may_pass(error: BaseException) -> bool:
    """Whether the network, the hub or a file server is the reason, also of an error that a library has made of it."""
    from huggingface_hub import constants

    for one in _reasons(error):
        if isinstance(one, OSError) and one.errno in UNREACHED:
            return True
        if constants.HF_HUB_OFFLINE:
            continue
        status = getattr(getattr(one, "response", None), "status_code", getattr(one, "status", None))
        if isinstance(status, int):
            return status in ASK_LATER or status >= 500
        if isinstance(one, NETWORK_ERRORS):
            return True
        if type(one).__module__.partition(".")[0] in HTTP_CLIENTS and not isinstance(one, ValueError):
            return True  # ValueError: of an address
    return False


def _is_full(error: BaseException) -> bool:
    """``datasets`` says so without a number before it writes."""
    return any(
        isinstance(one, OSError) and (one.errno in DISK_FULL or str(one).startswith("Not enough disk space"))
        for one in _reasons(error)
    )


def _reasons(error: BaseException) -> Iterator[BaseException]:
    """``error``, and those of which libraries have made it."""
    one: BaseException | None = error
    while one is not None:
        yield one
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)


def reason(error: BaseException) -> str:
    """One line without the queries of addresses, which may be signatures."""
    return re.sub(r"\?[^\s'\"]*", "", one_line(error))[:LONGEST_REASON]
