"""promtool: the settings in docker/prometheus are valid, and alerts fire exactly when they should."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.unit.project.dashboards import PROMETHEUS, ROOT, rules

pytestmark = pytest.mark.needs("promtool")
CASES = sorted((ROOT / "tests" / "fixtures").glob("rules*.test.yml"))


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=120, check=False)


def test_the_configuration_and_its_rules_are_valid() -> None:
    done = promtool("check", "config", "--lint-fatal", str(PROMETHEUS / "prometheus.yml"))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("cases", CASES, ids=lambda path: path.name)
def test_rules_have_the_expected_results_for_healthy_and_other_swarms(cases: Path) -> None:
    done = promtool("test", "rules", str(cases))
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_rule_has_a_case() -> None:
    """A case names NolocoX in an ALERTS selector, or the recorded series."""
    cases = "".join(path.read_text(encoding="utf-8") for path in CASES)
    untested = {name for rule in rules() if (name := rule.get("alert") or rule["record"]) not in cases}
    assert untested <= {
        "peer:noloco_idle:share30m",
        "peer:noloco_idle:share2h",
        "peer:noloco_unmerged:seconds",
        "peer:noloco_unsaved:seconds",
    }  # tested by the alerts that use them
