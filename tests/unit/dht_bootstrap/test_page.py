"""The page's files: right types, nothing from other hosts, and no string from another peer can become code."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from dht_bootstrap import page
from peer.telemetry.http_server import HEADERS

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "dht_bootstrap" / "page"
FILES = sorted(file for file in FOLDER.iterdir() if file.suffix in (".html", ".css", ".js", ".svg"))
SCRIPTS = [file for file in FILES if file.suffix == ".js"]
ids = pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)


@ids
def test_each_file_is_served_with_its_type(file: Path) -> None:
    found = page.answer("/" if file.name == "index.html" else f"/{file.name}")
    assert found is not None
    body, content_type = found
    assert body == file.read_bytes()
    types = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
    assert content_type.partition(";")[0] == types[file.suffix]


@pytest.mark.parametrize(
    "path", ["", "/nothing", "/../monitor.py", "/__init__.py", "/%2e%2e/cli.py", "//", "/page.css/"]
)
def test_nothing_else_is_served(path: str) -> None:
    assert page.answer(path) is None


def test_a_query_changes_nothing() -> None:
    assert page.answer("/?from=mail") == page.answer("/")


def test_the_headers_allow_no_other_host() -> None:
    policy = HEADERS["Content-Security-Policy"]
    assert "default-src 'self'" in policy and "unsafe" not in policy
    assert HEADERS["X-Content-Type-Options"] == "nosniff"
    assert HEADERS["Cache-Control"] == "no-cache"


@ids
def test_nothing_comes_from_another_host(file: Path) -> None:
    text = file.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")  # a namespace, not an address
    assert not re.findall(r"(?:https?:)?//[\w.-]+\.\w+|@import|url\((?!#)", text)


@ids
def test_no_string_becomes_code(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    code = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\b|new Function|setHTML|srcdoc"
    assert not re.findall(code, text)
    if file.suffix == ".html":
        assert not re.findall(r"\son\w+=|\sstyle=|<style|javascript:", text)
        assert re.findall(r"<script[^>]*>", text) == ['<script type="module" src="page.js">']


def test_every_module_and_id_in_use_exists() -> None:
    html = (FOLDER / "index.html").read_text(encoding="utf-8")
    assert len(SCRIPTS) > 5
    for script in SCRIPTS:
        text = script.read_text(encoding="utf-8")
        for module in re.findall(r'from "\./([^"]+)"', text):
            assert (FOLDER / module).is_file(), f"{script.name}: {module}"
        for name in re.findall(r'\bat\("(\w+)"\)|find\("#(\w+)"\)', text):
            assert f'id="{name[0] or name[1]}"' in html, f"{script.name}: {name}"


@ids
def test_files_are_short_and_scripts_begin_with_a_comment(file: Path) -> None:
    lines = file.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 300
    if file.suffix == ".js":
        assert lines[0].startswith("// ")


def test_the_wheel_contains_the_files() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    patterns = data["dht_bootstrap.page"]
    assert all(any(file.match(pattern) for pattern in patterns) for file in FILES)
