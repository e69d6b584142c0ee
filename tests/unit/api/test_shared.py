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
SAVED = {"config": canonical(SWARM)}  # all of a state that is read for settings


def start(
    monkeypatch: pytest.MonkeyPatch, offer: SwarmRunConfig | Exception | None, state: Any = None, **values: Any
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
    return resolve(None, keys, environment={}, ask=shared.of_swarm, state=state), asked


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


@pytest.mark.parametrize("nobody", NOBODY)
def test_without_an_answer_the_program_decides(nobody: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config, _ = start(monkeypatch, nobody, peer__initial_peers="a", run__name="mine")
    assert config.run == OwnRun(name="mine")
    with pytest.raises(UserError, match=r"run\.name"):
        start(monkeypatch, nobody, peer__initial_peers="a")


@pytest.mark.parametrize("nobody", NOBODY)
@pytest.mark.parametrize("where", [{"peer__initial_peers": "a"}, {}])
def test_without_an_answer_a_program_that_resumes_has_the_settings_of_its_state(
    where: dict[str, Any], nobody: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member that had joined by an address could not resume alone: its own checkpoint was of another run."""
    assert start(monkeypatch, nobody, SAVED, run__tag="books", **where)[0].run == SWARM
    config, _ = start(monkeypatch, nobody, SAVED, run__name="own", run__steps=12, run__exchange__codec="int8", **where)
    said = {"tag": "", "steps": 12, "exchange": SWARM.exchange.model_copy(update={"codec": "int8"})}
    assert config.run == SWARM.model_copy(update=said)
    assert start(monkeypatch, nobody, SAVED, run__name="mine", **where)[0].run == OwnRun(name="mine")
    diloco, _ = start(monkeypatch, nobody, SAVED, run__outer__name="diloco", **where)
    assert diloco.run == OwnRun(name="own", outer=DiLoCoConfig(name="diloco"))


def test_members_come_before_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = SWARM.model_copy(update={"inner_steps": 8})
    assert start(monkeypatch, theirs, SAVED, peer__initial_peers="a", run__tag="books")[0].run == theirs


def test_a_state_names_the_run_that_the_swarm_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bootstrap node had another run too: that one was taken, and the checkpoint was another run's."""
    assert start(monkeypatch, None, SAVED, peer__initial_peers="a")[1][0][1] == "own"
    assert start(monkeypatch, None, SAVED, peer__initial_peers="a", run__name="mine")[1][0][1] == "mine"


@pytest.mark.parametrize("state", [None, [1], {}, {"config": 1}, {"config": "{}"}, {"config": canonical(RunConfig())}])
def test_what_is_no_state_says_no_settings(state: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused later, with its reason."""
    assert start(monkeypatch, None, state, run__name="mine")[0].run == OwnRun(name="mine")


def test_without_an_address_nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert start(monkeypatch, UserError("asked"), run__name="mine")[1] == []


def test_a_swarm_of_the_trainer_is_not_a_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="noloco-peer join"):
        start(monkeypatch, RunConfig(), peer__initial_peers="a")
