"""The one table of series, and the clock that splits a peer's time."""

from __future__ import annotations

import errno
import re
import socket
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from email.parser import Parser
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
from prometheus_client import generate_latest

from peer import clock
from peer.errors import RunError, UserError
from peer.telemetry import http_server
from peer.telemetry import metrics as served
from peer.telemetry.http_server import HttpServer
from peer.telemetry.metrics import ActivityTimer, Metrics
from peer.telemetry.series import ACTIVITIES, OF_PEER, as_markdown


def nothing() -> None:
    """No accelerator to wait for."""


def test_every_series_is_there_from_the_start_with_all_its_label_values() -> None:
    metrics = Metrics()
    metrics.set_build(method="noloco", run="demo", config="c0ffee")
    text = generate_latest(metrics.registry).decode()
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


def test_a_name_with_addresses_of_both_kinds_is_served_where_prometheus_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian's localhost is ::1 first; health check and Prometheus ask 127.0.0.1."""
    stream = socket.SOCK_STREAM
    found = [(socket.AF_INET6, stream, 6, "", ("::1", 0, 0, 0)), (socket.AF_INET, stream, 6, "", ("127.0.0.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    server = HttpServer("localhost", 0, lambda _: http_server.HttpAnswer(200, b"", "text/plain"))
    server.stop()
    assert server.server_address[0] == "127.0.0.1"


def test_the_port_is_given_back_although_a_forked_process_has_a_copy_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker of a data loader."""
    servers: list[HttpServer] = []

    def start(*words: Any) -> HttpServer:
        servers.append(HttpServer(*words))
        return servers[-1]

    monkeypatch.setattr(served, "HttpServer", start)
    address, stop = Metrics().serve("127.0.0.1", 0)
    copy = servers[0].socket.dup()
    stop()
    with copy:
        again, stop = Metrics().serve("127.0.0.1", int(address.rpartition(":")[2]))
        stop()
    assert again == address


@pytest.fixture
def place() -> Iterator[tuple[str, int]]:
    """Where a peer's series are served."""
    address, stop = Metrics().serve("127.0.0.1", 0)
    host, _, port = address.rpartition(":")
    yield host, int(port)
    stop()


@pytest.mark.parametrize("said", [b"", b"GET /metrics HTTP/1.1\r\nHost:"])
def test_who_connects_and_says_nothing_is_hung_up_on(
    said: bytes, place: tuple[str, int], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each such connection kept a thread and a descriptor of the peer for ever."""
    assert http_server._Handler.timeout <= 10
    monkeypatch.setattr(http_server._Handler, "timeout", 0.2)
    with socket.create_connection(place, 10) as silent:
        silent.sendall(said)
        assert silent.recv(1) == b""
    assert capfd.readouterr().err == ""


def test_few_are_served_at_once(place: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "HTTP_CONNECTIONS", 2)
    with ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(place, 5)) for _ in range(3)]
        assert silent[0].recv(1) == b""  # the oldest, long before its ten seconds are over
        with urllib.request.urlopen(f"http://{place[0]}:{place[1]}/metrics", timeout=5) as answer:
            assert b"noloco_phase_seconds_total" in answer.read()


@pytest.mark.parametrize(("line", "lines"), [(b"X: " + b"\r" * 20_000, 1), (b"X: " + b"\r" * 400 + b"\r\n", 60)])
@pytest.mark.parametrize("more", [0, 1])
def test_no_more_is_read_than_a_request_needs(
    line: bytes, lines: int, more: int, place: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """39 MB of headers with lone carriage returns became 1.4 GB of the process that trains."""
    parsed, parse = list[int](), Parser.parsestr
    monkeypatch.setattr(Parser, "parsestr", lambda it, text, *how: (parsed.append(len(text)), parse(it, text, *how))[1])
    end = b"" if more else b"\r\n\r\n"
    said = (b"GET /metrics HTTP/1.1\r\n" + line * lines)[: http_server.HEAD_BYTES + more - len(end)] + end
    with socket.create_connection(place, 10) as outsider:
        outsider.sendall(said)
        assert outsider.recv(12, socket.MSG_WAITALL) == (b"HTTP/1.0 431" if more else b"HTTP/1.0 200")
    assert len(parsed) == (not more) and sum(parsed) < len(said) == http_server.HEAD_BYTES + more


def test_who_asks_for_a_path_without_end_is_hung_up_on(place: tuple[str, int]) -> None:
    with socket.create_connection(place, 10) as outsider:
        outsider.sendall(b"GET /".ljust(http_server.HEAD_BYTES + 1, b"a"))
        assert outsider.recv(1) == b""


def test_an_error_of_a_series_is_a_line_and_no_traceback(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    broken = Metrics()
    broken.refresh.append(lambda: 1 // 0)
    address, stop = broken.serve("127.0.0.1", 0)
    with pytest.raises(HTTPError, match="500"):
        urllib.request.urlopen(f"http://{address}/metrics", timeout=5)
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), 5) as outsider:
        outsider.sendall(b"GET /\x1b[31m" + 5000 * b"a" + b" HTTP/1.0\r\n\r\n")
        assert b"500" in outsider.recv(100)
    stop()
    assert "'/metrics': ZeroDivisionError" in caplog.text and "Traceback" not in capfd.readouterr().err
    assert "\x1b" not in caplog.text and len(caplog.text) < 1000  # anybody chooses the path


def test_a_port_that_was_asked_for_and_is_taken_is_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UserError, match="port occupied") as caught:
            Metrics().serve("127.0.0.1", taken.getsockname()[1])
    assert "\n" not in str(caught.value)


def test_an_address_of_another_machine_is_one_line_and_a_port_of_root_is_one() -> None:
    other = r"^peer\.metrics\.host 192\.0\.2\.1: .*; it must be an address of this machine$"
    with pytest.raises(UserError, match=other):
        Metrics().serve("192.0.2.1", None)
    denied = PermissionError(errno.EACCES, "Permission denied")
    said = http_server.cannot_listen(denied, "127.0.0.1", 80, "--http-host", "--http-port")
    assert str(said) == "--http-port 127.0.0.1:80: Permission denied; choose another --http-port"


def test_with_no_port_asked_for_a_second_peer_finds_another_one() -> None:
    first, stop_first = Metrics().serve("127.0.0.1", None)
    second, stop_second = Metrics().serve("127.0.0.1", None)
    stop_first()
    stop_second()
    assert first != second


@pytest.mark.usefixtures("virtual")
def test_phases_add_up_to_the_wall_clock_also_when_nested() -> None:
    began = clock.monotonic()
    timer = ActivityTimer(Metrics(), nothing)
    with timer("inner"):
        clock.sleep(0.2)
        with timer("eval"):
            clock.sleep(0.1)
    with timer("match"):
        clock.sleep(0.1)
    clock.sleep(0.1)
    assert sum(timer.totals.values()) == pytest.approx(clock.monotonic() - began, abs=1e-9)
    assert timer.totals == pytest.approx(
        dict.fromkeys(ACTIVITIES, 0.0) | {"inner": 0.2, "eval": 0.1, "match": 0.1, "apply": 0.1}
    )
    assert timer.idle_share() == pytest.approx(0.2)


@pytest.mark.usefixtures("virtual")
def test_an_activity_ends_when_the_accelerators_work_has_ended() -> None:
    timer = ActivityTimer(Metrics(), lambda: clock.sleep(0.1))
    with timer("inner"):
        pass
    assert timer.totals["inner"] == pytest.approx(0.1)


def test_an_activity_that_fails_does_not_wait_for_the_accelerator() -> None:
    """After the loss of a rank its work never ends, and the peer did not come to leave in good order."""
    waits: list[str] = []
    timer = ActivityTimer(Metrics(), lambda: waits.append("for it"))

    def left_early() -> None:
        with timer("inner"):
            return

    with pytest.raises(RunError), timer("inner"), timer("eval"):
        raise RunError("rank 1 of this peer has ended")
    assert waits == []
    left_early()
    assert waits == ["for it"]


def test_a_peer_is_always_in_one_activity() -> None:
    metrics = Metrics()
    timer = ActivityTimer(metrics, nothing)

    def current() -> list[str]:
        value = metrics.registry.get_sample_value
        return [activity for activity in ACTIVITIES if value("noloco_phase_info", {"phase": activity})]

    assert current() == ["apply"]
    with timer("inner"):
        assert current() == ["inner"]
        with timer("eval"):
            assert current() == ["eval"]
        assert current() == ["inner"]
    with pytest.raises(KeyError), timer("exchange"):
        raise KeyError
    assert current() == ["apply"]


@pytest.mark.usefixtures("virtual")
def test_the_series_say_what_the_clock_says() -> None:
    metrics = Metrics()
    timer = ActivityTimer(metrics, nothing)
    with timer("match"):
        clock.sleep(0.02)
    timer.idle_share()
    for activity in ACTIVITIES:
        shown = metrics.registry.get_sample_value("noloco_phase_seconds_total", {"phase": activity})
        assert shown == pytest.approx(timer.totals[activity])
    assert timer.totals["match"] == pytest.approx(0.02)


@pytest.mark.usefixtures("virtual")
def test_a_pause_and_a_join_are_neither_idle_nor_other_time() -> None:
    timer = ActivityTimer(Metrics(), nothing)
    for activity, seconds in (("inner", 3.0), ("exchange", 1.0), ("paused", 1000.0), ("join", 1200.0)):
        with timer(activity):
            clock.sleep(seconds)
    assert timer.idle_share() == pytest.approx(0.25, abs=0.001)
    assert timer.totals["paused"] == pytest.approx(1000.0)


@pytest.mark.parametrize("port", [0, None])
def test_a_host_that_is_not_this_machine_is_said_as_such(port: int | None) -> None:
    with pytest.raises(UserError, match=r"peer\.metrics\.host") as caught:
        Metrics().serve("192.0.2.1", port)  # set aside for documents, so nobody's
    assert "occupied" not in str(caught.value)


def test_the_readme_has_the_table_as_it_is() -> None:
    readme = Path(__file__).parents[3] / "peer" / "telemetry" / "README.md"
    assert as_markdown() in readme.read_text(encoding="utf-8")


@pytest.mark.usefixtures("virtual")
def test_a_scrape_in_the_middle_of_an_activity_has_all_of_it() -> None:
    metrics = Metrics()
    timer = ActivityTimer(metrics, nothing)
    with timer("inner"):
        clock.sleep(0.2)
        text = generate_latest(metrics.registry).decode()
    assert float(re.findall(r'phase_seconds_total{phase="inner"} (\S+)', text)[0]) == pytest.approx(0.2)
