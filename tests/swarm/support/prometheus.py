"""Debian's Prometheus on loopback, with the configuration of docker/prometheus and another bootstrap address."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.swarm.support.harness import ROOT, wait_for
from tests.swarm.support.ports import free_port

ANSWER = 10.0  # seconds
START = 30.0
SHORTER = {  # here, as a test waits for the server's clock
    "prometheus.yml": ("refresh_interval: 15s", "refresh_interval: 2s"),
    "recording.yml": ("interval: 1m", "interval: 5s"),
}


class Sample(NamedTuple):
    """The current value of one series in an answer."""

    labels: dict[str, str]
    value: float


class Prometheus:
    """A running server, queried over HTTP."""

    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, path: str, **values: str) -> Any:
        """``data`` of the API's answer; an invalid expression fails with the server's message."""
        try:
            with urllib.request.urlopen(f"{self.url}{path}?{urllib.parse.urlencode(values)}", timeout=ANSWER) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{values}: {error.read().decode()}") from None

    def query(self, expr: str) -> list[Sample]:
        """Evaluate ``expr`` now; NaN values are left out."""
        rows = self.ask("/api/v1/query", query=expr)["result"]
        samples = [Sample(row["metric"], float(row["value"][1])) for row in rows]
        return [sample for sample in samples if not math.isnan(sample.value)]

    def targets(self, job: str) -> dict[str, str]:
        """Health of each target of a job, by its peer label."""
        active = self.ask("/api/v1/targets", state="active")["activeTargets"]
        return {it["labels"].get("peer", ""): it["health"] for it in active if it["labels"]["job"] == job}

    def rules(self) -> list[dict[str, Any]]:
        """All rules with their state."""
        return [rule for group in self.ask("/api/v1/rules")["groups"] for rule in group["rules"]]

    def firing(self) -> dict[str, list[dict[str, Any]]]:
        """The alerts that fire, by name."""
        found = {
            rule["name"]: [alert for alert in rule["alerts"] if alert["state"] == "firing"]
            for rule in self.rules()
            if rule["type"] == "alerting"
        }
        return {name: alerts for name, alerts in found.items() if alerts}


@contextlib.contextmanager
def running(folder: Path, bootstrap: str) -> Iterator[Prometheus]:
    """A server that scrapes the swarm of the bootstrap node whose monitor is at ``bootstrap`` (host:port)."""
    settings = folder / "prometheus"
    shutil.copytree(ROOT / "docker" / "prometheus", settings)
    config = settings / "prometheus.yml"
    _replace(config, "bootstrap:9400", bootstrap, 2)
    for name, (long, short) in SHORTER.items():
        _replace(settings / name, long, short, 1)
    address = f"127.0.0.1:{free_port()}"
    log = folder / "prometheus.log"
    command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'series'}"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, f"--web.listen-address={address}", "--log.level=warn"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )

    def ready() -> bool:
        assert process.poll() is None, log.read_text(encoding="utf-8")
        with contextlib.suppress(OSError):
            return urllib.request.urlopen(f"http://{address}/-/ready", timeout=ANSWER).status == 200
        return False

    try:
        wait_for(ready, START, lambda: log.read_text(encoding="utf-8"))
        yield Prometheus(f"http://{address}")
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


def _replace(path: Path, old: str, new: str, times: int) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == times
    path.write_text(text.replace(old, new), encoding="utf-8")
