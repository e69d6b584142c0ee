"""Clouds that remap ports: what they put into the environment is announced, if it can be right."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping

import pytest

from peer.p2p.reachability.cloud import announced, find

RUNPOD = {
    "RUNPOD_POD_ID": "k3w9x0",
    "RUNPOD_PUBLIC_IP": "203.0.113.7",
    "RUNPOD_TCP_PORT_22": "10029",
    "RUNPOD_TCP_PORT_31338": "10030",
}
VAST = {"PUBLIC_IPADDR": "198.51.100.4", "VAST_TCP_PORT_22": "41233", "VAST_TCP_PORT_31338": "41234"}
Put = Callable[[Mapping[str, str]], None]


@pytest.fixture(autouse=True)
def put(monkeypatch: pytest.MonkeyPatch) -> Put:
    """Puts variables into the environment, which has none of a cloud."""
    for name in os.environ:
        if name.startswith(("RUNPOD_", "VAST_", "PUBLIC_IPADDR")):
            monkeypatch.delenv(name)

    def set_all(variables: Mapping[str, str]) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_all


@pytest.mark.parametrize(
    ("environment", "address"),
    [(RUNPOD, "/ip4/203.0.113.7/tcp/10030"), (VAST, "/ip4/198.51.100.4/tcp/41234")],
    ids=["runpod", "vast"],
)
def test_the_mapped_address_is_announced(
    environment: Mapping[str, str], address: str, put: Put, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "noloco")
    put(environment)
    assert announced("0.0.0.0", 31338) == (address,)
    assert [address in line for line in caplog.messages] == [True]


def test_what_the_user_gives_goes_before_it(put: Put, caplog: pytest.LogCaptureFixture) -> None:
    mine = ("/ip4/192.0.2.1/tcp/1",)
    put(RUNPOD)
    assert announced("0.0.0.0", 31338, mine) == mine
    assert not caplog.messages


@pytest.mark.parametrize("environment", [{}, {"PUBLIC_IPADDR": "203.0.113.7"}, {"RUNPOD_POD_ID": "k3w9x0"}])
def test_elsewhere_nothing_is_known_and_nothing_said(
    environment: Mapping[str, str], put: Put, caplog: pytest.LogCaptureFixture
) -> None:
    put(environment)
    assert find("0.0.0.0", 31338) is None
    assert announced("0.0.0.0", 31338) == () and not caplog.messages


def test_peers_of_one_machine_stay_on_it(put: Put) -> None:
    put(RUNPOD)
    assert find("127.0.0.1", 31338) is None


ADDRESSES = "pod.example 10.0.0.3 172.17.0.2 192.168.1.4 100.64.3.1 127.0.0.1 169.254.169.254 0.0.0.0 0.1.2.3 224.0.0.1"
OTHERS = "255.255.255.255 ::1 2001:db8::1 ::ffff:10.0.0.3 203.0.113.7/tcp/1"
PORTS = ("", "0", "65536", "-1", "1e3", "70000", "٣٠", "1,2", "9" * 5000)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("RUNPOD_PUBLIC_IP", it) for it in ("", *ADDRESSES.split(), *OTHERS.split())),
        *(("RUNPOD_TCP_PORT_31338", it) for it in PORTS),
    ],
)
def test_a_wrong_value_is_ignored_with_one_line(
    key: str, value: str, put: Put, caplog: pytest.LogCaptureFixture
) -> None:
    put({**RUNPOD, key: value})
    assert announced("0.0.0.0", 31338) == ()
    assert len(caplog.messages) == 1 and f"{key} is ignored" in caplog.messages[0]
    assert "\n" not in caplog.messages[0] and len(caplog.messages[0]) < 250


@pytest.mark.parametrize(("port", "said"), [(0, "a port that is chosen at the start"), (31337, "TCP 31337")])
def test_a_port_that_is_not_mapped_is_named_with_those_that_are(port: int, said: str, put: Put) -> None:
    put({**VAST, **{f"VAST_TCP_PORT_{it}": "9" for it in ("8080", "x\ny", "70000")}})
    found = find("0.0.0.0", port)
    assert found is not None and not found.address
    assert found.text == f"Vast.ai maps no port to {said}" and "(31338, 8080)" in found.advice
