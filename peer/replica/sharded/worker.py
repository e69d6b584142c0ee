"""What a rank other than 0 does: wait for a command of rank 0, carry it out, until it is sent home.

It knows no swarm, no data and no files. The end of rank 0 is its own, wherever it stands.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
import threading
import time

import torch

from peer import logs
from peer.errors import RunError, UserError
from peer.process import LoopContext
from peer.replica.inner_loop import out_of_memory
from peer.replica.sharded import channel, commands, sharding
from peer.replica.sharded.channel import RankLine
from peer.replica.sharded.commands import Command, CommandDone, CommandFailed, ReplicaPlan
from peer.replica.sharded.inner_loop import RankLoop
from peer.replica.sharded.launch import Rank
from peer.replica.sharded.shared import SharedMemory
from peer.replica.sharded.weights import WeightShards

LEAVE_SECONDS = 10.0  # seconds for what was asked before, and to take leave of the others
AFTER_LOSS = 2.0  # seconds: let the loss of another rank be known before what follows from it


def run(rank: Rank) -> int:
    """The exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logs.setup(f"rank-{rank.number}")
    memory, line = channel.join(rank)
    inbox = Inbox(line, rank)
    first = inbox.next()
    if isinstance(first, commands.Leave):
        return first.code
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it to all: rank 0 decides, and sends us home
    assert isinstance(first, ReplicaPlan)
    try:
        replica = WorkerReplica(first, rank, memory)
        inbox.grace = LEAVE_SECONDS
        while not isinstance(command := inbox.next(), commands.Leave):
            if replica.carry_out(command):
                line.send(CommandDone())
    except (UserError, RunError, RuntimeError, OSError) as error:
        return _fail(line, error, first.config.peer.micro_batch)
    with contextlib.suppress(RuntimeError):
        torch.distributed.destroy_process_group()
    return command.code


class Inbox:
    """Commands, read by a thread that ends the process when rank 0 is gone and this rank hangs."""

    def __init__(self, line: RankLine, rank: Rank) -> None:
        self._line, self._rank = line, rank
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self.grace = 0.0  # seconds to end in an orderly way
        threading.Thread(target=self._read, name="commands", daemon=True).start()

    def next(self) -> Command:
        """Waits as long as rank 0 lives: it may look for a partner for minutes."""
        return self._commands.get()

    def _read(self) -> None:
        while True:
            try:
                command: Command = self._line.receive()
            except (OSError, EOFError):
                if self._rank.number == 1:
                    sys.stderr.write("error: rank 0 of this peer has ended; start again, it resumes\n")
                os._exit(1)
            self._commands.put(command)
            if isinstance(command, commands.Leave):
                time.sleep(self.grace if command.code == 0 else 0.0)
                os._exit(command.code)


class WorkerReplica:
    """This rank's part of the replica."""

    def __init__(self, plan: ReplicaPlan, rank: Rank, memory: int) -> None:
        run, own = plan.config.run, plan.config.peer
        if own.threads:
            torch.set_num_threads(own.threads)
        torch.manual_seed(run.seed + rank.number)  # of dropout, where a model has it
        device = sharding.device_of(plan, rank)
        mesh = sharding.open_group(device, rank.size)
        network = sharding.sharded(plan, mesh, device)
        self._loop = RankLoop(network, plan, device, rank.size, LoopContext())
        place = (rank.number, rank.size)
        shared = SharedMemory(memory, plan.numel, plan.window)
        self._shards = WeightShards(network.named_parameters(), self._loop.optimizer, shared, place)

    def carry_out(self, command: Command) -> bool:
        """Carry out one command. ``True`` when rank 0 waits for that."""
        match command:
            case commands.Step(rows, rate):
                self._loop.train_rows(torch.from_numpy(rows), rate)
                return False
            case commands.Evaluate(batches):
                self._loop.evaluate_rows([torch.from_numpy(rows) for rows in batches])
                return False
            case commands.ReadElements(key, start, stop):
                self._shards.read(key, start, stop)
            case commands.FillElements(key, start, stop):
                self._shards.fill(key, start, stop)
            case commands.WriteFast(start, stop):
                self._shards.write_fast(start, stop)
            case commands.AddToFast(start, stop):
                self._shards.add_to_fast(self._shards.window[: stop - start], start)
            case commands.NewMoments(kinds):
                self._shards.new_moments(kinds)
            case _:
                raise RunError(f"rank 0 gave a command that is not known here: {command}")
        return True


def _fail(line: RankLine, error: Exception, micro_batch: int | None) -> int:
    """Tell rank 0, which says it to the user, and end: what others wait for in a collective then breaks off."""
    if isinstance(error, torch.OutOfMemoryError):
        text = out_of_memory(error, micro_batch)
    else:
        text = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
    if not isinstance(error, UserError | RunError | torch.OutOfMemoryError):
        time.sleep(AFTER_LOSS)
    with contextlib.suppress(OSError):
        line.send(CommandFailed(text))
    return 1
