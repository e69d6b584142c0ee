"""Small files and functions that fit a screen."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FILES = sorted([*(ROOT / "peer").rglob("*.py"), *(ROOT / "dht_bootstrap").rglob("*.py")])


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_a_file_has_one_job_and_says_which(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert text.count("\n") <= 300
    tree = ast.parse(text)
    assert ast.get_docstring(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno:
            assert node.end_lineno - node.lineno < 60, f"{node.name} is too long"
