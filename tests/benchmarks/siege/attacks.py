"""The attacks. Those with the same number of a threat do the same to the product."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Swarm = Literal["open", "invited"]
BOTH: tuple[Swarm, ...] = ("open", "invited")


@dataclass(frozen=True)
class Attack:
    """``threat``: its numbers. ``invited``: in an invited swarm it has an invitation. ``trains``: it is one of the six
    peers, and otherwise honest. ``swarms``: where it is run. ``group``: against a group of everyone (DiLoCo).
    """

    threat: str
    program: Literal["none", "outsider", "member"]
    invited: bool = False
    swarms: tuple[Swarm, ...] = BOTH
    group: bool = False

    @property
    def trains(self) -> bool:
        return self.program == "member"


ATTACKS: dict[str, Attack] = {
    "nobody": Attack("control", "none"),
    # requests to the DHT
    "nested": Attack("1", "outsider", invited=True),
    "ghosts": Attack("8", "outsider", invited=True),
    "forged": Attack("9, 12", "outsider", invited=True),
    "stores": Attack("10", "outsider", invited=True),
    "replayed": Attack("15", "outsider", invited=True),
    "strange": Attack("17, 18, 19", "outsider", invited=True),
    "revoked": Attack("11", "outsider", invited=True, swarms=("invited",)),
    # streams
    "providers": Attack("3", "outsider"),
    "streams": Attack("13, 20", "outsider"),
    "relay": Attack("16", "outsider"),
    "half_open": Attack("20", "outsider"),
    # members that meet others in pairs
    "boast": Attack("2", "member", invited=True),
    "drowned": Attack("4", "member", invited=True),
    "tokens": Attack("4", "member", invited=True),
    "uphill": Attack("4", "member", invited=True),
    "silent": Attack("7", "member", invited=True),
    "no-show": Attack("7", "member", invited=True),
    "false donor": Attack("2", "member", invited=True),
    "donors": Attack("20", "member", invited=True),
    # groups of everyone
    "nobody (group)": Attack("control", "none", group=True),
    "false mean": Attack("5", "member", invited=True, group=True),
    "absent": Attack("6", "member", invited=True, group=True),
    "crowd": Attack("6, 14", "member", invited=True, swarms=("open",), group=True),
}
QUICK = ("nested", "silent", "donors")
