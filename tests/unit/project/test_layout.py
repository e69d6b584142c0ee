"""The tree can be read from outside: few loose files, no crowded folder, one job a file, one meaning a name."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PRODUCT = sorted([*(ROOT / "peer").rglob("*.py"), *(ROOT / "dht_bootstrap").rglob("*.py")])
FOLDERS = sorted({file.parent for file in [*PRODUCT, *(ROOT / "tests").rglob("*.py")]})

PACKAGES = sorted({file.parent for file in PRODUCT} - {ROOT / "peer"})


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("file", PRODUCT, ids=relative)
def test_a_file_has_one_job_and_says_which(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert text.count("\n") <= 300
    tree = ast.parse(text)
    assert ast.get_docstring(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno:
            assert node.end_lineno - node.lineno < 60, f"{node.name} is too long"


@pytest.mark.parametrize("folder", FOLDERS, ids=relative)
def test_a_folder_has_at_most_fifteen_modules(folder: Path) -> None:
    assert len([file for file in folder.glob("*.py") if file.name != "__init__.py"]) <= 15


@pytest.mark.parametrize("package", PACKAGES, ids=relative)
def test_a_package_says_where_to_read_on(package: Path) -> None:
    """Its docstring names each of its modules and packages; those of ``peer`` are in its README.md."""
    said = ast.get_docstring(ast.parse((package / "__init__.py").read_text(encoding="utf-8"))) or ""
    modules = [f"{file.stem}.py" for file in package.glob("*.py") if not file.stem.startswith("__")]
    packages = [f"{init.parent.name}/" for init in package.glob("*/__init__.py")]
    assert [it for it in (*modules, *packages) if not re.search(rf"(?<!\w){re.escape(it)}", said)] == []


def test_peer_has_at_most_six_loose_files() -> None:
    assert len(list((ROOT / "peer").glob("*.py"))) <= 6


@pytest.mark.parametrize("kind", [ast.ClassDef, ast.Assign], ids=["class", "constant"])
def test_a_name_has_one_meaning(kind: type[ast.stmt]) -> None:
    """No public class and no constant of a module is defined in two files; each example is a program by itself."""
    found = defaultdict(set)
    for file in (it for it in PRODUCT if it.parent.name != "examples"):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, kind):
                for name in names(node):
                    found[name].add(relative(file))
    assert {name: files for name, files in found.items() if len(files) > 1} == {}


def names(node: ast.stmt) -> list[str]:
    """Those that others can import."""
    if isinstance(node, ast.ClassDef):
        return [] if node.name.startswith("_") else [node.name]
    assert isinstance(node, ast.Assign)
    targets = [it for target in node.targets for it in (target.elts if isinstance(target, ast.Tuple) else [target])]
    return [it.id for it in targets if isinstance(it, ast.Name) and it.id.isupper() and not it.id.startswith("_")]


def test_what_runs_in_a_users_program_makes_tensors_by_no_default_of_torch() -> None:
    """The program may have set another dtype or device (tests/unit/outer/test_torch_defaults.py)."""
    factories = {"empty", "zeros", "ones", "full", "tensor", "arange", "linspace", "rand", "randn", "randint", "eye"}
    rooms = ("api", "device", "exchange", "outer", "p2p", "rounds", "swarm", "training")
    loose = []
    for file in (it for room in rooms for it in (ROOT / "peer" / room).rglob("*.py") if it.parent.name != "examples"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in {f"torch.{it}" for it in factories}:
                given = {it.arg for it in node.keywords}
                loose += [f"{relative(file)}:{node.lineno}"] * (not {"dtype", "device"} <= given)
    assert loose == []
