"""The estimate of a peer's memory against what is measured: torch's own accounting, and what the process takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

from peer.config import load
from peer.config.model import LlamaModel
from peer.config.schema import Config, RunConfig
from peer.data import corpus
from peer.process import LoopContext
from peer.replica import memory, model
from peer.replica.inner_loop import mean_loss
from peer.replica.memory import _Ledger, available_memory, estimate, machine_memory, room, step_bytes, swap_bytes
from peer.replica.offload import HostCopies
from peer.replica.optimizer import hidden_matrices
from peer.rounds.contribution import PART
from peer.rounds.state import State
from peer.rounds.types import Grouping
from peer.training import replica
from tests.unit.device.doubles import plug_in
from tests.unit.replica.memory_peer import torch_peak

ROOT = Path(__file__).parents[3]
DEMO = ROOT / "configs" / "demo.yaml"
MIDDLE = (
    "run.model.hidden_size=384",
    "run.model.intermediate_size=1152",
    "run.model.layers=6",
    "run.data.sequence_length=256",
)


def config(*overrides: str) -> Config:
    return load.load(DEMO, overrides, environment={})


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("peer.gradient_checkpointing=true",),
        ("peer.micro_batch=2",),
        ("peer.precision=bf16",),
        ("run.model.vocabulary=8000", "peer.micro_batch=4"),
    ],
    ids=lambda overrides: " ".join(overrides) or "plain",
)
def test_a_step_takes_what_torch_says_that_it_took(overrides: tuple[str, ...]) -> None:
    asked = config("run.model.layers=3", *overrides)
    text = corpus.load(asked.run.data)
    state = replica.replica(asked, text.train, stream=1, device=torch.device("cpu"), context=LoopContext())
    state.inner.run(state.stream.take(1))  # AdamW's moments are made in the first step
    counted = step_bytes(asked.run, asked.peer, torch.device("cpu"))
    assert counted == pytest.approx(torch_peak(state), rel=0.15)


def test_a_step_with_offload_holds_one_gradient_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave_the_device(copies: HostCopies, parameter: torch.Tensor) -> None:
        parameter.grad = None

    monkeypatch.setattr(HostCopies, "_take", leave_the_device)
    pieces = ("run.model.layers=3", "peer.micro_batch=2")
    plain, asked = config(*pieces), config(*pieces, "peer.offload=optimizer")
    text = corpus.load(asked.run.data)
    state = replica.replica(asked, text.train, stream=1, device=torch.device("cpu"), context=LoopContext())
    state.inner.run(state.stream.take(1))
    counted, usual = (step_bytes(it.run, it.peer, torch.device("cpu")) for it in (asked, plain))
    assert counted == pytest.approx(torch_peak(state), rel=0.15)
    weights = estimate(plain.run, plain.peer).parts["weights"]
    assert usual - weights <= counted < usual - 0.5 * weights


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param((), marks=pytest.mark.long),
        pytest.param(MIDDLE, marks=pytest.mark.long),
        pytest.param((*MIDDLE, "peer.offload=optimizer"), marks=pytest.mark.long),
        pytest.param((*MIDDLE, "run.inner.optimizer=muon"), marks=pytest.mark.long),
    ],
    ids=["1M", "11M", "11M with offload", "11M with Muon"],
)
def test_a_peer_takes_what_was_estimated(overrides: tuple[str, ...]) -> None:
    program = [sys.executable, "-m", "tests.unit.replica.memory_peer", str(DEMO), *overrides]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout.splitlines()[-1])["resident"]
    asked = config(*overrides, "run.exchange.overlap=false")
    memory = estimate(asked.run, asked.peer)
    assert memory.device_bytes + memory.host_bytes == pytest.approx(measured, rel=0.15)


def test_the_parts_add_up_and_say_what_the_settings_change() -> None:
    asked = config(*MIDDLE)
    plain = estimate(asked.run, asked.peer)
    assert sum(plain.parts.values()) == plain.device_bytes + plain.host_bytes
    assert plain.parts["moments"] == 2 * plain.parts["weights"] == 2 * plain.parts["slow_weights"]
    for override in ("peer.gradient_checkpointing=true", "peer.micro_batch=1", "peer.precision=bf16"):
        less = config(*MIDDLE, override)
        assert estimate(less.run, less.peer).parts["activations"] < 0.8 * plain.parts["activations"], override
    alone = config(*MIDDLE, "run.outer={name: local}")
    without = estimate(alone.run, alone.peer)
    assert without.parts["momentum"] == 0
    muon = config(*MIDDLE, "run.inner.optimizer=muon")
    hidden = 4 * sum(it.numel() for it in hidden_matrices(model.outline(muon.run)))
    assert 2 * hidden > plain.parts["weights"]  # the matrices of the layers are most of it
    for ranks in (1, 4):
        adamw, one = estimate(asked.run, asked.peer, ranks), estimate(muon.run, muon.peer, ranks)
        assert one.parts["moments"] == pytest.approx(adamw.parts["moments"] - hidden / ranks, abs=32)
        assert one.parts["checkpoint"] == adamw.parts["checkpoint"] - (hidden if ranks > 1 else 0)
    group, waits = (config(*MIDDLE, it) for it in ("run.outer={name: diloco}", "run.exchange.overlap=false"))
    buffers = [estimate(it.run, it.peer).parts["swap_buffer"] for it in (group, waits)]
    assert buffers == [2 * plain.parts["weights"], plain.parts["weights"]]
    assert plain.parts["swap_buffer"] == 3.5 * plain.parts["weights"]  # all parts of a small model may be open
    for codec, kept in (("int4", 0), ("int2", plain.parts["slow_weights"])):
        coded = config(*MIDDLE, "run.outer={name: diloco}", f"run.exchange.codec={codec}")
        assert estimate(coded.run, coded.peer).parts["kept"] == kept
    assert plain.giving_bytes == 2 * without.giving_bytes == 2 * plain.parts["weights"]


@pytest.mark.parametrize("outer", ["noloco", "diloco", "decoupled", "local"])
def test_taking_a_state_takes_what_was_estimated(outer: str) -> None:
    """`check` had nothing of it: with offload 27% of the host's memory."""
    asked = config(*MIDDLE, f"run.outer={{name: {outer}}}", "run.exchange.overlap=false")
    text = corpus.load(asked.run.data)
    state = replica.replica(asked, text.train, stream=1, device=torch.device("cpu"), context=LoopContext())
    there = nn.ParameterList(it.view(-1) for it in (*state.inner.model.parameters(), *state.vectors()))
    with _Ledger(there) as ledger:
        if state.outer.grouping is not Grouping.NOBODY:
            taken = State(0, 1, state.room())
            with state.trying(taken.vectors[0]):
                pass
            state.rebase(taken)
    assert ledger.peak == pytest.approx(estimate(asked.run, asked.peer).taking_bytes, rel=0.15)


def test_a_state_is_taken_when_no_overlapped_swap_has_memory() -> None:
    overlapped, waits = (config(*MIDDLE, f"run.exchange.overlap={it}") for it in ("true", "false"))
    one, other = (estimate(it.run, it.peer) for it in (overlapped, waits))
    assert one.taking_bytes == other.taking_bytes - one.parts["swap_buffer"]


def test_an_evaluation_has_one_row_of_logits_in_fp32_at_a_time() -> None:
    """It took more memory than a training step that is compiled, and ended a peer long after its start."""
    tokens, length, rows = 4096, 64, 8
    net = model.build(RunConfig(model=LlamaModel(hidden_size=16, layers=1, heads=2, vocabulary=tokens)))
    batch = torch.zeros(rows, length + 1, dtype=torch.int64)
    with _Ledger(net) as ledger:
        mean_loss(net, [batch], torch.device("cpu"))
    logits = 4 * rows * length * tokens
    assert logits <= ledger.peak < 1.6 * logits  # two rows more, and the activations; it was three times as much


def test_a_swap_of_a_large_model_takes_seven_eighths_of_its_weights() -> None:
    """Its corrections in bf16, and three vectors of the eighth that is open."""
    assert swap_bytes(PART * 8000) == pytest.approx(0.875 * 4 * PART * 8000)


@pytest.mark.parametrize("kind", ["cuda", "mps"])
def test_offload_moves_moments_and_gradients_to_the_host(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in(monkeypatch, kind)
    small = ("run.model.layers=3", f"peer.device={kind}")
    rounded = 1 if kind != "cuda" else 2  # pinned memory is rounded up to a power of two
    gradients = {}
    # Gradients fill up what activations leave free: only those of earlier micro-batches are there at the peak.
    for micro_batch, least in (("8", 1.8), ("2", 2.5)):
        plain = config(*small, f"peer.micro_batch={micro_batch}")
        asked = config(*small, f"peer.micro_batch={micro_batch}", "peer.offload=optimizer")
        before, after = estimate(plain.run, plain.peer), estimate(asked.run, asked.peer)
        weights = before.parts["weights"]
        assert sum(after.parts.values()) == after.device_bytes + after.host_bytes
        under_way = after.parts.get("gradient_copies", 0)
        assert under_way == (weights if kind == "cuda" else 0)  # all of so few
        assert least * weights <= before.device_bytes - (after.device_bytes - under_way) <= 3 * weights
        assert after.parts["moments"] == 2 * weights and after.parts["checkpoint"] == 0
        assert weights <= after.parts["weight_copies"] <= rounded * weights
        gradients[micro_batch] = after.parts["gradients"]
    assert weights <= gradients["8"] <= rounded * weights and gradients["2"] == 2 * gradients["8"]


def test_a_compiled_model_gives_all_gradients_before_they_go_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its backward pass is one operation. The estimate had one gradient at a time, so the first step had no memory."""
    plug_in(monkeypatch, "cuda")
    small = (*MIDDLE, "run.data.sequence_length=8", "peer.micro_batch=1", "peer.device=cuda", "peer.precision=fp32")
    known, whole = (
        estimate(asked.run, asked.peer)
        for asked in (config(*small, "peer.offload=optimizer", f"peer.compile={it}") for it in ("false", "true"))
    )
    weights = known.parts["weights"]
    assert 0.8 * weights <= whole.device_bytes - known.device_bytes <= 1.1 * weights
    assert sum(whole.parts.values()) == whole.device_bytes + whole.host_bytes


def test_an_apple_gpu_and_the_host_share_one_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS does not say what is free: the host's share was compared with nothing."""
    plug_in(monkeypatch, "mps")
    monkeypatch.setattr(memory, "available_memory", lambda: None)
    asked = config("peer.device=mps")
    needed = estimate(asked.run, asked.peer)
    found = room(needed, torch.device("mps"))
    assert found["memory"] == (needed.device_bytes + needed.host_bytes, psutil.virtual_memory().total)
    assert found["GPU memory"][0] == needed.device_bytes
    assert "memory" not in room(needed, torch.device("cpu"))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_apple_gpu_keeps_the_scores_of_attention(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has a kernel without them for inference only. The estimate had none, and a longer text had no memory."""
    plug_in(monkeypatch, "mps")
    asked = config(*MIDDLE, "run.model.heads=6", "peer.micro_batch=2", f"peer.precision={precision}")
    kept, none = (step_bytes(asked.run, asked.peer, torch.device(kind)) for kind in ("mps", "cpu"))
    scores = 2 * 6 * 256**2 * 6 * 4  # of two rows, six heads and six layers
    assert 0.9 * scores <= kept - none <= 3 * scores


def test_a_large_model_is_estimated_without_making_it() -> None:
    large = load.load(ROOT / "configs" / "models" / "llama-6.8b.yaml", environment={})
    memory = estimate(large.run, large.peer)
    assert memory.parts["weights"] == 4 * 9_638_793_216
    assert 4 * memory.parts["weights"] < memory.device_bytes < 5 * memory.parts["weights"]


def test_ranks_share_what_the_optimizer_needs_and_the_slow_weights() -> None:
    asked = config(*MIDDLE)
    one, four = estimate(asked.run, asked.peer), estimate(asked.run, asked.peer, ranks=4)
    for part in ("weights", "gradients", "moments"):
        assert 4 * four.parts[part] == pytest.approx(one.parts[part], abs=32), part
    assert four.parts["slow_weights"] == one.parts["slow_weights"]  # of the machine, not of a rank
    assert 0.2 < four.parts["activations"] / one.parts["activations"] < 0.5  # of a quarter of the batch
    assert 0 < four.parts["gathered"] < 4 * one.parts["weights"]
    assert four.device_bytes < 0.6 * one.device_bytes


def test_a_rank_computes_in_the_bf16_that_it_gathers() -> None:
    """Autocast keeps a copy of each matrix until the forward pass ends, and ranks have none: `check` asked for that
    copy of the whole model on each GPU.
    """
    short = ("run.data.sequence_length=16", "peer.precision=bf16", "peer.gradient_checkpointing=true")
    asked = config(*MIDDLE, *short)
    copy = 2 * model.parameter_count(model.outline(asked.run))
    assert estimate(asked.run, asked.peer, ranks=4).parts["activations"] < copy / 2


def test_ranks_have_no_copies_of_a_swap_beside_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """`check` asked each GPU for all that one GPU has under way. Ranks wait for each window (sharded/weights.py)."""
    plug_in(monkeypatch, "cuda")
    asked = config(*MIDDLE)
    one, four = (estimate(asked.run, asked.peer, ranks).parts for ranks in (1, 4))
    assert one["swap_copies"] >= one["weights"] and "swap_copies" not in four


@pytest.mark.parametrize(
    ("stat", "free"),
    [
        ("anon 1\ninactive_file 20000\nactive_file 5000\n", 21_000),
        ("inactive_file 99999\n", 32_000),  # more than is used: they are not read at the same moment
        ("anon 1\n", 1_000),
        ("inactive_file\n", 1_000),
        ("inactive_file many\n", 1_000),
        (None, 1_000),
    ],
    ids=["cache", "too much", "no line", "no number", "odd", "no file"],
)
def test_in_a_container_clean_page_cache_counts_as_free(
    stat: str | None, free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        "/proc/meminfo": "MemTotal: 200000 kB\nMemAvailable: 100000 kB\n",
        "/sys/fs/cgroup/memory.max": "32000",
        "/sys/fs/cgroup/memory.current": "31000",
        "/sys/fs/cgroup/memory.stat": stat,
    }

    def read_text(path: Path, encoding: str) -> str:
        text = files[str(path)]
        if text is None:
            raise FileNotFoundError(path)
        return text

    monkeypatch.setattr(Path, "read_text", read_text)
    found, whole = available_memory(), machine_memory()
    monkeypatch.undo()
    assert (found, whole) == (free, 32_000)


def test_without_a_container_the_memory_is_the_whole_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "max\n")
    assert machine_memory() == psutil.virtual_memory().total
