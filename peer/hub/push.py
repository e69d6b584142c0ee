"""Push a folder to a model repository of the Hugging Face hub, and say before the work whether that will work.

The files go by plain LFS, one after the other, at most ``rate`` bytes a second: a push beside training must not take
the line or the cores. huggingface_hub's other way (Xet) uses all of both and has no limit to set.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from peer import clock
from peer.errors import UserError
from peer.hub.answers import client, library_errors, within

CHUNK = 2**16  # bytes that huggingface_hub reads at once
TOKENS = "see huggingface.co/settings/tokens"
REFUSED = {  # by status of HTTP
    401: f"the hub does not accept the token; make a new one, {TOKENS}",
    403: f"the token may not write there; take one with write access, {TOKENS}",
    404: "not there, or the token may not see it",
}
NO_ANSWER = OSError, ValueError, KeyError, TypeError  # of what the hub says: the user cannot correct it


def rights(name: str, private: bool) -> str:
    """What a push to ``name`` (OWNER/NAME) will do, in words. Nothing is written.

    Raises :class:`UserError` when this machine's token may not do it, :class:`RunError` when the hub does not say.
    """
    with _push_errors(name):
        return within(lambda: _rights(name, private))


def _rights(name: str, private: bool) -> str:
    from huggingface_hub import errors
    from huggingface_hub.utils import validate_repo_id

    validate_repo_id(name)
    hub = client()
    me = hub.whoami()
    try:
        hub.auth_check(name, write=True)
        return f"{name}: there already, and this token may write to it"
    except errors.RepositoryNotFoundError:
        mine = {me["name"], *(it["name"] for it in me.get("orgs") or ())}
    owner = name.partition("/")[0]
    if owner not in mine:
        raise UserError(f"{name}: {owner} is neither {me['name']} nor an organization of this token; take another name")
    token = me.get("auth", {}).get("accessToken", {})
    if token.get("role") == "read":
        raise UserError(f"{name}: the token may only read; take one with write access, {TOKENS}")
    return f"{name}: not there yet, it will be made{', private' if private else ', for all to see'}"


def push(folder: Path, name: str, *, private: bool, message: str, rate: float | None) -> str:
    """Push the files of ``folder`` as one commit; returns its address. A missing repository is made.

    ``private``: of a new repository; one that is there stays as it is. ``rate``: bytes a second. Raises as
    :func:`rights`.
    """
    from huggingface_hub import CommitOperationAdd

    with _push_errors(name), ExitStack() as stack:
        hub = client()
        hub.create_repo(name, private=private, exist_ok=True)
        files = [(it, stack.enter_context(PacedFile(it))) for it in sorted(folder.rglob("*")) if it.is_file()]
        additions = [CommitOperationAdd(str(it.relative_to(folder)), file) for it, file in files]
        for _, file in files:
            file.rate = rate  # from here on: an addition has read its file for the digest
        done = hub.create_commit(name, additions, commit_message=message, num_threads=1)
        return str(done.commit_url)


@contextmanager
def _push_errors(name: str) -> Iterator[None]:
    """Raises as :func:`library_errors`."""
    from huggingface_hub import errors

    with library_errors(name, passing=NO_ANSWER, later=""):
        try:
            yield
        except errors.LocalTokenNotFoundError:
            raise UserError(
                f"{name}: no token here; set HF_TOKEN to one that may write, or run hf auth login"
            ) from None
        except errors.OfflineModeIsEnabled:
            raise UserError(f"{name}: HF_HUB_OFFLINE is set; unset it") from None
        except errors.HFValidationError:
            raise UserError(f"{name}: not a name that the Hugging Face hub could have; give OWNER/NAME") from None
        except errors.HfHubHTTPError as error:
            refused = REFUSED.get(getattr(error.response, "status_code", 0))
            if refused is None:
                raise
            raise UserError(f"{name}: {refused}") from None


class PacedFile(io.BufferedReader):
    """A file that is read at most at ``rate`` bytes a second; ``None``: as fast as it is."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path))
        self.rate: float | None = None
        self._due = clock.monotonic()

    def read(self, size: int | None = -1, /) -> bytes:
        """As a file's; waits until what was read before was due."""
        piece = super().read(-1 if size is None else size)
        if self.rate is not None:
            self._due = max(self._due, clock.monotonic() - CHUNK / self.rate) + len(piece) / self.rate
            clock.sleep(max(0.0, self._due - clock.monotonic()))
        return piece
