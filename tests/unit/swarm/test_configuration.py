"""A node that is no member learns what a swarm trains: by the digest of most records, from members that may lie.

So does a peer that starts and has a configuration (connect.py).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest

from peer import clock
from peer.config.digest import LARGEST_TEXT, canonical, digest_of
from peer.config.schema import InnerConfig, RunConfig
from peer.errors import RunError, UserError
from peer.p2p.event_loop import LoopThread
from peer.p2p.greeting import MemberIdentity
from peer.p2p.stream import Refusal, Refused, Stream, StreamLost
from peer.swarm.configuration import OFFER_TIMEOUT, NoMajority, OfferedRun, _chosen, _from_swarm, ask, most_common
from peer.swarm.connect import _misfit
from peer.swarm.directory.records import MemberRecord
from tests.unit.parts import member_record
from tests.unit.virtual import run, stream_pair

TEXT, OTHER = canonical(RunConfig()), canonical(RunConfig(inner=InnerConfig(learning_rate=0.5)))
DIGEST, OTHER_DIGEST = digest_of(TEXT), digest_of(OTHER)


def records(*digests: str) -> list[MemberRecord]:
    """Of members ``m0``, ``m1``, ... with these digests."""
    return [member_record(f"m{i}").model_copy(update={"config": it}) for i, it in enumerate(digests)]


def honest(text: str) -> MemberIdentity:
    return MemberIdentity("member", "demo", digest_of(text), text, "layout")


class Swarm:
    """What a node needs to ask members: each answers as it is, over streams in virtual time."""

    def __init__(self, thread: LoopThread, members: dict[str, Any]) -> None:
        self.call, self._members = thread.call, members
        self.asked: list[str] = []

    async def open(self, peer_id: str, protocol: str, addresses: Sequence[str]) -> Stream:
        self.asked.append(peer_id)
        member = self._members[peer_id]
        if member is None:
            raise StreamLost("nobody listens")
        mine, theirs = await stream_pair()
        serving = asyncio.ensure_future(self._serve(member, theirs))
        mine.hang_up = lambda: serving.cancel()
        return mine

    async def _serve(self, member: Any, stream: Stream) -> None:
        try:
            if isinstance(member, MemberIdentity):
                await member.admit(stream)
            elif isinstance(member, Refusal):
                await stream.send(member, 1)
                await stream.until_closed(60)
            else:
                await asyncio.sleep(member)
        except StreamLost:
            pass
        finally:
            stream.close()


@pytest.mark.parametrize(
    ("digests", "found"),
    [("a", "a"), ("aab", "a"), ("abb", "b"), ("ab", None), ("abc", None), ("aabb", None), ("aabbc", None), ("", None)],
)
def test_more_than_half_of_the_records_decide(digests: str, found: str | None) -> None:
    assert most_common(records(*digests)) == found


def test_one_liar_decides_nothing_and_its_text_is_never_taken(thread: LoopThread) -> None:
    """It names the digest of most and sends another text; it is asked too."""
    liar = Refusal(reason="it trains another configuration", run=OTHER)
    members = {"m0": honest(TEXT), "m1": honest(TEXT), "m2": liar}
    node: Any = Swarm(thread, members)
    offer = _from_swarm(node, "demo", records(DIGEST, DIGEST, DIGEST), None)
    assert sorted(node.asked) == ["m0", "m1", "m2"]
    assert (offer.text, offer.digest, offer.agreeing, offer.members) == (TEXT, DIGEST, 3, 3)
    assert thread.call(ask(node, "demo", DIGEST, "m2", []), 60) is None

    node = Swarm(thread, {"m0": honest(TEXT), "m1": honest(TEXT), "m2": honest(OTHER)})
    offer = _from_swarm(node, "demo", records(DIGEST, DIGEST, OTHER_DIGEST), None)
    assert (offer.text, offer.agreeing, offer.members) == (TEXT, 2, 3) and "m2" not in node.asked


def test_on_a_tie_a_person_chooses(thread: LoopThread) -> None:
    node: Any = Swarm(thread, {"m0": honest(TEXT), "m1": honest(OTHER)})
    with pytest.raises(NoMajority, match="--digest") as error:
        _from_swarm(node, "demo", records(DIGEST, OTHER_DIGEST), None)
    assert f"{DIGEST} (m0)" in str(error.value) and f"{OTHER_DIGEST} (m1)" in str(error.value) and node.asked == []
    assert _from_swarm(node, "demo", records(DIGEST, OTHER_DIGEST), OTHER_DIGEST).text == OTHER


@pytest.mark.parametrize(("there", "agreeing"), [(DIGEST, 1), ("gone", 0)])
def test_on_a_tie_a_restarted_machine_goes_on_with_its_own(there: str, agreeing: int, thread: LoopThread) -> None:
    """Under systemd it was the end of the peer: exit code 2, as for a wrong configuration."""
    joined = OfferedRun("demo", DIGEST, TEXT, agreeing=0, members=0)
    node: Any = Swarm(thread, {})
    offer = _from_swarm(node, "demo", records(there, OTHER_DIGEST), None, joined=joined)
    assert offer == replace(joined, agreeing=agreeing, members=2)
    assert _from_swarm(node, "demo", records("a", "b", "c"), DIGEST, joined=joined) == replace(joined, members=3)
    with pytest.raises(NoMajority, match="--digest"):
        _from_swarm(node, "demo", records(there, OTHER_DIGEST), None, joined=replace(joined, name="another"))
    node = Swarm(thread, {"m0": honest(OTHER), "m1": honest(OTHER)})
    assert _from_swarm(node, "demo", records(OTHER_DIGEST, OTHER_DIGEST), None, joined=joined).text == OTHER


def test_of_several_runs_a_restarted_machine_goes_on_with_its_own() -> None:
    runs = {"ours": records("a", "a"), "theirs": records("b")}
    joined = OfferedRun("theirs", DIGEST, TEXT, agreeing=0, members=0)
    with pytest.raises(UserError, match=r"ours \(2 peers\), theirs \(1 peer\); choose one with --run NAME"):
        _chosen(runs, None)
    assert _chosen(runs, joined) == "theirs"
    assert _chosen(runs, replace(joined, name="gone")) is None  # as where nobody trains
    assert _chosen({"ours": runs["ours"]}, joined) == "ours" and _chosen({}, joined) is None


def test_a_digest_of_a_persons_own_counts_against_any_majority(thread: LoopThread) -> None:
    node: Any = Swarm(thread, {"m0": honest(TEXT), "m1": honest(OTHER), "m2": honest(OTHER)})
    found = records(DIGEST, OTHER_DIGEST, OTHER_DIGEST)
    assert _from_swarm(node, "demo", found, DIGEST).text == TEXT
    with pytest.raises(UserError, match="no member of demo has the configuration 0123"):
        _from_swarm(node, "demo", found, "0123")


def test_a_large_text_is_not_believed_even_with_the_right_digest(thread: LoopThread) -> None:
    large = "x" * (LARGEST_TEXT + 1)
    node: Any = Swarm(thread, {"m0": honest(large)})
    with pytest.raises(RunError, match="no member of demo has sent"):
        _from_swarm(node, "demo", records(digest_of(large)), None)


def test_a_member_that_is_gone_frozen_or_of_another_version_costs_its_deadline_and_no_more(thread: LoopThread) -> None:
    frozen = 1e6
    node: Any = Swarm(thread, {"m0": None, "m1": frozen, "m2": honest(TEXT)})
    began = clock.monotonic()
    assert _from_swarm(node, "demo", records(DIGEST, DIGEST, DIGEST), None).text == TEXT
    assert clock.monotonic() - began <= OFFER_TIMEOUT

    node = Swarm(thread, {"m0": None, "m1": OLDER})
    with pytest.raises(RunError, match=r"noloco-peer 0.1.0"):
        _from_swarm(node, "demo", records(DIGEST, DIGEST), None)
    assert isinstance(thread.call(ask(node, "demo", DIGEST, "m1", []), 60), Refused)


def test_a_newcomer_that_reaches_no_member_asks_the_node_that_it_has_reached(thread: LoopThread) -> None:
    """Members behind NAT, or in containers without an address of their own."""
    reached = ["/ip4/10.0.0.7/tcp/31337/p2p/QmB", "/ip4/10.0.0.8/tcp/31337/p2p/QmC"]
    node: Any = Swarm(thread, {"m0": None, "QmB": None, "QmC": honest(TEXT)})
    assert _from_swarm(node, "demo", records(DIGEST), None, reached).text == TEXT
    node = Swarm(thread, {"m0": None, "QmB": honest(OTHER), "QmC": 1e6})
    with pytest.raises(RunError, match="no member of demo has sent"):
        _from_swarm(node, "demo", records(DIGEST), None, reached)


def test_a_member_of_another_run_tells_nothing(thread: LoopThread) -> None:
    node: Any = Swarm(thread, {"m0": replace(honest(TEXT), run="other")})
    with pytest.raises(RunError, match="it trains another run"):
        _from_swarm(node, "demo", records(DIGEST), None)


# -- a peer that starts asks whether its configuration is theirs

LIES = {
    "another configuration": Refusal(reason="it trains another configuration", run=OTHER),
    "another layout": Refusal(reason="its model has another layout"),
}
OLDER = Refusal(reason="it runs noloco-peer 0.1.0 (wire version 1), this peer 0.2.0 (wire version 2)")
FITTING = Refusal(reason="it trains another configuration", run=TEXT)


class Greeted:
    """What a peer that starts needs to ask members: their answers, ``None`` for one that does not answer, each with a
    record of this peer's digest.
    """

    def __init__(self, *answers: Refusal | None) -> None:
        self._answers = {f"m{number}": answer for number, answer in enumerate(answers)}
        self.present = [member_record(it).model_copy(update={"config": DIGEST}) for it in self._answers]

    async def refused_by(self, peer_id: str, protocol: str, addresses: Sequence[str]) -> Refused | None:
        answer = self._answers[peer_id]
        return None if answer is None else Refused(answer)

    def call(self, work: Coroutine[Any, Any, Any], timeout: float) -> Any:
        return run(work)


def require(swarm: Any, own: RunConfig | None = None) -> None:
    misfit = _misfit(swarm, own or RunConfig(), swarm.present)
    if misfit is not None:
        raise misfit


@pytest.mark.parametrize("lie", LIES)
def test_one_member_that_lies_keeps_no_peer_from_starting(lie: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one member of each configuration was asked: each fourth start ended with a false reason."""
    for order in permutations(range(4)):
        swarm = Greeted(FITTING, FITTING, FITTING, LIES[lie])
        monkeypatch.setattr(random, "sample", lambda found, count, order=order: [found[it] for it in order])
        require(swarm)


def test_a_configuration_that_is_not_that_of_the_record_is_no_reason() -> None:
    require(Greeted(None, LIES["another configuration"]))


@pytest.mark.parametrize("others", [(), (None,), (FITTING,), *((it,) for it in LIES.values())])
def test_who_has_another_configuration_than_the_swarm_is_told_so(others: tuple[Refusal | None, ...]) -> None:
    """Whoever else of the swarm does not answer, or lies."""
    swarm = Greeted(FITTING, *others)
    with pytest.raises(UserError, match=r"run\.inner\.learning_rate is 0\.5 here .*; use .*another run\.name$"):
        require(swarm, RunConfig(inner=InnerConfig(learning_rate=0.5)))


@pytest.mark.parametrize("proved", [False, True])
def test_who_has_another_version_than_its_swarm_may_be_started_again(*, proved: bool) -> None:
    """An error of the user, after which systemd starts no peer again: one that was updated before the others was gone
    for good. Whether others have another configuration or not: one of another version may have this peer's.
    """
    swarm = Greeted(*[OLDER] * 3, *[LIES["another configuration"]] * proved)
    swarm.present[3:] = [it.model_copy(update={"config": OTHER_DIGEST}) for it in swarm.present[3:]]
    with pytest.raises(RunError, match=r"refuses this one: it runs noloco-peer 0\.1\.0") as error:
        require(swarm)
    assert ("run.inner.learning_rate is 0.001 here" in str(error.value)) is proved


@pytest.mark.parametrize("refusal", [OLDER, LIES["another layout"]])
def test_one_member_that_only_refuses_hides_no_difference_that_others_have_proved(refusal: Refusal) -> None:
    """A record with an invented digest hid it: the peer was started again and again, and its user read of no key."""
    swarm = Greeted(*[LIES["another configuration"]] * 6, refusal)
    swarm.present = [
        *(it.model_copy(update={"config": OTHER_DIGEST}) for it in swarm.present[:6]),
        swarm.present[6].model_copy(update={"config": "invented"}),
    ]
    with pytest.raises(RunError, match=r"run\.inner\.learning_rate is .* use the swarm's.*; peer .* refuses this one"):
        require(swarm)
