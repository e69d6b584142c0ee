"""One run: the processes of a method in the network laboratory, from their start to the exit of the last one."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.wan.reference import ADDRESS, Seat
from tests.benchmarks.wan.stages import Method, Stage
from tests.netlab.lab import Lab
from tests.netlab.peers import Child, LabSwarm
from tests.netlab.tun import DEVICE
from tests.swarm.support.warm import warm
from tests.whole_tail import WholeTail

START, STOP = 150.0, 60.0  # seconds until all have made a step, and for the straggler to end
SLOWEST = 4.0  # times the set time of all steps: then the run is given up


@dataclass(frozen=True)
class PeerRun:
    """One peer. ``pacer``: what pacer.py wrote; ``exited``: when its process ended, of the same clock; ``tail``: its
    rounds, where it is ours."""

    pacer: dict[str, Any]
    exited: float
    sent: int
    tail: WholeTail | None = None


def run(stage: Stage, method: Method, folder: Path) -> list[PeerRun]:
    """By peer; the straggler is the last one. Raises ``RuntimeError`` when a peer fails or the run takes too long."""
    return (_library if method.library else _ours)(stage, method, folder)


def _ours(stage: Stage, method: Method, folder: Path) -> list[PeerRun]:
    names = [f"peer-{index}" for index in range(stage.peers)]
    with LabSwarm(stage.plan, stage.peers, folder, warm=True) as swarm:
        processes = [
            swarm.peer(
                index + 1,
                name,
                method.config,
                stage.overrides(method),
                module="tests.benchmarks.wan.paced_peer",
                environment=_environment(stage, folder, index),
            )
            for index, name in enumerate(names)
        ]
        exits = _watch(stage, processes, folder)
        return [
            PeerRun(_read(folder, index), exits[index], swarm.lab.sent(index + 1), swarm.tail(name))
            for index, name in enumerate(names)
        ]


def _library(stage: Stage, method: Method, folder: Path) -> list[PeerRun]:
    with Lab(stage.plan, stage.peers + 1) as lab, ExitStack() as stack:

        def start(host: int, role: str, more: Mapping[str, str]) -> Child:
            seat = Seat(
                method.library,
                stage.options(method),
                method.config,
                stage.overrides(method),
                lab.address(host),
                max(host - 1, 0),
                stage.peers,
                str(folder),
            )
            words = ["-m", "tests.benchmarks.wan.reference", role, json.dumps(asdict(seat))]
            environment = {**os.environ, "GLOO_SOCKET_IFNAME": DEVICE, **more}
            child = warm().start(words, folder / f"{role}-{host}.log", environment, lab.namespace(host))
            stack.callback(_kill, child)
            return child

        start(0, "serve", {})
        _until((folder / ADDRESS).exists, START, folder)
        hosts = range(1, stage.peers + 1)
        processes = [start(host, "train", _environment(stage, folder, host - 1)) for host in hosts]
        exits = _watch(stage, processes, folder)
        return [PeerRun(_read(folder, host - 1), exits[host - 1], lab.sent(host)) for host in hosts]


def _environment(stage: Stage, folder: Path, index: int) -> dict[str, str]:
    drift = {"DRIFT": "1"} if stage.drift else {}
    return {"PACE": str(stage.paces()[index]), "PACER_FILE": str(folder / f"{index}.pacer.json"), **drift}


def _read(folder: Path, index: int) -> dict[str, Any]:
    file = folder / f"{index}.pacer.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return found


def _watch(stage: Stage, processes: Sequence[Child], folder: Path) -> dict[int, float]:
    """When each process ended. With a straggler the run ends with the last of the others; then it is asked to stop."""
    exits: dict[int, float] = {}
    fast = range(len(processes) - stage.straggler)

    def ended(wanted: Sequence[int]) -> bool:
        for index, process in enumerate(processes):
            code = process.poll()
            if index not in exits and code is not None:
                exits[index] = time.monotonic()
                if code:
                    raise RuntimeError(f"peer {index} ended with {code}:\n{_logs(folder)}")
        return all(index in exits for index in wanted)

    _until(lambda: ended(fast), START + SLOWEST * stage.steps * stage.pace, folder)
    everyone = range(len(processes))
    for index in everyone:
        if index not in exits:
            processes[index].send_signal(signal.SIGTERM)
    with suppress(RuntimeError):  # a library's process that does not end then is killed
        _until(lambda: ended(everyone), STOP, folder)
    return {index: exits.get(index, time.monotonic()) for index in everyone}


def _until(look: Callable[[], bool], seconds: float, folder: Path) -> None:
    deadline = time.monotonic() + seconds
    while not look():
        if time.monotonic() > deadline:
            raise RuntimeError(f"not within {seconds:.0f} s:\n{_logs(folder)}")
        time.sleep(0.05)


def _logs(folder: Path) -> str:
    return "\n".join(f"{file.name}: {file.read_text(errors='replace')[-400:]}" for file in sorted(folder.glob("*.log")))


def _kill(process: Child) -> None:
    """With its whole session: both libraries start processes."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(10)
