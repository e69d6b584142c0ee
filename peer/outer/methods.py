"""The outer method that a configuration names. The only place that picks its class."""

from __future__ import annotations

from peer.config.schema import Decoupled, DiLoCo, Local, NoLoCo, SwarmRun
from peer.outer.decoupled import Decoupled as DecoupledMethod
from peer.outer.diloco import DiLoCo as DiLoCoMethod
from peer.outer.local import Local as LocalMethod
from peer.outer.method import OuterMethod
from peer.outer.noloco import NoLoCo as NoLoCoMethod
from peer.outer.slow_weights import SlowWeights


def outer_method(run: SwarmRun, slow: SlowWeights) -> OuterMethod:
    """The method that ``run.outer`` names."""
    match run.outer:
        case NoLoCo():
            return NoLoCoMethod(slow, run.outer)
        case DiLoCo():
            return DiLoCoMethod(slow, run.outer)
        case Decoupled():
            return DecoupledMethod(slow, run.outer)
        case Local():
            return LocalMethod(slow)
