"""``run.data`` of each source: it loads, is shown as it is, and a mistake in it is a line. How losses are written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from peer.config import load as settings
from peer.config.data import HuggingFaceData
from peer.config.digest import canonical, digest
from peer.telemetry.metrics import Metrics
from peer.telemetry.report import Reporter
from tests.unit.config.test_load import load, mistake

SOURCES = [
    "{name: text, train: [a.txt]}",
    "{name: jsonl, train: [a.jsonl, b.jsonl.gz], validation: [c.jsonl], column: body, shuffle: 4}",
    "{name: c4, folder: ~/c4/en, tokenizer: {name: gpt2, vocabulary: 50257}}",
    "{name: parquet, train: [a.parquet], tokenizer: {name: t5, vocabulary: 32128, end: </s>, path: /tmp/t5}}",
    "{name: huggingface, path: some/set, subset: en, validation_split: validation, streaming: true}",
]


@pytest.mark.parametrize("data", SOURCES)
def test_what_show_config_prints_loads_to_the_same(data: str, tmp_path: Path) -> None:
    config = load(f"run: {{data: {data}, evaluation: {{sets: {{more: [x.txt], 2nd: [y.jsonl]}}}}}}", tmp_path)
    assert load(settings.dump(config), tmp_path) == config
    assert "x.txt" not in canonical(config.run) and "/tmp" not in canonical(config.run)
    assert "~" not in settings.dump(config)


def test_a_data_set_is_on_the_hub_if_it_is_not_here(tmp_path: Path) -> None:
    for path, on_hub in (("some/set", True), (str(tmp_path), False), ("~nobody-here/set", False)):
        assert HuggingFaceData(name="huggingface", path=path).on_hub is on_hub


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (
            "{name: c5}",
            "data.name: 'c5' is not known, choose one of: stdlib, text, jsonl, c4, parquet, huggingface",
        ),
        ("{name: jsonl}", "run.data.train: field required"),
        ("{name: jsonl, train: []}", "run.data.train:"),
        ("{name: jsonl, train: [a], colum: x}", "run.data.colum: unknown key, did you mean column?"),
        ("{name: c4, folder: ~nobody-here/c4}", "run.data.folder: there is no home directory"),
        ("{name: huggingface, path: x, token: secret}", "run.data.token: unknown key"),
        ("{name: c4, folder: x, tokenizer: {vocabulary: 3}}", "run.data.tokenizer: the tokenizer bytes has 257 tokens"),
        ("{name: stdlib, shuffle: 3}", "run.data.shuffle: unknown key"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_key(data: str, says: str, tmp_path: Path) -> None:
    assert says in mistake(f"run: {{data: {data}}}", tmp_path)


def test_where_validation_sets_are_is_not_part_of_the_run(tmp_path: Path) -> None:
    plain = load("run: {}", tmp_path)
    assert digest(plain.run) == digest(load("run: {evaluation: {sets: {a: [b]}}}", tmp_path).run)
    assert "run.evaluation.sets" in mistake("run: {evaluation: {sets: {a: []}}}", tmp_path)


def test_the_first_loss_keeps_its_name_and_the_others_have_theirs(tmp_path: Path) -> None:
    reporter = Reporter(tmp_path, Metrics())
    reporter.evaluation(5, 100, 2.5, {"books": 3.0, "code": float("nan")})
    row = json.loads((tmp_path / "evals.jsonl").read_text())
    assert row == {"step": 5, "tokens": 100, "val_loss": 2.5, "val_loss_books": 3.0, "val_loss_code": None}
