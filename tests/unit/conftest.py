"""Shared by the unit tests."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from peer.logs import LOGGER
from peer.p2p.event_loop import LoopThread

if TYPE_CHECKING:
    from tests.simulated.runtime import Runtime
    from tests.unit.hub.server import Hub


REAL_SECONDS = 100.0  # a test that hangs fails


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that is a coroutine runs in virtual time, and with the marker ``real_time`` on asyncio's own loop.

    Virtual time ends after all other fixtures: what a test has set in the place of a clock is taken back before.
    """
    for item in items:
        if _is_coroutine(item) and not item.get_closest_marker("real_time"):
            names = item.fixturenames  # type: ignore[attr-defined]
            names[:] = ["virtual", *(it for it in names if it != "virtual")]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not _is_coroutine(pyfuncitem):
        return None
    from tests.unit.virtual import run

    names = inspect.signature(pyfuncitem.obj).parameters
    test = pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})
    if pyfuncitem.get_closest_marker("real_time"):
        asyncio.run(asyncio.wait_for(test, REAL_SECONDS))
    else:
        run(test, pyfuncitem.funcargs["virtual"])
    return True


def _is_coroutine(item: pytest.Item) -> bool:
    return isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj)


@pytest.fixture
def virtual() -> Iterator[Runtime]:
    """The test runs in virtual time."""
    from tests.unit.virtual import virtual_time  # brings torch and hivemind, which many tests do not need

    with virtual_time() as runtime:
        yield runtime


@pytest.fixture
def thread(virtual: Runtime) -> Iterator[LoopThread]:
    """A network thread with its event loop, in virtual time."""
    it = LoopThread()
    yield it
    it.close()


@pytest.fixture
def real_thread() -> Iterator[LoopThread]:
    """A network thread with its event loop, as the product has it."""
    it = LoopThread()
    yield it
    it.close()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A hub on loopback, which huggingface_hub takes for the only one, here and in programs that are started."""
    from huggingface_hub import constants

    from tests.unit.hub.server import WRITE, serving

    with serving() as server:
        for name, value in server.environment(WRITE, tmp_path / "hf").items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        files = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-login"))
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        yield server


@pytest.fixture(autouse=True)
def log_as_it_was() -> Iterator[None]:
    """A command sets up its log, by which the next test would look into that one's."""
    logger = logging.getLogger(LOGGER)
    before = logger.handlers[:], logger.propagate, logger.level
    yield
    logger.handlers[:], logger.propagate = before[0], before[1]
    logger.setLevel(before[2])


@pytest.fixture(autouse=True)
def no_network_thread_is_left() -> Iterator[None]:
    """Each takes part in the work of all later tests, with its event loop and its open sockets."""
    before = set(threading.enumerate())
    yield
    left = [it for it in threading.enumerate() if it.name == "network" and it not in before]
    for thread in left:
        thread.join(60)  # one that is asked to end may do so on a slow machine
    assert not [it for it in left if it.is_alive()], "a test, or LoopThread.close(), leaves its network thread"
