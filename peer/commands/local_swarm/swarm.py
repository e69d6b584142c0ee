"""A bootstrap node and N peers as separate processes on this machine, until all of them have ended."""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from types import FrameType
from typing import Any

from peer.commands.local_swarm.summary import in_words, summarize
from peer.commands.local_swarm.table import SwarmView
from peer.commands.local_swarm.tail import Tail
from peer.config.schema import Config
from peer.device.accelerator import one_each
from peer.errors import RunError, UserError, tell
from peer.process import Child, Stop, cores, stop_signals
from peer.training.run_folder import require_folder, set_aside, write_figures
from peer.training.state import BEGIN_ANEW_ADVICE

POLL_SECONDS = 0.25  # between two looks at the peers, and so between two tables
START_SECONDS = 60.0  # for the bootstrap node to listen
STOP_SECONDS = 900.0  # to finish a step and a swap, and to save: a large model's checkpoint takes minutes
READY_LINE = re.compile(r" ready: .*\bhttp=(\S+)")  # a bootstrap node prints it when it listens
READY_LOOK = 0.05  # seconds between two looks for it
RESTARTS = 3  # of a member that crashes; it continues from its last checkpoint
LOCAL_HOST = "127.0.0.1"
SWARM_ANEW_ADVICE = "choose another run.dir, or leave out --resume to begin anew (this run is moved to before-<time>)"
MEMBER = "peer-"  # and its number: a member's name
# What only one peer of a machine can have, and what no member of this swarm needs. A member resumes whatever the file
# says: the launcher has moved the earlier run aside, or was asked to resume it.
SEVERAL_ON_ONE_MACHINE = (
    "peer.identity=null",
    "peer.stream=null",
    "peer.network.port=0",
    "peer.network.reach=auto",
    "peer.network.announce=[]",
    "peer.metrics.port=0",
    "peer.metrics.announce=null",
    "run.admission=open",
    "run.owner=null",
    "peer.invitation=null",
    "peer.checkpoint.resume=true",
)


class LocalSwarm:
    """Runs to the end, or until the first SIGINT or SIGTERM; then all members finish their step and save."""

    def __init__(
        self, config: Config, files: Sequence[Path], overrides: Sequence[str], *, peers: int, resume: bool
    ) -> None:
        self._config, self._files, self._overrides = config, files, list(overrides)
        self._folder = config.run.dir.resolve()
        self._names = [f"{MEMBER}{index}" for index in range(peers)]
        self._resume = resume
        self._stop = Stop()
        self._terminals = [output.fileno() for output in (sys.stdout, sys.stderr) if output.isatty()]
        self._page = self._address = ""  # the URL of the bootstrap node's page, until it is printed; its address
        self._children: list[Child] = []

    def run(self) -> int:
        """The exit code: 0 done or asked to stop, 1 when a member failed."""
        require_folder(self._folder)
        members = _members_in(self._folder)
        if self._resume and not members:
            raise UserError(f"--resume: no peer is in {self._folder}; check run.dir, or leave out --resume")
        before = {number: signal.signal(number, self._interrupt) for number in stop_signals()}
        if not self._resume:
            set_aside(self._folder, [*members, "bootstrap", "summary.json"])
        began = time.monotonic()
        try:
            tails = [Tail(name, self._folder / name) for name in self._names]
            for tail in tails:
                tail.poll()  # a resumed run does not show its earlier rounds again
            earlier = max(tail.seconds for tail in tails)
            peers = self._start()
            if not peers:
                return 0
            failed = self._watch(peers, tails)
        finally:
            stop_all(self._children[::-1])
        for number in (signal.SIGINT, signal.SIGTERM):  # not SIGHUP: the figures are for later, too
            signal.signal(number, before[number])
        for tail in tails:
            tail.poll()
        if len(failed) == len(peers) and all(child.exit_code() == 2 for child in failed):
            said = failed[0].last_line().removeprefix("error: ")
            raise UserError(said.replace(BEGIN_ANEW_ADVICE, SWARM_ANEW_ADVICE))
        for child in failed:
            tell(f"{child.name} failed: {child.last_line()} (see {child.console})", flush=False)
        self._save(summarize(self._config, tails, earlier + time.monotonic() - began))
        return 1 if failed else 0

    def _start(self) -> list[Child]:
        """The peers, each with a GPU of its own as far as there are several. None begins after a stop."""
        gpus = one_each(self._config.peer.device) or [{}]
        addresses_file = self._folder / "bootstrap" / "addresses"
        require_folder(addresses_file.parent)
        addresses_file.unlink(missing_ok=True)
        arguments = ["--host", LOCAL_HOST, "--port", "0", "--http-port", "0", "--stop-with-parent"]
        arguments += ["--identity", str(self._folder / "bootstrap" / "identity.key")]
        arguments += ["--addresses-file", str(addresses_file)]
        bootstrap = self._spawn("bootstrap", "dht_bootstrap", arguments)
        monitor = monitor_of(bootstrap, self._stop)
        if self._stop.requested:
            return []
        try:
            addresses = addresses_file.read_text(encoding="utf-8").split()
        except OSError as error:  # the node could not write it
            raise RunError(f"cannot read {addresses_file}: {error.strerror}; see {bootstrap.console}") from None
        threads = max(1, cores() // len(self._names))
        common = [f"peer.network.host={LOCAL_HOST}", f"peer.threads={threads}", f"peer.start_with={len(self._names)}"]
        common += [*self._overrides, *SEVERAL_ON_ONE_MACHINE]
        if self._config.peer.network.bulk_port != "off":
            common.append("peer.network.bulk_port=auto")
        sets = [argument for override in common for argument in ("--set", override)]
        self._page, self._address = f"http://{monitor}/", addresses[0]
        bootstrap.arguments += ["--port", addresses[0].partition("/tcp/")[2].partition("/")[0]]
        bootstrap.arguments += ["--http-port", monitor.rpartition(":")[2]]  # a restarted one listens on the same ports
        train = ["train", "--config", *map(str, self._files), *sets]
        train += ["--initial-peers", *addresses, "--stop-with-parent"]
        first, *others = (["--set", f"peer.name={name}"] for name in self._names)
        others = [[*words, "--set", "peer.push=null"] for words in others]  # they would push over each other
        if 1 < len(gpus) < len(self._names):
            print(f"warning: {len(self._names)} peers share {len(gpus)} GPUs; --peers {len(gpus)} gives each its own")
        members = zip(self._names, [first, *others], cycle(gpus), strict=False)
        return [
            self._spawn(name, "peer", [*train, *words], gpu) for name, words, gpu in members if not self._stop.requested
        ]

    def _spawn(
        self, name: str, module: str, arguments: list[str], environment: Mapping[str, str] | None = None
    ) -> Child:
        require_folder(self._folder / name)
        child = Child(name, module, arguments, self._folder / name / "console.log", environment)
        self._children.append(child)
        return child

    def _watch(self, peers: Sequence[Child], tails: Sequence[Tail]) -> list[Child]:
        """Until all have ended. A member that fails does not end the others; it is started again, a few times."""
        title = f"{self._config.run.name}: {self._config.run.outer.name}, {len(peers)} peers"
        try:
            with SwarmView(title, self._config.run.steps) as view:
                while not self._stop.requested:
                    running = [child for child in peers if child.exit_code() is None]
                    self._show(view, tails)
                    if not self._revive(view) and not running:
                        break
                    time.sleep(POLL_SECONDS)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            self._interrupt(signal.SIGHUP, None)  # the terminal is closed; its signal may come some ms later
        good = {0}
        if self._stop.requested:
            tell("asked to stop: every peer finishes its step and saves; once more to stop now", flush=False)
            stop_all(peers)
            good.add(-signal.SIGINT)  # of a member that was still starting
        return [child for child in peers if child.exit_code() not in good]

    def _show(self, view: SwarmView, tails: Sequence[Tail]) -> None:
        fresh = [(tail, row) for tail in tails for row in tail.poll()]
        if fresh and self._page:  # not earlier: when a peer is refused, its error is the only line
            view.say(f"the swarm as a page: {self._page}")
            view.say(f"one more peer, in another terminal: noloco-peer join {self._address}")
            self._page = ""
        view.show(tails, fresh)

    def _revive(self, view: SwarmView) -> bool:
        """Restart the members that have crashed; returns whether there were any."""
        crashed = [child for child in self._children if child.crashed and child.restarts < RESTARTS]
        for child in crashed:
            view.say(f"{child.name} {child.restart()}; started again ({child.restarts} of at most {RESTARTS} times)")
        return bool(crashed)

    def _save(self, summary: dict[str, Any]) -> None:
        path = self._folder / "summary.json"
        try:  # before the words: their reader may have gone
            write_figures(path, summary)
        finally:
            print(f"\n{in_words(summary)}")
        print(f"Figures: {path}")

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:  # a terminal that is closed sends it twice, and takes no text any more
            for terminal in self._terminals:
                os.dup2(os.open(os.devnull, os.O_WRONLY), terminal)
        elif self._stop.requested:
            for child in self._children:  # a second signal stops all at once
                child.ask_to_stop()
        self._stop.request()


def _members_in(folder: Path) -> list[str]:
    """The members of an earlier run, which may have had more of them."""
    return [path.name for path in folder.glob(f"{MEMBER}*") if path.name.removeprefix(MEMBER).isdecimal()]


def monitor_of(bootstrap: Child, stop: Stop) -> str:
    """Wait for the bootstrap node; HOST:PORT of its page, empty after a stop. Raises :class:`RunError` when it ends or
    is late.
    """
    deadline = time.monotonic() + START_SECONDS
    while not (ready := READY_LINE.search(bootstrap.output())):
        if stop.requested:
            return ""
        if bootstrap.exit_code() is not None:
            raise RunError(f"the bootstrap node ended: {bootstrap.last_line()}")
        if time.monotonic() > deadline:
            raise RunError(f"the bootstrap node did not start within {START_SECONDS:.0f} s; see {bootstrap.console}")
        time.sleep(READY_LOOK)
    return ready[1]


def stop_all(children: Sequence[Child]) -> None:
    """Ask all to stop, then wait for all, with one deadline."""
    for child in children:
        child.ask_to_stop()
    deadline = time.monotonic() + STOP_SECONDS
    for child in children:
        child.wait(deadline)
