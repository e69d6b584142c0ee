"""A real Prometheus finds a real swarm by the bootstrap's /targets; queries of dashboards and rules have results."""

from __future__ import annotations

import signal

import pytest

from tests.swarm.support import prometheus
from tests.swarm.support.harness import SLOW_LINE, Swarm, wait_for
from tests.swarm.support.prometheus import Prometheus
from tests.unit.project.dashboards import BOARDS, Query, board_queries, rules
from tests.unit.project.promql import words_in

pytestmark = pytest.mark.needs("prometheus")
SCRAPED, HIDDEN = ("a", "b"), "c"
SETS = (
    *("run.steps=100000000", "run.inner_steps=20", SLOW_LINE),
    *("run.evaluation.every_rounds=5", "peer.checkpoint.every_rounds=3"),
)
WHOLE, IDLE = "sum by (peer) (peer_phase:noloco_time:share1m)", "peer:noloco_idle:share1m"
FOUND = 75.0  # seconds
ANSWERED = 75.0  # a rate needs two scrapes
LOST = 90.0  # a record lives for 30 s


def queries() -> list[Query]:
    """The queries of all panels and rules; that of an alert is empty while all is well."""
    asked = [query for path in BOARDS for query in board_queries(path)]
    return asked + [Query(rule["record"], rule["record"]) for rule in rules() if "record" in rule]


def unanswered(server: Prometheus, asked: list[Query]) -> list[str]:
    """The queries without a result, or without a label that their legend names."""
    empty = []
    for query in asked:
        samples = server.query(query.expr)
        if not samples or any(not sample.labels.get(word) for sample in samples for word in words_in(query.legend)):
            empty.append(f"{query.where}: {query.expr}")
    return empty


@pytest.mark.smoke
def test_a_real_prometheus_sees_a_real_swarm(swarm: Swarm) -> None:
    """One of three peers announces an endpoint that cannot be scraped; later it is killed."""
    bootstrap, address = swarm.bootstrap()
    for name in SCRAPED:
        swarm.peer(name, *SETS, address=address)
    hidden = swarm.peer(HIDDEN, *SETS, "peer.metrics.announce=127.0.0.1:1024", address=address)
    monitor = bootstrap.line(r"http=(\S+)").group(1)
    with prometheus.running(swarm.folder, monitor) as server:
        healths = {**dict.fromkeys(SCRAPED, "up"), HIDDEN: "down"}
        wait_for(lambda: server.targets("noloco-peer") == healths, FOUND, lambda: str(server.targets("noloco-peer")))
        wait_for(lambda: server.targets("noloco-bootstrap") == {"": "up"}, FOUND)

        wait_for(lambda: set(shares(server, IDLE)) == {*SCRAPED, HIDDEN}, ANSWERED)  # HIDDEN's: from its record
        idle = shares(server, IDLE)
        assert all(0 <= share < 1 for share in idle.values()), idle
        assert server.firing().keys() <= {"NolocoPeerNotScraped"}, server.firing()

        hidden.signal(signal.SIGKILL)  # while its record grows old, all rules have their first results
        asked = [query for query in queries() if not query.silent and "ALERTS" not in query.expr]
        wait_for(lambda: not unanswered(server, asked), ANSWERED, lambda: "\n".join(unanswered(server, asked)))
        assert server.firing().keys() <= {"NolocoPeerNotScraped", "NolocoPeerLost"}, server.firing()
        silent = [query for query in queries() if query.silent or "ALERTS" in query.expr]
        assert len(silent) >= 4
        for rule in server.rules():
            assert rule["health"] == "ok", rule
        wait_for(lambda: set(shares(server, WHOLE)) == set(SCRAPED), ANSWERED)  # of each peer two scrapes are needed
        for share in shares(server, WHOLE).values():
            assert share == pytest.approx(1, abs=0.001)

        wait_for(lambda: "NolocoPeerLost" in server.firing(), LOST, lambda: str(server.firing()))
        (alert,) = server.firing()["NolocoPeerLost"]
        assert alert["annotations"]["summary"] == f"{HIDDEN} was lost from run demo without leaving it."
        wait_for(lambda: not unanswered(server, silent), ANSWERED, lambda: "\n".join(unanswered(server, silent)))
        wait_for(lambda: set(server.targets("noloco-peer")) == set(SCRAPED), FOUND)
    for process in swarm.processes:
        assert "Traceback" not in process.output()


def shares(server: Prometheus, expr: str) -> dict[str, float]:
    """The values by peer."""
    return {sample.labels["peer"]: sample.value for sample in server.query(expr)}
