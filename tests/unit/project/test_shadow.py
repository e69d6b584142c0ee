"""The check of the churn soak finds a correction that is no share of the distance to what the partner sent."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from peer.exchange.modulo import Modulo
from tests.swarm.support.shadow import ID, check, sent_file

NUMEL = 600
SHARE = 0.3


def write(
    folder: Path,
    *,
    codec: Literal["int8", "int4"] = "int8",
    apart: float = 0.01,
    shown: float = 1.0,
    share: float = SHARE,
    bent: float = 0.0,
    decoded: Tensor | None = None,
    to: str = "a",
    steps: int = 2,
) -> None:
    """``a`` takes a correction from a part of ``b``; ``shown``: times what b wrote down. ``steps``: 1 is fp16."""
    torch.manual_seed(0)
    own = torch.randn(NUMEL)
    theirs = own + apart * torch.randn(NUMEL)
    sender, receiver = Modulo(codec, NUMEL), Modulo(codec, NUMEL)
    for it in (sender, receiver):
        it.begin()
        it.learn(0, torch.full((NUMEL,), 0.02))
    if steps == 1:
        sender.sends = "fp16"
    data, out = bytearray(sender.encode(0, theirs)), torch.empty(NUMEL)
    receiver.decode(sender.sends, 0, data, own, out)
    out = out if decoded is None else decoded
    for name in "ab":
        (folder / name).mkdir()
        (folder / name / ID).write_text(f"id of {name}")
    np.save(folder / "b" / sent_file(data, f"id of {to}"), (theirs * shown).numpy())
    correction = (out - own) * share
    correction[7] += bent
    row = {"codec": sender.sends, "data": np.frombuffer(data, np.uint8), "own": own.numpy(), "decoded": out.numpy()}
    np.savez(folder / "a" / "taken-1-0.npz", correction=correction.numpy(), partner="id of b", **row)  # type: ignore[arg-type]


def objections(folder: Path) -> str:
    found = check(folder, ["a", "b"])
    assert found.parts == 1
    return " ".join(found.wrong)


@pytest.mark.parametrize("codec", ["int8", "int4"])
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5])
def test_a_share_of_the_distance_is_right(
    codec: Literal["int8", "int4"], steps: int, share: float, tmp_path: Path
) -> None:
    write(tmp_path, codec=codec, share=share, steps=steps)
    assert not objections(tmp_path)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"to": "c"}, "sent it nothing of the kind"),  # to another one, or in another meeting
        ({"shown": 1.01}, "is not what was sent"),
        ({"decoded": torch.zeros(NUMEL)}, "is not what was sent"),
        ({"share": 0.6}, "a share of 0.600"),
        ({"share": -0.1}, "a share of -0.100"),
        ({"bent": 0.001}, "no share of the distance"),
    ],
)
def test_what_is_wrong_is_found(wrong: dict[str, object], said: str, tmp_path: Path) -> None:
    write(tmp_path, **wrong)  # type: ignore[arg-type]
    assert said in objections(tmp_path)


def test_blocks_that_were_too_far_apart_are_counted_and_not_wrong(tmp_path: Path) -> None:
    write(tmp_path, apart=1.0)
    found = check(tmp_path, ["a", "b"])
    assert not found.wrong and found.left > 0.5
