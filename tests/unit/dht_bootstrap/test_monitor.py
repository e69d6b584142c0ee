"""The monitor's answers over HTTP, from whatever records there are: valid, finite and bounded."""

from __future__ import annotations

import json
import math
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from ipaddress import IPv4Network
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dht_bootstrap import monitor as monitoring
from dht_bootstrap.history import KEPT_WHOLE, NAMED
from dht_bootstrap.monitor import Monitor, json_answer
from dht_bootstrap.watch import Watch
from peer.errors import UserError
from peer.swarm.directory.ended import ENDED_PEERS, ENDED_RUNS
from peer.swarm.directory.reader import Entry
from peer.swarm.directory.records import LIFETIME, MemberRecord, Report
from peer.telemetry import http_server
from peer.telemetry.http_server import HttpAnswer
from tests.unit.parts import member_record

NOW = 1_700_000_000.0
LARGEST = Report(
    version="v" * 24,
    **dict.fromkeys(("tokens", "members", "merges"), 2**53),
    **dict.fromkeys(("train_loss", "val_loss"), 3.5e38),
    **dict.fromkeys(("seconds", "idle_seconds", "merged_ago"), 1e10),
)
Found = Mapping[str, Mapping[str, Entry]]


class Site:
    """A monitor whose directory is what a test says."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor

    def see(self, found: Found, at: float = 0.0) -> None:
        self._monitor._watch.see(found, NOW + at)

    def connect(self) -> socket.socket:
        host, _, port = self._monitor.address.rpartition(":")
        return socket.create_connection((host, int(port)), 5)

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://{self._monitor.address}{path}", timeout=60) as answer:
            return str(answer.read().decode())

    def json(self, path: str) -> Any:
        """Strict JSON, without the words that only some parsers know."""

        def refuse(word: str) -> None:
            raise AssertionError(word)

        return json.loads(self.get(path), parse_constant=refuse)

    def series(self) -> dict[str, list[Any]]:
        return {it.name: it.samples for it in text_string_to_metric_families(self.get("/metrics"))}


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setattr(Watch, "failure", "")
    node = SimpleNamespace(failure="", peer_id="QmNode", addresses=(), invited=False, p2p=None)
    node.call = lambda peers, timeout: peers
    monitor = Monitor(node, "127.0.0.1", 0, [IPv4Network("10.0.0.0/8")])  # type: ignore[arg-type]
    try:
        yield Site(monitor)
    finally:
        monitor.close()


def test_where_it_cannot_listen_the_option_that_is_wrong_is_named() -> None:
    """It called the port occupied, whatever was wrong."""
    node: Any = SimpleNamespace()
    with pytest.raises(UserError, match=r"^--http-host 192\.0\.2\.1: .*; it must be an address of this machine$"):
        Monitor(node, "192.0.2.1", 0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(UserError, match=rf"^port occupied: {place}: .*; choose another --http-port$"):
            Monitor(node, "127.0.0.1", taken.getsockname()[1])


def member(number: int, **changes: Any) -> MemberRecord:
    values = {"addresses": ["/ip4/10.0.0.7/tcp/1"], "metrics": "0.0.0.0:9464", **changes}
    return member_record(f"Qm{number:05d}").model_copy(update=values)


def entries(members: list[MemberRecord], at: float = 0.0) -> dict[str, Entry]:
    return {it.peer_id: Entry(it, NOW + at + LIFETIME) for it in members}


def test_few_are_served_at_once(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its port may be public. Each connection that said nothing kept a thread of the bootstrap node for ten seconds."""
    monkeypatch.setattr(http_server, "HTTP_CONNECTIONS", 2)
    with ExitStack() as stack:
        silent = [stack.enter_context(site.connect()) for _ in range(3)]
        assert silent[0].recv(1) == b""  # the oldest, long before its ten seconds are over
        assert site.json("/swarm.json")["runs"] == []


@pytest.mark.parametrize("path", ["/swarm.json", "/targets"])
def test_nobody_gets_the_last_answer_once_the_directory_cannot_be_read(
    site: Site, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(monitoring, "READ_PERIOD", math.inf)
    before = site.get(path)
    monkeypatch.setattr(Watch, "failure", "no answer for 30 s")
    with pytest.raises(urllib.error.HTTPError, match="503"):
        site.get(path)
    monkeypatch.setattr(Watch, "failure", "")
    assert site.get(path) == before


def test_what_many_ask_for_is_made_once_between_two_readings(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thirty-two who asked for a swarm of 512 peers kept the lock, and so the node's network thread, for seconds."""
    made, answers = list[str](), {"/swarm.json": "run_view", "/targets": "targets", "/metrics": "series_answer"}
    answers["/healthz"] = "count_peers"  # each who asked for it made the network thread ask the daemon
    monkeypatch.setattr(monitoring, "count_peers", lambda p2p: 7)
    for name in answers.values():
        make = getattr(monitoring, name)
        monkeypatch.setattr(monitoring, name, lambda *args, name=name, make=make: (made.append(name), make(*args))[1])
    monkeypatch.setattr(monitoring, "READ_PERIOD", math.inf)
    for at in (0.0, 2.0):
        site.see({"run": entries([member(number) for number in range(3)], at)}, at)
        for path, name in answers.items():
            made.clear()
            assert len({site.get(path) for _ in range(3)}) == 1 and made == [name], path
    monkeypatch.setattr(monitoring, "READ_PERIOD", -1.0)  # the directory does not answer for long
    made.clear()
    for path in answers:
        site.get(path)
    assert made == list(answers.values())


def test_an_answer_that_took_long_is_new_for_who_waited_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that hangs is asked for three seconds, longer than an answer is used: 32 who ask would wait in turn."""
    now, made = [100.0], list[float]()

    def slow() -> HttpAnswer:
        now[0] += 2 * monitoring.READ_PERIOD
        made.append(now[0])
        return HttpAnswer(503, b"")

    monkeypatch.setattr(monitoring.time, "monotonic", lambda: now[0])
    watch: Any = SimpleNamespace(reads={"ok": 0})
    shared = monitoring.SharedAnswer(watch, slow)
    assert [shared().status for _ in range(3)] == [503] * 3 and len(made) == 1
    now[0] += 1.1 * monitoring.READ_PERIOD
    shared()
    assert len(made) == 2


def test_what_a_peer_did_since_its_last_look_counts_when_it_leaves(site: Site) -> None:
    begun = [member(number, tokens_per_second=1000.0) for number in range(2)]
    site.see({"run": entries(begun)})
    done = [it.model_copy(update={"report": Report(tokens=1000, merges=3), "state": "left"}) for it in begun]
    for at in (2.0, 4.0):
        site.see({"run": entries(done, at)}, at)
    (given,) = site.json("/swarm.json")["contributors"]
    assert [(it["tokens"], it["merges"]) for it in given["peers"]] == [(1000, 3)] * 2


def test_the_largest_values_of_a_whole_swarm_stay_finite(site: Site) -> None:
    largest = {"step": 2**53, "round": 2**53, "tokens_per_second": 1e12, "report": LARGEST}
    for at in (0.0, 2.0, 4.0):
        site.see({"demo": entries([member(number, **largest) for number in range(600)], at)}, at)
    (run,) = site.json("/swarm.json")["runs"]
    assert run["tokens_per_second"] == 600e12 and run["tokens"] == 600 * 2**53 and run["step"] == 2**53
    for samples in site.series().values():
        assert all(math.isfinite(sample.value) for sample in samples)


def test_a_value_that_is_not_finite_breaks_nobody_else_s_line(site: Site) -> None:
    """No record has one; a sum might, one day."""
    broken = member(1, tokens_per_second=math.inf, report=Report.model_construct(train_loss=math.nan, seconds=1.0))
    site.see({"demo": entries([broken, member(2)])})
    (run,) = site.json("/swarm.json")["runs"]
    assert [it["tokens_per_second"] for it in run["peers"]] == [None, 1.0]
    assert run["tokens_per_second"] is None
    rates = site.series()["noloco_swarm_peer_tokens_per_second"]
    assert [(it.labels["peer_id"], it.value) for it in rates] == [("Qm00002", 1.0)]
    assert json_answer(200, {"a": [1.5, {"b": -math.inf}]}).body == b'{"a": [1.5, {"b": null}]}'


def test_six_thousand_members_that_are_not_there_are_counted_and_not_named(site: Site) -> None:
    """Attack 8 at 8d558f9: 7 MB of series and 6,099 targets."""
    honest = [member(number, report=Report(tokens=7)) for number in range(20)]
    flood = [member(number, name="x" * 64, state="waiting") for number in range(20, 6_120)]
    site.see({"demo": entries(honest)})
    for at in (2.0, 4.0):
        site.see({"demo": entries([*flood, *honest], at)}, at)
    (run,) = site.json("/swarm.json")["runs"]
    named = {it["peer_id"] for it in run["peers"]}
    assert len(named) == NAMED and {it.peer_id for it in honest} <= named  # those known first
    assert (run["members"], run["unnamed"]) == (6_120, 6_120 - NAMED)
    assert run["tokens"] == 140 and run["tokens_per_second"] == 6_120
    assert len(site.json("/targets")) == NAMED
    series = site.series()
    assert len(series["noloco_swarm_peer_step"]) == NAMED
    (unnamed,) = series["noloco_swarm_peers_unnamed"]
    assert unnamed.value == 6_120 - NAMED
    assert {it.labels["state"]: it.value for it in series["noloco_swarm_peers"]} == {
        **{"training": 20, "waiting": 6_100, "paused": 0, "left": 0, "lost": 0}
    }
    sizes = {path: len(site.get(path)) for path in ("/metrics", "/targets", "/swarm.json")}
    assert max(sizes.values()) < 3 * 2**20, sizes


def test_all_runs_share_the_named_and_a_peer_that_is_gone_makes_room(site: Site) -> None:
    runs = {f"run-{number}": entries([member(peer) for peer in range(100)]) for number in range(16)}
    site.see(runs)
    assert len(site.json("/targets")) == NAMED
    assert sum(len(it["peers"]) for it in site.json("/swarm.json")["runs"]) == NAMED
    assert sum(it["members"] for it in site.json("/swarm.json")["runs"]) == 1_600
    first, fresh = "run-0", [member(peer) for peer in range(5_000, 5_100)]
    for at in (2.0, 4.0):  # its first hundred are lost, and others come
        site.see(
            {**{name: entries([member(peer) for peer in range(100)], at) for name in runs}, first: entries(fresh, at)},
            at,
        )
    states = [peer["state"] for run in site.json("/swarm.json")["runs"] for peer in run["peers"]]
    assert states == ["training"] * NAMED


def test_a_swarm_within_the_bound_is_named_whole(site: Site) -> None:
    site.see({"demo": entries([member(number) for number in range(NAMED)])})
    (run,) = site.json("/swarm.json")["runs"]
    assert (len(run["peers"]), run["unnamed"]) == (NAMED, 0)


def test_runs_that_have_ended_stay_and_are_few_and_invented_ones_do_not_displace_them(site: Site) -> None:
    """Those that lasted longest stay: a stranger must keep an invented one up for longer."""
    real = {"real": entries([member(number, report=Report(tokens=9)) for number in range(40)])}
    site.see(real, -3600.0)
    site.see(real)
    for at in range(60, 100):
        site.see({f"run-{at}-{number}": entries([member(number)], at) for number in range(16)}, at)
    for at in (120.0, 122.0, 122.0 + KEPT_WHOLE):
        site.see({"live": entries([member(number) for number in range(NAMED)], at)}, at)
    runs = site.json("/swarm.json")["runs"]
    assert [it["run"] for it in runs[:1]] == ["live"] and len(runs) == 1 + ENDED_RUNS
    assert len(runs[0]["peers"]) == NAMED  # those that are gone take no room of the living
    (kept,) = [it for it in runs if it["run"] == "real"]
    assert kept["members"] == len(kept["peers"]) == ENDED_PEERS and kept["tokens"] == 9 * ENDED_PEERS
    assert {it.labels["run"] for it in site.series()["noloco_swarm_peers"]} == {"live"}  # it is years ago


def test_what_peers_have_given_is_there_without_their_run(site: Site) -> None:
    for at in (0.0, 10.0):
        site.see({"demo": entries([member(number, report=Report(tokens=int(at))) for number in range(3)], at)}, at)
    (given,) = site.json("/swarm.json")["contributors"]
    assert (given["run"], given["tokens"], [it["tokens"] for it in given["peers"]]) == ("demo", 30, [10] * 3)
