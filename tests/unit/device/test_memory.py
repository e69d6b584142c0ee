"""What an accelerator says of its memory, what `check` makes of it, and the line at the end of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from peer.commands.check import training
from peer.config.load import load
from peer.device.memory import device_memory, is_out_of_memory, peak_bytes
from peer.replica.inner_loop import InnerLoop, out_of_memory
from peer.replica.memory import estimate
from tests.unit import parts
from tests.unit.device.doubles import FREE, PEAK, TOTAL, Gpu, plug_in

AS_MPS_SAYS = "MPS backend out of memory (MPS allocated: 17.9 GB, max allowed: 18.1 GB). Tried to allocate 2.0 GB"
NAMES = {"cuda": "Example 8", "xpu": "Example 8", "mps": "Apple GPU"}
LARGE = ("run.model.hidden_size=2048", "run.model.intermediate_size=4096", "run.model.heads=8")


@pytest.mark.parametrize("kind", NAMES)
def test_the_figures_of_each_kind(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in(monkeypatch, kind)
    device = torch.device(kind)
    assert device_memory(device) == (NAMES[kind], TOTAL, FREE)
    assert peak_bytes(device) == PEAK


@pytest.mark.parametrize("kind", NAMES)
def test_check_says_what_the_device_is_and_what_it_needs(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in(monkeypatch, kind)
    config = load(None, [f"peer.device={kind}"], environment={})
    found, *others = training.device(config, 1)
    assert [it.topic for it in others] == ([] if kind == "mps" else ["compile"])
    numbers = "fp32" if kind == "mps" else "bf16"
    assert found.level == "ok" and found.text == f"{NAMES[kind]}, 8.0 GiB, computes in {numbers}"
    needed = next(iter(training.memory(config, 1)))
    assert needed.topic == "GPU memory" and needed.level == "ok" and "3.00 GiB free" in needed.text


@pytest.mark.parametrize("compiler", ["cc", "gcc", "clang", ""])
def test_check_says_when_torch_compile_lacks_a_compiler(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the image, where the advice to compile gained nothing."""
    plug_in(monkeypatch, "cuda")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    if compiler:
        (tmp_path / compiler).touch(mode=0o755)
    _, found = training.device(load(None, ["peer.device=cuda"], environment={}), 1)
    assert ("needs a C compiler, and none is installed" in found.advice) is (not compiler)


@pytest.mark.parametrize(("kind", "variable"), [("cuda", "CUDA_VISIBLE_DEVICES=1"), ("xpu", "ZE_AFFINITY_MASK=1")])
def test_check_says_how_to_use_a_second_gpu(kind: str, variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in(monkeypatch, kind, count=2)
    (found,) = training.device(load(None, ["peer.compile=true"], environment={}), 1)
    assert found.level == "warn" and "1 more not used" in found.text and variable in found.advice


def test_too_little_of_a_gpu_is_helped_by_offload(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu()
    plug_in(monkeypatch, "cuda", gpu)
    plain, offloaded, muon = (
        load(None, [*LARGE, *more], environment={})
        for more in ((), ("peer.offload=optimizer",), ("run.inner.optimizer=muon",))
    )
    whole, part = estimate(plain.run, plain.peer), estimate(offloaded.run, offloaded.peer)
    free = (whole.device_bytes + part.device_bytes) // 2
    gpu.mem_get_info = lambda device=None: (free, TOTAL)
    first, then, other = (next(iter(training.memory(it, 1))) for it in (plain, offloaded, muon))
    assert first.level == "fail" and first.advice.startswith("set peer.offload: optimizer, ")
    assert then.level in ("ok", "warn") and "offload" not in then.advice
    assert "offload" not in other.advice
    assert "AdamW" in first.text and "AdamW" not in then.text


@pytest.mark.parametrize("kind", ["cpu", "mps"])
def test_offload_to_the_same_memory_is_a_warning(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in(monkeypatch, None if kind == "cpu" else kind)
    found = next(
        iter(training.device(load(None, [f"peer.device={kind}", "peer.offload=optimizer"], environment={}), 1))
    )
    assert (found.topic, found.level) == ("offload", "warn") and "peer.offload: none" in found.advice


def test_an_end_of_memory_is_told_from_other_errors() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory.")) and is_out_of_memory(
        RuntimeError(AS_MPS_SAYS)
    )
    assert is_out_of_memory(RuntimeError("CUDA error: out of memory\nCUDA kernel errors might"))  # of pinned memory
    assert not is_out_of_memory(RuntimeError("shapes do not match")) and not is_out_of_memory(ValueError(AS_MPS_SAYS))


def test_the_line_names_what_helps() -> None:
    plain, set_already, muon = (
        load(None, more, environment={})
        for more in (["peer.micro_batch=4"], ["peer.offload=optimizer"], ["run.inner.optimizer=muon"])
    )
    error = RuntimeError(AS_MPS_SAYS)
    said = AS_MPS_SAYS.split(". ")[0]
    assert out_of_memory(error, plain) == f"{said}; lower peer.micro_batch (now 4), or set peer.offload: optimizer"
    assert out_of_memory(error, set_already) == f"{said}; lower peer.micro_batch (now the whole batch)"
    assert "offload" not in out_of_memory(error, muon) and "offload" not in out_of_memory(error, plain, ranks=2)


@pytest.mark.parametrize(
    "said",
    [
        "CUDA error: out of memory",
        "HIP error: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`",
    ],
)
def test_what_the_driver_refuses_is_one_line_of_its_own(said: str) -> None:
    """The peer's tensors need not be the reason, and more pinned memory is no help."""
    config = load(None, ["peer.micro_batch=4"], environment={})
    long = "\nSearch for `cudaErrorMemoryAllocation' in the manual.\nFor debugging consider CUDA_LAUNCH_BLOCKING=1."
    advice = "end other programs on this GPU, free memory of the host, or lower peer.micro_batch (now 4)"
    error = RuntimeError(f"{said}{long}")
    assert is_out_of_memory(error) and out_of_memory(error, config) == f"{said}; {advice}"


def test_a_compiled_model_that_ends_the_memory_of_mps_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def refuse(*inputs: object) -> None:
        calls.append(inputs)
        raise RuntimeError(AS_MPS_SAYS)

    monkeypatch.setattr(torch, "compile", lambda loss: refuse)
    net: nn.Module = parts.network()
    loop: InnerLoop = parts.inner_loop(net, compiled=True)
    with pytest.raises(RuntimeError, match="MPS backend out of memory"):
        loop.run(parts.stream().take(1))
    assert len(calls) == 1
