"""The mean of replicas that come one after the other, against the mean of all at once."""

from __future__ import annotations

import pytest
import torch

from peer.replica.averaging import MeanWeights


def test_of_one_replica_it_is_that_replica_to_the_bit_and_a_copy() -> None:
    weights = {"a": torch.randn(100), "b": torch.randn(3, 4)}
    mean = MeanWeights()
    mean.add(weights)
    assert all(torch.equal(mean.tensors[name], value) for name, value in weights.items())
    assert mean.square_distance(weights) == 0
    weights["a"].zero_()
    assert 0 < mean.square_distance(weights) < mean.square_norm()


def test_of_several_it_is_their_running_mean_to_the_bit_and_their_mean() -> None:
    torch.manual_seed(0)
    replicas = [torch.randn(1000) for _ in range(5)]
    mean = MeanWeights()
    by_hand = replicas[0].clone()
    for count, value in enumerate(replicas, 1):
        mean.add({"w": value})
        if count > 1:
            by_hand.lerp_(value, 1 / count)
    assert torch.equal(mean.tensors["w"], by_hand)
    at_once = torch.stack(replicas).double().mean(0)
    torch.testing.assert_close(mean.tensors["w"].double(), at_once, rtol=1e-5, atol=1e-6)
    assert mean.square_norm() == pytest.approx(float(by_hand.double().square().sum()), rel=1e-12)
    distance = float((replicas[3].double() - by_hand.double()).square().sum())
    assert mean.square_distance({"w": replicas[3]}) == pytest.approx(distance, rel=1e-6)
