"""The frontier of loss against bytes takes at each share the best run that sends no more."""

from __future__ import annotations

from typing import Any

import pytest

from tests.benchmarks.convergence.frontier import CHOSEN, TUNED, WHOLE, figures, frontier_cases, tuning


def row(label: str, share: float, loss: float, seed: int = 0) -> dict[str, Any]:
    loss_of = {"val_loss_mean": loss, "val_loss_averaged_model": loss / 1.001}
    return {"label": label, "seed": seed, "replicas": 8, "bytes_per_peer": round(share * WHOLE[8]), **loss_of}


def test_the_best_of_what_sends_no_more_counts() -> None:
    rows = [
        row("noloco_adamw_h4_int4", 0.99, 1.50),
        row("noloco_adamw_h4_int4", 0.99, 1.52, seed=1),
        row("noloco_adamw_h8_int4", 0.49, 1.60),
        row("diloco_adamw_h7_int4", 1.01, 1.40),
        row("diloco_adamw_h14_int4", 0.5, 1.45),
        row("diloco_muon_h14_int4", 0.5, 1.35),
    ]
    found = figures(rows)
    assert found["frontier"]["adamw 1"] == {"noloco": pytest.approx(1.51), "diloco": 1.45}
    assert found["frontier"]["adamw 0.5"] == {"noloco": 1.60, "diloco": 1.45}
    assert found["frontier"]["adamw 0.25"] == {} and found["frontier"]["muon 1"] == {"diloco": 1.35}
    assert found["seeds"]["noloco_adamw_h4_int4"] == 2
    assert found["final_merge_gap"] == pytest.approx(0.001)


def test_both_methods_have_as_many_settings_and_points() -> None:
    by_method = [sum(it.method == method for it in tuning()) for method in CHOSEN]
    assert by_method[0] == by_method[1] > 0
    assert {len(chosen) for chosen in CHOSEN.values()} == {4} and TUNED.keys() == CHOSEN.keys()
    for replicas in WHOLE:
        cases = frontier_cases(replicas=replicas)
        assert len({(it.label, it.seed) for it in cases}) == len(cases) == 2 * 2 * 2 * 4
        assert {it.replicas * it.steps for it in cases} == {10_000}
