"""Rank 0 commands the other ranks of the peer and detects the loss of one.

The loss of a rank ends the peer, because no other rank has its shard of the weights. The peer leaves the swarm and
reports the reason in one line. Its next start resumes.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait

from torch import distributed

from peer.clock import slices
from peer.device.memory import is_out_of_memory
from peer.errors import RunError, UserError, one_line
from peer.logs import get_logger
from peer.replica.sharded import channel
from peer.replica.sharded.commands import Command, Leave, RankAnswer
from peer.replica.sharded.launch import Rank

log = get_logger("ranks")

RANK_TIMEOUT = 600.0  # seconds for a command; the first command builds the model
END_SECONDS = 20.0  # seconds from the loss of a rank to the end of the process, and for the other ranks to end
NOTICE_SECONDS = 5.0  # seconds from an error between ranks until the loss of a rank is known


class Ranks:
    """The other ranks. ``give_up`` prints a sentence, if it gets one, and ends the process at once, which hangs.
    ``lock``: held by the thread that uses the shared window.
    """

    def __init__(self, rank: Rank, give_up: Callable[[str], None]) -> None:
        self.rank, self._give_up = rank, give_up
        self.lost = ""  # why the peer cannot go on
        self._dismissed = self._left = False
        self._noticed, self._gone = threading.Event(), threading.Event()
        self.lock = threading.RLock()
        self.memory, self._lines = channel.gather(rank)
        self._answers: dict[int, queue.SimpleQueue[RankAnswer | None]] = {it: queue.SimpleQueue() for it in self._lines}
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    def tell(self, command: Callable[[int], Command]) -> None:
        """Send ``command(rank)`` to every rank. A rank carries out its commands one after the other."""
        with self.lock:
            for number, line in self._lines.items():
                self._require()
                try:
                    line.send(command(number))
                except OSError:
                    self._noticed.wait(NOTICE_SECONDS)
                    self._require()
                    raise RunError(f"rank {number} of this peer takes no commands; start again, it resumes") from None

    def ask(self, command: Command, meanwhile: Callable[[], None]) -> None:
        """Send a command to all ranks, run this rank's part of it, and wait until all ranks are done."""
        with self.lock:
            self.tell(lambda _: command)
            meanwhile()
            waits = slices(RANK_TIMEOUT)  # for all ranks together
            for number in self._answers:
                if self._answer_of(number, waits) is None:
                    self._require()

    def _answer_of(self, number: int, waits: Iterator[float]) -> RankAnswer | None:
        for patience in waits:
            with contextlib.suppress(queue.Empty):
                return self._answers[number].get(timeout=patience)
        raise RunError(f"rank {number} of this peer did not answer in {RANK_TIMEOUT:.0f} s; is it stopped?")

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Around a collective: after the loss of a rank the others see a broken connection only."""
        try:
            yield
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            self._noticed.wait(NOTICE_SECONDS)
            self._require()
            raise RunError(f"the ranks of this peer cannot go on together: {one_line(error, 200)}") from error

    def dismiss(self, code: int) -> None:
        """End all other ranks with this exit code."""
        self._dismissed = True
        for line in self._lines.values():
            with contextlib.suppress(OSError):
                line.send(Leave(code))
        if code == 0 and distributed.is_initialized():
            distributed.destroy_process_group()
        self._gone.wait(END_SECONDS)
        self._left = True

    def _require(self) -> None:
        if self.lost:
            raise RunError(self.lost)

    def _watch(self) -> None:
        numbers: dict[Connection, int] = {line.connection: number for number, line in self._lines.items()}
        while numbers:
            for connection in wait(list(numbers)):
                assert isinstance(connection, Connection)
                number = numbers[connection]
                name = f"rank {number} of this peer"
                try:
                    answer: RankAnswer = self._lines[number].receive()
                except (OSError, EOFError):
                    del numbers[connection]
                    self._lose(f"{name} has ended, and a part of the weights with it; see its output")
                    continue
                if answer:
                    self._lose(f"{name}: {answer}")
                else:
                    self._answers[number].put(answer)
        self._gone.set()

    def _lose(self, why: str) -> None:
        if self._dismissed or self.lost:
            return
        self.lost = why
        self._noticed.set()
        for answers in self._answers.values():
            answers.put(None)
        last = threading.Timer(END_SECONDS, self._end)
        last.daemon = True
        last.start()

    def _end(self) -> None:
        """The main thread waits in a collective that will never finish, or the end of the process for a thread that
        does; then the command has said why.
        """
        self._give_up("" if self._left else self.lost)


@contextmanager
def leading(rank: Rank | None, give_up: Callable[[str], None]) -> Iterator[Ranks | None]:
    """The other ranks, in rank 0, which end at the exit; ``None`` for a peer of one rank."""
    if rank is None:
        yield None
        return
    ranks = Ranks(rank, give_up)
    code = 1
    try:
        yield ranks
        code = 0
    except KeyboardInterrupt:
        if ranks.lost:  # torchrun sent the signal because of the lost rank
            raise RunError(ranks.lost) from None
        code = 0
        raise
    except UserError:
        code = 2
        raise
    finally:
        ranks.dismiss(code)
