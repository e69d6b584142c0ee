"""A rank other than 0: it waits for commands of rank 0 and carries them out, until rank 0 ends it.

It knows no swarm, no data and no files. When rank 0 ends, it ends too, even within a command.
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
from peer.config.schema import Config
from peer.device.memory import is_out_of_memory
from peer.errors import RunError, UserError, one_line
from peer.process import LoopContext, stop_signals
from peer.replica.inner_loop import out_of_memory
from peer.replica.sharded import channel, commands
from peer.replica.sharded.channel import RankLine, SharedMemory
from peer.replica.sharded.commands import Command, ReplicaPlan
from peer.replica.sharded.inner_loop import RankLoop
from peer.replica.sharded.launch import Rank
from peer.replica.sharded.replica import sharded
from peer.replica.sharded.weights import WeightShards

LEAVE_SECONDS = 10.0  # seconds for the earlier commands, and to close the process group
AFTER_LOSS = 2.0  # seconds: rank 0 must see the loss of a rank before the errors that follow from it


def run(rank: Rank) -> int:
    """Run this rank until its end. Returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logs.setup(f"rank-{rank.number}")
    memory, line = channel.join(rank)
    for number in stop_signals():
        signal.signal(number, signal.SIG_IGN)  # torchrun signals all ranks: rank 0 decides when they end
    inbox = Inbox(line, rank)
    first = inbox.commands.get()
    if isinstance(first, commands.Leave):
        return first.code
    assert isinstance(first, ReplicaPlan)
    try:
        replica = WorkerReplica(first, rank, memory)
        inbox.grace = LEAVE_SECONDS
        while not isinstance(command := inbox.commands.get(), commands.Leave):
            if replica.carry_out(command):
                line.send("")
    except (UserError, RunError, RuntimeError, OSError) as error:
        return _fail(line, error, first.config, rank.size)
    with contextlib.suppress(RuntimeError):
        torch.distributed.destroy_process_group()
    return command.code


class Inbox:
    """The commands of rank 0. Their thread ends the process when rank 0 has ended or this rank hangs at the end."""

    def __init__(self, line: RankLine, rank: Rank) -> None:
        self._line, self._rank = line, rank
        self.commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self.grace = 0.0  # seconds for an orderly end
        threading.Thread(target=self._read, name="commands", daemon=True).start()

    def _read(self) -> None:
        while True:
            try:
                command: Command = self._line.receive()
            except (OSError, EOFError):
                if self._rank.number == 1:
                    sys.stderr.write("error: rank 0 of this peer has ended; start again, it resumes\n")
                os._exit(1)
            self.commands.put(command)
            if isinstance(command, commands.Leave):
                time.sleep(self.grace if command.code == 0 else 0.0)
                os._exit(command.code)


class WorkerReplica:
    """The part of the replica on this rank."""

    def __init__(self, plan: ReplicaPlan, rank: Rank, memory: int) -> None:
        torch.manual_seed(plan.config.run.seed + rank.number)  # for dropout
        network, device = sharded(plan, rank)
        self._loop = RankLoop(network, plan, device, rank.size, LoopContext())
        shared = SharedMemory(memory, plan.numel, plan.window)
        self._shards = WeightShards(network.named_parameters(), self._loop.optimizer, shared, rank)

    def carry_out(self, command: Command) -> bool:
        """Carry out one command. ``True`` if rank 0 waits for the answer."""
        match command:
            case commands.Step(rows, rate):
                self._loop.train_rows(torch.from_numpy(rows), rate)
            case commands.Evaluate(batches):
                self._loop.evaluate_rows([torch.from_numpy(rows) for rows in batches])
            case commands.OnShards(method, arguments):
                method(self._shards, *arguments)
                return True
            case _:
                raise RunError(f"unknown command of rank 0: {command}")
        return False


def _fail(line: RankLine, error: Exception, config: Config, size: int) -> int:
    """Report the error to rank 0, which prints it. The end of this process breaks the collectives of the others."""
    starved = is_out_of_memory(error)
    text = out_of_memory(error, config, size) if starved else one_line(error, 300)
    if not starved and not isinstance(error, UserError | RunError):
        time.sleep(AFTER_LOSS)
    with contextlib.suppress(OSError):
        line.send(text)
    return 1
