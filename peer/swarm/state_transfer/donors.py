"""Which members a newcomer believes and asks for their state, by their records. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median_high, median_low

from peer.swarm.directory.records import LIFETIME, MemberRecord

DONOR_AHEAD = 128  # rounds that a member may have done since it wrote its record
BELIEVED_RATIO = 2  # no donor is beyond so many times the median round, plus what it may have done alone since then
ALONE_SECONDS, ALONE_ROUNDS = 3600.0, 1000  # the others were away for an hour at most; rounds where that is not known
NEAR_ROUNDS = 5  # a member less than so many rounds behind the median is as good a donor


def plausible(records: Sequence[MemberRecord], inner_steps: int, tokens_per_step: float) -> list[MemberRecord]:
    """Without members that say to be much further than the median, in rounds or steps, where there are three or more.

    The step that a newcomer takes decides its learning rate and when its run ends. Two ids cost little, so two voices
    are no measure. A member that is faster than the median gets further and further ahead; one that was alone has done
    what fits into the time at the median rate. Of two that have trained the lower round may be one's and the lower step
    the other's, so that neither fits: then it is the one that is less far beyond.

    ``tokens_per_step``: of an inner step, 0 when unknown.
    """
    if len(records) < 3:
        return list(records)
    trained = _trained(records)
    said = [(it.round, it.step, it.tokens_per_second) for it in trained]
    rounds, steps, rate = (_median(values, len(records)) for values in zip(*said, strict=True))
    phases = ALONE_SECONDS * rate / (tokens_per_step * inner_steps) if rate and tokens_per_step else ALONE_ROUNDS
    alone = min(phases, ALONE_ROUNDS)
    most = BELIEVED_RATIO * rounds + alone, BELIEVED_RATIO * steps + alone * inner_steps
    fitting = [it for it in records if it.round <= most[0] and it.step <= most[1]]
    return fitting or [min(trained, key=lambda it: max(it.round / max(most[0], 1), it.step / max(most[1], 1)))]


def _trained(records: Sequence[MemberRecord]) -> Sequence[MemberRecord]:
    """The members whose median is the measure: those that have finished a round, if there are at least two; else all.

    Nobody takes the state of a member of round 0.
    """
    trained = [record for record in records if record.round]
    return trained if len(trained) > 1 else records


def _median(values: Sequence[float], members: int) -> float:
    """Of two of more ``members`` the lower value, as one of them may lie."""
    return median_low(values) if len(values) == 2 < members else median_high(values)


def furthest(records: Sequence[MemberRecord], inner_steps: int, tokens_per_step: float) -> tuple[float, float]:
    """The round and the step that any member can have reached, by the plausible ones among ``records``."""
    known = plausible(records, inner_steps, tokens_per_step)
    rounds, steps = max(it.round for it in known), max(it.step for it in known)
    return rounds + DONOR_AHEAD, steps + DONOR_AHEAD * inner_steps


def usual_step(own: MemberRecord, others: Sequence[MemberRecord], tokens_per_step: float) -> int:
    """The step that most members can have reached. A record of the ``others`` may be as old as its lifetime; this
    peer's ``own`` is new, so a step that it has been told makes no room for the next lie.
    """
    records, steps_per_rate = [own, *others], LIFETIME / tokens_per_step if tokens_per_step else 0.0
    said = [(it.step, 0.0 if it is own else it.tokens_per_second) for it in _trained(records)]
    return int(_median([step + rate * steps_per_rate for step, rate in said], len(records)))


def plausible_rate(record: MemberRecord, records: Sequence[MemberRecord]) -> float:
    """The most tokens a second that a member among ``records`` is believed to do: its own word, up to
    ``BELIEVED_RATIO`` times the second highest rate where there are three or more. The median is no measure of machines
    that differ by far, so two members can give each other any rate.
    """
    said = sorted(it.tokens_per_second for it in records)
    return BELIEVED_RATIO * (record.tokens_per_second if len(said) < 3 else min(record.tokens_per_second, said[-2]))


def donors_of(records: Sequence[MemberRecord], above: int, reached: int) -> list[MemberRecord]:
    """Members beyond round ``above`` that are not far behind the median, so that newcomers spread over many.

    ``reached``: the last round of a peer that comes back, 0 for a newcomer: it need not repeat rounds that others have.
    Peers that claim a round that nobody has would be the only donors if the furthest were the measure.
    """
    usual = _median([record.round for record in _trained(records)] or [0], len(records))
    least = max(above + 1, usual - NEAR_ROUNDS + 1, min(reached, usual))
    return [record for record in records if record.round >= least]
