"""What the network or the hub does to a peer passes by itself: exit code 1. What the user must correct: exit code 2."""

from __future__ import annotations

import errno
import http.client
import socket
import ssl
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from peer.config.data import HuggingFaceData, TokenizerConfig
from peer.data.prefetch import Prefetched
from peer.data.sources import huggingface
from peer.data.sources.documents import Split
from peer.data.sources.stream import DocumentStream, Shape
from peer.data.tokenizer import Bytes, load
from peer.errors import RunError, UserError
from peer.hub.answers import library_errors, may_pass


@pytest.fixture(autouse=True)
def _online(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


def foreign(module: str, base: type[Exception] = Exception, text: str = "it broke", **fields: Any) -> Exception:
    """An error of a library."""
    error = type("Foreign", (base,), {"__module__": module, **fields})(text)
    assert isinstance(error, Exception)
    return error


def answered(status: int) -> Exception:
    return foreign("httpx2", OSError, response=SimpleNamespace(status_code=status))


def made_of(reason: Exception) -> Exception:
    """As ``datasets`` and ``transformers`` hand on what they have caught."""
    try:
        raise OSError("cannot load it") from reason
    except OSError as error:
        return error


PASSING = [
    ConnectionError("Server Disconnected"),
    TimeoutError(),
    socket.gaierror(-2, "Name or service not known"),
    ssl.SSLError("bad record"),
    OSError(errno.ENETUNREACH, "Network is unreachable"),
    OSError(errno.ESTALE, "Stale file handle"),  # a local data set, or the cache, on a file server
    http.client.IncompleteRead(b""),
    foreign("requests.exceptions", OSError),
    foreign("aiohttp.client_exceptions"),
    foreign("httpx2"),
    foreign("aiohttp.client_exceptions", status=502),
    answered(429),
    answered(503),
    made_of(foreign("httpx")),
]
WRONG = [
    FileNotFoundError(errno.ENOENT, "No such file"),
    PermissionError(errno.EACCES, "Permission denied"),
    OSError("Corrupt snappy compressed data"),
    ValueError("Unknown split"),
    foreign("requests.exceptions", ValueError),
    answered(401),
    answered(404),
    made_of(answered(404)),
]


@pytest.mark.parametrize("error", PASSING, ids=repr)
def test_the_network_may_come_back(error: Exception) -> None:
    with (
        pytest.raises(RunError, match=r"^here: the network or .* does not answer: .*; start again to go on$") as caught,
        library_errors("here"),
    ):
        raise error
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("error", WRONG, ids=repr)
def test_what_is_wrong_stays_wrong(error: Exception) -> None:
    with pytest.raises(UserError, match=r"^here: .+; do this$"), library_errors("here", "; do this"):
        raise error


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        made_of(OSError(errno.EDQUOT, "Disk quota exceeded")),
        OSError("Not enough disk space. Needed: 1 TB"),  # of datasets
    ],
    ids=repr,
)
def test_a_full_disk_may_have_room_later(error: Exception) -> None:
    """With exit code 2 a service whose cache was full stayed down; everywhere else a full disk is 1."""
    with pytest.raises(RunError, match=r"^here: .+; free some space$"), library_errors("here", "; do this"):
        raise error


def test_who_asks_the_hub_says_what_else_may_pass() -> None:
    with pytest.raises(RunError, match=r"^here: no JSON$"), library_errors("here", passing=(ValueError,)):
        raise ValueError("no JSON")


@pytest.mark.parametrize("module", ["aiohttp.client_exceptions", "elsewhere"])
def test_a_signed_address_is_not_told(module: str) -> None:
    """Who reads it in peer.log could read a private file."""
    signed = foreign(module, text="no answer: https://cdn/x?X-Amz-Signature=SECRET&Expires=1")
    with (
        pytest.raises((RunError, UserError), match=r": no answer: https://cdn/x(; start again to go on)?$") as caught,
        library_errors("here"),
    ):
        raise signed
    assert "SECRET" not in "".join(traceback.format_exception(caught.value))


def test_who_forbids_the_network_is_not_told_to_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert not may_pass(ConnectionError("OfflineModeIsEnabled"))
    assert may_pass(OSError(errno.ESTALE, "Stale file handle"))  # a local data set may be on a file server


def test_a_stream_that_breaks_off_can_be_started_again() -> None:
    import datasets

    def rows() -> Iterator[dict[str, str]]:
        for index in range(100):
            yield {"text": f"some words {index}" * 20}
        raise ConnectionError("Server Disconnected")

    streamed = huggingface.StreamedSource(datasets.IterableDataset.from_generator(rows), "org/set train", "text")
    stream = DocumentStream(Split(streamed, Bytes()), Shape(4, 64, 8), seed=0, stream=1)
    ahead = Prefetched(stream, pin=False)
    with pytest.raises(RunError, match=r"org/set train shard 1 of 1 row 101: the network .* Server Disconnected"):
        list(ahead.take(10**4))
    ahead.close()


def test_so_can_a_peer_that_finds_no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import datasets
    from transformers import AutoTokenizer

    def unreached(*names: object, **more: object) -> None:
        raise ConnectionError("Couldn't reach the Hub")

    monkeypatch.setattr(datasets, "load_dataset", unreached)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", unreached)
    with pytest.raises(RunError, match=r"run\.data\.path: cannot load org/set train: the network"):
        huggingface.load(HuggingFaceData(name="huggingface", path="org/set"), "train")
    with pytest.raises(RunError, match=r"run\.data\.tokenizer: cannot load org/it: the network"):
        load(TokenizerConfig(name="org/it", vocabulary=300))
