"""The Makefile says what its targets do, and a commit is held to what its lint target runs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[3]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = re.findall(r"^([a-z][\w-]*):", MAKEFILE, re.MULTILINE)


def test_the_hooks_of_a_commit_run_what_lint_runs() -> None:
    recipe = re.findall(r"^lint:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)[0]
    lint = [line.strip().replace("$(BIN)", ".venv/bin") for line in recipe.splitlines()]
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    assert local["repo"] == "local"
    assert [hook["entry"] for hook in local["hooks"]] == lint
    for hook in local["hooks"]:
        assert set(hook) == {"id", "name", "entry", "language", "pass_filenames"}
        assert (hook["language"], hook["pass_filenames"]) == ("system", False)


@pytest.mark.skipif(not shutil.which("make"), reason="make is not installed")
def test_help_lists_every_target_with_a_line() -> None:
    # This test itself runs under `make test`: an inner make that inherits its variables prints more lines.
    own = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    make = subprocess.run(["make", "help"], cwd=ROOT, env=own, capture_output=True, text=True, timeout=30, check=True)
    said = make.stdout
    rows = [line.split(maxsplit=1) for line in said.splitlines()]
    assert [row[0] for row in rows] == TARGETS
    assert all(len(row) == 2 for row in rows)


def test_the_parts_of_make_test_run_no_long_tests() -> None:
    for target in ("test", "unit", "simulated", "smoke"):
        recipe = re.findall(rf"^{target}:.*\n\t(.*)", MAKEFILE, re.MULTILINE)[0]
        assert re.search(r'-m ("not long|smoke )', recipe), recipe


def test_every_target_is_phony() -> None:
    assert set(re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)[0].split()) == set(TARGETS)
