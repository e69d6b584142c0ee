"""The one table of series, and the clock that splits a peer's time."""

from __future__ import annotations

import re
import socket
import time
import urllib.request
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from peer.errors import UserError
from peer.telemetry.metrics import Metrics, PhaseClock
from peer.telemetry.series import OF_PEER, PHASES, as_markdown


def nothing() -> None:
    """No accelerator to wait for."""


def test_every_series_is_there_from_the_start_with_all_its_label_values() -> None:
    text = generate_latest(Metrics(method="noloco", run="demo", config="c0ffee").registry).decode()
    for row in OF_PEER:
        assert f"# HELP noloco_{row.name} " in text
        assert f"# TYPE noloco_{row.name} {row.kind}" in text
        for value in row.values:
            assert f'noloco_{row.name}{{{row.labels[-1]}="{value}"}} 0.0' in text
        assert (row.kind == "counter") == row.name.endswith("_total")
    assert 'noloco_build_info{config="c0ffee",method="noloco",run="demo",version=' in text


def test_they_are_served_on_a_free_port_and_the_port_is_given_back() -> None:
    address, stop = Metrics().serve("127.0.0.1", 0)
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as answer:
        assert b"noloco_phase_seconds_total" in answer.read()
    stop()
    again, stop = Metrics().serve("127.0.0.1", int(address.rpartition(":")[2]))
    stop()
    assert again == address


def test_a_port_that_was_asked_for_and_is_taken_is_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UserError, match="port occupied") as caught:
            Metrics().serve("127.0.0.1", taken.getsockname()[1])
    assert "\n" not in str(caught.value)


def test_with_no_port_asked_for_a_second_peer_finds_another_one() -> None:
    first, stop_first = Metrics().serve("127.0.0.1", None)
    second, stop_second = Metrics().serve("127.0.0.1", None)
    stop_first()
    stop_second()
    assert first != second


def test_phases_add_up_to_the_wall_clock_also_when_nested() -> None:
    began = time.monotonic()
    clock = PhaseClock(Metrics(), nothing)
    with clock("inner"):
        time.sleep(0.2)
        with clock("eval"):
            time.sleep(0.1)
    with clock("match"):
        time.sleep(0.1)
    time.sleep(0.1)
    idle = clock.idle_share()
    wall = time.monotonic() - began
    assert sum(clock.totals.values()) == pytest.approx(wall, rel=0.01)
    assert set(clock.totals) == set(PHASES)
    assert clock.totals["inner"] == pytest.approx(0.2, abs=0.05)
    assert clock.totals["eval"] == pytest.approx(0.1, abs=0.05)
    assert idle == pytest.approx(clock.totals["match"] / wall, rel=0.02)


def test_a_phase_ends_when_the_accelerators_work_has_ended() -> None:
    clock = PhaseClock(Metrics(), lambda: time.sleep(0.1))
    with clock("inner"):
        pass
    assert clock.totals["inner"] >= 0.1


def test_a_peer_is_always_in_one_phase() -> None:
    metrics = Metrics()
    clock = PhaseClock(metrics, nothing)

    def current() -> list[str]:
        return [phase for phase in PHASES if metrics.registry.get_sample_value("noloco_phase_info", {"phase": phase})]

    assert current() == ["apply"]
    with clock("inner"):
        assert current() == ["inner"]
        with clock("eval"):
            assert current() == ["eval"]
        assert current() == ["inner"]
    with pytest.raises(KeyError), clock("exchange"):
        raise KeyError
    assert current() == ["apply"]


def test_the_series_say_what_the_clock_says() -> None:
    metrics = Metrics()
    clock = PhaseClock(metrics, nothing)
    with clock("match"):
        time.sleep(0.02)
    clock.idle_share()
    for phase in PHASES:
        shown = metrics.registry.get_sample_value("noloco_phase_seconds_total", {"phase": phase})
        assert shown == pytest.approx(clock.totals[phase], abs=0.01)  # it goes on
    assert clock.totals["match"] >= 0.02


@pytest.mark.parametrize("port", [0, None])
def test_a_host_that_is_not_this_machine_is_said_as_such(port: int | None) -> None:
    with pytest.raises(UserError, match=r"peer\.metrics\.host") as caught:
        Metrics().serve("192.0.2.1", port)  # set aside for documents, so nobody's
    assert "occupied" not in str(caught.value)


def test_the_readme_has_the_table_as_it_is() -> None:
    readme = Path(__file__).parents[3] / "peer" / "telemetry" / "README.md"
    assert as_markdown() in readme.read_text(encoding="utf-8")


def test_a_scrape_in_the_middle_of_a_phase_has_all_of_it() -> None:
    metrics = Metrics()
    clock = PhaseClock(metrics, nothing)
    with clock("inner"):
        time.sleep(0.2)
        text = generate_latest(metrics.registry).decode()
    assert float(re.findall(r'phase_seconds_total{phase="inner"} (\S+)', text)[0]) >= 0.2
