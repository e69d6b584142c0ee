"""The parts of somebody's own loop that need no network: settings, weights, state."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from peer.api.account import StepAccount
from peer.api.config import OwnConfig, resolve
from peer.api.state import OwnState
from peer.api.weights import require_finite, require_no_masters, require_same, require_trains, trained
from peer.config.digest import canonical, digest, first_difference
from peer.config.methods import DiLoCoConfig, NoLoCoConfig
from peer.errors import RunError, UserError
from peer.outer.diloco import DiLoCo
from peer.outer.method import OuterMethod
from peer.outer.noloco import NoLoCo
from peer.outer.slow_weights import SlowWeights

RUN = '{"inner_steps":20}'


class Tied(nn.Module):
    """An embedding that is the output as well, a frozen layer, and one that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.frozen, self.layer = nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        self.frozen.requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.layer(self.frozen(self.embed(ids))))
        return out


def own(**keywords: Any) -> OwnConfig:
    return resolve(None, {"run.name": "test", **keywords}, environment={})


def outer(model: nn.Module) -> OuterMethod:
    return NoLoCo(SlowWeights(trained(model)), NoLoCoConfig())


# -- settings


def test_keywords_are_keys_and_come_before_environment_and_file(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("run: {name: file, inner_steps: 7, tag: a}\npeer: {initial_peers: [x]}")
    config = resolve(
        file,
        {
            "run.name": "mine",
            "run.outer.name": "diloco",
            "peer.initial_peers": "one, two",
            "run.outer.momentum": 0.25,
            "peer.network.host": "127.0.0.1",
        },
        environment={"NOLOCO_INITIAL_PEERS": "z", "NOLOCO_PEER_NAME": "me"},
    )
    assert (config.run.name, config.run.inner_steps, config.run.tag) == ("mine", 7, "a")
    assert config.run.outer == DiLoCoConfig(name="diloco", momentum=0.25)
    assert (config.peer.initial_peers, config.peer.name) == (("one", "two"), "me")


def test_a_setting_of_the_method_may_come_before_its_name(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("run: {name: file, outer: {name: noloco, beta: 0.6}}")
    config = resolve(file, {"run.outer.momentum": 0.25, "run.outer.name": "diloco"}, environment={})
    assert config.run.outer == DiLoCoConfig(name="diloco", momentum=0.25)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"run.name": None}, "run.name"),
        ({"run.outer.name": "adam"}, "run.outer.name: 'adam' is not known, choose one of: noloco"),
        ({"run.inner_step": 3}, "run.inner_step: unknown key, did you mean inner_steps"),
        ({"run.data.name": "stdlib"}, "data is your own program's affair; leave it out"),
        ({"peer.micro_batch": 2}, "micro_batch is your own program's affair"),
        ({"run.outer.name": "noloco", "run.outer.gamma": 3.0}, "diverge"),
        ({"run.inner_steps": 0}, "run.inner_steps"),
        ({"run.outer.name": "diloco", "run.exchange.overlap": True}, "overlap is for noloco"),
    ],
)
def test_a_mistake_is_one_line(values: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as caught:
        resolve(None, {"run.name": "test", **values}, environment={})
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_config_that_is_whole_takes_nothing_beside_it() -> None:
    assert resolve(own(), {}) == own()
    with pytest.raises(UserError, match=r"run\.name is given with a complete config"):
        resolve(own(), {"run.name": "other"})


def test_the_digest_is_of_what_members_have_in_common() -> None:
    assert digest(own(**{"peer.initial_peers": ["a"], "peer.name": "one"}).run) == digest(
        own(**{"peer.name": "two"}).run
    )
    changed = own(**{"run.tag": "tokenizer v2"})
    assert digest(changed.run) != digest(own().run)
    assert first_difference(canonical(own().run), canonical(changed.run)).startswith("run.tag is")


def test_the_package_and_the_command_line_load_neither_torch_nor_hivemind() -> None:
    code = (
        "import sys, peer, peer.commands.cli; peer.UserError; peer.commands.cli._parser()\n"
        "left = {'torch', 'hivemind', 'transformers'} & set(sys.modules); assert not left, left\n"
        "try: peer.OuterLop\nexcept AttributeError as error: assert 'OuterLop' in str(error)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# -- weights


def test_tied_weights_once_and_frozen_ones_not_at_all() -> None:
    assert [name for name, _ in trained(Tied())] == ["embed.weight", "layer.weight", "layer.bias"]


@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel, lambda model: nn.DataParallel(torch.compile(model))])
def test_what_wraps_a_model_does_not_change_its_layout(wrap: Callable[[nn.Module], nn.Module]) -> None:
    bare, wrapped = Tied(), wrap(Tied())
    assert SlowWeights(trained(wrapped)).layout() == SlowWeights(trained(bare)).layout()


def test_a_layer_that_is_compiled_by_itself_keeps_its_name() -> None:
    model = Tied()
    model.layer = torch.compile(model.layer)  # type: ignore[assignment]
    assert SlowWeights(trained(model)).layout() == SlowWeights(trained(Tied())).layout()


class Adapted(nn.Module):
    """A layer of its own about a model, whose attributes it has too, as PEFT's models do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.adapter = inner, nn.Linear(4, 4)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)


def test_the_layers_about_a_compiled_model_are_swapped_too() -> None:
    """They were left out without a word, and all weights had names other than those of a model that is not compiled."""
    names = [name for name, _ in trained(Adapted(torch.compile(Tied())))]  # type: ignore[arg-type]
    assert names == [name for name, _ in trained(Adapted(Tied()))]
    assert {"adapter.weight", "inner.layer.weight"} <= set(names)


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_data_parallelism_of_one_rank_is_looked_through_and_shards_are_refused(one_rank: None) -> None:
    parallel = nn.parallel.DistributedDataParallel(Tied())
    assert SlowWeights(trained(parallel)).layout() == SlowWeights(trained(Tied())).layout()
    sharded = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(UserError, match="weight is spread over several ranks"):
        trained(sharded)


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """A process group of two that talks to nobody."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("wrap", [nn.Module.train, nn.parallel.DistributedDataParallel])
def test_one_of_several_ranks_is_refused_however_they_communicate(
    two_ranks: None, wrap: Callable[[nn.Module], nn.Module]
) -> None:
    with pytest.raises(UserError, match=r"is one of 2 ranks.*without torchrun"):
        trained(wrap(Tied()))


def channels_last() -> nn.Module:
    return nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)


def half_on_meta() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))


def one_memory() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 3, bias=False), nn.Linear(2, 3, bias=False))
    model[1].weight.data = model[0].weight.data
    return model


def one_buffer() -> nn.Module:
    """Parameters that are views of one tensor, side by side."""
    buffer = torch.zeros(4)
    return nn.ParameterList([nn.Parameter(buffer[2:]), nn.Parameter(buffer[:2]), nn.Parameter(buffer[:0])])


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (one_memory, "1.weight shares memory with 0.weight; tie them as one nn.Parameter"),
        (channels_last, "weight is not contiguous"),
        (half_on_meta, "1.weight is on the meta device"),
        (lambda: nn.Sequential(nn.LazyLinear(2)), "0.weight has no shape yet; give the model one batch first"),
        (lambda: nn.Linear(2, 2).requires_grad_(False), "no parameter that is trained"),
        (lambda: nn.ParameterList([nn.Parameter(torch.zeros(2, dtype=torch.complex64))]), "swaps real numbers"),
        (lambda: nn.Linear(2, 2).to(torch.float8_e4m3fn), "of torch.float8_e4m3fn; OuterLoop swaps real numbers of 16"),
        (lambda: [nn.Linear(2, 2)], "not a torch.nn.Module"),
    ],
)
def test_weights_that_cannot_be_swapped_are_said_at_once(model: Callable[[], nn.Module], said: str) -> None:
    with pytest.raises(UserError, match=said):
        trained(model())


def test_views_of_one_tensor_side_by_side_are_parameters_like_others() -> None:
    assert [name for name, _ in trained(one_buffer())] == ["0", "1", "2"]


def test_parameters_that_were_replaced_are_noticed() -> None:
    model = Tied()
    spans = outer(model).slow.spans
    require_same(model, spans)
    model.double().float()  # in place
    require_same(model, spans)
    model.layer = nn.Linear(4, 4)
    with pytest.raises(RunError, match=r"layer.weight is not the one of OuterLoop.start"):
        require_same(model, spans)


def test_parameters_that_are_trained_by_now_are_noticed() -> None:
    model = Tied()
    spans = outer(model).slow.spans
    model.layer.requires_grad_(False)  # for a while
    require_same(model, spans)
    model.frozen.requires_grad_(True)
    with pytest.raises(RunError, match=r"frozen.weight is trained and was not"):
        require_same(model, spans)


def test_broken_weights_are_named() -> None:
    model = Tied()
    spans = outer(model).slow.spans
    require_finite(spans, 5)
    with torch.no_grad():
        model.layer.bias[2] = torch.inf
    with pytest.raises(RunError, match=r"layer.bias is not finite at step 5"):
        require_finite(spans, 5)


def test_an_optimizer_of_another_model_is_refused() -> None:
    model = Tied()
    require_trains([torch.optim.SGD(model.parameters(), lr=0.1)], trained(model))
    with pytest.raises(UserError, match="the SGD has none of the model's parameters"):
        require_trains([torch.optim.SGD(Tied().parameters(), lr=0.1)], trained(model))


def test_an_optimizer_that_also_trains_weights_outside_the_model_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """They were never averaged, as a temperature or a head beside the model, and no word said so."""
    model, head = Tied(), nn.Linear(4, 2)
    held = [*model.parameters(), *head.requires_grad_(False).parameters()]  # frozen ones of both are no matter
    require_trains([torch.optim.SGD(held, lr=0.1)], trained(model))
    assert not caplog.messages
    head.requires_grad_(True)
    require_trains([torch.optim.SGD(held, lr=0.1)], trained(model))
    (said,) = caplog.messages
    assert said.startswith("the SGD trains 2 parameters outside the model") and "one nn.Module that holds all" in said
    require_trains([torch.optim.SGD(held, lr=0.1)], trained(nn.ModuleList([model, head])))
    assert caplog.messages == [said]


class Masters(torch.optim.SGD):
    """With fp32 copies of the weights, as Transformer Engine's FusedAdam(master_weights=True) has them."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in (it for group in self.param_groups for it in group["params"]):
            master = self.state[parameter].setdefault("master_param", parameter.float().clone())
            parameter.copy_(master.sub_(0.01 * torch.randn_like(master)))


class AdamWScheduleFree(torch.optim.SGD):
    """By its name: the package is not needed."""


def test_an_optimizer_that_would_undo_each_merge_is_refused() -> None:
    model = Tied().to(torch.bfloat16)
    spans = SlowWeights(trained(model)).spans
    for good in (torch.optim.AdamW(model.parameters()), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)):
        require_no_masters([good], spans)  # it has no state yet
        sum(it.float().square().sum() for it in model.parameters()).backward()  # type: ignore[union-attr]
        good.step()
        require_no_masters([good], spans)
    exact = Tied()  # its average is equal to the weights for a million steps
    average = torch.optim.ASGD(exact.parameters())
    sum(it.square().sum() for it in exact.parameters()).backward()  # type: ignore[union-attr]
    average.step()
    require_no_masters([average], SlowWeights(trained(exact)).spans)
    masters = Masters(model.parameters(), lr=0.1)
    masters.step()
    with pytest.raises(RunError, match=r"the Masters computes the weights from its own copy \(master_param\)"):
        require_no_masters([masters], spans)
    free = AdamWScheduleFree(model.parameters(), lr=0.1)
    for given in (free, SimpleNamespace(optimizer=free, param_groups=free.param_groups)):
        with pytest.raises(UserError, match="the AdamWScheduleFree computes the weights from its own copy, which"):
            require_trains([given], trained(model))  # type: ignore[list-item]


def test_a_model_in_16_bits_loses_nothing_of_its_slow_weights() -> None:
    """What rounding takes from φ when it becomes θ is no training, and must not come back as Δ."""
    model = Tied().to(torch.bfloat16)
    method = outer(model)
    with torch.no_grad():
        method.slow.phi.add_(torch.randn(method.slow.numel) * 1e-3)
    method.slow.write_fast()
    theta = torch.empty(method.slow.numel)
    method.slow.read_fast(0, theta)
    assert torch.equal(theta, method.slow.phi)
    assert model.layer.weight.dtype == torch.bfloat16
    with torch.no_grad():
        model.layer.weight.add_(0.5)  # training
    method.slow.read_fast(0, theta)
    change = (theta - method.slow.phi)[32:48]
    torch.testing.assert_close(change, torch.full((16,), 0.5), atol=5e-3, rtol=0)


# -- state


def test_a_state_comes_back_and_goes_through_torch_save(tmp_path: Path) -> None:
    first = OwnState(outer(Tied()), (), RUN, feedback=True)
    first.inner.step = 12
    first.kept.normal_()  # type: ignore[union-attr]
    first.outer.momentum.normal_()  # type: ignore[union-attr]
    first.cross_boundary("mean", members=3)
    torch.save(first.state_dict(), tmp_path / "outer.pt")
    second = OwnState(outer(Tied()), (), RUN, feedback=True)
    second.load_state_dict(torch.load(tmp_path / "outer.pt", weights_only=True))
    assert second.counters == first.counters and second.inner.step == 12
    for one, two in zip(first.saved_vectors().values(), second.saved_vectors().values(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("state", [{"version": 1}, {}, [1], Tied().state_dict()])
def test_what_is_no_state_is_refused(state: Any) -> None:
    with pytest.raises(UserError, match="is none that OuterLoop"):
        OwnState(outer(Tied()), (), RUN).load_state_dict(state)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"config": '{"inner_steps":10}'}, "is of another run: run.inner_steps is 20 here and 10 there"),
        ({"config": "[1]"}, "could not be read"),
        ({"layout": "other"}, "names or shapes"),
        ({"version": 99}, "another version"),
    ],
)
def test_a_state_of_something_else_is_refused(change: dict[str, Any], said: str) -> None:
    state = OwnState(outer(Tied()), (), RUN)
    before = state.outer.slow.phi.clone()
    with pytest.raises(UserError, match=said):
        state.load_state_dict({**OwnState(outer(Tied()), (), RUN).state_dict(), **change})
    assert torch.equal(state.outer.slow.phi, before)


def test_a_state_of_a_run_of_another_length_is_taken() -> None:
    state, longer = OwnState(outer(Tied()), (), RUN), json.dumps({**json.loads(RUN), "steps": 900})
    state.load_state_dict({**OwnState(outer(Tied()), (), RUN).state_dict(), "step": 40, "config": longer})
    assert state.inner.step == 40


def test_equal_replicas_that_begin_with_other_weights_are_not_of_one_line() -> None:
    def lineage(seed: int) -> str:
        torch.manual_seed(seed)
        method = DiLoCo(SlowWeights(trained(Tied())), DiLoCoConfig(name="diloco"))
        return OwnState(method, (), RUN).counters.lineage.digest

    assert lineage(0) == lineage(0) != lineage(1)


def test_adopting_a_members_weights_clears_the_users_optimizer() -> None:
    donor, model = OwnState(outer(Tied()), (), RUN), Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(8)).sum().backward()
    optimizer.step()
    state = OwnState(outer(model), (optimizer,), RUN)
    assert optimizer.state and not state.adopted
    before = model.layer.weight
    state.adopt(donor.snapshot())
    assert not optimizer.state and state.adopted
    assert model.layer.weight is before and model.head.weight is model.embed.weight
    assert torch.equal(torch.cat([p.flatten() for _, p in trained(model)]), donor.outer.slow.phi)


@pytest.mark.parametrize("broken", [math.inf, math.nan])
def test_a_phase_has_the_losses_that_are_finite(broken: float) -> None:
    """A batch whose labels are all masked made the loss of its whole phase NaN."""
    account = StepAccount()
    for told in (broken, 1.0, 3.0):
        account.add(7, told)
    report = account.report(0.1)
    assert (report.loss, report.first_loss, report.losses, report.broken_losses) == (2.0, 1.0, 2, 1)
    assert report.spread == pytest.approx(math.sqrt(2))


def test_a_phase_without_a_finite_loss_has_none() -> None:
    account = StepAccount()
    account.add(7, math.inf)
    report = account.report(0.1)
    assert all(math.isnan(it) for it in (report.loss, report.first_loss, report.spread))
    assert (report.losses, report.broken_losses) == (0, 1)


def test_a_phase_that_ends_while_another_thread_asks_for_its_tokens_is_counted() -> None:
    """The peer's record divided by no steps: it was never announced again."""
    account = StepAccount()
    account.add(20, None)

    class Ending(int):
        def __bool__(self) -> bool:
            account.begin()
            return True

    account._steps = Ending(2)
    assert account.tokens_per_step() == 10


def test_an_account_reads_losses_only_when_its_phase_ends() -> None:
    account = StepAccount()
    for value in (3.0, torch.tensor(1.0, requires_grad=True), None):
        account.add(10, value)
    assert account.tokens_per_step() == 10
    report = account.report(0.5)
    assert (report.steps, report.tokens, report.loss, report.first_loss) == (3, 30, 2.0, 3.0)
    assert account.tokens_per_step() == 10  # of the last phase, until the next step
