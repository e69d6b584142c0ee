"""The bootstrap's monitor over HTTP with a real swarm, and ``noloco-peer status``."""

from __future__ import annotations

import gzip
import json
import re
import signal
import time
import urllib.error
import urllib.request
from typing import Any

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from peer.swarm.directory.records import LIFETIME
from peer.telemetry.series import OF_PEER, PREFIX
from tests.swarm.support.harness import Swarm, wait_for

LONG = ("run.steps=100000", "run.inner_steps=100")
NAMES = ("ann", "bob", "cat")


def get(url: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def series(url: str) -> dict[str, Any]:
    families = text_string_to_metric_families(get(url)[1].decode())
    return {family.name: family.samples for family in families}


def test_a_run_that_has_ended_is_shown_and_its_contributors_outlive_the_node(swarm: Swarm) -> None:
    bootstrap, address = swarm.bootstrap()
    url = "http://" + bootstrap.line(r"http=(\S+)").group(1)

    def swarm_of(url: str) -> dict[str, Any]:
        return dict(json.loads(get(url + "/swarm.json")[1]))

    peers = [swarm.peer(name, "run.steps=600", "peer.start_with=2", address=address) for name in NAMES[:2]]
    assert [peer.exit_code(90) for peer in peers] == [0, 0]
    (run,) = wait_for(lambda: [it for it in swarm_of(url).get("runs", []) if it["ended_age"]], 60)
    assert run["members"] == 2 and run["step"] > 0 and run["tokens"] > 0 and run["tokens_per_second"] > 0
    assert {peer["name"] for peer in run["peers"]} == set(NAMES[:2])
    (given,) = swarm_of(url)["contributors"]
    assert {peer["name"] for peer in given["peers"]} == set(NAMES[:2])
    assert 0 < given["tokens"] == run["tokens"] <= 2 * 600 * 2 * 16  # of both: steps, sequences, tokens
    _status_knows(swarm, address, str(run["run"]))
    bootstrap.signal(signal.SIGTERM)
    assert bootstrap.exit_code(30) == 0
    again, _ = swarm.bootstrap()
    url = "http://" + again.line(r"http=(\S+)").group(1)
    later = wait_for(lambda: swarm_of(url).get("contributors"), 60)
    same = [(peer["peer_id"], peer["tokens"], peer["merges"]) for peer in later[0]["peers"]]
    assert same == [(peer["peer_id"], peer["tokens"], peer["merges"]) for peer in given["peers"]]


def _status_knows(swarm: Swarm, address: str, run: str) -> None:
    """From the bootstrap node, when no record is left in the directory."""
    time.sleep(LIFETIME + 2)
    status = swarm.start("status", ["-m", "peer", "status", address])
    assert status.exit_code(60) == 0, status.output()
    assert re.search(rf"{run}: ended .* ago, these are its last figures: 2 peers, \d+ tokens/s", status.output())
    for name in NAMES[:2]:
        assert re.search(rf"{name} .*left ", status.output()), status.output()


def test_the_monitor_sees_peers_join_train_merge_leave_and_die(swarm: Swarm) -> None:
    bootstrap, address = swarm.bootstrap()
    url = "http://" + bootstrap.line(r"http=(\S+)").group(1)
    assert get(url + "/nothing")[0] == 404
    peers = {name: swarm.peer(name, *LONG, "run.name=seen", address=address) for name in NAMES}
    for name in NAMES:
        swarm.wait_for_rounds(name, 2)

    def run() -> dict[str, Any]:
        status, body = get(url + "/swarm.json")
        assert status == 200, body
        return next((it for it in json.loads(body)["runs"] if it["run"] == "seen"), {})

    def told() -> bool:
        seen = run()
        if not seen or seen["members"] < 3 or len(seen["meetings"]) < 2:
            return False
        return all(peer["members"] == 3 and peer["partners"] for peer in seen["peers"])

    wait_for(told, 60, lambda: str(run()))
    seen = run()
    assert [it for it in seen["warnings"] if it["kind"] != "straggler"] == []  # the load of this machine may cause one
    request = urllib.request.Request(url + "/swarm.json", headers={"Accept-Encoding": "gzip, br"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert answer.headers["Content-Encoding"] == "gzip"
        assert json.loads(gzip.decompress(answer.read())).keys() == json.loads(get(url + "/swarm.json")[1]).keys()
    assert {peer["name"] for peer in seen["peers"]} == set(NAMES)
    for peer in seen["peers"]:
        assert peer["state"] == "training"
        assert 0 < peer["val_loss"] < 7 and 0 <= peer["idle_share"] < 1 and peer["tokens"] > 0
    assert json.loads(get(url + "/targets")[1]) == [
        {
            "targets": [peers[peer["name"]].line(r"metrics=(\S+)").group(1)],
            "labels": {"peer": peer["name"], "peer_id": peer["peer_id"], "run": "seen"},
        }
        for peer in sorted(seen["peers"], key=lambda peer: str(peer["peer_id"]))
    ]
    swarm_series = series(url + "/metrics")
    assert {it.labels["peer"] for it in swarm_series["noloco_swarm_peer_step"]} == set(NAMES)
    _status_shows(swarm, address)

    swarm.note_children()
    peers["ann"].signal(signal.SIGTERM)
    assert peers["ann"].exit_code(30) == 0
    peers["bob"].signal(signal.SIGKILL)
    states = {"ann": "left", "bob": "lost", "cat": "training"}
    wait_for(lambda: {it["name"]: it["state"] for it in run()["peers"]} == states, 60, lambda: str(run()["events"]))
    assert [(it["event"], it["name"]) for it in run()["events"][-2:]] == [("left", "ann"), ("lost", "bob")]
    assert [it["labels"]["peer"] for it in json.loads(get(url + "/targets")[1])] == ["cat"]

    (daemon,) = [child for child in psutil.Process(bootstrap.pid).children() if child.name() == "p2pd"]
    daemon.suspend()
    wait_for(lambda: get(url + "/targets")[0] == 503, 60)  # not an empty list, which would remove all targets
    assert get(url + "/swarm.json")[0] == 503
    assert get(url + "/metrics")[0] == 200
    daemon.resume()
    wait_for(lambda: get(url + "/targets")[0] == 200, 60)
    assert "Traceback" not in bootstrap.output()


def _status_shows(swarm: Swarm, address: str) -> None:
    status = swarm.start("status", ["-m", "peer", "status", "--initial-peers", address])
    assert status.exit_code(60) == 0, status.output()
    assert re.search(r"seen: 3 peers, \d+ tokens/s", status.output())
    for name in NAMES:
        assert re.search(rf"{name} .*training", status.output()), status.output()


def test_status_without_a_swarm_is_one_line(swarm: Swarm) -> None:
    _, address = swarm.bootstrap()
    status = swarm.start("status", ["-m", "peer", "status", "--initial-peers", address])
    assert status.exit_code(60) == 1
    assert status.output().splitlines()[-1].startswith("error: nobody is there")


def test_a_peers_phases_add_up_to_the_wall_clock_between_two_scrapes(swarm: Swarm) -> None:
    peer = swarm.peer("peer", "run.steps=100000", "run.inner_steps=3000")
    url = "http://" + peer.line(r"metrics=(\S+)").group(1) + "/metrics"

    def booked() -> tuple[float, float, float]:
        """The middle of the request, half of what it took, and the seconds that are booked."""
        before = time.monotonic()
        found = series(url)
        half = (time.monotonic() - before) / 2
        return before + half, half, sum(it.value for it in found["noloco_phase_seconds"])

    peer.line("val_loss=")
    first = booked()
    time.sleep(5)  # in the middle of inner phases
    last = booked()
    between = last[0] - first[0]
    unknown = first[1] + last[1]  # the peer has read its clock somewhere within a request
    assert last[2] - first[2] == pytest.approx(between, abs=0.01 * between + unknown)
    names = series(url).keys()
    for row in OF_PEER:
        assert PREFIX + (row.name.removesuffix("_total") if row.kind == "counter" else row.name) in names
