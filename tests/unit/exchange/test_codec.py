"""Codecs: sizes, errors, and that what cannot be decoded is noticed and not averaged."""

from __future__ import annotations

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from peer.config import schema
from peer.config.schema import CodecName
from peer.exchange.codec import BLOCK, Codec, size
from peer.exchange.modulo import MARGIN, WIDEN, Modulo, codec_named

NAMES: tuple[CodecName, ...] = schema.CODECS["noloco"]
MODULO: tuple[CodecName, ...] = ("int8", "int4")


def two_peers(numel: int, apart: float, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weights of two peers and their Δ, with typical sizes: weights 0.05, Δ a hundredth of that, times ``apart``."""
    chance = torch.Generator().manual_seed(seed)
    base = 0.05 * torch.randn(numel, generator=chance)
    changes = [5e-4 * apart * torch.randn(numel, generator=chance) for _ in range(2)]
    return base + changes[0], base + changes[1], changes[0], changes[1]


def swap(sender: Codec, receiver: Codec, theirs: Tensor, own: Tensor) -> Tensor:
    """What ``receiver`` makes of one part."""
    out = torch.empty_like(own)
    receiver.decode(sender.sends, 0, bytearray(sender.encode(0, theirs)), own, out)
    return out


def round_trip(pair: tuple[Codec, Codec], apart: float, numel: int = 5000, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Errors of both decoded parts, in a round that ends well."""
    one, two, change_one, change_two = two_peers(numel, apart, seed)
    for codec, change in zip(pair, (change_one, change_two), strict=True):
        if codec.begin():
            codec.learn(0, change)
    errors = swap(pair[1], pair[0], two, one) - two, swap(pair[0], pair[1], one, two) - one
    for codec in pair:
        codec.end_round(True)
    return errors


def make(name: CodecName, numel: int = 5000) -> tuple[Codec, Codec]:
    return codec_named(name, numel), codec_named(name, numel)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("numel", [1, BLOCK - 1, BLOCK, 3 * BLOCK + 7])
def test_a_part_has_the_announced_size(name: CodecName, numel: int) -> None:
    codec = codec_named(name, numel)
    codec.begin()
    codec.learn(0, torch.randn(numel))
    assert len(codec.encode(0, torch.randn(numel))) == size(name, numel)


def test_four_bits_are_at_most_13_percent_of_the_bytes() -> None:
    numel = 10_000_000
    assert size("int4", numel) <= 0.13 * 4 * numel
    assert size("int8", numel) <= 0.26 * 4 * numel
    assert size("fp16", numel) == 2 * numel


@pytest.mark.parametrize(("name", "bits"), [("fp16", 11), ("bf16", 8)])
def test_a_cast_rounds_each_element(name: CodecName, bits: int) -> None:
    one, two, *_ = two_peers(1000, 1.0)
    error = swap(*make(name), one, two) - one
    assert float(error.abs().max()) <= 2.0**-bits * float(one.abs().max())
    assert torch.equal(swap(*make("none"), one, two), one)


def test_what_is_too_large_for_fp16_is_its_largest_number_and_what_is_not_finite_stays_so() -> None:
    sent = torch.tensor([65504.0, 7e4, -1e30, 2e-8, 6e-8, torch.inf, -torch.inf, torch.nan])
    found = swap(*make("fp16"), sent, sent)
    assert found[:5].tolist() == [65504.0, 65504.0, -65504.0, 0.0, 2.0**-24]
    assert torch.equal(found[5:7], sent[5:7]) and found[7].isnan()


@pytest.mark.parametrize(("name", "levels"), [("int8", 256), ("int4", 16)])
@pytest.mark.parametrize("apart", [1e-3, 1.0, 30.0])
def test_the_error_scales_with_the_distance_not_the_weights(name: CodecName, levels: int, apart: float) -> None:
    pair = make(name)
    for seed in range(5):
        errors = round_trip(pair, apart, seed=seed)
        reach = 5e-4 * apart * 2**0.5 * 5  # no element of 5000 is further off
        for error in errors:  # all but a block that happens to be further apart than ever before
            assert float(error.abs().quantile(0.9)) <= 2 * MARGIN * reach / levels


def test_alien_weights_are_not_decoded_and_noticed_and_the_next_round_is_safe() -> None:
    pair = make("int4")
    round_trip(pair, 1.0)
    one, two, *_ = two_peers(5000, 1.0)
    two = two + 0.3 * torch.randn(5000)  # has been away for long
    for codec in pair:
        codec.begin()
    left, right = swap(pair[1], pair[0], two, one), swap(pair[0], pair[1], one, two)
    assert float((left == one).float().mean()) > 0.75  # all but a few of 20 blocks are its own
    for codec in pair:
        codec.end_round(True)
        assert codec.sends == "fp16"
    for _ in range(12):  # a reach doubles in a swap
        if pair[0].sends == pair[1].sends == "int4":
            break
        for codec in pair:
            codec.begin()
        if pair[1].sends == "fp16":
            assert float((swap(pair[1], pair[0], two, one) - two).abs().max()) < 2e-3
        swap(pair[0], pair[1], one, two)
        for codec in pair:
            codec.end_round(True)
    for codec in pair:
        assert codec.sends == "int4"
        codec.begin()
    assert float((swap(pair[1], pair[0], two, one) - two).abs().max()) < 0.3  # reaches that far now
    assert float((right == two).float().mean()) > 0.75


@pytest.mark.parametrize("name", MODULO)
def test_no_block_of_a_partner_that_is_too_far_away_is_taken_for_another_value(name: CodecName) -> None:
    numel = 4000 * BLOCK
    one, two, change_one, change_two = two_peers(numel, 1.0)
    two += torch.randn(numel, generator=torch.Generator().manual_seed(1))
    pair = make(name, numel)
    for codec, change in zip(pair, (change_one, change_two), strict=True):
        codec.begin()
        codec.learn(0, change)
    assert torch.equal(swap(pair[1], pair[0], two, one), one)


@pytest.mark.parametrize("name", MODULO)
@pytest.mark.parametrize("untrained", [0.0, 1e-7])  # an outer step rounds
def test_what_a_newcomer_sends_is_decoded_although_it_had_trained_nothing_before_its_first_swap(
    name: CodecName, untrained: float
) -> None:
    newcomer, first = make(name)
    for number in range(4):
        member = first if number == 0 else codec_named(name, 5000)
        one, two, change_one, change_two = two_peers(5000, 1.0, number)
        if number == 0:
            one, change_one = one - change_one, change_one * untrained
        for codec, change in ((newcomer, change_one), (member, change_two)):
            if codec.begin():
                codec.learn(0, change)
        error = swap(newcomer, member, one, two) - one
        swap(member, newcomer, two, one)
        newcomer.end_round(True)
        if number:
            assert float(error.abs().max()) < 1e-3


def test_a_block_that_one_peer_never_moves_is_averaged_from_the_second_round_on() -> None:
    pair = make("int4", 4 * BLOCK)
    one, two, change_one, change_two = two_peers(4 * BLOCK, 1.0)
    one[:BLOCK] -= change_one[:BLOCK]
    two[:BLOCK] -= change_two[:BLOCK]
    change_one[:BLOCK] = change_two[:BLOCK] = 0
    two[:BLOCK] += 5e-4  # a partner moved it long ago
    for codec, change in zip(pair, (change_one, change_two), strict=True):
        assert codec.begin()
        codec.learn(0, change)
    for _ in range(6):
        out = swap(pair[1], pair[0], two, one)
        swap(pair[0], pair[1], one, two)
        for codec in pair:
            codec.end_round(True)
            assert not codec.begin()
    assert float((out[:BLOCK] - two[:BLOCK]).abs().max()) < 2e-4


@pytest.mark.parametrize("expects", [0.0, 1e30])
@pytest.mark.parametrize("sent", ["fp16", "int8"])
def test_a_false_distance_coarsens_no_later_payload_by_more_than_two(sent: CodecName, expects: float) -> None:
    """A partner may send any distance, and say before that it expects any; this peer's next payload goes to somebody
    else. What it expected counted too: the payload was six times as coarse.
    """
    codec, hostile = make("int8")
    round_trip((codec, hostile), 1.0)
    one, *_ = two_peers(5000, 1.0)
    assert isinstance(codec, Modulo)
    before = codec._range(0, torch.empty(20, BLOCK))
    codec.begin()
    codec.meet(expects)
    if sent == "int8":
        for _ in range(40):
            hostile.end_round(False)
        assert isinstance(hostile, Modulo)
        hostile._reach.fill_(10.0)
        false = bytearray(hostile.encode(0, one + 5))
    else:
        false = bytearray((one + 100).half().view(torch.uint8).numpy().tobytes())
    out = torch.empty(5000)
    codec.decode(sent, 0, false, one, out)
    assert float((out - one).abs().max()) > 1
    codec.end_round(True)
    assert (codec._reach <= 2.001 * before).all()


def test_a_failed_round_teaches_nothing() -> None:
    codec, other = make("int4")
    round_trip((codec, other), 1.0)
    assert isinstance(codec, Modulo)
    before = codec._range(0, torch.empty(20, BLOCK))
    codec.begin()
    codec.decode("int4", 0, bytearray(size("int4", 5000)), torch.randn(5000), torch.empty(5000))
    codec.end_round(False)
    torch.testing.assert_close(codec._range(0, before), before * WIDEN)  # whoever comes next may be further away
    assert codec.sends == "int4"


@settings(max_examples=300)
@given(st.sampled_from(MODULO), st.binary(max_size=2 * (BLOCK + 5)), st.floats(1e-6, 10.0), st.integers(1, 2 * BLOCK))
def test_whatever_arrives_is_decoded_without_harm(name: CodecName, junk: bytes, scale: float, numel: int) -> None:
    codec = Modulo("int8" if name == "int8" else "int4", numel)
    own = scale * torch.randn(numel)
    codec.begin()
    codec.learn(0, own)
    data = bytearray(size(name, numel))
    data[: len(junk)] = junk[: len(data)]
    out = torch.empty(numel)
    codec.decode(name, 0, data, own, out)
    codec.end_round(True)
    assert codec._reach.isfinite().all()
    codec.begin()
    assert len(codec.encode(0, own)) == size(codec.sends, numel)


def test_a_partner_that_has_been_away_further_is_reached_too() -> None:
    """A peer that was alone for a round expects more, says so, and is decoded by one that expected less."""
    pair = make("int4")
    round_trip(pair, 1.0)
    one, two, *_ = two_peers(5000, 1.0)
    two = two + 1.5e-3 * torch.randn(5000, generator=torch.Generator().manual_seed(3))
    pair[1].end_round(False)
    pair[1].end_round(False)
    for codec in pair:
        codec.begin()
    assert pair[1].expects > 1.5 * pair[0].expects
    for codec, other in (pair, pair[::-1]):
        codec.meet(other.expects)
    errors = swap(pair[1], pair[0], two, one) - two, swap(pair[0], pair[1], one, two) - one
    assert all(float(error.abs().quantile(0.95)) < 2e-3 for error in errors)
    pair[0].meet(1e30)  # whatever a partner says, precision is not given away
    assert isinstance(pair[0], Modulo) and pair[0]._partner <= 3


@pytest.mark.parametrize(
    ("name", "sent", "received", "damaged"),
    [
        ("int8", "3c74b2be3fb712ce", "c23e33a83093fbdf", "963a7fa64f25a30c"),
        ("int4", "a37e355de9c7e1a7", "b26bc27cd4fc2444", "aaedf24ddf12691f"),
    ],
)
def test_the_bits_of_a_part_are_fixed(name: CodecName, sent: str, received: str, damaged: str) -> None:
    """Peers of one wire version agree on them. The elements are exact in fp32, so on every machine the same."""

    def elements(seed: int) -> Tensor:
        places = torch.arange(1000, dtype=torch.int64) + seed
        return ((places * 2654435761 % 2**31).float() / 2**30 - 1) * 0.05

    def bits(data: bytes) -> str:
        return xxhash.xxh3_64_hexdigest(data)

    def decoded(data: bytearray) -> bytes:
        out = torch.empty(1000)
        codec.decode(name, 0, data, own, out)
        return out.numpy().tobytes()

    codec, own = codec_named(name, 1000), elements(1)
    codec.begin()
    codec.learn(0, elements(7) * 0.01)
    data = bytearray(codec.encode(0, own + elements(5) * 0.02))
    assert (bits(data), bits(decoded(data))) == (sent, received)
    data[3] ^= 1  # the check of the first block
    assert bits(decoded(data)) == damaged
