"""The Go libp2p daemon (p2pd) as a child process in a session of its own.

We start it ourselves and attach hivemind to it. hivemind would leave it in the terminal's process group, where Ctrl+C
ends it before the peer has left the swarm. p2pd ends by itself when this process is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import socket
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from importlib.resources import files
from pathlib import Path
from queue import Empty, Queue
from zlib import crc32

from peer import clock
from peer.errors import RunError, UserError
from peer.logs import get_logger
from peer.p2p.addresses import listening, tcp_of
from peer.p2p.identity import load_or_create

log = get_logger("daemon")
_FOLDER_PREFIX = "noloco-"
# Bytes of the longest path of a Unix socket: macOS's, Linux has four more. What follows the folder's prefix in ours
LONGEST_SOCKET, SOCKET_NAME = 103, len("12345678/p2pclient-12345678901.sock")
# What p2pd reads of the environment, and no more: tokens of this user are not its business
DAEMON_VARIABLES = ("PATH", "HOME", "TMPDIR", "GODEBUG", "GOGC", "GOMAXPROCS", "GOMEMLIMIT", "GOTRACEBACK")
DAEMON_STOP_SECONDS = 5.0  # for p2pd to end by itself when it is told to
LINGERING = 10.0  # seconds: a p2pd ends after the peer that was killed, as a rule two seconds
PORT_LOOK_SECONDS = 0.2
QUESTION_SECONDS = 20.0  # between two questions whether it answers
HUNG_SECONDS = 300.0  # without an answer, after which none is awaited: a busy machine takes far less


class Daemon:
    """One running p2pd. ``sockets`` is the folder of its control socket and of hivemind's."""

    def __init__(
        self,
        *,
        identity: Path | None,
        address: str,
        announce: Sequence[str] = (),
        upnp: bool = False,
        relayed: bool = False,
        timeout: float = 60.0,
    ) -> None:
        """Start, and wait at most ``timeout`` seconds until it listens on ``address`` (a multiaddr).

        ``identity``: the file of its key; without one it has a new key. ``relayed``: others cannot dial this node.
        It tries to replace each relayed connection by a direct one then (hole punching).
        """
        _require_free(address)
        _require_short(tempfile.gettempdir())
        _remove_leftovers()
        self.sockets = Path(tempfile.mkdtemp(prefix=folder_prefix()))
        self.control = f"/unix{self.sockets}/p2pd.sock"
        self.key = identity or self.sockets / "identity.key"
        self._output: deque[str] = deque(maxlen=20)
        self._ready: Queue[bool] = Queue()
        self._process: subprocess.Popen[str] | None = None
        self._hangs = False
        self._reader = threading.Thread(target=self._read, name="p2pd-output", daemon=True)
        try:
            load_or_create(self.key)
            self._process = self._started(address, announce, upnp=upnp, relayed=relayed)
            self._reader.start()
            self._wait(timeout, address)
        except BaseException:  # Ctrl+C too
            self.stop()
            raise

    def _started(self, address: str, announce: Sequence[str], *, upnp: bool, relayed: bool) -> subprocess.Popen[str]:
        command = [
            str(files("hivemind.hivemind_cli") / "p2pd"),
            f"-listen={self.control}",
            f"-hostAddrs={address}",
            "-dhtClient=1",  # dht/whereabouts.py replaces its server
            *(["-forceReachabilityPrivate=1"] if relayed else []),
            "-relay=1",
            "-relayService=0",  # reachability/relay.py replaces the daemon's own
            "-autonat=1",
            "-connManager=1",
            "-tls=1",
            "-idleTimeout=30s",
            f"-natPortMap={int(upnp)}",
            f"-id={self.key}",
            *([f"-announceAddrs={','.join(announce)}"] if announce else []),
        ]
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
            errors="replace",
            env={name: os.environ[name] for name in DAEMON_VARIABLES if name in os.environ}
            | {"GOLOG_LOG_LEVEL": "error"},
        )

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def failure(self) -> str:
        """How it has died, or that it hangs, in one line; empty while it works."""
        if self._process is not None and self._process.poll() is None:
            hangs = f"the p2p daemon (pid {self.pid}) hangs: it gave no answer for {HUNG_SECONDS:.0f} s"
            return hangs if self._hangs else ""
        return f"the p2p daemon (pid {self.pid}) has died: {self._output[-1] if self._output else 'no output'}"

    async def watch(self, ask: Callable[[], Awaitable[object]]) -> None:
        """``ask`` it for something now and then, until :attr:`failure`. The time of a freeze of ours does not count."""
        while not self.failure:
            for pause in clock.slices(HUNG_SECONDS, QUESTION_SECONDS):
                await asyncio.sleep(pause)
                with contextlib.suppress(Exception):  # hivemind raises many types
                    await ask()
                    break
            else:
                self._hangs = True

    def stop(self, timeout: float = DAEMON_STOP_SECONDS) -> None:
        """End the process and remove its sockets. It is killed after ``timeout`` seconds. Stopping twice is fine."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            try:
                self._process.wait(timeout)
            except subprocess.TimeoutExpired:
                self._process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(timeout)  # it is as good as gone: this only reaps it
            if self._reader.is_alive():
                self._reader.join(timeout)
        shutil.rmtree(self.sockets, ignore_errors=True)

    def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        for line in self._process.stdout:
            self._output.append(line.strip())
            log.debug("p2pd: %s", line.strip())
            if line.startswith("Peer ID:"):
                self._ready.put(True)
        self._process.stdout.close()
        self._ready.put(False)

    def _wait(self, timeout: float, address: str) -> None:
        try:
            started = self._ready.get(timeout=timeout)
        except Empty:
            raise RunError(
                f"the p2p daemon did not start within {timeout:.0f} s; "
                "raise peer.network.start_timeout on a slow machine"
            ) from None
        if started:
            return
        said = " ".join(self._output)
        if "address already in use" in said:
            raise _occupied(address)
        if "cannot assign requested address" in said:
            raise UserError(f"no such address on this machine: {address}; set the host to 0.0.0.0 or a local address")
        _, wrong, which = said.partition("failed to parse multiaddr ")
        if wrong:
            raise UserError(
                f"not an address: {which}; a host to listen on is an IPv4 address, a port at most 65535, and what is "
                "announced is as /ip4/203.0.113.7/tcp/31337"
            )
        raise RunError(f"the p2p daemon did not start: {said[-300:] or 'no output'}")


def _require_free(address: str) -> None:
    """p2pd shares its port with another one of the same user, and the kernel spreads the callers over both."""
    place = tcp_of(address)
    if place is None:  # any free port
        return
    for pause in clock.slices(LINGERING, PORT_LOOK_SECONDS):
        try:
            listening(*place).close()
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                clock.sleep(pause)
                continue
        return  # p2pd itself says what else is wrong with the address
    raise _occupied(address)


def _require_short(folder: str) -> None:
    """Where a socket has no room, hivemind says nothing: this node would train alone, as others could not call it."""
    excess = len(os.fsencode(Path(folder, folder_prefix()))) + SOCKET_NAME - LONGEST_SOCKET
    if excess > 0:
        raise UserError(
            f"the path of the temporary folder {folder} is {excess} bytes too long for a socket in it; set TMPDIR to a "
            "shorter one"
        )


def _occupied(address: str) -> UserError:
    return UserError(f"port occupied: cannot listen on {address}; choose another port, or 0 for any free one")


def folder_prefix() -> str:
    """Of this process' temporary folders. After a kill the next daemon of this machine removes them."""
    return f"{_FOLDER_PREFIX}{os.getpid()}-{_machine()}-"


def _machine() -> str:
    """Where a process id is this one's: other machines (NFS) or containers may see the same temporary folder. Short, as
    the path of a socket is.
    """
    link = Path("/proc/self/ns/pid")
    return f"{crc32(f'{socket.gethostname()} {link.exists() and link.readlink()}'.encode()) & 0xFFFF:04x}"


def _remove_leftovers() -> None:
    """Folders of processes that were killed before they could clean up."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER_PREFIX}*-{_machine()}-*"):
        pid = folder.name.removeprefix(_FOLDER_PREFIX).partition("-")[0]
        if pid.isdigit() and not Path("/proc", pid).exists() and Path("/proc").exists():
            shutil.rmtree(folder, ignore_errors=True)
