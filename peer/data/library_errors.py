"""An error of the Hugging Face libraries in one line: what the user can correct, or what may pass by itself."""

from __future__ import annotations

import errno
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager

from peer.errors import RunError, UserError, one_line

LIBRARY_ERROR_CHARACTERS = 300
HTTP_CLIENTS = {"aiohttp", "http", "httpcore", "httpcore2", "httpx", "httpx2", "requests", "urllib3"}
NETWORK_ERRORS = ConnectionError, TimeoutError, socket.gaierror, ssl.SSLError
NETWORK_NUMBERS = {errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH}
ASK_LATER = {408, 429}  # statuses of HTTP, and those from 500 on


@contextmanager
def library_errors(where: str, advice: str = "") -> Iterator[None]:
    """Raises :class:`UserError`, or :class:`RunError` if the network or the hub fails."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        said = one_line(error, LIBRARY_ERROR_CHARACTERS)
        if not may_pass(error):
            raise UserError(f"{where}: {said}{advice}") from error
        raise RunError(
            f"{where}: the network or the Hugging Face hub does not answer: {said}; start again to go on"
        ) from error


def may_pass(error: BaseException) -> bool:
    """Whether the network or the hub is the reason, also of an error that a library has made of theirs."""
    from huggingface_hub import constants

    one: BaseException | None = error
    while one is not None and not constants.HF_HUB_OFFLINE:
        status = getattr(getattr(one, "response", None), "status_code", getattr(one, "status", None))
        if isinstance(status, int):
            return status in ASK_LATER or status >= 500
        if isinstance(one, NETWORK_ERRORS) or (isinstance(one, OSError) and one.errno in NETWORK_NUMBERS):
            return True
        if type(one).__module__.partition(".")[0] in HTTP_CLIENTS and not isinstance(one, ValueError):
            return True  # ValueError: of an address
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
    return False
