"""What some tests need of the machine: ``@pytest.mark.needs("chromium")``.

Without it they are skipped, so that ``make test`` runs on any machine. In CI, where ``.ci/tools`` installs the
programs, they fail: otherwise nobody would notice that they no longer run.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from importlib.util import find_spec

import pytest

from tests.netlab.tun import possible


def program(name: str, package: str) -> Callable[[], str]:
    return lambda: "" if shutil.which(name) else f"no {name}: apt-get install --no-install-recommends {package}"


MISSING: dict[str, Callable[[], str]] = {  # why the machine lacks it; empty when it does not
    "laboratory": possible,
    "iptables": program("iptables", "iptables"),
    "prometheus": program("prometheus", "prometheus"),
    "promtool": program("promtool", "prometheus"),
    "chromium": program("chromium", "chromium"),
    "systemd-analyze": program("systemd-analyze", "systemd"),
    "lm_eval": lambda: "" if find_spec("lm_eval") else "the extra `eval` is not installed: make long",
}


def check(item: pytest.Item) -> None:
    """Skip a test whose needs this machine lacks, or fail it in CI."""
    for mark in item.iter_markers("needs"):
        for what in mark.args:
            missing = MISSING[what]()
            if missing and os.environ.get("CI") == "true":
                pytest.fail(f"CI must not skip it: {missing}", pytrace=False)
            if missing:
                pytest.skip(missing)
