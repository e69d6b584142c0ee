"""Each decision that depends on the device, for every kind of device; none of them is here."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from peer.device.accelerator import connect_ranks, device_count, one_each, pick_device, wants_bf16
from peer.errors import UserError
from tests.unit import parts
from tests.unit.device.doubles import MODULES, FirstXpu, Gpu, Mps, plug_in

ROOT = Path(__file__).parents[3]
TIMEOUT = timedelta(seconds=5)
KINDS = tuple(MODULES)


@pytest.mark.parametrize("kind", [*KINDS, None])
def test_auto_is_the_accelerator_that_torch_names(kind: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in(monkeypatch, kind, count=2)
    assert pick_device("auto").type == (kind or "cpu")
    assert pick_device("cpu").type == "cpu"
    assert device_count(pick_device("auto")) == (2 if kind else None)
    if kind:
        assert pick_device(kind).type == kind


@pytest.mark.parametrize(
    ("count", "given", "found"),
    [
        (0, None, []),
        (1, None, []),
        (1, "3", []),
        (3, None, ["0", "1", "2"]),
        (3, "", ["0", "1", "2"]),
        (2, "GPU-b5e7, GPU-0d1c", ["GPU-b5e7", "GPU-0d1c"]),
        (2, "6,4,99", ["6", "4"]),  # the driver ignores what is not there
    ],
)
@pytest.mark.parametrize(("kind", "variable"), [("cuda", "CUDA_VISIBLE_DEVICES"), ("xpu", "ZE_AFFINITY_MASK")])
def test_a_process_can_be_given_one_of_the_accelerators_that_are_visible(
    kind: str, variable: str, count: int, given: str | None, found: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plug_in(monkeypatch, kind if count else None, count=count)
    monkeypatch.delenv(variable, raising=False)
    if given is not None:
        monkeypatch.setenv(variable, given)
    assert one_each("auto") == [{variable: it} for it in found]
    assert one_each("cpu") == []


def test_the_gpu_of_a_mac_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in(monkeypatch, "mps", count=2)
    assert one_each("auto") == []


def test_auto_leaves_an_accelerator_alone_that_is_not_known_here(monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in(monkeypatch, "mtia", module=Gpu())
    assert pick_device("auto").type == "cpu"


@pytest.mark.parametrize("wish", KINDS)
@pytest.mark.parametrize("here", [None, "cuda", "xpu"])
def test_a_device_that_is_not_here_is_refused_with_what_to_do(
    wish: str, here: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if wish == here:
        pytest.skip("it is here")
    plug_in(monkeypatch, here)
    with pytest.raises(UserError) as refused:
        pick_device(wish)
    text = str(refused.value)
    assert text.startswith(f"peer.device: {wish} is not available here") and text.endswith(", or use auto")
    assert {"cuda": "nvidia-smi", "mps": "Apple silicon", "xpu": "xpu-smi"}[wish] in text and "\n" not in text
    assert (f"peer.device: {here} is" in text) == (here is not None)


@pytest.mark.parametrize(
    ("kind", "module", "bf16"),
    [
        ("cuda", Gpu(bf16=True), True),
        ("cuda", Gpu(bf16=False), False),
        ("xpu", Gpu(bf16=True), True),
        ("xpu", Gpu(bf16=False), False),
        ("xpu", FirstXpu(), True),
        ("mps", Mps(), False),
        ("cpu", None, False),
    ],
)
def test_bf16_is_used_where_the_device_computes_in_it(
    kind: str, module: Any, bf16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plug_in(monkeypatch, None if kind == "cpu" else kind, module)
    device = torch.device(kind)
    assert wants_bf16("auto", device) is bf16
    assert wants_bf16("bf16", device) and not wants_bf16("fp32", device)


def test_the_random_state_of_a_device_is_saved_and_comes_back_on_such_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    state, again, elsewhere = (parts.peer_state() for _ in range(3))
    module = plug_in(monkeypatch, "xpu")
    state.inner.device = again.inner.device = torch.device("xpu")
    scalars = state.scalars()
    assert scalars["rng"]["xpu"] == [1, 2, 3]
    saved = type("Saved", (), {"tensors": dict(state.tensors()), "state": scalars})()
    module.random = torch.zeros(3, dtype=torch.uint8)
    elsewhere.restore(saved)
    assert module.random.sum() == 0
    again.restore(saved)
    assert module.random.tolist() == [1, 2, 3]
    again.restore(type("Saved", (), {"tensors": saved.tensors, "state": elsewhere.scalars()})())  # without one


@pytest.mark.parametrize(("kind", "backend"), [("cuda", "nccl"), ("xpu", "xccl")])
def test_ranks_talk_by_the_collectives_of_their_device(
    kind: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(distributed, "init_process_group", lambda name, **how: asked.append((name, how)))
    module = plug_in(monkeypatch, kind, count=4)
    monkeypatch.setattr(distributed, f"is_{backend}_available", lambda: False)
    with pytest.raises(UserError, match=rf"no collectives \({backend}\) for {kind}; start without torchrun"):
        connect_ranks(kind, 3, TIMEOUT)
    monkeypatch.setattr(distributed, f"is_{backend}_available", lambda: True)
    device = connect_ranks(kind, 3, TIMEOUT)
    assert device == torch.device(kind, 3) and module.current == 3
    assert asked == [(backend, {"timeout": TIMEOUT, "device_id": device})]
    assert connect_ranks("cpu", 1, TIMEOUT) == torch.device("cpu") and asked[1] == ("gloo", {"timeout": TIMEOUT})


@pytest.mark.parametrize("kind", KINDS)
def test_a_double_has_nothing_that_torchs_module_has_not(kind: str) -> None:
    assert {it for it in vars(MODULES[kind]()) if it != "random"} <= set(dir(getattr(torch, kind)))


def test_no_other_package_names_an_accelerator() -> None:
    """But for the values of peer.device."""
    found = []
    for folder in ("peer", "dht_bootstrap"):
        for file in (ROOT / folder).rglob("*.py"):
            if file.is_relative_to(ROOT / "peer" / "device"):
                continue
            for line in file.read_text(encoding="utf-8").splitlines():
                if re.search(r"\b(cuda|mps|xpu|nccl|xccl)\b", line):
                    found.append((file.name, line.split(":")[0].strip()))
    assert found == [("schema.py", "device")]
