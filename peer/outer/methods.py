"""The outer method that a configuration names. The only place that picks its class."""

from __future__ import annotations

from peer.config.schema import DecoupledConfig, DiLoCoConfig, LocalConfig, NoLoCoConfig, SwarmRunConfig
from peer.outer.decoupled import Decoupled
from peer.outer.diloco import DiLoCo
from peer.outer.local import Local
from peer.outer.method import OuterMethod
from peer.outer.noloco import NoLoCo
from peer.outer.slow_weights import SlowWeights


def outer_method(run: SwarmRunConfig, slow: SlowWeights) -> OuterMethod:
    """The method that ``run.outer`` names."""
    match run.outer:
        case NoLoCoConfig():
            return NoLoCo(slow, run.outer)
        case DiLoCoConfig():
            return DiLoCo(slow, run.outer)
        case DecoupledConfig():
            return Decoupled(slow, run.outer)
        case LocalConfig():
            return Local(slow)
