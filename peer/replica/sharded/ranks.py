"""Rank 0's side of its crew, the other ranks of the peer: tell them what to do, and notice when one is gone.

A rank that is lost takes the peer with it: its shard of the weights is nowhere else. The peer leaves the swarm, says
why in one line, and its next start resumes.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait

import torch
from torch import distributed

from peer.errors import RunError, UserError
from peer.logs import get_logger
from peer.process import slices
from peer.replica.sharded import channel
from peer.replica.sharded.commands import Answer, Failed, Order, Stop
from peer.replica.sharded.launch import Rank

log = get_logger("ranks")

PATIENCE = 600.0  # seconds for an order; the first one builds the model
LEAVING = 20.0  # seconds from the loss of a rank to the end of the process, and for the others to go
NOTICE = 5.0  # seconds from an error between ranks until it is known that one is lost


class Crew:
    """The other ranks. ``give_up`` says a sentence and ends the process at once: for a main thread that hangs."""

    def __init__(self, rank: Rank, give_up: Callable[[str], None]) -> None:
        self.rank, self._give_up = rank, give_up
        self.lost = ""  # why the peer cannot go on
        self._dismissed = False
        self._noticed, self._gone = threading.Event(), threading.Event()
        self._lock = threading.RLock()
        self.memory, self._lines = channel.gather(rank)
        self._answers: dict[int, queue.SimpleQueue[Answer | None]] = {it: queue.SimpleQueue() for it in self._lines}
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """While one thread uses the window that all orders share."""
        with self._lock:
            yield

    def tell(self, order: Callable[[int], Order]) -> None:
        """``order(rank)`` to every rank; they carry out their orders one after the other."""
        with self._lock:
            for number, line in self._lines.items():
                self._require()
                try:
                    line.send(order(number))
                except OSError:
                    self._noticed.wait(NOTICE)
                    self._require()
                    raise RunError(f"rank {number} of this peer takes no orders; start again, it resumes") from None

    def ask(self, order: Order, meanwhile: Callable[[], None]) -> None:
        """One order to all, this rank's own part of it, and wait until everybody has done theirs."""
        with self._lock:
            self.tell(lambda _: order)
            meanwhile()
            waits = slices(PATIENCE)  # for all of them
            for number in self._answers:
                if self._answer_of(number, waits) is None:
                    self._require()

    def _answer_of(self, number: int, waits: Iterator[float]) -> Answer | None:
        for patience in waits:
            with contextlib.suppress(queue.Empty):
                return self._answers[number].get(timeout=patience)
        raise RunError(f"rank {number} of this peer did not answer in {PATIENCE:.0f} s; is it stopped?")

    @contextmanager
    def together(self) -> Iterator[None]:
        """Around what all ranks do in step: when one is gone the others see nothing but a broken connection."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._noticed.wait(NOTICE)
            self._require()
            said = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
            raise RunError(f"the ranks of this peer cannot go on together: {said}") from error

    def dismiss(self, code: int) -> None:
        """Send everybody home, with this exit code."""
        self._dismissed = True
        for line in self._lines.values():
            with contextlib.suppress(OSError):
                line.send(Stop(code))
        if code == 0 and distributed.is_initialized():
            distributed.destroy_process_group()
        self._gone.wait(LEAVING)

    def _require(self) -> None:
        if self.lost:
            raise RunError(self.lost)

    def _watch(self) -> None:
        numbers: dict[Connection, int] = {line.connection: number for number, line in self._lines.items()}
        while numbers:
            for connection in wait(list(numbers)):
                assert isinstance(connection, Connection)
                number = numbers[connection]
                try:
                    answer: Answer = self._lines[number].receive()
                except (OSError, EOFError):
                    del numbers[connection]
                    self._lose(
                        f"rank {number} of this peer has ended, and a part of the weights with it; see its output"
                    )
                    continue
                if isinstance(answer, Failed):
                    self._lose(f"rank {number} of this peer: {answer.text}")
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
        last = threading.Timer(LEAVING, self._end)
        last.daemon = True
        last.start()

    def _end(self) -> None:
        """The main thread has not come round: it stands in a collective that will never end."""
        if not self._dismissed:
            self._give_up(self.lost)


@contextmanager
def mustered(rank: Rank | None, give_up: Callable[[str], None]) -> Iterator[Crew | None]:
    """The crew of rank 0, dismissed at the end; ``None`` for a peer of one rank."""
    if rank is None:
        yield None
        return
    crew = Crew(rank, give_up)
    code = 1
    try:
        yield crew
        code = 0
    except KeyboardInterrupt:
        if crew.lost:  # torchrun has told us to end because of that
            raise RunError(crew.lost) from None
        code = 0
        raise
    except UserError:
        code = 2
        raise
    finally:
        crew.dismiss(code)
