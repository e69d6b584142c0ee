"""The hosts and links of a laboratory as a small YAML file; ``profiles/`` holds the profiles that we use."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

PROFILES = Path(__file__).parent / "profiles"


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Access(Section):
    """A host's access link. ``None``: no limit."""

    up_mbit: float | None = Field(default=None, gt=0)
    down_mbit: float | None = Field(default=None, gt=0)


class Path_(Section):
    """The path between two hosts. All traffic in one direction between the same two regions shares ``mbit``."""

    rtt_ms: float = Field(default=0.0, ge=0)
    loss: float = Field(default=0.0, ge=0, lt=1)  # share of packets
    mbit: float | None = Field(default=None, gt=0)


class Plan(Section):
    """``regions``: hosts are assigned to them in turn. ``between``: by pair (``us-eu``); ``path``: all other pairs."""

    access: Access = Access()
    path: Path_ = Path_()
    regions: tuple[str, ...] = ("here",)
    between: dict[str, Path_] = {}
    network: str = Field(default="10.77", pattern=r"^\d+\.\d+$")  # the first half of every host's address
    nat: dict[int, Literal["cone", "symmetric", "forward"]] = {}  # by host; see nat.py
    queue_ms: float = Field(default=250.0, gt=0)  # capacity of a rate limit's queue, as time

    @model_validator(mode="after")
    def _known(self) -> Plan:
        for pair in self.between:
            if len(ends := pair.split("-")) != 2 or not set(ends) <= set(self.regions):
                raise ValueError(f"between.{pair}: must be two of {', '.join(self.regions)}")
        if self.nat and int(self.network.partition(".")[0]) < 128:
            raise ValueError(f"network {self.network}: with a nat the first number must be above 127, see line.py")
        return self

    def address(self, host: int) -> str:
        """The host's IPv4 address as the others see it: its own or its NAT's."""
        return f"{self.network}.{host // 250}.{host % 250 + 1}"

    def inside(self, host: int) -> str:
        """The IPv4 address of a host's device."""
        return f"192.168.{host}.2" if host in self.nat else self.address(host)

    def region(self, host: int) -> str:
        return self.regions[host % len(self.regions)]

    def path_of(self, source: int, target: int) -> tuple[str, Path_]:
        """The path's name and its properties. Traffic with the same name shares ``mbit``."""
        one, two = self.region(source), self.region(target)
        found = self.between.get(f"{one}-{two}", self.between.get(f"{two}-{one}"))
        return (f"{one}>{two}", found) if found is not None else (f"{source}>{target}", self.path)


def load(name: str) -> Plan:
    """Read a profile by its name, or by its file name."""
    file = Path(name) if name.endswith(".yaml") else PROFILES / f"{name}.yaml"
    return Plan.model_validate(yaml.safe_load(file.read_text(encoding="utf-8")))
