"""Small simulations for the unit tests."""

from __future__ import annotations

from typing import Any

from peer.commands.simulate.options import Method, Options, with_method
from peer.commands.simulate.replica import Replica
from peer.commands.simulate.simulation import Simulation
from peer.config.schema import Config, EvaluationConfig, ExchangeConfig, InnerConfig, LlamaModel, RunConfig, StdlibData
from peer.exchange.guard import Guard
from peer.exchange.modulo import codec_named
from tests.unit import parts

MODEL = LlamaModel(hidden_size=16, intermediate_size=32, layers=1, heads=2)


def config(**run: Any) -> Config:
    values: dict[str, Any] = {
        **{"steps": 12, "inner_steps": 4, "batch_size": 2, "model": MODEL, "data": StdlibData(sequence_length=16)},
        **{
            "exchange": ExchangeConfig(overlap=False, codec="none"),
            "evaluation": EvaluationConfig(every_rounds=1, batches=2),
            "inner": InnerConfig(learning_rate=3e-3, warmup_steps=2),
        },
        **run,
    }
    return Config(run=RunConfig(**values))


def replica_of(name: str, steps: int, inner_steps: int) -> Replica:
    state = parts.peer_state()
    replica = Replica(name, state, 1.0, steps, inner_steps, codec_named("none", state.outer.slow.numel), Guard())
    replica.target = inner_steps
    return replica


def simulate(
    method: Method | None = None,
    replicas: int = 4,
    run: dict[str, Any] | None = None,
    peer: dict[str, Any] | None = None,
    **more: Any,
) -> Any:
    chosen, name = with_method(config(**(run or {})), method)
    chosen = chosen.model_copy(update={"peer": chosen.peer.model_copy(update=peer or {})})
    return Simulation(chosen, Options(replicas=replicas, method=name, **more)).run(lambda line: None)


def without_clock(summary: Any) -> Any:
    summary["swarm"].pop("wall_seconds")
    return summary
