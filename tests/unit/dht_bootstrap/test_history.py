"""The bootstrap's output from the records that it reads: histories, warnings, targets, series."""

from __future__ import annotations

import json
from collections.abc import Callable
from ipaddress import IPv4Network
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from dht_bootstrap.collector import SwarmCollector
from dht_bootstrap.findings import ALONE_GRACE, MERGE_SLACK, UNMERGED_ROUNDS, findings
from dht_bootstrap.history import FORGET, KEPT_WHOLE, POINTS, Curve, Point, RunHistory
from dht_bootstrap.refusals import REFUSED_SECONDS
from dht_bootstrap.targets import targets
from dht_bootstrap.view import run_view
from peer.swarm.directory import records
from peer.swarm.directory.ended import ENDED_PEERS
from peer.swarm.directory.reader import Entry
from peer.swarm.directory.records import LIFETIME, MemberRecord, Report
from peer.telemetry.series import OF_BOOTSTRAP, PREFIX
from tests.unit.project.dashboards import rules

NOW = 1_700_000_000.0
HOSTILE = '<script>alert("1")</script>\n\\ \u202e'


def entry(name: str, at: float, *, state: Any = "training", rate: float = 100.0, **report: Any) -> Entry:
    """A record that ``name`` wrote at ``at`` seconds."""
    record = MemberRecord(
        peer_id=f"Qm{name}",
        name=name,
        addresses=["/ip4/10.0.0.7/tcp/31337"],
        config="c0ffee",
        state=state,
        step=max(0, int(at)),
        round=max(0, int(at)) // 50,
        tokens_per_second=rate,
        metrics="0.0.0.0:9464",
        report=Report(**{"seconds": max(0.0, at), "members": 3, **report}),
    )
    return Entry(record, NOW + at + LIFETIME)


def seen(*looks: tuple[float, list[Entry]]) -> RunHistory:
    """A run after these reads of the directory."""
    run = RunHistory()
    for at, entries in looks:
        run.see({it.record.peer_id: it for it in entries}, NOW + at)
    return run


def swarm(at: float, **report: Any) -> list[Entry]:
    return [entry(name, at, **report) for name in "abc"]


def test_the_idle_share_covers_the_last_minutes_and_survives_a_restart_of_the_peer() -> None:
    looks = [(at, [entry("a", at, idle_seconds=0.5 * min(at, 600))]) for at in range(1, 1200, 5)]
    run = seen(*looks)
    assert run.peers["Qma"].idle_share() == pytest.approx(0.0, abs=0.02)  # it waited half of its first ten minutes
    run.see({"Qma": Entry(entry("a", 30.0, idle_seconds=3.0).record, NOW + 1300 + LIFETIME)}, NOW + 1300)
    assert run.peers["Qma"].idle_share() == pytest.approx(0.1)


def test_each_join_departure_and_loss_is_one_event() -> None:
    first = [entry("a", 1), entry("b", 1), entry("c", 1)]
    left = entry("b", 5, state="left")
    run = seen((1, first), (5, [entry("a", 5), left, entry("c", 5)]), (7, [entry("a", 7), left]), (9, [entry("a", 9)]))
    assert [(it.event, it.name) for it in run.events] == [
        *(("joined", name) for name in "abc"),
        ("left", "b"),
        ("lost", "c"),
    ]
    states = {peer["name"]: peer["state"] for peer in run_view("demo", run, NOW + 9)["peers"]}
    assert states == {"a": "training", "b": "left", "c": "lost"}
    run.see({"Qmc": entry("c", 20)}, NOW + 20)
    assert [(it.event, it.name) for it in list(run.events)[-2:]] == [("joined", "c"), ("lost", "a")]
    assert run.peers["Qmc"].live
    run.see({"Qma": entry("a", 21 + FORGET)}, NOW + 21 + FORGET)
    assert run.peers.keys() == {"Qma", "Qmc"}


def test_a_run_that_has_ended_keeps_its_last_figures() -> None:
    usual = {"tokens": 500, "train_loss": 2.0, "val_loss": 2.1, "idle_seconds": 1.0}
    run = seen(*((at, swarm(at, merges=int(at), partners=("a",), **usual)) for at in (1.0, 20.0)))
    before = run_view("demo", run, NOW + 20)
    run.see({it.record.peer_id: it for it in [entry(name, 21.0, state="left", **usual) for name in "abc"]}, NOW + 21)
    run.see({}, NOW + 60)
    after = run_view("demo", run, NOW + 21 + 7200)
    kept = ("members", "tokens", "tokens_per_second", "idle_share")
    assert {key: after[key] for key in kept} == {key: before[key] for key in kept}
    assert (before["step"], after["step"]) == (20, 21), "of a short run the last record is the only one with figures"
    assert (before["ended_age"], after["ended_age"]) == (None, 7200.0)
    assert [peer["state"] for peer in after["peers"]] == ["left"] * 3 and after["meetings"]
    assert after["peers"][0]["val_loss"] == 2.1 and after["warnings"] == [] and targets({"demo": run}, []) == []
    run.see({"Qmd": entry("d", 8000.0)}, NOW + 8000)  # it goes on with others
    assert run_view("demo", run, NOW + 8000)["ended_age"] is None and run.peers.keys() == {"Qmd"}


def test_a_run_that_seemed_to_end_comes_back_whole() -> None:
    """In the first look that found nobody, the curves of all but 32 peers were gone."""
    members = [entry(f"peer-{number}", 1.0) for number in range(40)]
    run = seen((1.0, members), (40.0, []), (40.0 + KEPT_WHOLE, []))
    assert len(run.peers) == 40 and len(run.last("demo", NOW + 60).peers) == ENDED_PEERS
    run.see({}, NOW + 41 + KEPT_WHOLE)
    assert len(run.peers) == ENDED_PEERS


def test_a_member_whose_clock_is_ahead_does_not_hide_the_end_of_its_run() -> None:
    """Its last record came from the future, so `status` heard of no ended run."""
    run = seen((0, [entry("a", 0)]), (2, [entry("a", 6, state="left")]))
    assert run.ended_at == NOW + 2
    assert [[it.age for it in run.last("demo", NOW + at).peers] for at in (2, 20)] == [[0.0], [14.0]]


@pytest.mark.parametrize("order", ["abc", "cba"])
def test_a_partner_that_is_seen_first_in_the_same_look_is_named(order: str) -> None:
    looks = [(1.0, [entry("a", 1.0)]), (5.0, [entry(it, 5.0, merges=int(it == "a"), partners=("c",)) for it in order])]
    assert [(it["a"], it["b"]) for it in run_view("demo", seen(*looks), NOW + 5)["meetings"]] == [("Qma", "Qmc")]


def test_a_look_counts_the_names_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It did so twice for each peer: half a million names of 512 peers, every two seconds, while all readers wait."""
    counted, ids = list[RunHistory](), RunHistory._ids
    monkeypatch.setattr(RunHistory, "_ids", lambda run: (counted.append(run), ids(run))[1])
    seen(*((at, swarm(at, merges=int(at), partners=("a",))) for at in (1.0, 5.0)))
    assert len(counted) == 2


def test_a_merge_that_both_peers_report_counts_once() -> None:
    looks = []
    for count in range(4):
        at = 10.0 * count + 1
        met = {"a": ("b",), "b": ("a",), "c": ()}
        looks.append((at, [entry(name, at, merges=count, partners=met[name] if count else ()) for name in "abc"]))
    view = run_view("demo", seen(*looks), NOW + 35)
    assert view["meetings"] == [{"a": "Qma", "b": "Qmb", "age": pytest.approx(4.0), "count": 3}]
    assert view["peers"][0]["partners"] == ["Qmb"] * 3


@pytest.mark.parametrize(
    ("kind", "odd"),
    [
        ("split", {"members": 1}),
        ("straggler", {"rate": 30.0}),
        ("stuck", {"merges": 10, "merged_ago": 150.0}),
    ],
)
def test_a_peer_with_a_problem_has_a_warning_of_one_line(kind: str, odd: dict[str, Any]) -> None:
    usual = {"merges": 20, "merged_ago": 2.0}
    looks = [
        (at, [entry("a", at, **usual), entry("b", at, **usual), entry("c", at, **{**usual, **odd})])
        for at in range(200, 240, 2)
    ]
    (found,) = findings(seen(*looks))
    assert (found.kind, found.peer_id) == (kind, "Qmc")
    assert "c " in found.text
    assert "\n" not in found.text


@pytest.mark.parametrize(("state", "warned"), [("training", True), ("paused", False)])
def test_who_merges_with_nobody_while_all_others_are_paused_is_not_stuck(state: str, warned: bool) -> None:
    alone = entry("a", 200.0, merges=10, merged_ago=150.0)
    run = seen((200.0, [alone, *(entry(name, 200.0, state=state) for name in "bc")]))
    assert [(it.kind, it.peer_id) for it in findings(run)] == [("stuck", "Qma")] * warned


def first_stuck(odd: Callable[[float], dict[str, Any]], resting: range = range(0)) -> float | None:
    """When c is said to be stuck, whose records are ``odd``. Rounds of 50 s; a and b are paused while ``resting``."""
    run = RunHistory()
    for at in range(0, 2000, 5):
        states = {"state": "paused" if at in resting else "training"}
        others = [entry(name, at, merges=at // 50, merged_ago=at % 50, **states) for name in "ab"]
        run.see({it.record.peer_id: it for it in [*others, entry("c", at, **odd(at))]}, NOW + at)
        found = [(it.kind, it.peer_id) for it in findings(run)]
        assert found in ([], [("stuck", "Qmc")])
        if found:
            return at
    return None


@pytest.mark.parametrize("merges", [0, 1])
def test_a_peer_is_stuck_after_some_of_its_rounds(merges: int) -> None:
    """Not of its merges, which may be rare; c has merged at once, or never."""
    longest = UNMERGED_ROUNDS * 50 + MERGE_SLACK
    found = first_stuck(lambda at: {"merges": merges, "merged_ago": at if merges else None})
    assert found is not None and longest < found <= longest + 5


def test_of_who_was_away_for_longer_than_it_has_trained_the_length_of_a_round_is_not_known() -> None:
    """It took another's state since its last merge; a bootstrap node that began then has seen none of its rounds."""
    away = [entry("a", 300.0, merges=3, merged_ago=610.0), entry("b", 300.0), entry("c", 300.0)]
    assert findings(seen((300.0, away))) == []


def test_who_was_alone_has_as_long_to_merge_again_as_with_the_alert() -> None:
    found = first_stuck(lambda at: {"merges": 1, "merged_ago": at}, resting=range(100, 300))
    assert found == 295 + ALONE_GRACE + 5


def test_the_page_and_the_alert_have_one_rule() -> None:
    (rule,) = [rule for rule in rules() if rule.get("alert") == "NolocoNoMerge"]
    assert f"unmerged:seconds > {MERGE_SLACK:g} + {UNMERGED_ROUNDS:g} * peer:noloco_round:seconds" in rule["expr"]
    assert f"[{ALONE_GRACE / 60:g}m:15s]) < 2" in rule["expr"]


@pytest.mark.parametrize("odd", [{"state": "paused"}, {"members": 1}])
def test_a_peer_that_is_paused_or_knows_nobody_is_not_stuck(odd: dict[str, Any]) -> None:
    members = [entry("a", 200.0, merges=10, merged_ago=150.0, **odd), *(entry(name, 200.0) for name in "bc")]
    assert "stuck" not in {it.kind for it in findings(seen((200.0, members)))}


def test_where_nobody_merges_nobody_is_stuck() -> None:
    assert findings(seen(*((float(at), swarm(float(at))) for at in range(0, 600, 5)))) == []


def test_a_split_is_judged_by_all_members_the_unnamed_too() -> None:
    run, members = RunHistory(), [entry(name, 100.0, members=4) for name in "abcdefghij"]
    run.see({it.record.peer_id: it for it in members}, NOW + 100, room=4)
    assert [(it.kind, it.peer_id) for it in findings(run)] == [("split", f"Qm{name}") for name in "abcd"]
    assert "sees 4 of 10 members" in findings(run)[0].text


@pytest.mark.parametrize(("shift", "warned"), [(0.0, False), (2.5, True), (-6.0, True), (-1.0, False)])
def test_a_wrong_clock_shows_in_the_age_of_the_records(shift: float, warned: bool) -> None:
    run = RunHistory()
    for at in range(0, 60, 2):
        wrote = at - at % 6 + shift  # written every six seconds, read every two
        run.see({it.record.peer_id: it for it in [*swarm(at), entry("d", wrote)]}, NOW + at)
    assert {it.kind for it in findings(run) if it.peer_id == "Qmd"} == ({"clock"} if warned else set())


def test_a_warning_for_a_peer_refused_often_and_for_one_with_another_configuration() -> None:
    looks = [(100.0 + at, [*swarm(100.0 + at, refused=(("b", at),)), entry("d", 100.0 + at)]) for at in range(3)]
    run = seen((99.0, [*swarm(99.0), entry("d", 99.0)]), *looks)
    other = entry("d", 103.0)
    record = other.record.model_copy(update={"config": "abcdef"})
    run.see({it.record.peer_id: it for it in [*swarm(103.0), Entry(record, other.expires)]}, NOW + 103)
    assert {(it.kind, it.peer_id) for it in findings(run)} == {("refused", "Qmb"), ("config", "Qmd")}
    assert run.refusals.lately() == {"Qmb": 6}
    later = 103 + REFUSED_SECONDS
    told = [*swarm(later, refused=(("b", 2),)), Entry(record, NOW + later + LIFETIME)]
    run.see({it.record.peer_id: it for it in told}, NOW + later)
    assert {it.kind for it in findings(run)} == {"config"}, "its own advice was followed long ago"


def refusals(*looks: list[Entry]) -> dict[str, int]:
    """The counter after these looks, two seconds apart; of each peer that was refused."""
    run = seen(*((100.0 + 2 * number, [*entries, entry("z", 100.0)]) for number, entries in enumerate(looks)))
    return {peer_id: count for peer_id, count in run.refusals.total.items() if count}


def test_a_refusal_counts_when_it_happens_and_never_again() -> None:
    """Whoever came back after some minutes told of refusals weeks ago, and an alert fired. The first word of one member
    alone is no refusal.
    """

    def told(at: float, *refused: tuple[str, int]) -> list[Entry]:
        return [entry("a", at, refused=refused), entry("b", at), entry("c", at, refused=refused)]

    assert refusals(told(100, ("b", 9)), told(102, ("b", 9))) == {}, "when is not known"
    assert refusals(told(100), told(102, ("b", 2)), told(104, ("b", 3)), [entry("b", 106)]) == {"Qmb": 4}
    assert refusals(told(100, ("b", 9)), [entry("b", 102)], told(104, ("b", 10))) == {"Qmb": 2}, "it was away"
    assert refusals(told(100, ("b", 9)), told(102), told(104, ("b", 9))) == {}, "its record had no room"
    restarted = [entry(name, 102, seconds=3.0, refused=(("b", 2),)) for name in "ac"] + [entry("b", 102)]
    assert refusals(told(100, ("b", 9)), restarted) == {"Qmb": 2}, "its process is a new one"
    # one that is named again: the two that are refused most often are in a record
    assert refusals(told(100, ("z", 5), ("b", 4)), told(102, ("z", 5), ("y", 5)), told(104, ("b", 6), ("z", 5))) == {
        "Qmb": 2
    }


def test_one_record_accuses_nobody() -> None:
    """A member that had met nobody told of 2^53 refusals, and the page advised to revoke an honest one's invitation."""

    def liar(at: float, often: int) -> list[Entry]:
        return [*swarm(at), entry("liar", at, refused=(("b", often), ("c", often)))]

    run = seen((99.0, swarm(99.0)), *((100.0 + at, liar(100.0 + at, 2**at)) for at in range(50)))
    assert run.refusals.lately() == {} and findings(run) == [] and not run.refusals.total.total()
    two = seen((99.0, [entry("a", 99.0), entry("b", 99.0)]), (100.0, [entry("a", 100.0, refused=(("b", 9),))]))
    assert two.refusals.total == {"Qmb": 1}, "of two members nobody else can say it"


def test_of_two_peers_with_one_name_nobody_knows_which_was_refused() -> None:
    twin = Entry(entry("b", 100.0).record.model_copy(update={"peer_id": "Qmtwin"}), NOW + 130)
    looks = [(100.0 + at, [*swarm(100.0 + at, refused=(("b", at),)), twin]) for at in range(3)]
    run = seen(*looks)
    assert run.refusals.lately() == {}
    assert {it.peer_id for it in findings(run) if it.kind == "name"} == {"Qmb", "Qmtwin"}, "either may be the false one"


def test_a_healthy_swarm_has_no_warnings() -> None:
    looks = [(at, swarm(at, merges=int(at) // 10, merged_ago=at % 10)) for at in range(200, 300, 2)]
    assert findings(seen(*looks)) == []


@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=2000))
@settings(max_examples=20)
def test_a_curve_has_bounded_length_and_keeps_its_beginning(steps: list[float]) -> None:
    """And has its newest point: after a week it was more than an hour old."""
    curve, at = Curve(), 0.0
    for step in steps:
        last = Point(at, 0, None, None)
        curve.add(last)
        at += step
    points = curve.points
    assert len(points) <= POINTS
    assert points[0].at == 0.0 and points[-1] is last
    assert [it.at for it in points] == sorted({it.at for it in points})


class Known:
    """The attributes of a watch that the collector reads."""

    def __init__(self, runs: dict[str, RunHistory]) -> None:
        import threading

        self.runs, self.lock = runs, threading.Lock()
        self.reads, self.read_seconds, self.connected = {"ok": 3, "failed": 0}, 0.1, 2


def test_every_series_of_the_bootstrap_exists_and_hostile_names_are_escaped() -> None:
    looks = [
        (at, [entry(name, at, merges=int(at), partners=("a",), train_loss=2.0, val_loss=2.1, merged_ago=1.0)
              for name in "ab"])
        for at in (1.0, 5.0)
    ]  # fmt: skip
    runs = {HOSTILE: seen(*looks)}
    other = runs[HOSTILE].peers["Qmb"]  # no record has such a name: the series do not rely on it
    other.record = other.record.model_copy(update={"name": HOSTILE})
    registry = CollectorRegistry()
    registry.register(SwarmCollector(Known(runs)))  # type: ignore[arg-type]
    families = {it.name: it for it in text_string_to_metric_families(generate_latest(registry).decode())}
    for row in OF_BOOTSTRAP:
        name = PREFIX + (row.name.removesuffix("_total") if row.kind == "counter" else row.name)
        assert families[name].samples, name
        for sample in families[name].samples:
            assert tuple(sorted(sample.labels)) == tuple(sorted(row.labels))
    assert {it.labels["peer"] for it in families["noloco_swarm_peer_step"].samples} == {"a", HOSTILE}
    assert json.loads(json.dumps(targets(runs, [IPv4Network("10.0.0.0/8")])))[0]["labels"]["run"] == HOSTILE


def test_a_record_always_fits_and_decodes_to_the_same_record() -> None:
    full = entry("n" * 64, 1, partners=("p" * 64,) * 3, refused=(("r" * 64, 2**53),) * 2, version="v" * 24).record
    full = full.model_copy(update={"addresses": ["/ip4/203.0.113.255/tcp/65535" + "x" * 90] * 8, "config": "c" * 64})
    text = records.encode(full)
    assert len(text.encode()) <= records.RECORD_BYTES
    found = records.decode(full.peer_id, text)
    assert found is not None
    assert found.addresses  # other peers can still reach it
    plain = entry("a", 1, partners=("b",), refused=(("c", 2),), train_loss=1.5).record
    assert records.decode("Qma", records.encode(plain)) == plain


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-1.0", '"x"', "1e999"])
def test_a_record_with_absurd_numbers_is_rejected(value: str) -> None:
    text = records.encode(entry("a", 1, seconds=7.25).record)
    assert "7.25" in text
    assert records.decode("Qma", text.replace("7.25", value)) is None
