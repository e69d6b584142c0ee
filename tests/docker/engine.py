"""A temporary Docker engine: ``with Engine() as engine: engine.docker("ps")``. The exit removes all of it.

Its images, volumes and sockets are in a folder in /tmp. Without a network namespace it makes no bridge and no firewall
rules, which is enough for a build. In a network namespace it works as on a separate machine.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tests.docker.compose import FOLDER, for_old_compose

START = 60.0  # seconds
KEEP_OUT = ("--bridge=none", "--iptables=false", "--ip6tables=false", "--ip-forward=false")
PLACES = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/bin"


def missing() -> str:
    """What this machine lacks and how to install it; empty if nothing is missing."""
    if os.geteuid() != 0:
        return "a temporary Docker engine needs root"
    if not all(shutil.which(name, path=PLACES) for name in ("dockerd", "runc", "iptables")):
        return "no dockerd, runc or iptables: apt-get install docker.io iptables"
    if not _compose():
        return "neither docker compose nor docker-compose: apt-get install docker-compose"
    return ""


class Engine:
    """``network``: the file of a network namespace. ``data``: the folder of a stopped engine, which is reused."""

    def __init__(self, network: str | None = None, data: Path | None = None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="noloco-docker-"))
        self._network = network
        if data is not None:
            for part in data.iterdir():  # links to image layers, which no engine writes to
                how = ["cp", "--archive", *(["--link"] if part.name == "overlay2" else [])]
                (self.folder / "data").mkdir(exist_ok=True)
                subprocess.run([*how, str(part), str(self.folder / "data")], check=True, timeout=600)

    def __enter__(self) -> Engine:
        inside = ["nsenter", f"--net={self._network}"] if self._network else []
        folders = [f"--{it}={self.folder}/{it.removesuffix('-root')}" for it in ("data-root", "exec-root", "pidfile")]
        with (self.folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *("setpriv", "--pdeathsig", "TERM", *inside, "dockerd", f"--host={self._host}", *folders),
                    *("--exec-opt=native.cgroupdriver=cgroupfs", *(() if inside else KEEP_OUT)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "PATH": PLACES},
            )
        deadline = time.monotonic() + START
        while self.docker("info", check=False).returncode:
            if time.monotonic() > deadline or self._process.poll() is not None:
                said = (self.folder / "log").read_text()[-2000:]
                self.__exit__(None, None, None)
                raise RuntimeError(f"the engine did not start: {said}")
            time.sleep(0.2)
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()
        shutil.rmtree(self.folder)

    def stop(self) -> Path:
        """Stop the engine and all its containers; returns its data folder, which stays."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        mounted = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
        for place in sorted((it for it in mounted if it.startswith(f"{self.folder}/")), reverse=True):
            subprocess.run(["umount", "--lazy", place], check=False, timeout=30)
        return self.folder / "data"

    @property
    def _host(self) -> str:
        return f"unix://{self.folder}/socket"

    def docker(
        self, *arguments: str, timeout: float = 60.0, check: bool = True, stdin: int = subprocess.DEVNULL
    ) -> subprocess.CompletedProcess[str]:
        """``docker ARGUMENTS``; with ``check`` a failure raises with the command's output."""
        return self._run([_client(), *arguments], {}, timeout, check, stdin)

    def compose(
        self, file: str, arguments: Sequence[str], environment: Mapping[str, str], timeout: float = 300.0
    ) -> subprocess.CompletedProcess[str]:
        """``docker compose -f docker/FILE ARGUMENTS``, or the same with the old docker-compose."""
        command = [*_compose()]
        path, project = FOLDER / file, "noloco" if file == "compose.yaml" else "noloco-peer"
        if command == ["docker-compose"]:
            path = for_old_compose(file, self.folder)
            command = [*command, "--project-directory", str(FOLDER), "--project-name", project]
        return self._run([*command, "-f", str(path), *arguments], environment, timeout, True)

    def volume(self, name: str) -> Path:
        """The folder of a volume on this machine."""
        return self.folder / "data" / "volumes" / name / "_data"

    def _run(
        self, command: list[str], more: Mapping[str, str], timeout: float, check: bool, stdin: int = subprocess.DEVNULL
    ) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "DOCKER_HOST": self._host, "DOCKER_CONFIG": str(self.folder / "client")}
        done = subprocess.run(
            command,
            env={**environment, "DOCKER_BUILDKIT": "1", **more},
            stdin=stdin,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}")
        return done


@functools.cache
def _client() -> str:
    """A docker command that can build with BuildKit: version 20.10, or a later one with the plugin."""
    found = [it for place in PLACES.split(":") if (it := shutil.which("docker", path=place))]
    for client in found:
        with suppress(OSError, subprocess.SubprocessError):
            version = subprocess.run([client, "--version"], capture_output=True, text=True, timeout=20).stdout
            if " 20." in version or _works([client, "buildx", "version"]):
                return client
    raise RuntimeError("no docker command with BuildKit: apt-get install docker.io, or the plugin buildx")


@functools.cache
def _compose() -> list[str]:
    for command in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(command[0], path=PLACES) and _works([*command, "version"]):
            return command
    return []


def _works(command: list[str]) -> bool:
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, timeout=30).returncode == 0
    return False
