"""lm-evaluation-harness (the ``eval`` extra) runs on an exported folder: offline, on a task of a few lines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.unit.commands.test_export import config, export, saved, trained

pytestmark = [pytest.mark.long, pytest.mark.needs("lm_eval")]

TASK = {
    "task": "foxes",
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{label}}",
    "target_delimiter": "",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}
TEXT = "the quick brown fox jumps over the lazy dog. "


def test_it_scores_what_the_model_has_learnt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = trained(config(tmp_path, inner={"learning_rate": 0.01, "warmup_steps": 5}, steps=80), 1, steps=80)
    assert export(capsys, saved(tmp_path, "alice", state), tmp_path / "out", "--no-evaluate")[0] == 0
    rows = []
    for start in range(8):  # the next letters against letters from elsewhere
        cut = start + 8
        rows.append({"question": TEXT[start:cut], "choices": ["#@", TEXT[cut : cut + 2]], "label": 1})
    (tmp_path / "rows.json").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    task = {**TASK, "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.json")}}}
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "foxes.yaml").write_text(yaml.safe_dump(task), encoding="utf-8")
    program = [sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args", f"pretrained={tmp_path / 'out'}"]
    program += ["--tasks", "foxes", "--include_path", str(tmp_path / "tasks"), "--device", "cpu", "--batch_size", "4"]
    program += ["--output_path", str(tmp_path / "scores")]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")}
    done = subprocess.run(
        program, env={**os.environ, **offline}, capture_output=True, text=True, timeout=170, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (scores,) = (tmp_path / "scores").rglob("results_*.json")
    assert json.loads(scores.read_text())["results"]["foxes"]["acc,none"] == 1.0
