"""Few bits in a group: all members have the same mean, as exact as the bits allow, and send as many bytes as said."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from peer.config.schema import CodecName
from peer.exchange.codec import BLOCK
from peer.exchange.group.feedback import mean_of_slices
from peer.exchange.group.rounding import MOST_LOST, Rounding, borders
from peer.rounds.contribution import PART, Vector
from peer.rounds.types import Outcome
from tests.unit.exchange.group.harness import EXACT, many

CODECS: list[CodecName] = list(MOST_LOST)
BITS: dict[CodecName, float] = {"none": 32, "fp16": 16, "bf16": 16, "int8": 8, "int4": 4, "int2": 2}
LEVELS: dict[CodecName, float] = {"int8": 127, "int4": 7}
ERRORS: dict[CodecName, float] = {"none": 1e-6, "fp16": 0.001, "bf16": 0.01, "int8": 0.02, "int4": 0.3, "int2": 0.5}


def noise(numel: int, seed: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("codec", CODECS)
@given(numel=st.integers(0, 3000), seed=st.integers(0, 10**6), scale=st.sampled_from([1e-20, 1e-6, 1.0, 1e6]))
@settings(max_examples=40)
def test_an_element_is_off_by_at_most_half_a_step_of_its_block(
    codec: CodecName, numel: int, seed: int, scale: float
) -> None:
    part, rounding, out = noise(numel, seed) * scale, Rounding(codec), torch.full((numel,), math.nan)
    data = bytearray(rounding.encode(part))
    assert len(data) == rounding.size(numel)
    rounding.decode(data, out)
    for first in range(0, numel, BLOCK):
        here, there = part[first : first + BLOCK], out[first : first + BLOCK]
        largest = float(here.abs().max())
        if codec == "int2":
            lost, norm = float((here - there).double().norm()), float(here.double().norm())
            assert lost <= (0.45 if len(here) > 50 else 0.75) * norm
            continue
        if codec == "fp16":  # one element does not count in the scale of the others
            here = here.clamp(-65504, 65504)
            assert ((here - there).abs() <= here.abs() / 2**11 + 2.0**-25).all()
            continue
        allowed = largest / LEVELS[codec] * 0.51 + 0.004 * largest if codec in LEVELS else largest / 256
        assert float((here - there).abs().max()) <= (0.0 if codec == "none" else allowed)


@given(largest=st.floats(1, 1e6), count=st.integers(0, 10), numel=st.integers(11, BLOCK))
@settings(max_examples=40)
def test_two_bits_lose_less_than_all_of_any_block(largest: float, count: int, numel: int) -> None:
    """Or an honest mean could be taken for a false one."""
    block = noise(numel, count)
    block[:count] *= largest
    rounded = block.clone()
    Rounding("int2").apply(rounded)
    assert float((block - rounded).norm()) < MOST_LOST["int2"] * float(block.norm())


@pytest.mark.parametrize("codec", [it for it in CODECS if it != "int2"])
def test_what_is_rounded_stays_as_it_is(codec: CodecName) -> None:
    once = noise(5000, 1) * noise(5000, 2).abs_().pow_(3)
    Rounding(codec).apply(once)
    twice = once.clone()
    Rounding(codec).apply(twice)
    assert torch.equal(once, twice)


@pytest.mark.parametrize("codec", CODECS)
def test_what_is_not_finite_is_seen(codec: CodecName) -> None:
    for wrong in (math.nan, math.inf, -math.inf):
        part = noise(1000, 3)
        part[700] = wrong
        Rounding(codec).apply(part)
        assert part[:512].isfinite().all() and not part[700].isfinite()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(("count", "numel"), [(2, 1), (2, 5000), (3, 3 * PART + 700), (5, 2000)])
def test_all_members_get_the_same_mean_and_it_is_the_simulators(codec: CodecName, count: int, numel: int) -> None:
    tensors, mean = [noise(numel, seed) for seed in range(count)], torch.empty(numel)
    with many(count, numel, settings=EXACT.model_copy(update={"codec": codec})) as group:
        results = group.average([Vector(it) for it in tensors])
    kept = [torch.zeros(numel) if codec == "int2" else None for _ in tensors]
    mean_of_slices([Vector(it) for it in tensors], Rounding(codec), mean, kept)
    for it in results:
        assert it.outcome is Outcome.MERGED, it
        assert torch.equal(it.mean, mean)
    for one, other in zip(group.kept, kept, strict=True):
        assert one is other is None or torch.equal(one, other)
    if numel > 1:
        exact = torch.stack(tensors).mean(0)
        assert float((mean - exact).norm() / exact.norm()) <= ERRORS[codec]


@pytest.mark.parametrize("scale", [1e-6, 5e-7])
def test_a_group_uses_fp16_for_small_pseudo_gradients_too(scale: float) -> None:
    """Below 6e-5 fp16 has fewer bits: what it loses is no sign of a false mean."""
    tensors = [scale * noise(5000, seed) for seed in range(3)]
    with many(3, 5000, settings=EXACT.model_copy(update={"codec": "fp16"})) as group:
        results = group.average([Vector(it) for it in tensors])
    exact = torch.stack(tensors).mean(0)
    for it in results:
        assert it.outcome is Outcome.MERGED, it
        assert float((it.mean - exact).norm() / exact.norm()) < 0.1


@pytest.mark.parametrize("codec", CODECS)
def test_the_bytes_are_those_of_the_bits(codec: CodecName) -> None:
    numel, count = 400_000, 4
    with many(count, numel, settings=EXACT.model_copy(update={"codec": codec})) as group:
        results = group.average([Vector(noise(numel, seed)) for seed in range(count)])
    fair = 2 * (count - 1) / count * numel * BITS[codec] / 8
    for it in results:
        assert fair < it.bytes_sent < 1.03 * fair + 20_000


# -- error feedback: what two bits lose is sent later

INT2 = EXACT.model_copy(update={"codec": "int2"})


@settings(max_examples=30)
@given(
    numel=st.sampled_from([1, 255, 3000, PART + 300]),
    count=st.integers(2, 5),
    scales=st.lists(st.sampled_from([1e-3, 1.0, 30.0]), min_size=1, max_size=6),
    seed=st.integers(0, 10**6),
)
def test_what_is_used_and_what_is_kept_add_up_to_what_was_contributed(
    numel: int, count: int, scales: list[float], seed: int
) -> None:
    kept = [torch.zeros(numel) for _ in range(count)]
    exact, used, mean = torch.zeros(numel), torch.zeros(numel), torch.empty(numel)
    for number, scale in enumerate(scales):
        tensors = [scale * noise(numel, seed + 10 * number + it) for it in range(count)]
        mean_of_slices([Vector(it) for it in tensors], Rounding("int2"), mean, kept)
        exact += torch.stack(tensors).mean(0)
        used += mean
    for place, (start, stop) in enumerate(borders(numel, count)):  # eᵢ of the mean, and of each contribution to it
        used[start:stop] += sum(it[start:stop] / (1 if me == place else count) for me, it in enumerate(kept))
    torch.testing.assert_close(used, exact, rtol=1e-4, atol=1e-4 * max(scales))


def test_what_is_kept_stays_bounded_so_that_the_mean_over_rounds_is_exact() -> None:
    numel, rounds, members = 3000, 200, 3
    tensors = [noise(numel, seed) + noise(numel, 9) for seed in range(members)]
    exact, sum_of_means = torch.stack(tensors).mean(0), torch.zeros(numel)
    kept, mean, sizes = [torch.zeros(numel) for _ in range(members)], torch.empty(numel), []
    for _ in range(rounds):
        mean_of_slices([Vector(it) for it in tensors], Rounding("int2"), mean, kept)
        sum_of_means += mean
        sizes.append(max(float(it.norm()) for it in kept))
    assert max(sizes[rounds // 2 :]) < 1.05 * max(sizes[: rounds // 2])
    assert float((sum_of_means / rounds - exact).norm() / exact.norm()) < 0.02
    without = torch.empty(numel)
    mean_of_slices([Vector(it) for it in tensors], Rounding("int2"), without)
    assert float((without - exact).norm() / exact.norm()) > 0.3


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("tailed", [False, True])
def test_who_has_kept_much_is_not_taken_for_a_liar(count: int, tailed: bool) -> None:
    """The last phase of a run may be one step: what is kept is then much longer than what is contributed."""
    numel = 20_000
    with many(count, numel, settings=INT2) as group:
        for scale in (1.0, 1.0, 0.01, 1e-4, 0.0, 1.0):
            tensors = [scale * noise(numel, seed) for seed in range(count)]
            if tailed:
                tensors = [it * noise(numel, 9).abs() ** 4 for it in tensors]
            for result in group.average([Vector(it) for it in tensors]):
                assert result is not None and result.outcome is Outcome.MERGED, (scale, result)


@pytest.mark.parametrize("count", [2, 3, pytest.param(5, marks=pytest.mark.long)])
def test_real_members_keep_what_the_simulator_says_and_a_failed_round_changes_nothing(count: int) -> None:
    numel, mean = PART + 700, torch.empty(PART + 700)
    kept = [torch.zeros(numel) for _ in range(count)]
    with many(count, numel, settings=INT2) as group:
        for number in range(3):
            tensors = [noise(numel, 10 * number + seed) for seed in range(count)]
            contributions = [Vector(it) for it in tensors]
            before = [it.clone() for it in group.kept if it is not None]
            failed = group.average(contributions, silent=[count - 1])
            assert {it.outcome for it in failed} == {Outcome.TIMEOUT}
            assert all(torch.equal(one, two) for one, two in zip(before, group.kept, strict=True) if two is not None)
            mean_of_slices(contributions, Rounding("int2"), mean, kept)
            for result in group.average(contributions):
                assert result is not None and result.outcome is Outcome.MERGED, result
                assert torch.equal(result.mean, mean)
            for one, two in zip(group.kept, kept, strict=True):
                assert one is not None and torch.equal(one, two)
