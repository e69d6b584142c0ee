"""The simulated swarm: replicas train, reach their boundaries in the order of the simulated clock, and average.

A worker thread holds the activations and gradients of one replica. A replica holds θ, φ, δ and its optimizer's moments.
All random numbers come from the run's seed. No result depends on the order of the threads: a model that draws numbers
while it trains has one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby

from peer.commands.simulate.exchanges import OverlappedSwap, average, both_merged, swap
from peer.commands.simulate.meetings import Arrivals, choose_pairs
from peer.commands.simulate.options import Method, Options
from peer.commands.simulate.replica import Replica
from peer.config.schema import Config
from peer.rounds.backoff import BACKOFF_PHASES, PeerBackoff
from peer.rounds.pairing_rule import last_swaps
from peer.rounds.types import Grouping, Outcome, Verdict

SAME_TIME = 1e-9

Sample = Callable[[float], None]


class World:
    """Runs ``replicas`` to their last step; calls ``sample(time)`` at time 0, every few rounds, and at the end."""

    def __init__(
        self, config: Config, options: Options, replicas: Sequence[Replica], sample: Sample, pool: ThreadPoolExecutor
    ) -> None:
        self._config, self._options, self._replicas, self._sample = config, options, replicas, sample
        self._pool = pool
        self._arrivals = Arrivals()
        self._chance = random.Random(config.run.seed)
        self._training: dict[Replica, Future[None]] = {}
        self._time = 0.0
        self._backoff = {replica: PeerBackoff(lambda: self._time) for replica in replicas}
        self._group: list[tuple[Replica, float]] = []  # members that wait for the others, since when

    def run(self) -> None:
        """Raises :class:`peer.errors.RunError` when a replica's loss is not finite."""
        every = self._config.run.evaluation.every_rounds * self._config.run.inner_steps
        sample_at = every
        self._sample(0.0)
        self._go_on(self._replicas)
        while self._arrivals.due:
            self._time = time = min(self._arrivals.due.values())
            here = [replica for replica, due in self._arrivals.due.items() if due - time < SAME_TIME]
            for replica in here:
                del self._arrivals.due[replica]
                self._training.pop(replica).result()
                self._count_overlapped(replica)
                self._avoid_harmful(replica)
                replica.ended = time
            free = self._at_boundary(here)
            if time >= sample_at - SAME_TIME:
                sample_at += every
                if any(not replica.done for replica in self._replicas):
                    for future in self._training.values():
                        future.result()  # a sample sees every replica at the end of an inner phase
                    self._sample(time)
            self._go_on(free)
        for replica in self._replicas:
            self._complete(replica)
        if self._options.method in (Method.NOLOCO, Method.AVERAGING):
            for _, ended in groupby(sorted(self._replicas, key=lambda it: it.ended), key=lambda it: round(it.ended, 6)):
                self._end_together(list(ended))
        self._sample(self._time)

    def _complete(self, replica: Replica) -> None:
        """No inner step follows: what has not arrived is applied."""
        replica.inner_phase()
        replica.judge()
        self._count_overlapped(replica)

    def _end_together(self, replicas: Sequence[Replica]) -> None:
        """The swaps after the last inner step. Replicas that end at another time are not waited for."""
        for replica in replicas:
            replica.pairwise.end_run()
            replica.rollback.training_ended()
        swaps = {it: last_swaps(len(replicas), it.last_outcome is Outcome.MERGED) for it in replicas}
        for left in range(max(swaps.values()), 0, -1):
            here = [it for it in replicas if swaps[it] >= left]
            for one, two in choose_pairs(Arrivals(), here, self._time, 0.0, self._chance, self._avoided):
                if two is None:
                    one.cross_boundary(Outcome.ALONE)
                elif self._chance.random() >= self._options.drop:
                    self._swap(one, two)
            for replica in here:
                self._complete(replica)

    def _go_on(self, replicas: Sequence[Replica]) -> None:
        training = [replica for replica in replicas if not replica.done]
        for replica in training:
            self._arrivals.due[replica] = self._time + replica.phase_steps / replica.speed
            replica.target = replica.state.inner.step + replica.phase_steps
        for replica in training:
            self._training[replica] = self._pool.submit(replica.inner_phase)

    def _at_boundary(self, here: Sequence[Replica]) -> Sequence[Replica]:
        """The replicas that go on."""
        if self._options.method in (Method.DDP, Method.ONE_WORKER, Method.LOCAL):
            for replica in here:
                self._alone(replica, Outcome.ALONE)
            return here
        return self._pairs(here) if self._replicas[0].state.outer.grouping is Grouping.PAIR else self._everyone(here)

    def _alone(self, replica: Replica, outcome: Outcome) -> None:
        """The outer step of a group of one."""
        replica.codec.end_round(False)
        replica.apply(average([replica])[0])
        replica.cross_boundary(outcome)

    def _pairs(self, here: Sequence[Replica]) -> list[Replica]:
        time, window = self._time, self._config.run.rendezvous.window
        since = {replica: start for replica, (_, start) in self._arrivals.waiting.items()}
        free: list[Replica] = []
        for first, second in choose_pairs(self._arrivals, here, time, window, self._chance, self._avoided):
            first.waited += time - since.get(first, time)
            free += [first] if second is None else [first, second]
            if second is None:
                self._alone(first, Outcome.ALONE)
            elif self._chance.random() < self._options.drop:
                self._alone(first, Outcome.TIMEOUT)
                self._alone(second, Outcome.TIMEOUT)
            else:
                self._swap(first, second)
        return free

    def _avoided(self, one: Replica, two: Replica) -> bool:
        return self._backoff[one].avoided(two.name) or self._backoff[two].avoided(one.name)

    def _swap(self, one: Replica, two: Replica) -> None:
        if self._config.run.exchange.overlap:
            one.overlapped = two.overlapped = OverlappedSwap(one, two, one.swap_steps)
        else:
            means, verdicts = swap(one, two)
            for replica, other, mean in ((one, two, means[0]), (two, one, means[1])):
                if both_merged(verdicts):
                    replica.apply(mean, other.name)
                else:
                    replica.apply(average([replica])[0])
            self._count(one, two, verdicts)
            self._count(two, one, verdicts[::-1])
        for replica, other in ((one, two), (two, one)):
            replica.met[other.name] = replica.state.counters.round
            replica.state.cross_boundary()

    def _count_overlapped(self, replica: Replica) -> None:
        """Count the overlapped swap that has ended during the last inner phase, if any."""
        overlapped, replica.overlapped = replica.overlapped, None
        if overlapped is not None and overlapped.one is replica:
            self._count(replica, overlapped.two, overlapped.verdicts)
        elif overlapped is not None:
            self._count(replica, overlapped.one, overlapped.verdicts[::-1])

    def _count(self, replica: Replica, other: Replica, verdicts: tuple[Verdict, Verdict]) -> None:
        """Count a swap of ``replica`` by its own verdict and the other's."""
        own, theirs = verdicts
        if both_merged(verdicts):
            replica.partners[other.name] += 1
        elif own.outcome is not Outcome.MERGED:
            self._backoff[replica].note(other.name, BACKOFF_PHASES * replica.usual_time, offence=True)
        refused = own.outcome is Outcome.MERGED and theirs.outcome is not Outcome.MERGED
        replica.count(Outcome.REFUSED if refused else own.outcome)

    def _avoid_harmful(self, replica: Replica) -> None:
        for name in replica.harmful:
            self._backoff[replica].note(name, BACKOFF_PHASES * replica.usual_time, offence=True)
        replica.harmful.clear()

    def _everyone(self, here: Sequence[Replica]) -> list[Replica]:
        self._group += [(replica, self._time) for replica in here]
        if self._arrivals.due:
            return []
        came: list[Replica] = []
        missed: list[Replica] = []
        for replica, since in sorted(self._group, key=lambda entry: self._replicas.index(entry[0])):
            replica.waited += self._time - since
            (missed if self._chance.random() < self._options.drop else came).append(replica)
        self._group.clear()
        if came:
            self._average(came)
        for replica in missed:
            if replica.state.outer.equal_replicas:  # it goes on training and catches up at its next round
                replica.cross_boundary(Outcome.TIMEOUT)
            else:
                self._alone(replica, Outcome.TIMEOUT)
        return came + missed

    def _average(self, group: list[Replica]) -> None:
        if group[0].state.outer.equal_replicas:
            newest = max(self._replicas, key=lambda replica: replica.merged)
            merged = newest.merged
            for replica in group:
                if replica.merged < merged:
                    replica.state.rebase(newest.state.snapshot())
                replica.merged = merged + 1
        mean, size = average(group, self._config.run.exchange.codec)
        for replica in group:
            replica.apply(mean)
            replica.bytes_sent += size
            replica.bytes_received += size
            others = [other.name for other in group if other is not replica]
            replica.partners.update(others)
            replica.cross_boundary(Outcome.MERGED if len(group) > 1 else Outcome.ALONE)
