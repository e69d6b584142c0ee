"""Which parameter gets which optimizer, and that a step with Muon is torch's Muon beside torch's AdamW."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from peer.commands.check import runner
from peer.commands.check.training import memory
from peer.config.load import load
from peer.config.schema import InnerConfig
from peer.errors import UserError
from peer.replica import model
from peer.replica.inner_loop import learning_rate
from peer.replica.optimizer import hidden_matrices, inner_optimizer, moment_count
from tests.unit import parts

MUON = InnerConfig(optimizer="muon", learning_rate=1e-2, warmup_steps=4)
LLAMA = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"} | {
    f"mlp.{name}_proj" for name in ("gate", "up", "down")
}


def llama(tied: bool) -> Any:
    from transformers import LlamaConfig

    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    return LlamaConfig(**sizes, num_attention_heads=2, tie_word_embeddings=tied)


def gpt2() -> Any:
    from transformers import GPT2Config

    return GPT2Config(vocab_size=40, n_positions=32, n_embd=16, n_layer=2, n_head=2)


def mixtral() -> Any:
    from transformers import MixtralConfig

    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    return MixtralConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, num_local_experts=2)


@pytest.mark.parametrize(
    ("config", "layers", "names"),
    [
        (llama(False), "model.layers", LLAMA),
        (llama(True), "model.layers", LLAMA),
        (gpt2(), "transformer.h", {"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"}),
        (mixtral(), "model.layers", {name for name in LLAMA if name.startswith("self_attn")}),
    ],
    ids=["a head of its own", "a tied head", "GPT-2's linear layers and its table of positions", "experts"],
)
def test_only_the_matrices_of_hidden_layers_are_muons(config: Any, layers: str, names: set[str]) -> None:
    network = model.fresh(config)
    found = {id(it) for it in hidden_matrices(network)}
    expected = {f"{layers}.{layer}.{name}.weight" for layer in (0, 1) for name in names}
    assert {name for name, it in network.named_parameters() if id(it) in found} == expected
    groups = inner_optimizer(network, MUON).param_groups
    held = [id(it) for group in groups for it in group["params"]]
    assert sorted(held) == sorted(id(it) for it in network.parameters())  # each one once
    assert [group["weight_decay"] for group in groups] == [0.1, 0.1, 0.0]
    assert all(it.dim() < 2 for it in groups[2]["params"])


def test_frozen_parameters_have_no_optimizer() -> None:
    network = model.fresh(llama(False))
    frozen = network.model.layers[0].mlp.up_proj.weight  # type: ignore[union-attr, index]
    frozen.requires_grad = False  # type: ignore[union-attr]
    groups = inner_optimizer(network, MUON).param_groups
    assert all(it is not frozen for group in groups for it in group["params"])
    assert len(groups[0]["params"]) == 13


def test_it_is_torchs_muon_and_adamw_to_the_bit() -> None:
    net, reference = parts.network(), parts.network()
    loop = parts.inner_loop(net, inner=MUON)
    block = reference.model.layers[0]  # type: ignore[union-attr, index]
    layers = [module for module in block.modules() if isinstance(module, nn.Linear)]  # type: ignore[union-attr]
    hidden = [layer.weight for layer in layers]
    rest = [it for it in reference.parameters() if all(it is not weight for weight in hidden)]
    muon = torch.optim.Muon(hidden, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    groups = [
        {"params": [it for it in rest if it.dim() == 2], "weight_decay": 0.1},
        {"params": [it for it in rest if it.dim() == 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)
    for step in range(5):
        batch = parts.stream().batch(step)
        for group in (*muon.param_groups, *adamw.param_groups):
            group["lr"] = learning_rate(step, 100, MUON)
        logits = reference(input_ids=batch[:, :-1]).logits
        functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten()).backward()
        nn.utils.clip_grad_norm_(list(reference.parameters()), 1.0)
        for one in (muon, adamw):
            one.step()
            one.zero_grad()
    report = loop.run(parts.stream().take(5))
    assert report.learning_rate == learning_rate(4, 100, MUON)
    for (name, one), other in zip(net.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(one, other), name


def test_it_learns_with_muon() -> None:
    loop, stream = parts.inner_loop(parts.network(), inner=MUON), parts.stream()
    validation = [stream.batch(10_000)]
    before = loop.evaluate(validation)
    loop.run(stream.take(60))
    assert loop.evaluate(validation) < before - 1.5


def test_the_moments_are_counted() -> None:
    network = parts.network()
    loop = parts.inner_loop(network, inner=MUON)
    loop.run(parts.stream().take(1))
    kept = [it for state in loop.optimizer.state.values() for it in state.values() if it.dim()]
    assert moment_count(network, MUON) == sum(it.numel() for it in kept)
    assert moment_count(network, InnerConfig()) == 2 * model.parameter_count(network)


def test_a_torch_without_muon_is_named_in_one_line_at_start_and_by_check(monkeypatch: pytest.MonkeyPatch) -> None:
    network, config = parts.network(), load(None, ("run.inner.optimizer=muon",), environment={})
    monkeypatch.setattr(runner, "topics", lambda *_: (("memory", memory(config, 1)),))
    assert [it.level for it in runner.findings(config)] == ["ok"]
    monkeypatch.delattr(torch.optim, "Muon")
    monkeypatch.setattr(torch, "__version__", "2.6.0")
    words = "run.inner.optimizer: muon needs torch 2.9 or newer, this is 2.6.0; update it, or use adamw"
    with pytest.raises(UserError) as caught:
        parts.inner_loop(network, inner=MUON)
    assert str(caught.value) == words
    (found,) = runner.findings(config)
    assert (found.level, found.text) == ("fail", words)
    parts.inner_loop(network).run(parts.stream().take(1))  # AdamW needs no Muon


def test_a_model_without_matrices_for_muon_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    network = parts.network()
    with monkeypatch.context() as change:
        change.setattr(network, "get_output_embeddings", lambda: None)
        with pytest.raises(UserError, match=r"run.model does not say which layer is its head; use adamw$"):
            parts.inner_loop(network, inner=MUON)
    for matrix in hidden_matrices(network):
        matrix.requires_grad = False
    with pytest.raises(
        UserError, match=r"^run.inner.optimizer: muon is for linear layers, .* none that trains; use adamw$"
    ):
        parts.inner_loop(network, inner=MUON)
