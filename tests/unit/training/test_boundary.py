"""The end of a round, with a swarm and an exchange that answer as they are told to."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import peer.swarm.presence
from peer import clock
from peer.config.load import load
from peer.errors import RunError
from peer.exchange.pair.mailbox import OpenPart, overlapped_parts
from peer.outer.noloco import NoLoCo
from peer.process import LoopContext
from peer.replica.inner_loop import InnerReport
from peer.rounds.contribution import PART, Averaged, Contribution
from peer.rounds.progress import Progress
from peer.rounds.state import Lineage, State
from peer.rounds.types import Group, Grouping, Outcome, Seat
from peer.swarm.context import BoundaryClock
from peer.swarm.matchmaking import Matchmaking
from peer.swarm.state_transfer.download import DonorBehind
from peer.telemetry.metrics import ActivityTimer, Metrics
from peer.telemetry.report import Reporter
from peer.training.boundaries.blocking import Blocking
from peer.training.boundaries.boundary import PhaseLength
from peer.training.boundaries.group_weights import GroupWeights
from peer.training.boundaries.overlapped import Overlapped
from peer.training.state import PeerState
from peer.training.validation import Validation
from tests.swarm.support.harness import DEMO, TINY
from tests.unit import parts
from tests.unit.late_device import LateDevice
from tests.unit.parts import theta
from tests.unit.replica.memory_peer import most_allocated
from tests.unit.virtual import took

H, TOTAL = 5, 100


class NoMatchmaking(Matchmaking):
    """Finds nobody."""

    def __init__(self) -> None:
        self.postponed = 0
        self.called_off: list[str] = []

    def postpone(self) -> None:
        self.postponed += 1

    def call_off(self, reason: str) -> None:
        self.called_off.append(reason)


class Presence:
    """Alone in its swarm."""

    peer_id, size = "me", 1
    call_off = peer.swarm.presence.Presence.call_off

    def __init__(self, progress: Progress) -> None:
        self.ended_rounds: list[Averaged] = []
        self.asked: list[tuple[int, ...]] = []
        self._context = SimpleNamespace(boundary=BoundaryClock(progress))
        self.matchmaking = NoMatchmaking()

    def group_for(self, round: int, ended_phase_number: int | None = None) -> Group:
        self.asked.append((round,) if ended_phase_number is None else (round, ended_phase_number))
        return Group(round)

    def without_avoided(self, group: Group) -> Group:
        return group

    def ended(self, averaged: Averaged) -> None:
        self.ended_rounds.append(averaged)


class Mailbox:
    """A swap that ends when it is told to, without a partner."""

    def __init__(self, numel: int) -> None:
        self.parts, self.over, self.waits = overlapped_parts(numel), False, 0
        self._count = 0

    def result(self) -> Averaged | None:
        return Averaged(torch.empty(0), Outcome.ALONE) if self.over else None

    def take_corrections(self) -> list[Any]:
        return []

    def parts_to_open(self, *, idle: bool = False) -> range:
        return self.parts_left() if self.over else range(0)

    def parts_left(self) -> range:
        return range(self._count, len(self.parts))

    def put(self, index: int, part: object) -> None:
        self._count = index + 1

    def wait(self, seconds: float) -> None:
        self.waits += 1
        self.over = self.waits > 2


class Exchange:
    """Hands out mailboxes; averages with nobody, after the outcomes it is told."""

    def __init__(self, *outcomes: Averaged, mailbox: type[Mailbox] = Mailbox) -> None:
        self._mailbox = mailbox
        self.mailboxes: list[Mailbox] = []
        self.groups: list[Group] = []
        self._outcomes = list(outcomes)

    def start(self, meet: Callable[[], Group]) -> Mailbox:
        self.groups.append(meet())
        self.mailboxes.append(self._mailbox(parts.peer_state().outer.slow.numel))
        return self.mailboxes[-1]

    def average(self, contribution: Contribution, group: Group) -> Averaged:
        self.groups.append(group)
        mean = torch.empty(contribution.numel)
        contribution.read(0, mean)
        told = self._outcomes.pop(0) if self._outcomes else Averaged(mean, Outcome.ALONE)
        return replace(told, mean=mean)


class Scene:
    """A peer at the end of an inner phase."""

    def __init__(self, folder: Path) -> None:
        metrics = Metrics()
        self.resources: Any = SimpleNamespace(timer=ActivityTimer(metrics), context=LoopContext())
        progress = self.resources.context.progress
        self.state, self.presence = parts.peer_state(), Presence(progress)
        self.reporter = Reporter(folder, metrics)
        run = load(DEMO, [*TINY, f"run.inner_steps={H}"]).run
        self.length = PhaseLength(run, TOTAL, self.state, progress)

    def parts(self) -> tuple[PeerState, Any, Reporter, Any, PhaseLength]:
        return self.state, self.presence, self.reporter, self.resources, self.length

    def train(self) -> InnerReport:
        steps = self.length.begin()
        inner = self.state.inner.run(self.state.stream.take(steps))
        self.state.counters.phase_tokens += inner.tokens
        self.state.counters.phase_steps_done += inner.steps
        return inner


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


@pytest.mark.parametrize("trained", [True, False])
def test_a_run_that_was_done_when_its_process_began_swaps_no_more(scene: Scene, trained: bool) -> None:
    """Each resume of a finished swarm added a round alone and five seconds of idle time to each peer."""
    boundary = Blocking(*scene.parts(), exchange=Exchange())
    scene.resources.context.progress.step_seconds = float(trained)
    scene.state.inner.step = scene.state.counters.boundary_step = TOTAL
    scene.presence.matchmaking.last_partners = lambda: 1  # type: ignore[method-assign]
    boundary.finish()
    assert bool(scene.presence.ended_rounds) == trained


def overlapped(scene: Scene, exchange: Any) -> Overlapped:
    return Overlapped(*scene.parts(), exchange=exchange)


def begun(scene: Scene, mailbox: type[Mailbox] = Mailbox) -> tuple[Overlapped, Exchange]:
    """A boundary whose first swap has begun."""
    exchange = Exchange(mailbox=mailbox)
    boundary = overlapped(scene, exchange)
    assert boundary.cross(scene.train())
    boundary.between_steps()
    return boundary, exchange


class Asking(Mailbox):
    """Asks for three parts a step. ``opened``: the parts that it got."""

    def __init__(self, numel: int) -> None:
        super().__init__(numel)
        self.opened: dict[int, OpenPart] = {}

    def parts_to_open(self, *, idle: bool = False) -> range:
        return self.parts_left()[:3]

    def put(self, index: int, part: OpenPart) -> None:  # type: ignore[override]
        super().put(index, part)
        self.opened[index] = part


def test_a_boundary_waits_until_a_donor_has_copied_its_state(scene: Scene) -> None:
    """The copy had the round before and was counted from the boundary after it."""
    boundary, inner = overlapped(scene, Exchange()), scene.train()
    with scene.state.outer.slow.changing:
        crossing = threading.Thread(target=boundary.cross, args=(inner,))
        crossing.start()
        crossing.join(0.2)
        assert scene.state.counters.round == 0 and scene.state.counters.boundary_step == 0
    crossing.join(60.0)
    assert scene.state.counters.round == 1 and scene.state.counters.unopened == 0


def test_the_position_of_a_copy_is_that_of_its_beginning(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.train()
    vectors = scene.state.vectors

    def slowly() -> list[torch.Tensor]:
        scene.state.inner.step += H  # the training goes on meanwhile
        return vectors()

    monkeypatch.setattr(scene.state, "vectors", slowly)
    copied = scene.state.snapshot()
    assert (copied.step, copied.phase_steps_done) == (0, H)


class Correcting(Asking):
    """Each look finds another correction. It ends when it has been cancelled twice: the first time nobody was met."""

    cancelled = 0

    def take_corrections(self) -> list[Any]:
        return [(0, torch.ones(self.parts[0][1]))] if self.opened else []

    def cancel(self) -> None:
        self.cancelled += 1
        self.over = self.cancelled > 1

    def wait(self, seconds: float) -> None:
        self.waits += 1
        self.over |= self.waits > 9


def test_a_swap_of_a_state_that_was_replaced_changes_nothing_any_more(scene: Scene) -> None:
    """Its parts took their outer step, and its corrections came, on top of the state that a program had restored."""
    outer, progress = scene.state.outer, scene.resources.context.progress
    saved = {name: vector.clone() for name, vector in scene.state.saved_vectors().items()}
    boundary, exchange = begun(scene, Correcting)
    progress.step_seconds = 0.1
    progress.swap_begins()
    assert not torch.equal(outer.slow.phi, saved["phi"])
    boundary.abandon()
    scene.state.take_outer(saved)
    outer.slow.write_fast()
    for _ in range(3):
        boundary.between_steps()
    boundary.await_swap()
    assert torch.equal(outer.slow.phi, saved["phi"]) and torch.equal(theta(scene.state), saved["phi"])
    assert scene.reporter.last is None and len(scene.presence.ended_rounds) == 1
    inner = scene.train()
    assert progress.eta() is not None  # that swap's end is not waited for
    assert boundary.cross(inner) and len(exchange.mailboxes) == 1
    boundary.between_steps()
    assert len(exchange.mailboxes) == 2  # and the next one begins as any other


@pytest.mark.parametrize(("overlap", "failed"), [(True, False), (False, False), (False, True)])
def test_nobody_waits_for_a_peer_whose_state_is_replaced(scene: Scene, overlap: bool, failed: bool) -> None:
    """To take a newer state may last minutes. The time to its boundary went on to 0 meanwhile, and the partner of its
    meeting waited, and left it out. After a step that had ``failed`` at its boundary others were told of one phase.
    """
    boundary = overlapped(scene, Exchange()) if overlap else Blocking(*scene.parts(), exchange=Exchange())
    progress = scene.resources.context.progress
    progress.step_seconds = 0.1
    told = BoundaryClock(progress)
    scene.train()
    assert told.eta() is not None
    if failed:  # at its boundary
        with told.at_end_of(progress.phase_number):
            pass
        assert told.eta() == progress.phase_seconds
    boundary.abandon()
    assert told.eta() is None and scene.presence.matchmaking.called_off == ["another state replaces this one"]
    scene.train()
    assert told.eta() is not None


def test_a_swap_that_was_given_up_before_it_began_does_not_begin(scene: Scene) -> None:
    exchange = Exchange()
    boundary = overlapped(scene, exchange)
    assert boundary.cross(scene.train())
    boundary.abandon()
    boundary.between_steps()
    assert exchange.mailboxes == []


def test_a_swap_that_does_not_end_in_time_is_given_up_later(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that looks for its partner cannot be interrupted."""
    monkeypatch.setattr("peer.training.boundaries.overlapped.LEAVING_SECONDS", 0.0)
    boundary, _ = begun(scene, Correcting)
    before = scene.state.outer.slow.phi.clone()
    boundary.abandon()
    assert not scene.presence.ended_rounds
    assert not boundary.cross(scene.train())  # only one swap at a time
    for _ in range(3):
        boundary.between_steps()
    assert len(scene.presence.ended_rounds) == 1 and torch.equal(scene.state.outer.slow.phi, before)


class Failed(Mailbox):
    """Its helper thread has failed."""

    def result(self) -> Averaged | None:
        raise RuntimeError("a defect")


def test_the_error_of_a_swap_that_is_given_up_is_raised_no_more(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """Each call that restored a state raised it again, so a program could not go on without a new process."""
    exchange = Exchange(mailbox=Failed)
    boundary = overlapped(scene, exchange)
    assert boundary.cross(scene.train())
    with pytest.raises(RuntimeError, match="a defect"):
        boundary.between_steps()
    boundary.abandon()
    assert [it.getMessage() for it in caplog.records] == ["a swap that was given up has failed: RuntimeError: a defect"]
    assert boundary.cross(scene.train())
    with pytest.raises(RuntimeError, match="a defect"):
        boundary.between_steps()
    assert len(exchange.mailboxes) == 2  # the next one begins as any other


class FailsLate(Correcting):
    """Its helper thread fails when the peer has given the swap up and gone on."""

    failed = False

    def result(self) -> Averaged | None:
        if self.failed:
            raise RuntimeError("a defect")
        return super().result()


def test_nor_is_one_that_comes_later_raised_at_the_next_boundary(
    scene: Scene, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peer.training.boundaries.overlapped.LEAVING_SECONDS", 0.0)
    boundary, _ = begun(scene, FailsLate)
    boundary.abandon()
    inner = scene.train()
    monkeypatch.setattr(FailsLate, "failed", True)
    assert boundary.cross(inner)
    assert [it.getMessage() for it in caplog.records] == ["a swap that was given up has failed: RuntimeError: a defect"]


def test_no_look_at_a_swap_waits_for_the_accelerator(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor afterwards: the parts that are left are opened as their copies arrive, and then the swap is over."""
    exchange, waits = Exchange(mailbox=Asking), 0

    def synchronize() -> None:
        nonlocal waits
        waits += 1

    scene.resources.timer = ActivityTimer(Metrics(), synchronize)
    boundary = overlapped(scene, exchange)
    assert boundary.cross(scene.train())
    waits = 0
    with LateDevice(monkeypatch) as device:
        device.side_of(scene.state.outer.slow)
        boundary.between_steps()
        boundary.between_steps()
        (mailbox,) = exchange.mailboxes
        assert isinstance(mailbox, Asking) and mailbox.opened == {} and device.begun == 3
        device.complete()
        boundary.between_steps()
        assert list(mailbox.opened) == [0, 1, 2] and all(it.own.isfinite().all() for it in mailbox.opened.values())
        boundary.between_steps()
        assert device.begun == 6 and len(mailbox.opened) == 3
        mailbox.over = True
        while mailbox.parts_left():
            assert not scene.presence.ended_rounds
            device.complete()
            boundary.between_steps()
        assert list(mailbox.opened) == list(range(len(mailbox.parts)))
        assert waits == 0 and "host waits" not in device.calls
    assert [it.outcome for it in scene.presence.ended_rounds] == [Outcome.ALONE]
    assert all(span.parameter.isfinite().all() for span in scene.state.outer.slow.spans)


def test_a_part_that_is_not_finite_is_not_sent(scene: Scene) -> None:
    """The inner steps beside a swap may break weights that were finite at the boundary."""
    (boundary, exchange), slow = begun(scene, Asking), scene.state.outer.slow
    (mailbox,) = exchange.mailboxes
    assert isinstance(mailbox, Asking) and list(mailbox.opened) == [0, 1, 2]
    last = slow.spans[-1]
    with torch.no_grad():
        last.parameter.view(-1)[-1] = torch.inf
    before = slow.phi.clone()
    for _ in range(2):  # a program that catches it does not send the rest either
        with pytest.raises(RunError, match=rf"^the weight {last.name} is not finite at step {H}; nobody has got it"):
            while mailbox.parts_left():
                boundary.between_steps()
    first = mailbox.parts[-1][0]
    assert list(mailbox.opened) == list(range(len(mailbox.parts) - 1))
    assert torch.equal(slow.phi[first:], before[first:])  # a newcomer may still take these


def test_a_swap_begins_with_the_next_inner_step_and_not_while_its_peer_evaluates(scene: Scene) -> None:
    exchange = Exchange()
    boundary = overlapped(scene, exchange)
    inner = scene.train()
    assert boundary.cross(inner)
    assert (scene.state.counters.round, exchange.mailboxes) == (1, [])
    scene.length.begin()
    boundary.between_steps()
    assert len(exchange.mailboxes) == 1
    assert scene.presence.asked == [(0, 1)]  # round 0 and the first inner phase have ended
    assert exchange.groups[0].tokens == inner.tokens
    boundary.between_steps()
    assert len(exchange.mailboxes) == 1 and scene.reporter.last is None
    exchange.mailboxes[0].over = True
    boundary.between_steps()
    assert scene.reporter.last is not None and scene.reporter.last.boundary.round == 1
    assert torch.equal(scene.state.outer.slow.phi, theta(scene.state))  # all parts have taken their step alone


def test_while_a_swap_is_on_its_way_the_boundary_is_postponed(scene: Scene) -> None:
    (boundary, exchange), tokens = begun(scene), 0
    for _ in range(2):
        inner = scene.train()
        tokens += inner.tokens
        assert not boundary.cross(inner)
        assert (scene.state.counters.round, scene.length.remaining()) == (1, H)
    assert scene.presence.matchmaking.postponed == 2  # a partner does not wait
    exchange.mailboxes[0].over = True
    boundary.between_steps()
    tokens += (inner := scene.train()).tokens
    assert boundary.cross(inner) and scene.state.counters.round == 2
    boundary.finish()
    assert exchange.groups[-1].tokens == tokens  # of all three inner phases
    assert [it.outcome for it in scene.presence.ended_rounds] == [Outcome.ALONE] * 2
    assert scene.reporter.last is not None and scene.reporter.last.boundary.round == 2


def test_a_swap_that_has_ended_with_parts_left_does_not_postpone_the_boundary(scene: Scene) -> None:
    boundary, exchange = begun(scene, Asking)
    exchange.mailboxes[0].over = True
    boundary.between_steps()
    assert exchange.mailboxes[0].parts_left() and not scene.presence.ended_rounds
    assert boundary.cross(scene.train()) and scene.state.counters.round == 2
    assert not exchange.mailboxes[0].parts_left() and len(scene.presence.ended_rounds) == 1


def test_the_last_phases_are_not_shorter_than_a_swap_by_what_was_known_when_they_began(scene: Scene) -> None:
    progress, counters = scene.resources.context.progress, scene.state.counters
    run = load(DEMO, [*TINY, f"run.inner_steps={H}", "run.exchange.overlap=true"]).run
    length = PhaseLength(run, TOTAL, scene.state, progress)
    progress.step_seconds = 1.0
    scene.state.inner.step = counters.boundary_step = TOTAL - H
    assert length.begin() == 3
    progress.swap_took(4.0)
    assert length.remaining() == 3 and length.begin() == H
    counters.phase_steps_done, progress.step_seconds = 4, 100.0
    assert length.begin() == 1  # it goes on
    resumed = PhaseLength(run, TOTAL, scene.state, progress)
    assert resumed.remaining() == 0  # 4 steps are made of what would be 3 now


def test_the_rest_of_a_phase_has_the_rest_of_its_time(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """``run.inner_time``; a resumed peer goes on with the phase that it had begun."""
    run = load(DEMO, [*TINY, f"run.inner_steps={H}", "run.inner_time=10"]).run
    progress, now = scene.resources.context.progress, 100.0
    length = PhaseLength(run, TOTAL, scene.state, progress)
    monkeypatch.setattr(clock, "monotonic", lambda: now)
    for done, seconds in ((0, 10.0), (2, 6.0)):
        scene.state.counters.phase_steps_done, began = done, now
        assert length.begin() == H - done
        now = began + seconds - 0.1
        assert not progress.time_up
        now = began + seconds
        assert progress.time_up


def test_a_running_swap_is_waited_for_only_after_the_last_inner_step_of_the_run(scene: Scene) -> None:
    boundary, exchange = begun(scene)
    scene.state.inner.step = TOTAL - H
    scene.state.begin_phase()
    while not boundary.cross(scene.train()):
        assert scene.state.inner.step < TOTAL and exchange.mailboxes[0].waits == 0
    assert scene.state.inner.step == TOTAL and exchange.mailboxes[0].waits > 2


def test_after_the_last_inner_step_nobody_looks_long_for_a_partner(scene: Scene) -> None:
    boundary = overlapped(scene, Exchange())
    scene.state.inner.step = TOTAL - 1
    scene.state.begin_phase()
    assert boundary.cross(scene.train())
    boundary.finish()
    assert scene.presence.asked == [(0,)]  # without an inner phase that runs meanwhile


@pytest.mark.parametrize(("culprits", "tries"), [(("another",), 2), (("another", "me"), 2), (("me",), 1), ((), 1)])
def test_a_round_of_everyone_is_repeated_once_without_the_member_that_broke_it(
    scene: Scene,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    culprits: tuple[str, ...],
    tries: int,
) -> None:
    """The first attempt left no trace, and its bytes were nobody's."""
    monkeypatch.setattr(NoLoCo, "grouping", Grouping.EVERYONE)
    monkeypatch.setattr(NoLoCo, "equal_replicas", True)
    failed = Averaged(
        torch.empty(0), Outcome.TIMEOUT, culprits=culprits, bytes_sent=3, bytes_received=5, detail="b is the slowest"
    )
    exchange: Any = Exchange(failed, failed)
    inner, before = scene.train(), scene.state.outer.slow.phi.clone()
    assert Blocking(*scene.parts(), exchange).cross(inner)
    assert len(exchange.groups) == len(scene.presence.ended_rounds) == tries
    assert {group.tokens for group in exchange.groups} == {inner.tokens}
    assert torch.equal(scene.state.outer.slow.phi, before)  # a round that has failed changes nobody's
    assert scene.state.counters.round == 1 and scene.reporter.last is not None
    averaged = scene.reporter.last.averaged
    assert averaged.outcome is Outcome.TIMEOUT
    assert (averaged.bytes_sent, averaged.bytes_received) == (3 * tries, 5 * tries)
    told = [it.getMessage() for it in caplog.records if it.getMessage().startswith("repeating a round")]
    assert len(told) == tries - 1 and all("outcome=timeout detail='b is the slowest'" in it for it in told)


def test_a_contribution_is_computed_before_each_match_that_may_form_a_group(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a round, and again when a donor's weights have come: the group waits for a stall."""
    monkeypatch.setattr(NoLoCo, "grouping", Grouping.EVERYONE)
    monkeypatch.setattr(NoLoCo, "equal_replicas", True)
    done, outer, presence = list[str](), scene.state.outer, scene.presence
    computed, vectors = outer.contribution, [torch.zeros_like(it) for it in scene.state.vectors()]
    groups = [Group(0, donor=Seat("a", "peer-a")), Group(0), Group(0)]

    def contribution() -> Any:
        done.append(scene.resources.timer._activity)
        return computed()

    def group_for(round: int) -> Group:
        done.append(scene.resources.timer._activity)
        return groups.pop(0)

    monkeypatch.setattr(outer, "contribution", contribution)
    monkeypatch.setattr(presence, "group_for", group_for)
    given = State(H, 1, vectors, lineage=Lineage("theirs", 9))
    monkeypatch.setattr(presence, "state_of", lambda donor, room: given, raising=False)
    failed = Averaged(torch.empty(0), Outcome.TIMEOUT, culprits=("another",))
    assert Blocking(*scene.parts(), Exchange(failed, failed)).cross(scene.train())
    assert done == ["apply", "match", "apply", "match", "match"] and not groups


@pytest.mark.parametrize(("gives", "taken"), [("more", True), ("as much", False), ("nothing", False), ("early", False)])
def test_who_loses_the_last_round_takes_what_the_group_has(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, gives: str, taken: bool
) -> None:
    """It saved, evaluated and pushed weights that were in no mean; the cure for a lost round is the next boundary."""
    monkeypatch.setattr(NoLoCo, "grouping", Grouping.EVERYONE)
    monkeypatch.setattr(NoLoCo, "equal_replicas", True)
    monkeypatch.setattr("peer.training.boundaries.boundary.isinstance", lambda *_: False, raising=False)
    presence, own = scene.presence, scene.state.outer.slow.phi
    step, count = (TOTAL - 1 if gives == "early" else TOTAL), (0 if gives == "as much" else 9)
    vectors = [own + 1e-3, torch.zeros_like(own)]
    theirs = State(step, 1, vectors, lineage=Lineage("theirs", count), donor="c")
    worse = State(TOTAL, 1, [own * torch.nan, torch.zeros_like(own)], lineage=Lineage("b's", 0), donor="b")

    def state_of(donor: Seat, room: Any, least: int) -> State | None:
        assert least == scene.state.counters.round == 1
        return None if gives == "nothing" else worse if donor.peer_id == "b" else theirs

    others = [SimpleNamespace(peer_id=it, name=it, addresses=[]) for it in "bc"]
    monkeypatch.setattr(presence, "others", lambda: others, raising=False)
    monkeypatch.setattr(presence, "state_of", state_of, raising=False)
    exchange: Any = Exchange(Averaged(torch.empty(0), Outcome.TIMEOUT))
    boundary = Blocking(*scene.parts(), exchange)
    boundary.finish()  # no round was lost
    scene.state.inner.step = TOTAL - 1
    scene.state.begin_phase()
    assert boundary.cross(scene.train())
    before = theta(scene.state)
    boundary.finish()
    assert torch.equal(theta(scene.state), theirs.vectors[0] if taken else before)
    assert scene.state.inner.step == TOTAL


def test_who_loses_the_last_round_and_finds_nobody_any_more_says_so(
    scene: Scene, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its group had left before it learnt that: it ended with other weights, and said nothing."""
    monkeypatch.setattr(scene.presence, "others", list, raising=False)
    Blocking(*scene.parts(), Exchange()).group_weights.take_last()
    [told] = [it.getMessage() for it in caplog.records]
    assert told.startswith("the last round was lost") and "all others have left" in told


@pytest.mark.parametrize("repeated_after", [0.0, 20.0, math.inf])
def test_donors_that_are_still_in_the_last_round_are_asked_by_turns_for_a_while(
    virtual: Any, scene: Scene, repeated_after: float
) -> None:
    """Who made its first attempt fail asked each once, milliseconds later, and none had repeated it."""
    presence: Any = scene.presence
    began, asked = clock.monotonic(), Counter[str]()
    theirs = State(0, 1, [torch.ones_like(it) for it in scene.state.vectors()], lineage=Lineage("theirs", 9))

    def state_of(donor: Seat, room: Any, least: int) -> State:
        asked[donor.peer_id] += 1
        if clock.monotonic() - began < repeated_after:
            raise DonorBehind
        return theirs

    presence.others = lambda: [SimpleNamespace(peer_id=it, name=it, addresses=[]) for it in "bcd"]
    presence.state_of = state_of
    boundary = Blocking(*scene.parts(), Exchange())
    boundary.group_weights._objection = lambda *_: ""  # type: ignore[method-assign]
    boundary.group_weights.take_last()
    assert torch.equal(theta(scene.state), theirs.vectors[0]) == (repeated_after < math.inf)
    assert max(asked.values()) <= 4  # more of them a donor does not answer (STATE_REQUESTS)
    assert clock.monotonic() - began == took(0.0 if not repeated_after else 25.0 if repeated_after == 20.0 else 65.0)


@pytest.mark.parametrize("gives", ["better", "worse", "nothing like it", "nothing", "a long momentum"])
def test_the_weights_that_a_member_calls_the_groups_are_taken_if_they_are_no_worse(scene: Scene, gives: str) -> None:
    """One member that said that it had more rounds behind it could give all others its weights."""
    own = scene.state.outer.slow.phi
    scene.train()
    theirs = theta(scene.state) if gives in ("better", "a long momentum") else own.clone()
    if gives == "worse":
        theirs += 0.5 * torch.randn(len(own), generator=torch.Generator().manual_seed(0))
    elif gives == "nothing like it":
        theirs[7] = torch.nan
    momentum = torch.full_like(theirs, 1e30 if gives == "a long momentum" else 0.0)
    state = State(TOTAL, 9, [theirs, momentum], lineage=Lineage("theirs", 100))
    refused: list[Seat] = []
    presence: Any = scene.presence
    presence.state_of = lambda donor, room: None if gives == "nothing" else state
    presence.refuse_state = refused.append
    batches = scene.state.stream.take(2)
    validation = Validation(scene.state, scene.resources.timer, 5.0, [*batches], {})
    boundary = Blocking(*scene.parts(), Exchange(), validation=validation)  # type: ignore[arg-type]
    before = theta(scene.state)
    group = boundary.group_weights.caught_up(Seat("a", "peer-a"))
    if gives == "better":
        assert not refused and not group.lost and scene.state.counters.round == 9
        assert torch.equal(scene.state.outer.slow.phi, theirs)
    else:
        assert refused == ([] if gives == "nothing" else [Seat("a", "peer-a")])
        assert "peer-a" in group.lost and scene.state.counters.round == 0
        torch.testing.assert_close(theta(scene.state), before)


def test_a_state_is_compared_part_by_part() -> None:
    """The difference of the whole was one more copy of the model, made while a group waits."""
    own, theirs = ([torch.full((16 * PART,), value) for value in pair] for pair in ((0.0, 0.0), (0.5, 0.25)))
    outer = SimpleNamespace(vectors=lambda: own, outer=None, counters=None)
    weights = GroupWeights(outer, None, None, None)  # type: ignore[arg-type]
    said: list[str] = []
    peak = most_allocated(lambda: said.append(weights._objection(State(0, 1, theirs), "a")))
    assert said == [""] and peak <= 2 * 4 * PART
    theirs[1] *= 21  # the distance is 1024, so it may be 10240 long, and is 10752
    assert weights._objection(State(0, 1, theirs), "a") == "the momentum of a is too long: 1.075e+04"


@pytest.mark.parametrize("done", [0, 3, H])
def test_who_takes_a_state_from_within_a_phase_is_at_the_end_of_that_phase(scene: Scene, done: int) -> None:
    """Its steps stayed off from the group's: its learning rate too, and the end of its run came later."""
    scene.train()
    presence: Any = scene.presence
    vectors = [torch.zeros_like(it) for it in scene.state.vectors()]
    presence.state_of = lambda donor, room: State(
        2 * H, 2, vectors, lineage=Lineage("theirs", 9), phase_steps_done=done
    )
    boundary = Blocking(*scene.parts(), Exchange())
    boundary.group_weights.caught_up(Seat("a", "peer-a"))
    assert scene.state.inner.step == 3 * H and scene.length.remaining() == 0


@pytest.mark.parametrize(("equal", "used"), [(True, True), (True, False), (False, False)])
def test_a_change_whose_verdict_was_lost_is_kept_only_if_the_group_has_not_used_it(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, equal: bool, used: bool
) -> None:
    """Unequal replicas have taken their own outer step then, and what they share is of another length."""
    monkeypatch.setattr(NoLoCo, "equal_replicas", equal)
    phi = scene.state.outer.slow.phi.clone()
    scene.train()
    given = theta(scene.state) - phi
    boundary = Blocking(*scene.parts(), Exchange())
    mean = given.clone() if equal else given[:3].clone()
    missed = Averaged(mean, Outcome.TIMEOUT, partners=("a", "b"), unheard="digest")
    boundary.group_weights.note_unheard(missed)
    scene.state.cross_boundary()
    scene.train()
    since = theta(scene.state) - phi
    presence: Any = scene.presence
    lineage = Lineage().after("another" if equal and not used else "digest", 3)
    presence.state_of = lambda donor, room: State(9, 1, [phi + 1, torch.zeros_like(phi)], lineage=lineage)
    boundary.group_weights.caught_up(Seat("a", "peer-a"))
    kept = theta(scene.state) - scene.state.outer.slow.phi
    torch.testing.assert_close(kept, since - given if used else since, rtol=0, atol=1e-6)
    boundary.group_weights.caught_up(Seat("a", "peer-a"))  # once
    torch.testing.assert_close(theta(scene.state) - scene.state.outer.slow.phi, kept, rtol=0, atol=1e-6)


def test_a_state_that_a_program_restores_does_not_have_a_change_whose_verdict_was_lost(scene: Scene) -> None:
    """The change was subtracted from it when the group had used that round."""
    phi = scene.state.outer.slow.phi.clone()
    boundary = Blocking(*scene.parts(), Exchange())
    boundary.group_weights.note_unheard(
        Averaged(torch.ones_like(phi), Outcome.TIMEOUT, partners=("a", "b"), unheard="digest")
    )
    boundary.abandon()
    presence: Any = scene.presence
    theirs = State(9, 1, [phi + 1, torch.zeros_like(phi)], lineage=Lineage().after("digest", 3))
    presence.state_of = lambda donor, room: theirs
    boundary.group_weights.caught_up(Seat("a", "peer-a"))
    assert torch.equal(theta(scene.state), theirs.vectors[0])


@pytest.mark.parametrize(("outcome", "rounds"), [(Outcome.ALONE, 0), (Outcome.MERGED, 0), (Outcome.TIMEOUT, 1)])
def test_a_lost_verdict_is_forgotten_when_its_change_is_used_or_no_longer_held(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, outcome: Outcome, rounds: int
) -> None:
    monkeypatch.setattr(NoLoCo, "equal_replicas", True)
    boundary = Blocking(*scene.parts(), Exchange())
    boundary.group_weights.note_unheard(Averaged(torch.zeros(1), Outcome.TIMEOUT, unheard="digest"))
    boundary.group_weights.note_unheard(Averaged(torch.zeros(1), Outcome.TIMEOUT))  # the same round is repeated
    assert boundary.group_weights.unheard is not None
    scene.state.counters.round += rounds
    boundary.group_weights.note_unheard(Averaged(torch.zeros(1), outcome))
    assert boundary.group_weights.unheard is None
