"""Every call of the hub has a deadline, and its refusal is one line: what the user can correct, or what may pass."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from peer import clock
from peer.errors import RunError, UserError, one_line

SILENCE = 30.0  # seconds without a byte from the hub; huggingface_hub's own clients wait for ever
ASK_SECONDS = 20.0  # for questions that are asked before the work
LONGEST_REASON = 200  # characters
TOKENS = "see huggingface.co/settings/tokens"
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
def in_one_line(what: str) -> Iterator[None]:
    """Raises :class:`UserError` for what the user must correct, :class:`RunError` for what may pass by itself."""
    from huggingface_hub import errors

    try:
        yield
    except errors.LocalTokenNotFoundError:
        raise UserError(f"{what}: no token here; set HF_TOKEN to one that may write, or run hf auth login") from None
    except errors.OfflineModeIsEnabled:
        raise UserError(f"{what}: HF_HUB_OFFLINE is set; unset it") from None
    except errors.HFValidationError:
        raise UserError(f"{what}: not a name that the Hugging Face hub could have; give OWNER/NAME") from None
    except errors.HfHubHTTPError as error:
        raise _refused(what, error) from None
    except TimeoutError:
        raise RunError(f"{what}: the Hugging Face hub does not answer in time") from None
    except (OSError, ValueError, KeyError, TypeError) as error:  # no connection, or an answer that is none
        raise RunError(f"{what}: {reason(error)}") from None
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in ("httpx", "httpx2"):
            raise
        raise RunError(f"{what}: the Hugging Face hub cannot be reached: {reason(error)}") from None


def reason(error: BaseException) -> str:
    """One line without the queries of addresses, which may be signatures."""
    return re.sub(r"\?[^\s'\"]*", "", one_line(error))[:LONGEST_REASON]


def _refused(what: str, error: Any) -> UserError | RunError:
    status = getattr(error.response, "status_code", None)
    if status == 401:
        return UserError(f"{what}: the hub does not accept the token; make a new one, {TOKENS}")
    if status == 403:
        return UserError(f"{what}: the token may not write there; take one with write access, {TOKENS}")
    if status == 404:
        return UserError(f"{what}: not there, or the token may not see it")
    return RunError(f"{what}: the hub has answered {status}: {reason(error)}")
