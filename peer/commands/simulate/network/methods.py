"""The clock of a round for each method: pairs as swarm/pairing makes them, and groups of everyone.

A pair's swap: a round trip for the greeting, the payload at the slower uplink, a round trip for the verdicts. A group's
round: all wait for the last member; reduce-scatter and all-gather upload 2 (n - 1) / n of the payload; six messages
follow each other, each as slow as the slowest of n. What would take longer than is worth it (rounds/transfer_rule.py)
is ended, a swap at its first look and a group's round at its limit.
"""

from __future__ import annotations

import heapq
from collections import deque

import numpy as np

from peer.commands.simulate.network.conditions import Chance, Conditions, Figures, Times
from peer.rounds.pairing_rule import AT_BOUNDARY, OPENS, PROPOSAL_PAUSE, end_patience, last_swaps, near
from peer.rounds.transfer_rule import CHECKS, swap_limit

ASKED_AT_BOUNDARY = 8  # peers asked at a boundary
GOODPUT = 0.8  # share of a line's rate that real swaps reach (tests/benchmarks/wan, network_model)
PAIR_MESSAGES, GROUP_MESSAGES = 4, 6  # one after the other


def pairs(it: Conditions, seed: int = 0) -> Figures:
    """NoLoCo: each peer meets one whose boundary is near its own, waits for it, or does not when swaps overlap."""
    return _Pairs(it, seed).run()


class _Pairs:
    """The rule of rounds/pairing_rule.py, except for the order: each peer asks others at random."""

    def __init__(self, it: Conditions, seed: int) -> None:
        self.it, self.chance = it, Chance(it, seed)
        self.phase_seconds = self.chance.all_phase_seconds()  # of the present phase, for each peer
        self.due = self.phase_seconds.copy()  # next boundary
        self.meeting = np.full(it.peers, -1)
        self.arrived = np.full(it.peers, np.nan)  # since when it is at its boundary
        self.busy = np.zeros(it.peers)  # until when its overlapped swap takes
        self.rounds = np.zeros(it.peers, dtype=int)
        self.trained = np.zeros(it.peers)
        self.left = np.zeros(it.peers)  # when it had made its last round
        self.postponed = 0  # boundaries
        self.merged = 0
        self.last_merged = np.zeros(it.peers, dtype=bool)  # the last round
        self.events: list[tuple[float, bool, int]] = []  # when, whether it is the boundary, whose

    def run(self) -> Figures:
        it = self.it
        for peer in range(it.peers):
            self._begin(peer, 0.0)
        while self.events:
            time, boundary, peer = heapq.heappop(self.events)
            if boundary:
                for free, when in self._boundary(peer, time):
                    self._end(free, when)
            elif self.meeting[peer] < 0 and self._agree(peer, time, it.window, 1) < 0:
                self._seek(peer, time + sum(PROPOSAL_PAUSE) / 2 * self.phase_seconds[peer])
        idle = 1 - float(self.trained.sum()) / float(self.left.sum())
        merged = self.merged / (it.peers * it.rounds - self.postponed)
        ends, sent = self._ends(), merged * it.payload * it.coded
        in_all, end = 1 - float(self.trained.sum() / ends.sum()), float((ends - self.left).mean())
        return Figures("noloco", float(self.left.max()), idle, merged, sent, in_all, end)

    def _begin(self, peer: int, time: float) -> None:
        """Begin an inner phase."""
        self.due[peer] = time + self.phase_seconds[peer]
        heapq.heappush(self.events, (float(self.due[peer]), True, peer))
        self._seek(peer, float(self.due[peer] - self.chance.rng.uniform(*OPENS) * self.phase_seconds[peer]))

    def _seek(self, peer: int, time: float) -> None:
        if time < self.due[peer]:
            heapq.heappush(self.events, (time, False, peer))

    def _end(self, peer: int, time: float) -> None:
        """End a round."""
        self.trained[peer] += self.phase_seconds[peer]
        self.rounds[peer] += 1
        self.left[peer] = time
        if self.rounds[peer] < self.it.rounds:
            self.phase_seconds[peer] = self.chance.phase_seconds(peer)
            self._begin(peer, time + _join(self.it, self.chance))

    def _boundary(self, peer: int, time: float) -> list[tuple[int, float]]:
        """The peers that go on, and when."""
        if self.busy[peer] > time:  # an overlapped swap takes longer than an inner phase: train on
            self.postponed += self.rounds[peer] + 1 < self.it.rounds
            return [(peer, time)]
        self.last_merged[peer] = False
        partner = int(self.meeting[peer])
        if partner < 0:
            partner = self._agree(peer, time, AT_BOUNDARY, ASKED_AT_BOUNDARY)
        overlap = self.it.overlap
        if partner < 0:
            return [(peer, time if overlap else time + 2 * self.chance.latency())]
        if np.isnan(self.arrived[partner]):
            self.arrived[peer] = time
            return [(peer, time)] if overlap else []
        seconds, merged = self._swap(float(min(self.phase_seconds[peer], self.phase_seconds[partner])))
        done = time + seconds
        self.merged += 2 * merged
        self.last_merged[[peer, partner]] = merged
        self.meeting[peer] = self.meeting[partner] = -1
        self.arrived[peer] = self.arrived[partner] = np.nan
        if overlap:  # the swap begins when the second peer comes to its boundary; none of the two waits
            self.busy[peer] = self.busy[partner] = done
            return [(peer, time)]
        return [(peer, done), (partner, done)]

    def _agree(self, peer: int, time: float, window: float, tries: int) -> int:
        """Meet a random free peer whose boundary is near; its number, or -1. A boundary that comes while a swap runs is
        postponed.
        """
        mine = max(time, float(self.due[peer]))
        if self.busy[peer] > mine:
            return -1
        for other in self.chance.rng.integers(0, self.it.peers, tries):
            close = near(mine, self.due[other], self.phase_seconds[peer], self.phase_seconds[other], window)
            free = self.meeting[other] < 0 and self.busy[other] <= self.due[other] and self.due[other] >= time
            if other != peer and close and free and self.rounds[other] < self.it.rounds:
                self.meeting[peer], self.meeting[other] = other, peer
                return int(other)
        return -1

    def _swap(self, phase_seconds: float) -> tuple[float, bool]:
        """Seconds until it has ended, and whether it has merged. ``phase_seconds``: of the faster peer."""
        it, seconds = self.it, transfer(self.it, self.it.payload * self.it.coded)
        limit = swap_limit(it.stall, it.max_phases, phase_seconds)
        if seconds > limit:
            return limit / CHECKS, False
        seconds += sum(self.chance.latency() for _ in range(PAIR_MESSAGES))
        if self.chance.rng.random() < it.loss:
            return seconds * float(self.chance.rng.random()) + it.stall, False
        return seconds, True

    def _ends(self) -> Times:
        """When each peer has ended: a running swap is waited for, and in the swaps after the last inner step a peer
        meets the one that is free next, if it comes in time.
        """
        clock = np.maximum(self.left, self.busy)
        usual = transfer(self.it, self.it.payload * self.it.coded)
        patience = np.array([end_patience(usual, float(seconds)) for seconds in self.phase_seconds])
        ending = [int((np.abs(clock - at) <= wait).sum()) for at, wait in zip(clock, patience, strict=True)]
        swaps = np.array([last_swaps(*it) for it in zip(ending, self.last_merged.tolist(), strict=True)])
        while len(here := np.flatnonzero((swaps > 0) & (patience > 0))) > 1:
            order = deque(here[np.argsort(clock[here], kind="stable")].tolist())
            while order:
                one = order.popleft()
                if not order or clock[order[0]] - clock[one] > patience[one]:
                    clock[one] += patience[one]
                    patience[one] = 0.0
                    continue
                two = order.popleft()
                patience[one] -= clock[two] - clock[one]
                shorter = float(min(self.phase_seconds[one], self.phase_seconds[two]))
                clock[[one, two]] = clock[two] + self._swap(shorter)[0]
                swaps[[one, two]] -= 1
        return np.asarray(clock)


def transfer(it: Conditions, payload: float) -> float:
    """Seconds for ``payload`` bytes each way."""
    return payload / (GOODPUT * min(it.up, it.down))


def groups(it: Conditions, seed: int = 0) -> Figures:
    """DiLoCo: one group of all peers. A round that loses a member is repeated without it: it does not merge."""
    chance = Chance(it, seed)
    trained = clock = 0.0
    done, sent = 0, 2 * (it.peers - 1) / it.peers * it.payload * it.coded
    for _ in range(it.rounds):
        phase_seconds = chance.all_phase_seconds()
        trained += float(phase_seconds.sum())
        clock += float((phase_seconds + [_join(it, chance) for _ in range(it.peers)]).max())
        reduce = transfer(it, sent) + sum(chance.latency(it.peers) for _ in range(GROUP_MESSAGES))
        if chance.rng.random() < 1 - (1 - it.loss) ** it.peers:  # a member is lost: the others notice it and repeat
            clock += reduce * float(chance.rng.random()) + it.stall
        limit = swap_limit(it.stall, it.max_phases, float(phase_seconds[0]))  # of the leader
        done += reduce <= limit
        clock += min(reduce, limit)
    merged = (1 - it.loss) * (done / it.rounds)
    idle = 1 - trained / (it.peers * clock)
    return Figures("diloco", clock, idle, merged, sent, idle)


def _join(it: Conditions, chance: Chance) -> float:
    """Seconds in which a newcomer that replaces this peer downloads weights and momentum."""
    return transfer(it, 2 * it.payload) if it.churn and chance.rng.random() < it.churn else 0.0


def pairs_by_round(it: Conditions, seed: int = 0) -> Figures:
    """The paper's pairs: random in every round, whatever their speed; each waits for its partner, and swaps in fp32."""
    chance = Chance(it, seed)
    clock, trained = np.zeros(it.peers), np.zeros(it.peers)
    for _ in range(it.rounds):
        phase_seconds = chance.all_phase_seconds()
        clock, trained = clock + phase_seconds, trained + phase_seconds
        order = chance.rng.permutation(it.peers)
        one, two = order[0::2], order[1::2]
        swap = transfer(it, it.payload) + PAIR_MESSAGES * it.latency
        meet = np.maximum(clock[one[: len(two)]], clock[two]) + swap
        clock[one[: len(two)]], clock[two] = meet, meet
    idle = 1 - float(trained.sum()) / float(clock.sum())
    return Figures("noloco, pairs by round", float(clock.max()), idle, 1.0, float(it.payload), idle)


def tree_to_pair(it: Conditions, seed: int = 0) -> float:
    """Time of a tree all-reduce over that of a pair's average when only latency counts (arXiv 2506.10911, section 5.3).

    Two peers send messages to each other at once and wait for the slower one: a pair twice, a tree on every level up
    and down. Equal latencies give log2(n); with log-normal latencies each level waits for its slowest message.
    """
    chance, draws = Chance(it, seed), range(200)
    pair = [2 * chance.latency(2) for _ in draws]
    return float(np.mean([_tree(it.peers, chance) for _ in draws]) / np.mean(pair))


def _tree(peers: int, chance: Chance) -> float:
    """Seconds until every peer has the mean."""
    clock = np.zeros(1 << (peers - 1).bit_length())
    up = clock
    while len(up) > 1:
        half = len(up) // 2
        up = np.maximum(up[:half], up[half:]) + chance.latencies(half)
    down = up
    while len(down) < len(clock):
        down = np.concatenate([down, down]) + np.tile(chance.latencies(len(down)), 2)
    return float(down.max())
