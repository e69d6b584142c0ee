"""The page ``/`` of the monitor: static files that show ``/swarm.json``. No build step, no library.

``answer("/")`` is the page; monitor.py sends it. The reading order is page.js, run.js, then its parts.
"""

from __future__ import annotations

from importlib import resources

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_FILES = {
    "/" if file.name == "index.html" else f"/{file.name}": file
    for file in resources.files(__name__).iterdir()
    if file.name.rpartition(".")[2] in _TYPES
}


def answer(path: str) -> tuple[bytes, str] | None:
    """Body and content type of a path of the page; ``None`` when there is no such file."""
    file = _FILES.get(path.partition("?")[0])
    return None if file is None else (file.read_bytes(), _TYPES[file.name.rpartition(".")[2]])
