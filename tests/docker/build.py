"""Builds the image from the Dockerfile, on BASE from the environment or on a small Debian that debootstrap makes.

pip in the build uses this machine's pip settings: they are a build secret. Folders of wheels are served on loopback.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.docker.compose import ROOT, load
from tests.docker.engine import Engine

IMAGE: str = load("compose.yaml")["services"]["bootstrap"]["image"]
BASE = "localhost/python-base"
PACKAGES = "python3,python3-venv,ca-certificates,tzdata"


def build(engine: Engine, *, timeout: float = 1500.0) -> None:
    """Build ``IMAGE`` in ``engine``."""
    base = os.environ.get("BASE")
    if not base:
        _import_base(engine)
        base = BASE
    with tempfile.TemporaryDirectory(prefix="noloco-pip-") as folder, _pip_settings(Path(folder)) as secrets:
        arguments = [
            "--network=host",
            "--build-arg",
            f"BASE={base}",
            *secrets,
            "--file",
            str(ROOT / "docker/Dockerfile"),
        ]
        engine.docker("build", "--progress=plain", *arguments, "--tag", IMAGE, str(ROOT), timeout=timeout)


def _import_base(engine: Engine) -> None:
    if not shutil.which("debootstrap"):
        raise RuntimeError("no BASE in the environment and no debootstrap: apt-get install debootstrap")
    root = engine.folder / "base"
    try:
        subprocess.run(
            ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", _suite(), str(root)],
            capture_output=True,
            check=True,
            timeout=600,
        )
        with subprocess.Popen(["tar", "-C", str(root), "-c", "."], stdout=subprocess.PIPE) as tar:
            assert tar.stdout is not None
            engine.docker("import", "-", BASE, stdin=tar.stdout.fileno(), timeout=300)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _suite() -> str:
    """The Debian release of this machine, whose packages it can download."""
    release = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)
    return release["VERSION_CODENAME"].strip('"')


@contextlib.contextmanager
def _pip_settings(folder: Path) -> Iterator[list[str]]:
    """Arguments of ``docker build`` that give pip there the settings of pip here, but for paths of this machine."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, timeout=60)
    settings = {}
    for line in listed.stdout.splitlines():
        key, _, value = line.partition("=")
        settings[key.rpartition(".")[2]] = value.strip("'\"")
    certificates = settings.pop("cert", None)
    wheels = [it.removeprefix("file://") for it in settings.pop("find-links", "").split()]
    elsewhere = {key: it for key, it in settings.items() if "file:" not in it and not it.startswith("/")}
    lines = ["[global]", *(f"{key} = {value}" for key, value in elsewhere.items())]
    with contextlib.ExitStack() as stack:
        served = [stack.enter_context(_serving(Path(it))) if it.startswith("/") else it for it in wheels]
        lines += [f"find-links = {' '.join(served)}"] if served else []
        lines += ["cert = /run/secrets/ca"] if certificates else []
        (folder / "pip.conf").write_text("\n".join(lines) + "\n")
        secrets = [f"--secret=id=pip,src={folder}/pip.conf"]
        yield [*secrets, f"--secret=id=ca,src={certificates}"] if certificates else secrets


@contextlib.contextmanager
def _serving(folder: Path) -> Iterator[str]:
    """Serve a folder over HTTP on loopback."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join(5)
