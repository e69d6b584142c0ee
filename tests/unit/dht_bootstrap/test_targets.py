"""Prometheus is sent to peers, and to nothing else that a record can name."""

from __future__ import annotations

from ipaddress import IPv4Network

import pytest

from dht_bootstrap.cli import _parser
from dht_bootstrap.targets import default_networks, target_of
from tests.unit.parts import member_record

LAN, LOOPBACK, ALL = "10.0.0.0/8", "127.0.0.0/8", "0.0.0.0/0"
PUBLIC, PRIVATE, LOCAL = "/ip4/45.1.2.3/tcp/1", "/ip4/10.0.0.7/tcp/1", "/ip4/127.0.0.1/tcp/1"
RELAYED = "/ip4/45.9.9.9/tcp/1/p2p/QmRelay/p2p-circuit"


def target(metrics: str | None, addresses: list[str], *networks: str) -> str | None:
    record = member_record("QmA").model_copy(update={"metrics": metrics, "addresses": addresses})
    return target_of(record, [IPv4Network(it) for it in networks])


@pytest.mark.parametrize(
    ("metrics", "addresses", "networks", "expected"),
    [
        ("45.1.2.3:9464", [PRIVATE, PUBLIC], (), "45.1.2.3:9464"),
        ("0.0.0.0:9464", [LOCAL, PRIVATE, PUBLIC], (), "45.1.2.3:9464"),
        ("0.0.0.0:9464", [LOCAL, PRIVATE, PUBLIC], (LAN,), "10.0.0.7:9464"),  # the first, as the peer lists them
        ("45.7.7.7:9464", [PUBLIC], (), None),  # somebody else's
        ("45.7.7.7:9464", [PUBLIC], ("45.7.7.0/24",), "45.7.7.7:9464"),  # the operator knows better
        ("10.0.0.7:9464", [PRIVATE], (), None),  # an address in the network of Prometheus, for all that we know
        ("10.0.0.7:9464", [PRIVATE], (LAN,), "10.0.0.7:9464"),
        ("0.0.0.0:9464", [LOCAL], (LOOPBACK,), "127.0.0.1:9464"),
        ("127.0.0.1:9464", [LOCAL], (LOOPBACK,), "127.0.0.1:9464"),
        ("127.0.0.1:9464", [LOCAL], (), None),
        ("127.0.0.1:9464", [PRIVATE], (LOOPBACK, LAN), None),  # loopback of another machine
        ("0.0.0.0:9464", [RELAYED, PRIVATE], (LAN,), None),  # Prometheus cannot reach it, or it needed no relay
        ("45.9.9.9:9464", [RELAYED], (), None),  # the relay's address
        ("10.0.0.7:9464", [RELAYED], (LAN,), "10.0.0.7:9464"),
        ("45.1.2.3:09464", [PUBLIC], (), "45.1.2.3:9464"),
    ],
)
def test_a_peer_is_scraped_where_it_is(
    metrics: str, addresses: list[str], networks: tuple[str, ...], expected: str | None
) -> None:
    assert target(metrics, addresses, *networks) == expected


@pytest.mark.parametrize(
    "host",
    [
        *("169.254.169.254", "169.254.1.1", "224.0.0.1", "239.1.2.3", "255.255.255.255", "240.0.0.1"),
        *("prometheus", "localhost", "metadata.google.internal", "gpu.example.org", "[::1]", "[fe80::1]", "::"),
        *("10.0.0.7/x", "10.0.0", "010.0.0.7", "10.0.0.7\n", "10.0.0.7@10.0.0.8", "1٠.0.0.7", ""),
    ],
)
def test_a_host_that_is_no_peer_is_never_a_target(host: str) -> None:
    """Whatever addresses the record claims and whatever the operator allows."""
    own = [PUBLIC, f"/ip4/{host}/tcp/1", f"/dns4/{host}/tcp/1", f"/ip6/{host.strip('[]')}/tcp/1"]
    assert target(f"{host}:9464", own, ALL) is None
    assert target(f"{host}:9464", own[1:], ALL) is None
    assert target("0.0.0.0:9464", own[1:], ALL) is None


@pytest.mark.parametrize(
    "port", ["80", "1023", "0", "65536", "99999", "-9464", "9464 ", "9464/x?y", "9464#", "٩٤٦٤", ""]
)
def test_a_port_of_a_system_or_of_nobody_is_never_a_target(port: str) -> None:
    assert target(f"45.1.2.3:{port}", [PUBLIC], ALL) is None


def test_a_record_that_claims_all_addresses_is_no_target() -> None:
    assert target("0.0.0.0:9464", ["/ip4/0.0.0.0/tcp/1"], ALL) is None


def test_the_default_is_loopback_for_a_swarm_of_one_machine_only() -> None:
    assert list(default_networks("127.0.0.1")) == [IPv4Network("127.0.0.0/8")]
    assert not default_networks("0.0.0.0") and not default_networks("45.1.2.3")


def test_the_operator_s_networks_are_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert _parser().parse_args([]).scrape_networks is None
    given = _parser().parse_args(["--scrape-networks", LAN, "192.168.0.0/16"]).scrape_networks
    assert given == [IPv4Network(LAN), IPv4Network("192.168.0.0/16")]
    with pytest.raises(SystemExit):
        _parser().parse_args(["--scrape-networks", "10.0.0.0/99"])
    assert "10.0.0.0/99" in capsys.readouterr().err
