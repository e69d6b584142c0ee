"""The queries of docker/grafana with their variables filled in, and the rules of docker/prometheus."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[3]
GRAFANA, PROMETHEUS = ROOT / "docker" / "grafana", ROOT / "docker" / "prometheus"
BOARDS = sorted((GRAFANA / "dashboards").glob("*.json"))
RULES = sorted(path for path in PROMETHEUS.glob("*.yml") if path.stem != "prometheus")
# Values for Grafana's variables: the time range of a demo, four scrapes, all peers.
BUILT_IN = {"__range": "1m", "__rate_interval": "20s", "peer": ".*"}


@dataclass(frozen=True)
class Query:
    """One expression and its place. The result must have the labels that ``legend`` names."""

    where: str
    expr: str
    legend: str = ""
    silent: bool = False  # an alert: empty while all is well


def board(path: Path) -> dict[str, Any]:
    """Read a dashboard."""
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def fill_in(expr: str, run: str) -> str:
    """The expression that Prometheus receives."""
    values = {**BUILT_IN, "run": run}
    return re.sub(r"\$(?:\{(\w+)\}|(\w+))", lambda match: values[match[1] or match[2]], expr)


def board_queries(path: Path, run: str = "demo") -> list[Query]:
    """The queries of a dashboard's panels, variables and annotations."""
    content = board(path)
    found = [
        Query(
            f"{path.stem}: {panel['title']} {target['refId']}",
            fill_in(target["expr"], run),
            target.get("legendFormat", ""),
        )
        for panel in content["panels"]
        for target in panel["targets"]
    ]
    for note in content["annotations"]["list"]:
        found.append(Query(f"{path.stem}: annotation {note['name']}", fill_in(note["expr"], run), silent=True))
    for variable in content["templating"]["list"]:
        series, label = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["definition"]).groups()  # type: ignore[union-attr]
        expr = f"count by ({label}) ({fill_in(series, run)})"
        found.append(Query(f"{path.stem}: variable {variable['name']}", expr, f"{{{{{label}}}}}"))
    return found


def rules() -> list[dict[str, Any]]:
    """All recording and alerting rules in the order of their evaluation."""
    return [
        rule
        for path in sorted(RULES, reverse=True)  # recording.yml before alerts.yml
        for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]
        for rule in group["rules"]
    ]
