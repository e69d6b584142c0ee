"""The simulator: the same for a seed, honest about who met whom, and stopped by what makes no sense."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from peer.commands.simulate import simulation
from peer.commands.simulate.exchanges import swap
from peer.commands.simulate.meetings import Arrivals, choose_pairs
from peer.commands.simulate.options import Method, Options, with_method
from peer.commands.simulate.replica import Replica
from peer.commands.simulate.simulation import Simulation
from peer.config.methods import DecoupledConfig, DiLoCoConfig, NoLoCoConfig
from peer.config.model import AutoModel
from peer.config.schema import ExchangeConfig, InnerConfig
from peer.errors import RunError, UserError
from peer.exchange.group.rounding import Rounding
from peer.rounds.types import Outcome
from tests.swarm.support.attacks import Attack, Hostile, Unguarded, gradient, uphill
from tests.unit import parts
from tests.unit.commands.simulate_harness import config, replica_of, simulate, without_clock

PAIR_ROUNDS = 5  # of 12 steps with H 4: 4, 4, 2, 1, 1
LAST_SWAPS = 1  # of four replicas, after the last step of a round that has merged


@pytest.mark.parametrize("method", list(Method))
def test_every_method_learns_and_is_the_same_for_a_seed_whatever_the_threads(method: Method) -> None:
    one = without_clock(simulate(method, workers=1))
    two = without_clock(simulate(method, workers=3))
    assert one == two
    swarm = one["swarm"]
    assert swarm["method"] == method.value
    assert (swarm["peers"], len(one["peers"])) == (4, 4)
    assert swarm["tokens"] == 4 * 12 * 2 * 16 == sum(row["tokens"] for row in one["peers"].values())
    assert swarm["val_loss_mean"] < one["curves"][0]["val_loss_mean"]
    assert [row["time"] for row in one["curves"]] == [0, 4, 8, 12]


def test_muon_is_another_run_and_the_same_for_a_seed_whatever_the_threads() -> None:
    adamw, muon = (InnerConfig(optimizer=it, learning_rate=3e-3, warmup_steps=2) for it in ("adamw", "muon"))
    one, two = (without_clock(simulate(run={"inner": muon}, workers=workers)) for workers in (1, 3))
    assert one == two
    assert one["swarm"]["val_loss_mean"] < one["curves"][0]["val_loss_mean"]
    other = without_clock(simulate(run={"inner": adamw}))
    assert one["curves"][0] == other["curves"][0] and one["swarm"] != other["swarm"]


@pytest.mark.parametrize(("dropout", "threads"), [(0.1, 1), (0.0, 3)])
def test_dropout_is_the_same_for_a_seed_too(
    dropout: float, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing seeded it, and all threads drew from one generator. A model without it trains in several."""
    from transformers import GPT2Config

    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    GPT2Config(vocab_size=257, n_positions=16, n_embd=16, n_layer=1, n_head=2, **rates).save_pretrained(tmp_path)
    run = {"model": AutoModel(name="auto", source=str(tmp_path))}
    monkeypatch.setattr(simulation, "workers", used := Mock(wraps=simulation.workers))
    one, two = (without_clock(simulate(run=run, workers=workers)) for workers in (1, 3))
    assert one == two
    assert [call.args[0] for call in used.call_args_list] == [1, threads]


def test_the_averaged_model_is_evaluated_in_the_precision_of_the_replicas() -> None:
    curves = simulate(peer={"precision": "bf16"}, replicas=2)["curves"]
    assert curves[0]["val_loss_averaged_model"] == curves[0]["val_loss_mean"]  # all begin with the same weights


def test_another_seed_is_another_run() -> None:
    losses = {simulate(run={"seed": seed})["swarm"]["val_loss_mean"] for seed in range(3)}
    assert len(losses) == 3


def test_replicas_of_a_group_of_equals_stay_equal_and_those_of_pairs_do_not() -> None:
    assert simulate(Method.DILOCO)["swarm"]["spread"] < 1e-7
    assert simulate(Method.NOLOCO, replicas=3)["swarm"]["spread"] > 1e-6  # two would end at their mean
    assert simulate(Method.LOCAL)["swarm"]["spread"] > simulate(Method.AVERAGING)["swarm"]["spread"]


def test_data_parallel_training_is_one_model_on_all_the_data() -> None:
    """Against a loop by hand: the mean of the replicas' gradients in every step."""
    run = config(outer=NoLoCoConfig(), steps=3, inner=InnerConfig(learning_rate=1e-3, warmup_steps=0, clip_norm=100.0))
    chosen, method = with_method(run, Method.DDP)
    simulation = Simulation(chosen, Options(replicas=2, method=method))
    ddp = simulation._replicas()[0].state
    streams = [simulation._build("", chosen, index).state.stream for index in range(2)]
    net = simulation._build("", chosen, 0).state.inner.model
    logits = [net(input_ids=batch[:, :-1]).logits for batch in (stream.batch(0) for stream in streams)]
    losses = [
        torch.nn.functional.cross_entropy(it.flatten(0, 1), stream.batch(0)[:, 1:].flatten())
        for it, stream in zip(logits, streams, strict=True)
    ]
    total = torch.stack(losses).mean()
    total.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in net.parameters() if p.grad is not None])
    report = ddp.inner.run(ddp.stream.take(1))
    assert report.loss == pytest.approx(float(total.detach()), rel=1e-5)
    assert report.grad_norm == pytest.approx(float(norm), rel=1e-4)


def test_bytes_are_those_of_the_protocols() -> None:
    numel = sum(p.numel() for p in parts.network().parameters())
    assert simulate(Method.NOLOCO)["swarm"]["bytes_sent"] == 4 * (PAIR_ROUNDS + LAST_SWAPS) * 4 * numel
    assert simulate(Method.DILOCO)["swarm"]["bytes_sent"] == 4 * 3 * round(2 * 3 / 4 * Rounding("int8").size(numel))
    assert simulate(Method.DDP)["swarm"]["bytes_sent"] == 12 * 2 * 3 * 4 * numel
    assert simulate(Method.LOCAL)["swarm"]["bytes_sent"] == 0
    assert simulate(Method.ONE_WORKER)["swarm"]["bytes_sent"] == 0
    assert simulate(Method.DECOUPLED)["swarm"]["bytes_sent"] < simulate(Method.DILOCO)["swarm"]["bytes_sent"] / 10


def test_everybody_meets_and_with_an_odd_number_everybody_takes_turns_at_being_alone() -> None:
    summary = simulate(replicas=5, run={"steps": 40})
    alone = [row["rounds"]["alone"] for row in summary["peers"].values()]
    # of 9 + 3 rounds, and of those after the last step: 2, or 3 where the round before was without a partner
    assert sorted(alone) == [2, 3, 3, 3, 4]
    assert sorted(sum(row["rounds"].values()) for row in summary["peers"].values()) == [14, 14, 14, 14, 15]
    assert sum(len(row["partners"]) for row in summary["peers"].values()) >= 16
    for name, row in summary["peers"].items():
        for other, count in row["partners"].items():
            assert summary["peers"][other]["partners"][name] == count


def pairings(rounds: int, remember: bool) -> Counter[frozenset[str]]:
    """How often each pair of six replicas meets."""
    replicas = [replica_of(str(index), 10**9, 10) for index in range(6)]
    chance, met = random.Random(0), Counter[frozenset[str]]()
    for number in range(rounds):
        for one, two in choose_pairs(Arrivals(), replicas, 0.0, 0.5, chance):
            assert two is not None
            met[frozenset((one.name, two.name))] += 1
            if remember:
                one.met[two.name] = two.met[one.name] = number
    return met


def test_among_partners_met_equally_long_ago_every_pair_is_as_likely() -> None:
    met = pairings(3000, remember=False)
    assert len(met) == 15
    expected = 3000 * 3 / 15
    chi_square = sum((count - expected) ** 2 / expected for count in met.values())
    assert chi_square < 36.1  # 14 degrees of freedom, 0.1%


def test_partners_met_longest_ago_come_first() -> None:
    met = pairings(50, remember=True)
    assert min(met.values()) >= 0.7 * 10 and max(met.values()) <= 1.3 * 10, met  # chance alone: about 5 to 16


def test_dropped_swaps_are_counted_and_cost_no_bytes() -> None:
    summary = simulate(drop=1.0)
    assert summary["swarm"]["bytes_sent"] == 0
    assert all(row["rounds"]["timeout"] == PAIR_ROUNDS for row in summary["peers"].values())
    some = simulate(drop=0.3, run={"steps": 80})
    share = sum(row["rounds"]["timeout"] for row in some["peers"].values()) / (4 * 22)
    assert 0.1 < share < 0.5


def test_a_member_that_missed_a_round_of_equals_catches_up() -> None:
    diloco = {"steps": 80, "outer": DiLoCoConfig(name="diloco", momentum=0.5)}
    summary = simulate(run=diloco, drop=0.3)
    outcomes = Counter[str]()
    for row in summary["peers"].values():
        outcomes.update(row["rounds"])
    assert outcomes["timeout"] > 5 and outcomes["merged"] > 30
    assert summary["swarm"]["val_loss_mean"] < simulate(Method.LOCAL, run={"steps": 80})["swarm"]["val_loss_mean"] + 0.2
    assert any(row["spread"] < 1e-7 for row in summary["curves"][1:])


def test_unlike_speeds_train_as_long_as_each_other_and_groups_wait_for_the_slowest() -> None:
    pair = simulate(speeds=(1.0, 0.5), run={"steps": 40})
    steps = [row["steps"] for row in pair["peers"].values()]
    assert steps == [40, 20, 40, 20]
    group = simulate(Method.DILOCO, speeds=(1.0, 0.5), run={"steps": 40})
    assert group["swarm"]["idle_share"] > 2 * pair["swarm"]["idle_share"]
    assert all(len(row["partners"]) >= 1 for row in pair["peers"].values())


def test_replicas_may_read_parts_of_the_text_that_do_not_overlap() -> None:
    chosen, method = with_method(config(), None)
    simulation = Simulation(chosen, Options(replicas=3, method=method, non_iid=True))
    texts = [simulation._part(index).train for index in range(3)]
    assert sum(map(len, texts)) == len(simulation._text.train)
    assert simulate(non_iid=True)["swarm"]["val_loss_mean"] != simulate()["swarm"]["val_loss_mean"]
    many = Simulation(chosen, Options(replicas=64, method=method, non_iid=True))
    many._text = replace(many._text, train=many._text.train[:1000])
    with pytest.raises(UserError, match="--non-iid: a replica has 15 tokens and needs"):
        many._part(0)


def test_two_replicas_average_to_the_bits_of_the_pair_exchange() -> None:
    replicas = [replica_of(str(seed), 8, 4) for seed in range(2)]
    for replica in replicas:
        replica.inner_phase()
    left, right = swap(*replicas)[0]
    own, theirs = (flat(replica) for replica in replicas)
    mean = (own + theirs) * 0.5
    assert torch.equal(left, mean) and torch.equal(right, mean)


def flat(replica: Replica) -> Tensor:
    contribution = replica.state.outer.contribution()
    out = torch.empty(contribution.numel)
    contribution.read(0, out)  # type: ignore[union-attr]
    return out


def test_a_loss_that_is_not_finite_names_the_replica_and_the_step() -> None:
    run = {"inner": InnerConfig(learning_rate=1e30, warmup_steps=0, clip_norm=1e30, weight_decay=0.0)}
    with pytest.raises(RunError, match=r"replica-\d: the training loss is (nan|inf) at step \d+; nothing was averaged"):
        simulate(run=run)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"replicas": 1}, "needs 2 to 64"),
        ({"replicas": 65}, "needs 2 to 64"),
        ({"drop": -0.1}, "it is a share"),
        ({"drop": math.nan}, "it is a share"),
        ({"speeds": (1.0, 0.0)}, "--speeds"),
        ({"swap_steps": 0}, "--swap-steps 0"),
        ({"workers": 0}, "--workers 0"),
        ({"method": Method.DDP, "drop": 0.1}, "--method ddp"),
    ],
)
def test_options_that_make_no_sense_are_one_line(options: dict[str, Any], words: str) -> None:
    values = {"replicas": 4, "method": Method.NOLOCO, **options}
    with pytest.raises(UserError, match=words):
        Options(**values).check(config())


def test_a_method_on_the_command_line_keeps_the_files_settings_when_they_are_its_own() -> None:
    own = config(outer=DiLoCoConfig(name="diloco", learning_rate=0.3))
    assert with_method(own, Method.DILOCO)[0].run.outer == own.run.outer
    assert with_method(own, Method.ONE_WORKER)[0].run.outer == own.run.outer
    assert with_method(own, Method.NOLOCO)[0].run.outer == NoLoCoConfig()
    assert isinstance(with_method(own, Method.DECOUPLED)[0].run.outer, DecoupledConfig)
    assert with_method(own, None) == (own, Method.DILOCO)


def test_outcomes_of_controls_are_rounds_alone() -> None:
    for method in (Method.LOCAL, Method.ONE_WORKER):
        assert all(row["rounds"][Outcome.ALONE] == 3 for row in simulate(method)["peers"].values())


class Attacked(Simulation):
    """Replica 0 is hostile. ``guarded``, ``undoes``: what the others do about it."""

    attack: Attack | None  # ``None``: along the gradient of the loss
    guarded = undoes = True

    def _replicas(self) -> list[Replica]:
        replicas = super()._replicas()
        false = uphill(partial(gradient, replicas[0].state), 3.0) if self.attack is None else self.attack
        replicas[0].codec = Hostile(false)
        for replica in replicas:
            replica.guard = replica.guard if self.guarded else Unguarded()
            if not self.undoes:
                replica.try_merge = lambda corrections, partner="": None  # type: ignore[method-assign]
        return replicas


def attacked(attack: Attack | None, *, guarded: bool = True, undoes: bool = True, **run: Any) -> dict[str, Any]:
    """The figures of four replicas."""
    chosen, method = with_method(config(**{"steps": 80, **run}), None)
    simulation = Attacked(chosen, Options(replicas=4, method=method, swap_steps=2))
    simulation.attack, simulation.guarded, simulation.undoes = attack, guarded, undoes
    peers: dict[str, Any] = simulation.run(lambda line: None)["peers"]
    return peers


@pytest.mark.parametrize("overlap", [False, True])
def test_a_hostile_replica_is_refused_and_then_avoided(overlap: bool) -> None:
    peers = attacked(Attack.NAN, exchange=ExchangeConfig(overlap=overlap, codec="none"))
    hostile = peers.pop("replica-0")
    assert hostile["partners"] == {} and hostile["rounds"]["refused"] >= 3
    for row in peers.values():
        assert 1 <= row["rounds"]["poisoned"] <= 3  # of 20 rounds: 4, 8, 16 phases of peace
        assert row["rounds"]["merged"] >= 10
        assert 22 <= sum(row["rounds"].values()) <= 23 + LAST_SWAPS


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.long), True])
@pytest.mark.parametrize("attack", [Attack.DROWNED, pytest.param(Attack.SCALE, marks=pytest.mark.long)])
def test_a_hostile_replica_that_is_not_refused_does_far_less_harm_than_without_the_guard(
    attack: Attack, overlap: bool
) -> None:
    exchange = ExchangeConfig(overlap=overlap, codec="none")
    honest = loss(simulate(run={"steps": 80, "exchange": exchange}, swap_steps=2)["peers"])
    harm = loss(attacked(attack, exchange=exchange)) - honest
    unguarded = loss(attacked(attack, exchange=exchange, guarded=False, undoes=False))
    assert harm < 0.25 * (unguarded - honest)  # one of four


@pytest.mark.long
def test_merges_along_the_gradient_of_the_loss_are_undone() -> None:
    """The guard accepts them: they are no longer than those of honest peers."""
    run = {"steps": 200, "inner_steps": 20, "batch_size": 4}
    honest = loss(simulate(run=run)["peers"])
    assert loss(attacked(None, **run)) < 1.05 * honest  # one of four
    assert loss(attacked(None, **run, undoes=False)) > 1.2 * honest


def loss(peers: dict[str, Any]) -> float:
    """Of all but replica 0."""
    return sum(peers[f"replica-{index}"]["val_loss"] for index in (1, 2, 3)) / 3


def test_tokens_that_were_never_trained_gain_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit: more than as many as the partner's own count like as many."""

    def mean(claimed: int | None) -> Tensor:
        replicas = [replica_of(str(seed), 8, 4) for seed in range(2)]
        for replica in replicas:
            replica.inner_phase()
        if claimed is not None:
            monkeypatch.setattr(Replica, "tokens", property(lambda it: claimed if it is replicas[1] else 1))
        return swap(*replicas)[0][0]

    assert torch.equal(mean(2**53), mean(None))


def test_unequal_tokens_weigh_the_mean_and_a_partner_counts_for_a_half_at_most() -> None:
    replicas = [replica_of(str(seed), 8, 4) for seed in range(2)]
    replicas[1].target = 3
    for replica in replicas:
        replica.inner_phase()
    own, theirs = (flat(replica) for replica in replicas)
    left, right = swap(*replicas)[0]
    torch.testing.assert_close(left, own + 3 / 7 * (theirs - own))
    torch.testing.assert_close(right, theirs + 0.5 * (own - theirs))


@pytest.mark.parametrize("overlap", [False, pytest.param(True, marks=pytest.mark.long)])
def test_after_the_last_step_the_replicas_come_to_their_mean(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    run = {"steps": 40, "exchange": ExchangeConfig(overlap=overlap, codec="int8")}
    merged = simulate(replicas=8, run=run)["swarm"]
    monkeypatch.setattr("peer.commands.simulate.world.last_swaps", lambda members, merged: 0)
    apart = simulate(replicas=8, run=run)["swarm"]
    assert merged["spread"] < 0.45 * apart["spread"]  # each swap halves its square
    gaps = [it["val_loss_mean"] - it["val_loss_averaged_model"] for it in (merged, apart)]
    assert 0 <= abs(gaps[0]) < 0.2 * gaps[1]
    assert merged["val_loss_averaged_model"] == pytest.approx(apart["val_loss_averaged_model"], rel=1e-3)
    assert merged["tokens"] == apart["tokens"] and merged["bytes_sent"] > apart["bytes_sent"]
