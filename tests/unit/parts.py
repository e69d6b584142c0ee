"""Small real parts for the unit tests."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from peer.config.methods import NoLoCoConfig
from peer.config.schema import Config, InnerConfig, LlamaModel, PeerConfig, RunConfig
from peer.data.batches import TokenStream
from peer.outer.noloco import NoLoCo
from peer.outer.slow_weights import SlowWeights
from peer.process import LoopContext, Stop
from peer.replica import model
from peer.replica.inner_loop import InnerLoop
from peer.swarm.context import BoundaryClock, SwarmContext
from peer.swarm.directory.records import MemberRecord
from peer.training.outer_state import Counters
from peer.training.state import PeerState

LENGTH = 16
TEXT = np.frombuffer(b"the quick brown fox jumps over the lazy dog. " * 40, dtype=np.uint8).astype(np.uint16)


def network(seed: int = 0) -> nn.Module:
    settings = LlamaModel(hidden_size=16, intermediate_size=32, layers=1, heads=2)
    return model.build(RunConfig(model=settings, seed=seed))


def stream(number: int = 0) -> TokenStream:
    return TokenStream(TEXT, batch_size=4, sequence_length=LENGTH, seed=0, stream=number)


def inner_loop(
    net: nn.Module,
    *,
    micro_batch: int | None = None,
    autocast: bool = False,
    compiled: bool = False,
    stop: Stop | None = None,
    inner: InnerConfig | None = None,
    offload: bool = False,
) -> InnerLoop:
    run = RunConfig(inner=inner or InnerConfig(learning_rate=1e-2, warmup_steps=4), steps=100)
    return InnerLoop(
        net,
        Config(run=run, peer=PeerConfig(micro_batch=micro_batch, offload="optimizer" if offload else "none")),
        device=torch.device("cpu"),
        autocast=autocast,
        compiled=compiled,
        context=LoopContext(stop=stop or Stop()),
    )


def peer_state(inner: InnerConfig | None = None, *, feedback: bool = False, **how: Any) -> PeerState:
    net = network()
    outer = NoLoCo(SlowWeights(net.named_parameters()), NoLoCoConfig())
    return PeerState(inner_loop(net, inner=inner, **how), outer, stream(), "digest", {}, feedback=feedback)


def theta(state: PeerState) -> Tensor:
    """Its fast weights."""
    out = torch.empty(state.outer.slow.numel)
    state.outer.slow.read_fast(0, out)
    return out


def contribution(state: PeerState) -> Tensor:
    out = torch.empty(state.outer.slow.numel)
    state.outer.contribution().read(0, out)  # type: ignore[union-attr]
    return out


def alone(state: PeerState) -> None:
    """An outer step with a group of one, which changes θ."""
    state.outer.apply(contribution(state))


def member_record(peer_id: str, round: int = 10, *, taken: int = 0, root: str = "") -> MemberRecord:
    """Of a member that trains."""
    return MemberRecord(
        peer_id=peer_id,
        name=peer_id,
        addresses=[],
        config="c",
        state="training",
        step=round,
        round=round,
        tokens_per_second=1.0,
        metrics=None,
        taken=taken,
        root=root,
    )


def context_of(node: Any, members: Any, stop: Stop | None = None) -> SwarmContext:
    """Of a peer that has trained nothing yet, with rounds of 100 inner steps."""
    training = LoopContext(stop=stop or Stop())
    return SwarmContext(node, members, BoundaryClock(training.progress), training, Counters(), inner_steps=100)


def no_compiler() -> AbstractContextManager[None]:
    """Within the context torch.compile fails. pytest's monkeypatch would leave torch's settings unreadable."""
    import torch._dynamo  # takes seconds
    import torch._inductor.config

    torch._dynamo.reset()
    without: AbstractContextManager[None] = torch._inductor.config.patch(
        {"cpp.cxx": ("no-such-compiler",), "force_disable_caches": True}
    )
    return without
