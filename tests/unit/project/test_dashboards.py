"""Dashboards and rules use only series that exist, describe the healthy state, and are laid out without gaps."""

from __future__ import annotations

import json
import re
from collections import Counter
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from dht_bootstrap.findings import AHEAD, BEHIND
from peer.rounds.types import Reason
from peer.telemetry.metrics import Metrics
from peer.telemetry.series import ACTIVITIES, OF_BOOTSTRAP, OF_PEER, PREFIX, WARNINGS
from tests.unit.project.dashboards import BOARDS, GRAFANA, PROMETHEUS, ROOT, Query, board, board_queries, rules
from tests.unit.project.promql import Known, Unknown, words_in

KINDS = {"timeseries", "stat", "table", "state-timeline", "xychart", "barchart", "bargauge", "heatmap"}
PANELS = [(path, panel) for path in BOARDS for panel in board(path)["panels"]]
QUERIES = [query for path in BOARDS for query in board_queries(path)]


def name_of(value: Any) -> str:
    return value.where if isinstance(value, Query) else value["title"] if isinstance(value, dict) else ""


@cache
def known() -> Known:
    """All series with the recorded ones; each recording rule may use those before it."""
    it = Known()
    for rule in rules():
        if "record" in rule:
            it.add(rule["record"], rule["expr"])
    return it


@pytest.mark.parametrize("query", QUERIES, ids=name_of)
def test_an_expression_names_series_and_labels_that_exist(query: Query) -> None:
    assert words_in(query.legend) <= known().labels_of(query.expr)


@pytest.mark.parametrize("rule", [rule for rule in rules() if "record" in rule], ids=lambda rule: rule["record"])
def test_the_name_of_a_recorded_series_names_its_labels(rule: dict[str, Any]) -> None:
    levels = {
        "run": {"run"},
        "run_phase": {"run", "phase"},
        "peer": {"run", "peer", "peer_id"},
        "peer_phase": {"run", "peer", "peer_id", "phase"},
    }
    assert known().labels_of(rule["expr"]) == levels[rule["record"].split(":")[0]]


@pytest.mark.parametrize("rule", [rule for rule in rules() if "alert" in rule], ids=lambda rule: rule["alert"])
def test_an_alert_has_a_severity_and_advice(rule: dict[str, Any]) -> None:
    labels = known().labels_of(rule["expr"])
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    assert set(rule["annotations"]) == {"summary", "description"}
    for template in rule["annotations"].values():
        assert "\n" not in template
        assert words_in(template) <= labels | {"value"}
    assert len(rule["annotations"]["description"]) > 80


def test_the_readme_names_every_alert_with_its_severity() -> None:
    readme = (ROOT / "peer" / "telemetry" / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(Noloco\w+)` \| (\w+) \|", readme, re.MULTILINE)
    assert rows == [(rule["alert"], rule["labels"]["severity"]) for rule in rules() if "alert" in rule]


@pytest.mark.parametrize(
    "wrong",
    [
        "noloco_idle_share",
        'noloco_phase_info{phase="sleep"}',
        'noloco_phase_info{phase=~"match|exhange"}',
        "sum by (partner) (noloco_round)",
        "noloco_dht_read_seconds * on (run) noloco_round",
        'noloco_dht_read_seconds{run="demo"}',
    ],
)
def test_the_check_of_expressions_finds_errors(wrong: str) -> None:
    with pytest.raises(Unknown):
        Known().labels_of(wrong)


def test_phases_have_the_same_numbers_in_rule_and_dashboard() -> None:
    expr = next(rule["expr"] for rule in rules() if rule.get("record") == "peer:noloco_phase:index")
    numbers = {
        activity: int(number or 1)
        for number, activity in re.findall(r'(?:(\d) \* )?noloco_phase_info{phase="(\w+)"}', expr)
    }
    assert numbers == {activity: place for place, activity in enumerate(ACTIVITIES, 1)}
    (panel,) = [panel for _, panel in PANELS if panel["title"] == "Phase of each peer"]
    (mapping,) = panel["fieldConfig"]["defaults"]["mappings"]
    assert {word["text"]: int(number) for number, word in mapping["options"].items()} == numbers


@pytest.mark.parametrize(("path", "panel"), PANELS, ids=name_of)
def test_a_panel_has_a_title_and_describes_the_healthy_state(path: Path, panel: dict[str, Any]) -> None:
    assert panel["type"] in KINDS
    assert panel["title"]
    assert "Healthy: " in panel["description"]
    assert panel["fieldConfig"]["defaults"]["unit"]
    references = [target["refId"] for target in panel["targets"]]
    assert len(set(references)) == len(references)


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_panels_fill_the_grid_and_do_not_overlap(path: Path) -> None:
    panels = board(path)["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells: Counter[tuple[int, int]] = Counter()
    for panel in panels:
        place = panel["gridPos"]
        assert place["w"] >= 4 and place["h"] >= 3 and place["x"] >= 0 and place["x"] + place["w"] <= 24
        for x in range(place["x"], place["x"] + place["w"]):
            cells.update((x, y) for y in range(place["y"], place["y"] + place["h"]))
    assert set(cells.values()) == {1}
    assert len(cells) == 24 * (1 + max(y for _, y in cells))  # no gaps


def test_the_first_row_shows_idle_time() -> None:
    first = [
        panel for panel in board(GRAFANA / "dashboards" / "idle-time.json")["panels"] if panel["gridPos"]["y"] == 0
    ]
    assert len(first) > 1
    assert all("idle" in panel["title"].lower() for panel in first)


def test_every_query_uses_the_provisioned_datasource() -> None:
    (source,) = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yaml").read_text())["datasources"]
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    assert source["jsonData"]["timeInterval"] == config["global"]["scrape_interval"]
    uids = re.findall(r'"type": "prometheus",\s+"uid": "([^"]*)"', "".join(path.read_text() for path in BOARDS))
    assert set(uids) == {source["uid"]}
    for path, panel in PANELS:
        assert all(thing["datasource"]["uid"] == source["uid"] for thing in (panel, *panel["targets"])), path
    (provider,) = yaml.safe_load((GRAFANA / "provisioning/dashboards/noloco.yaml").read_text())["providers"]
    assert provider["type"] == "file"


def test_the_bootstraps_series_are_not_accepted_from_a_peer() -> None:
    jobs = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["scrape_configs"]
    (drop,) = [
        step["regex"] for job in jobs for step in job.get("metric_relabel_configs", ()) if step["action"] == "drop"
    ]
    assert all(re.fullmatch(drop, PREFIX + row.name) for row in OF_BOOTSTRAP)
    assert not any(re.fullmatch(drop, PREFIX + row.name) for row in OF_PEER)


def test_what_prometheus_makes_itself_is_not_accepted_from_a_peer() -> None:
    """A peer could export a firing alert, and the idle share of a run."""
    jobs = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["scrape_configs"]
    (steps,) = [job["metric_relabel_configs"] for job in jobs if job["job_name"] == "noloco-peer"]
    (keep,) = [step for step in steps if step["action"] == "keep"]
    assert keep["source_labels"] == ["__name__"]
    exported = {sample.name for family in Metrics().registry.collect() for sample in family.samples}
    assert all(re.fullmatch(keep["regex"], name) for name in exported)
    made = {"up", "scrape_samples_scraped", "ALERTS", *(rule["record"] for rule in rules() if "record" in rule)}
    assert not any(re.fullmatch(keep["regex"], name) for name in made)


@pytest.mark.parametrize("query", QUERIES, ids=name_of)
def test_what_peers_of_one_name_show_is_not_added(query: Query) -> None:
    """Only rates add up: of two peers of one name, or of one with a new id, phase 2 (match) and 1 were 3 (exchange)."""
    sums = re.findall(r"sum by \(([^)]*)\) \((\w*)", query.expr)
    added = {what for labels, what in sums if "peer" in labels.split(", ")}
    assert added <= {"rate", "increase"}


@pytest.mark.parametrize(("path", "panel"), PANELS, ids=name_of)
def test_two_peers_of_one_name_are_two(path: Path, panel: dict[str, Any]) -> None:
    """A name is the host's by default. Every series that has a peer has its id, too."""
    for target in panel["targets"]:
        for labels in re.findall(r"by \(([^)]*)\)", target["expr"]):
            assert "peer" not in labels.split(", ") or "peer_id" in labels.split(", ")
    for step in panel.get("transformations", ()):
        assert step["id"] != "groupingToMatrix"  # its rows have one key, and a later one replaces the one before
        if step["id"] == "partitionByValues":
            assert step["options"]["fields"] == ["peer", "peer_id"]


def test_dashboards_link_to_each_other_and_share_their_variables() -> None:
    boards = [board(path) for path in BOARDS]
    assert len({it["uid"] for it in boards}) == len({it["title"] for it in boards}) == len(boards) == 3
    for it in boards:
        (link,) = it["links"]
        assert link["type"] == "dashboards" and set(link["tags"]) <= set(it["tags"]) and link["includeVars"]
    for one, other in combinations(boards, 2):
        assert one["templating"] == other["templating"] and one["schemaVersion"] == other["schemaVersion"]
    assert [variable["name"] for variable in boards[0]["templating"]["list"]] == ["run", "peer"]


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_a_file_is_formatted_as_grafana_exports_it(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == json.dumps(board(path), indent=2, ensure_ascii=False) + "\n"


@pytest.mark.parametrize(("path", "panel"), PANELS, ids=name_of)
def test_columns_in_overrides_and_transformations_are_in_the_result(path: Path, panel: dict[str, Any]) -> None:
    """Grafana silently ignores a column name that does not exist."""
    tables = [target for target in panel["targets"] if target["format"] == "table"]
    if not tables or panel["type"] == "barchart":
        return
    queries = [query for query in board_queries(path) if query.where.startswith(f"{path.stem}: {panel['title']} ")]
    columns = {"Time"} | {f"Value #{target['refId']}" if len(tables) > 1 else "Value" for target in tables}
    for query in queries:
        columns |= known().labels_of(query.expr)
    (organize,) = [step["options"] for step in panel["transformations"] if step["id"] == "organize"]
    named = {*organize["excludeByName"], *organize["renameByName"], *organize.get("indexByName", ())}
    assert named <= columns
    assert panel["type"] != "table" or columns & {"peer_id"} <= named  # a key, and no column for readers by itself
    answering = columns - {*organize["excludeByName"]} | {*organize["renameByName"].values()}  # by old or new name
    for override in panel["fieldConfig"]["overrides"]:
        assert override["matcher"]["options"] in answering
    for series in panel["options"].get("series", ()):
        # By the first name: after the partition by peer each column has another display name.
        assert {series[axis]["matcher"]["options"] for axis in "xy"} == {"Value #A", "Value #B"}


def test_a_panel_explains_each_warning_and_each_reason() -> None:
    told = {
        panel["title"]: panel["description"]
        for file in BOARDS
        for panel in board(file)["panels"]
        if "description" in panel
    }
    kinds, reasons = told["Warnings by kind"], told["Refusals by reason"]
    assert [it for it in WARNINGS if f"{it}:" not in kinds] == []
    assert [it for it in Reason if not re.search(rf"\b{it}\b", reasons)] == []
    ahead, behind = f"{AHEAD:g} s ahead", f"{BEHIND:g} s behind"
    assert ahead in kinds and behind in kinds
