"""A peer that starts asks members whether its configuration is theirs: what one of them says, nobody has to believe."""

from __future__ import annotations

import random
from collections.abc import Coroutine, Sequence
from itertools import permutations
from typing import Any

import pytest

from peer.config.digest import canonical, digest_of
from peer.config.schema import InnerConfig, RunConfig
from peer.errors import UserError
from peer.p2p.stream import Refusal, Refused
from peer.swarm.connect import _require_fitting
from tests.unit.parts import member_record
from tests.unit.virtual import run

OURS, OTHER = RunConfig(), RunConfig(inner=InnerConfig(learning_rate=0.5))
TEXT, OTHER_TEXT = canonical(OURS), canonical(OTHER)
LIES = {
    "another configuration": Refusal(reason="it trains another configuration", run=OTHER_TEXT),
    "another layout": Refusal(reason="its model has another layout"),
}
HONEST = Refusal(reason="it trains another configuration", run=TEXT)


class Swarm:
    """Members by their answers, ``None`` for one that does not answer, each with a record of this peer's digest."""

    def __init__(self, *answers: Refusal | None, config: str = digest_of(TEXT)) -> None:
        self._answers = {f"m{number}": answer for number, answer in enumerate(answers)}
        self.present = [member_record(it).model_copy(update={"config": config}) for it in self._answers]

    async def refused_by(self, peer_id: str, protocol: str, addresses: Sequence[str]) -> Refused | None:
        answer = self._answers[peer_id]
        return None if answer is None else Refused(answer)

    def call(self, work: Coroutine[Any, Any, Any], timeout: float) -> Any:
        return run(work)


def require(swarm: Any, own: RunConfig = OURS) -> None:
    _require_fitting(swarm, own, swarm.present)


@pytest.mark.parametrize("lie", LIES)
def test_one_member_that_lies_keeps_no_peer_from_starting(lie: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one member of each configuration was asked: each fourth start ended with a false reason."""
    for order in permutations(range(4)):
        swarm = Swarm(HONEST, HONEST, HONEST, LIES[lie])
        monkeypatch.setattr(random, "sample", lambda found, count, order=order: [found[it] for it in order])
        require(swarm)


def test_a_configuration_that_is_not_that_of_the_record_is_no_reason() -> None:
    require(Swarm(None, LIES["another configuration"]))


@pytest.mark.parametrize("others", [(), (None,), (HONEST,), (LIES["another configuration"],)])
def test_who_has_another_configuration_than_the_swarm_is_told_so(others: tuple[Refusal | None, ...]) -> None:
    """Whoever else of the swarm does not answer, or lies."""
    swarm = Swarm(HONEST, *others)
    with pytest.raises(UserError, match=r"run\.inner\.learning_rate is 0\.5 here .*; use .*another run\.name$"):
        require(swarm, OTHER)


def test_who_has_another_layout_than_all_others_is_told_so() -> None:
    with pytest.raises(UserError, match="refuses this one: its model has another layout"):
        require(Swarm(*[LIES["another layout"]] * 4))
