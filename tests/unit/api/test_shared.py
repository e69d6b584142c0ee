"""What a program's own loop takes from the swarm that it joins, and what stays the program's."""

from __future__ import annotations

from typing import Any

import pytest

from peer.api import shared
from peer.api.config import OwnConfig, OwnRun, resolve
from peer.config.digest import canonical, digest_of
from peer.config.methods import DiLoCoConfig, NoLoCoConfig
from peer.config.schema import ExchangeConfig, RunConfig, SwarmRunConfig
from peer.errors import RunError, UserError
from peer.swarm.configuration import NoMajority, OfferedRun

FP16, INT8 = ExchangeConfig(codec="fp16"), ExchangeConfig(codec="int8")
SWARM = OwnRun(name="own", tag="books", steps=9, inner_steps=7, outer=NoLoCoConfig(alpha=0.2), exchange=FP16)
NOBODY = (None, NoMajority("half of them"), RunError("no member has sent it"), TimeoutError())


def start(
    monkeypatch: pytest.MonkeyPatch, offer: SwarmRunConfig | Exception | None, **values: Any
) -> tuple[OwnConfig, list[Any]]:
    """The program's settings, and what the swarm was asked for. ``values``: with ``__`` for a dot."""
    asked: list[Any] = []

    def offered(*what: Any) -> OfferedRun | None:
        asked.append(what)
        if isinstance(offer, Exception):
            raise offer
        if offer is None:
            return None
        return OfferedRun(offer.name, digest_of(canonical(offer)), canonical(offer), agreeing=2, members=2)

    monkeypatch.setattr(shared, "offered", offered)
    keys = {key.replace("__", "."): value for key, value in values.items()}
    return resolve(None, keys, environment={}, ask=shared.of_swarm), asked


def test_what_the_program_does_not_say_is_the_swarms_but_not_its_tag(monkeypatch: pytest.MonkeyPatch) -> None:
    config, asked = start(monkeypatch, SWARM, peer__initial_peers="a b", run__exchange__codec="int8")
    assert config.run == SWARM.model_copy(
        update={"tag": "", "exchange": SWARM.exchange.model_copy(update={"codec": "int8"})}
    )
    assert asked == [(config.peer, None)] and config.peer.initial_peers == ("a", "b")
    config, asked = start(monkeypatch, SWARM, peer__initial_peers=["a"], run__name="own", run__tag="books")
    assert config.run == SWARM and asked[0][1] == "own"


def test_a_program_with_another_method_keeps_its_own_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    config, _ = start(monkeypatch, SWARM, peer__initial_peers="a", run__outer__name="diloco")
    assert config.run == OwnRun(name="own", outer=DiLoCoConfig(name="diloco"))


@pytest.mark.parametrize(
    "nobody", [None, NoMajority("half of them"), RunError("no member has sent it"), TimeoutError()]
)
def test_without_an_answer_the_program_decides(nobody: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config, _ = start(monkeypatch, nobody, peer__initial_peers="a", run__name="mine")
    assert config.run == OwnRun(name="mine")
    with pytest.raises(UserError, match=r"run\.name"):
        start(monkeypatch, nobody, peer__initial_peers="a")


def test_without_an_address_nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert start(monkeypatch, UserError("asked"), run__name="mine")[1] == []


def test_a_swarm_of_the_trainer_is_not_a_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="noloco-peer join"):
        start(monkeypatch, RunConfig(), peer__initial_peers="a")
