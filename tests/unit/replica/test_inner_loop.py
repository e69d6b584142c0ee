"""The inner loop is AdamW with a schedule, clipping and accumulation, and nothing else."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from peer.config.schema import InnerConfig
from peer.process import Stop
from peer.replica import model
from peer.replica.inner_loop import learning_rate, token_loss
from tests.unit import parts


def flat(net: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in net.parameters()])


def test_the_schedule_warms_up_peaks_and_ends_at_its_floor() -> None:
    settings = InnerConfig(learning_rate=1.0, warmup_steps=10, min_lr_ratio=0.1)
    assert learning_rate(0, 110, settings) == pytest.approx(0.1)
    assert learning_rate(10, 110, settings) == pytest.approx(1.0)
    assert learning_rate(60, 110, settings) == pytest.approx(0.55)
    assert learning_rate(110, 110, settings) == pytest.approx(0.1)
    assert learning_rate(500, 110, settings) == pytest.approx(0.1)
    assert learning_rate(0, 1, InnerConfig(learning_rate=1.0, warmup_steps=0)) == pytest.approx(1.0)


def test_it_is_adamw_with_clipping() -> None:
    net, reference = parts.network(), parts.network()
    loop = parts.inner_loop(net)
    settings = InnerConfig(learning_rate=1e-2, warmup_steps=4)
    matrices = [p for p in reference.parameters() if p.dim() >= 2]
    vectors = [p for p in reference.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), foreach=False)
    for step in range(5):
        batch = parts.stream().batch(step)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, 100, settings)
        logits = reference(input_ids=batch[:, :-1]).logits
        functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
        nn.utils.clip_grad_norm_(list(reference.parameters()), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    report = loop.run(parts.stream().take(5))
    assert (report.steps, report.tokens, loop.step) == (5, 5 * 4 * 16, 5)
    torch.testing.assert_close(flat(net), flat(reference), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("micro_batch", [1, 2])
def test_accumulation_equals_the_whole_batch(micro_batch: int) -> None:
    whole, pieces = parts.network(), parts.network()
    one = parts.inner_loop(whole).run(parts.stream().take(3))
    other = parts.inner_loop(pieces, micro_batch=micro_batch).run(parts.stream().take(3))
    assert one.loss == pytest.approx(other.loss, rel=1e-5)
    torch.testing.assert_close(flat(whole), flat(pieces), rtol=1e-3, atol=1e-5)


def test_a_stop_ends_after_the_current_step_and_takes_no_batch_too_many() -> None:
    stop = Stop()
    loop, stream = parts.inner_loop(parts.network(), stop=stop), parts.stream()
    stop.request()
    assert loop.run(stream.take(10)).steps == 1
    assert stream.position == 1


def test_the_loss_falls_and_evaluation_agrees() -> None:
    net = parts.network()
    loop, stream = parts.inner_loop(net), parts.stream()
    validation = [stream.batch(10_000)]
    before = loop.evaluate(validation)
    report = loop.run(stream.take(60))
    assert before == pytest.approx(math.log(257), abs=0.2)
    assert report.first_loss == pytest.approx(before, abs=0.2)
    assert loop.evaluate(validation) < before - 1.5


def test_bf16_autocast_runs_and_keeps_fp32_weights() -> None:
    net = parts.network()
    report = parts.inner_loop(net, autocast=True).run(parts.stream().take(3))
    assert math.isfinite(report.loss)
    assert {parameter.dtype for parameter in net.parameters()} == {torch.float32}


def test_no_batch_no_step() -> None:
    report = parts.inner_loop(parts.network()).run([])
    assert report.steps == 0
    assert math.isnan(report.loss)


def test_the_report_is_of_the_phase_and_the_schedule_goes_on_by_the_swarms_step() -> None:
    net, reference = parts.network(), parts.network()
    loop, stream = parts.inner_loop(net), parts.stream()
    batch = stream.batch(0)
    functional.cross_entropy(reference(input_ids=batch[:, :-1]).logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
    norm = torch.cat([p.grad.flatten() for p in reference.parameters() if p.grad is not None]).norm()
    first = loop.run(stream.take(1))
    assert first.grad_norm == pytest.approx(float(norm), rel=1e-4)
    assert first.grad_norm > 1.0  # so it is the one before clipping
    assert first.loss == first.first_loss
    loop.step = 50  # as adopted from the swarm
    second = loop.run(stream.take(2))
    assert loop.step == 52
    assert second.learning_rate == learning_rate(51, 100, InnerConfig(learning_rate=1e-2, warmup_steps=4))
    assert second.first_loss != second.loss
    assert second.seconds > 0


def test_a_phase_in_two_pieces_is_the_whole_phase() -> None:
    whole, pieces = parts.network(), parts.network()
    one, other, stream = parts.inner_loop(whole), parts.inner_loop(pieces), parts.stream()
    one.run(parts.stream().take(4))
    other.run(stream.take(1))
    other.evaluate([stream.batch(9)])  # in between, as at a boundary
    other.run(stream.take(3))
    assert torch.equal(flat(whole), flat(pieces))


@pytest.mark.long
def test_a_compiled_model_trains_the_same_and_one_that_cannot_be_compiled_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain, compiled, broken = parts.network(), parts.network(), parts.network()
    expected = parts.inner_loop(plain).run(parts.stream().take(3))
    got = parts.inner_loop(compiled, compiled=True).run(parts.stream().take(3))
    assert got.loss == pytest.approx(expected.loss, rel=1e-4)
    torch.testing.assert_close(flat(compiled), flat(plain), rtol=1e-3, atol=1e-4)

    monkeypatch.setattr(logging.getLogger("noloco"), "propagate", True)
    with parts.no_compiler():
        fallen = parts.inner_loop(broken, compiled=True).run(parts.stream().take(3))
    assert fallen.loss == expected.loss
    assert [record.message for record in caplog.records if "peer.compile fails on this machine" in record.message]


def test_all_from_the_token_ids_to_the_loss_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Tensor] = []

    def compiled(work: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(model: nn.Module, batch: Tensor, *more: Any) -> Tensor:
            given.extend([batch, work(model, batch, *more)])
            return given[-1]

        return run

    monkeypatch.setattr(torch, "compile", compiled)
    report = parts.inner_loop(parts.network(), compiled=True).run(parts.stream().take(1))
    ids, loss = given
    assert not ids.is_floating_point() and loss.shape == () and float(loss.detach()) == report.loss


class LateFailure(torch.autograd.Function):
    """What torch.compile makes of the backward pass, when that is compiled at its first use."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise RuntimeError("out of resource: shared memory")


@pytest.mark.parametrize("offloaded", [False, True])
def test_a_backward_pass_that_cannot_be_compiled_does_not_end_the_peer(
    offloaded: bool, caplog: pytest.LogCaptureFixture
) -> None:
    expected = parts.peer_state(micro_batch=2, offload=offloaded).inner
    inner = parts.peer_state(micro_batch=2, offload=offloaded).inner
    calls = []

    def compiled(*inputs: Any) -> Any:
        calls.append(1)
        loss = token_loss(*inputs)
        return LateFailure.apply(loss) if len(calls) > 1 else loss  # one piece has gradients already

    inner._loss = compiled
    batches = list(parts.stream().take(3))
    one, other = expected.run(batches), inner.run(batches)
    assert (one.loss, one.grad_norm) == (other.loss, other.grad_norm) and len(calls) == 2
    assert "training goes on without it: out of resource" in caplog.text
    inner._loss = lambda *inputs: (_ for _ in ()).throw(torch.OutOfMemoryError("no room"))
    with pytest.raises(torch.OutOfMemoryError):
        inner.run(batches)


def mixtral(*, balanced: bool) -> Any:
    from transformers import MixtralConfig

    sizes = {"vocab_size": 257, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 1}
    return model.fresh(MixtralConfig(**sizes, **heads, output_router_logits=balanced, router_aux_loss_coef=0.5))


@pytest.mark.parametrize("how", ["plain", "compiled", "checkpointed"])
def test_experts_are_balanced_as_transformers_balances_them_where_the_config_asks_for_it(how: str) -> None:
    batch = parts.stream().batch(0)
    targets = batch[:, 1:].contiguous()
    own, reference, plain = mixtral(balanced=True), mixtral(balanced=True), mixtral(balanced=False)
    reference(input_ids=batch[:, :-1], labels=targets, shift_labels=targets).loss.backward()
    if how == "checkpointed":
        model.checkpoint_activations(own.train())
    loss_of = torch.compile(token_loss, backend="aot_eager") if how == "compiled" else token_loss

    loss, without = loss_of(own, batch, False), token_loss(plain, batch, False)
    loss.backward()
    without.backward()

    assert loss.item() == pytest.approx(without.item(), rel=1e-6)  # what is reported is the cross entropy
    unlike = set()
    for (name, it), wanted in zip(own.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(it.grad, wanted.grad, rtol=1e-4, atol=1e-6)
        if not torch.allclose(it.grad, plain.get_parameter(name).grad, rtol=1e-2, atol=1e-5):
            unlike.add(name)
    assert {f"model.layers.{layer}.mlp.gate.weight" for layer in range(2)} <= unlike


def test_evaluation_in_micro_batches_is_the_same_mean() -> None:
    stream = parts.stream()
    validation = [stream.batch(5), stream.batch(6)]
    whole = parts.inner_loop(parts.network()).evaluate(validation)
    assert parts.inner_loop(parts.network(), micro_batch=1).evaluate(validation) == pytest.approx(whole, rel=1e-6)
