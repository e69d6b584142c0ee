"""A pause in its order: memory back, others told, wait, memory taken, caught up; and what keeps a peer paused."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from peer import clock
from peer.data.batches import BatchStream, TokenStream
from peer.data.prefetch import DATA_SILENCE, LOOK, Prefetched
from peer.errors import RunError, UserError
from peer.process import LoopContext
from peer.training.pausing.rest import TRY_AGAIN, Rest
from tests.unit import parts
from tests.unit.virtual import virtual_time

GPU, HOST = torch.device("cuda"), torch.device("cpu")


class Peer:
    """Notes what a rest does, and when. ``trouble``: what the attempts to come back raise, one after the other."""

    def __init__(self, device: torch.device, *trouble: Exception) -> None:
        self.done: list[str] = []
        self.trouble, self.context = list(trouble), LoopContext()
        self.network, self.took = "", 0.0  # seconds of its pause, which an error does not end
        self.stream: BatchStream = parts.stream()
        self.inner, self.counters = SimpleNamespace(step=7), SimpleNamespace(round=2)
        folder = SimpleNamespace(path="runs/a")
        resources = SimpleNamespace(
            context=self.context, device=device, timer=lambda name: nullcontext(), folder=folder
        )
        member: Any = SimpleNamespace(resources=resources, presence=self, rejoin=self.rejoin)
        self.rest = Rest(member, self)  # type: ignore[arg-type]

    @property
    def failure(self) -> str:
        return self.network

    def note(self, what: str) -> None:
        self.done.append(what)

    @property
    def rested(self) -> float:
        """Seconds, as the reporter counts them."""
        return self.context.pause.seconds

    def announce(self) -> None:
        self.note("announces that it is paused" if self.context.pause.active else "announces that it trains")

    def move_to(self, device: torch.device) -> None:
        assert self.context.pause.resting
        self.note(f"to {device.type}")

    def rejoin(self, *, restored: bool) -> None:
        assert not restored, "what rounding has kept back was sent to nobody"
        assert self.context.pause.active, "others must not meet it before it has caught up"
        self.note("catches up")
        if self.trouble:
            raise self.trouble.pop(0)


@pytest.fixture(autouse=True)
def _no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peer.training.pausing.rest.release_memory", lambda device: None)


def paused(peer: Peer, seconds: float, then: Any = None, *, saved: bool = True) -> Any:
    """The result of a pause that ends after ``seconds``."""
    with virtual_time() as runtime:
        peer.context.pause.requested = True
        end = then or (lambda: setattr(peer.context.pause, "requested", False))
        runtime.loop.call_later(seconds, end)
        began = clock.monotonic()
        try:
            return peer.rest.until_resumed(saved=saved)
        finally:
            peer.took = clock.monotonic() - began


def test_a_pause_in_its_order() -> None:
    peer = Peer(GPU)
    peer.context.progress.begin(5, 10)
    peer.context.progress.step_seconds = 1.0
    assert paused(peer, 600.0)
    assert peer.done == [
        *("to cpu", "announces that it is paused", "to cuda", "catches up", "announces that it trains")
    ]
    assert peer.rested == pytest.approx(600, abs=1)
    assert not peer.context.away and peer.context.progress.eta() is None  # until the next step


def test_a_peer_on_a_cpu_moves_nothing() -> None:
    peer = Peer(HOST)
    assert paused(peer, 5.0)
    assert "to cpu" not in peer.done


def test_without_room_or_a_member_that_answers_it_stays_paused_and_tries_again() -> None:
    peer = Peer(GPU, torch.OutOfMemoryError("no room. Tried to allocate"), RunError("no member gave its weights"))
    assert paused(peer, 60.0)
    assert peer.done.count("catches up") == 3 and peer.done.count("to cpu") == 3
    assert peer.rested == pytest.approx(60 + 2 * TRY_AGAIN, abs=1)
    assert peer.done[-1] == "announces that it trains"


class Slow(TokenStream):
    """Its first batch comes after ``seconds``."""

    def __init__(self, seconds: float) -> None:
        super().__init__(parts.TEXT, batch_size=4, sequence_length=parts.LENGTH, seed=0, stream=0)
        self.seconds = seconds

    def take(self, count: int) -> Iterator[torch.Tensor]:
        clock.sleep(self.seconds)
        yield from super().take(count)


def reading(peer: Peer, seconds: float) -> Prefetched:
    """What assemble.py makes of a stream."""
    return Prefetched(Slow(seconds), pin=False, depth=0, away=lambda: peer.context.called_away or bool(peer.network))


def test_a_peer_whose_place_in_the_data_is_not_found_yet_stays_paused() -> None:
    """It was paused in the wait for it. The state that it took was as old as the rest of the wait, at its next swap."""
    peer = Peer(GPU)
    peer.stream = reading(peer, 100.0)
    assert paused(peer, 20.0)
    assert 120 <= peer.rested <= 120 + LOOK
    assert peer.done.count("to cuda") == peer.done.count("catches up") == 1


def test_a_pause_whose_data_is_silent_ends_the_peer() -> None:
    """It tried again for ever, each time with one look: no service that restarts a peer saw an end."""
    peer = Peer(GPU)
    peer.stream = reading(peer, 20_000.0)
    with pytest.raises(RunError, match=r"no row was read in 600 s"):
        paused(peer, 20.0)
    assert peer.took == pytest.approx(20 + DATA_SILENCE, abs=2 * LOOK)
    assert "to cuda" not in peer.done


def test_a_stop_or_a_failed_network_ends_the_wait_for_data_of_a_peer_that_comes_back() -> None:
    for fails in (False, True):
        peer = Peer(GPU)
        peer.stream = reading(peer, 20_000.0)

        def come_back(peer: Peer = peer, fails: bool = fails) -> None:
            peer.context.pause.requested = False
            end = partial(setattr, peer, "network", "p2pd has ended") if fails else peer.context.stop.request
            asyncio.get_running_loop().call_later(30.0, end)

        with pytest.raises(RunError, match="p2pd has ended") if fails else nullcontext():
            assert not paused(peer, 20.0, come_back)
        assert peer.took <= 50 + 2 * LOOK and "to cuda" not in peer.done


def test_after_a_stop_nothing_moves_back() -> None:
    peer = Peer(GPU)
    assert not paused(peer, 60.0, peer.context.stop.request)
    assert peer.done == ["to cpu", "announces that it is paused"]


def test_others_of_another_configuration_do_not_end_the_peer() -> None:
    """A stranger under the run's name did, when it was the only one there."""
    peer = Peer(GPU, UserError("this configuration is not the swarm's"))
    assert paused(peer, 1.0)
    assert peer.done[-1] == "announces that it trains" and peer.done.count("to cpu") == 1


@pytest.mark.parametrize("saved", [True, False])
def test_a_network_that_fails_ends_the_peer_and_says_whether_its_state_is_saved(saved: bool) -> None:
    """It said that the state is saved after a save that had failed."""
    peer = Peer(GPU)
    words = "is saved, start again" if saved else "is not saved in runs/a; free some space"
    with pytest.raises(RunError, match=f"p2pd has ended; the state {words}"):
        paused(peer, 60.0, lambda: setattr(peer, "network", "p2pd has ended"), saved=saved)
    assert peer.context.pause.resting, "it accepts no meeting any more"


def test_without_a_request_training_goes_on_and_after_a_stop_it_does_not() -> None:
    peer = Peer(GPU)
    assert peer.rest.until_resumed(saved=True)
    peer.context.stop.request()
    peer.context.pause.requested = True
    assert not peer.rest.until_resumed(saved=True)
    assert peer.done == []
