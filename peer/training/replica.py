"""Makes one replica from a configuration: model, data, inner loop and outer method, without a network.

Used by assemble.py for a peer and by commands/simulate/ for many replicas.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import nn

from peer import __version__
from peer.config.digest import digest
from peer.config.model import AutoModel
from peer.config.schema import Config, RunConfig
from peer.data.open import batches
from peer.data.sources.documents import Split
from peer.data.tokenizer import Tokens
from peer.device.accelerator import wants_bf16
from peer.outer.method import outer_method
from peer.outer.slow_weights import SlowWeights
from peer.process import LoopContext
from peer.replica import model
from peer.replica.inner_loop import InnerLoop
from peer.replica.model_source import generation_settings
from peer.replica.sharded.ranks import Ranks
from peer.replica.sharded.replica import build as build_sharded
from peer.training.state import PeerState


def replica(
    config: Config,
    tokens: Tokens | Split,
    *,
    stream: int,
    device: torch.device,
    context: LoopContext,
    ranks: Ranks | None = None,
) -> PeerState:
    """A replica with the run's initial weights, on data stream ``stream`` of ``tokens``; sharded over ``ranks``."""
    run = config.run
    bf16 = wants_bf16(config.peer.precision, device)
    if ranks is None:
        network = model.build(run).to(device)
        if config.peer.gradient_checkpointing:
            model.checkpoint_activations(network)
        inner = InnerLoop(network, config, device=device, autocast=bf16, compiled=config.peer.compile, context=context)
        slow = SlowWeights(network.named_parameters())
    else:
        inner, slow = build_sharded(ranks, config, device, bf16=bf16, context=context)
    outer, feedback = outer_method(run, slow), run.exchange.feedback
    data = batches(run, tokens, stream)
    return PeerState(inner, outer, data, digest(run), origin(run, inner.model), feedback=feedback)


def origin(run: RunConfig, network: nn.Module) -> dict[str, Any]:
    """The run and the model of a checkpoint: all that ``export`` needs. ``network`` may be its outline."""
    found = {
        "version": __version__,
        "run": run.model_dump(mode="json"),
        "architecture": json.loads(network.config.to_json_string(use_diff=False)),  # type: ignore[operator, union-attr]
    }
    generates = getattr(network, "generation_config", None) is not None  # a class of its own may not
    if isinstance(run.model, AutoModel) and run.model.pretrained and generates:
        found["generation"] = generation_settings(run.model)
    return found
