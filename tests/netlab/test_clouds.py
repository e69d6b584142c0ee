"""A bootstrap node and a peer in clouds that remap ports announce what the environment says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.netlab.lab import ROOT, Lab
from tests.netlab.plan import Plan

pytestmark = [pytest.mark.needs("laboratory"), pytest.mark.long]
NETWORK = "131.77"  # public, as in test_nat.py


def test_the_cloud_s_address_is_printed_and_checked(tmp_path: Path) -> None:
    with Lab(Plan(network=NETWORK), 2) as lab:
        pod = {"RUNPOD_PUBLIC_IP": lab.address(0), "RUNPOD_TCP_PORT_31337": "10030"}
        words = ["--identity", str(tmp_path / "key"), "--http-port", "0"]
        with subprocess.Popen(
            lab.command(0, [sys.executable, "-m", "dht_bootstrap", *words]),
            cwd=ROOT,
            env={**os.environ, **pod},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as bootstrap:
            try:
                assert bootstrap.stdout is not None
                said = bootstrap.stdout.readline()  # the test's timeout bounds the wait
                place, _, peer_id = said.strip().removeprefix("initial peer: ").partition("/p2p/")
                assert place == f"/ip4/{lab.address(0)}/tcp/10030"
                found = _check(lab, f"/ip4/{lab.address(0)}/tcp/31337/p2p/{peer_id}", tmp_path)
            finally:
                bootstrap.terminate()
                bootstrap.wait(30)
    mine = f"/ip4/{lab.address(1)}/tcp/31338"
    assert f"ok    announce      Vast.ai maps {mine} to TCP 31338 of this container" in found
    assert any(line.startswith("ok    reachability") and mine in line for line in found.splitlines()), found


def _check(lab: Lab, initial: str, folder: Path) -> str:
    """What ``noloco-peer check`` says on host 1, a container whose port is mapped to the same one."""
    cloud = {"PUBLIC_IPADDR": lab.address(1), "VAST_TCP_PORT_31338": "31338"}
    sets = [f"run.dir={folder}", "peer.network.port=31338", "peer.network.upnp=false"]
    words = [
        "--config",
        "configs/demo.yaml",
        "--initial-peers",
        initial,
        *(it for key in sets for it in ("--set", key)),
    ]
    command = lab.command(1, [sys.executable, "-m", "peer", "check", *words])
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **cloud}, capture_output=True, text=True, timeout=240, check=False
    )
    return done.stdout
