"""A pre-trained model that gets another tokenizer than its own: said in ``train``, found by ``check``, allowed."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from peer.commands.check.finding import Finding
from peer.commands.check.runner import findings
from peer.commands.export.folder import save_byte_tokenizer
from peer.config import load
from peer.config.data import StdlibData, TokenizerConfig
from peer.config.model import AutoModel, LlamaModel
from peer.config.schema import Config, RunConfig
from peer.data.tokenizer import Bytes
from peer.errors import UserError
from peer.replica import pretrained_tokenizer
from tests.unit.data.harness import bpe, texts


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small GPT-2 with weights and, at first, without a tokenizer."""
    from transformers import GPT2Config, GPT2LMHeadModel

    own = GPT2Config(vocab_size=320, n_positions=32, n_embd=16, n_layer=1, n_head=2)
    GPT2LMHeadModel(own).save_pretrained(tmp_path / "gpt")
    return tmp_path / "gpt"


def run(folder: Path, tokenizer: TokenizerConfig | None = None, *, pretrained: bool = True) -> RunConfig:
    return RunConfig(
        model=AutoModel(name="auto", source=str(folder), pretrained=pretrained),
        data=StdlibData(sequence_length=16, tokenizer=tokenizer or TokenizerConfig()),
    )


def compared(*arguments: object, **keys: object) -> pretrained_tokenizer.Comparison:
    found = pretrained_tokenizer.compare(run(*arguments, **keys))  # type: ignore[arg-type]
    assert found is not None
    return found


def test_its_own_is_fine_wherever_it_comes_from_and_with_tokens_added(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    own = bpe(folder)
    assert compared(folder, own).advice == ""
    more = AutoTokenizer.from_pretrained(folder)
    more.add_tokens(["<|user|>", "<|model|>"])
    more.save_pretrained(tmp_path / "more")
    added = TokenizerConfig(name="more", path=tmp_path / "more", vocabulary=302)
    assert compared(folder, added).advice == ""


def test_another_is_said_with_what_to_set_and_this_is_right(folder: Path, tmp_path: Path) -> None:
    bpe(folder)
    embedded = compared(folder)
    assert "bytes is not" in embedded.text and "of 257 ids" in embedded.text
    backwards = bpe(tmp_path / "other", name="other", words=[it[::-1] for it in texts()])
    other = compared(folder, backwards)
    assert "other is not" in other.text and "of 300 ids" in other.text
    override = embedded.advice.removeprefix("set ").removesuffix(", unless you mean it")
    chosen = load.load(None, ["run.data.name=stdlib", override], environment={}).run.data.tokenizer
    assert chosen.path == folder and compared(folder, chosen).advice == ""


def test_fresh_weights_have_no_tokenizer_of_their_own(folder: Path) -> None:
    bpe(folder)
    assert pretrained_tokenizer.compare(run(folder, pretrained=False)) is None
    assert pretrained_tokenizer.compare(RunConfig(model=LlamaModel())) is None


def test_a_folder_without_one_cannot_be_compared_and_says_so(folder: Path) -> None:
    assert "contains no tokenizer" in compared(folder).text and not compared(folder).advice
    (folder / "tokenizer.json").write_text("{", encoding="utf-8")
    assert "contains no tokenizer" in compared(folder).text


def test_bytes_are_the_own_of_what_was_exported_from_a_run_with_bytes(folder: Path) -> None:
    save_byte_tokenizer(folder)
    assert compared(folder).text == f"bytes has the ids of {folder}'s own"
    assert len(Bytes().tokens()) == 257


def test_one_that_cannot_be_loaded_is_the_error_that_it_is_anyway(folder: Path, tmp_path: Path) -> None:
    bpe(folder)
    with pytest.raises(UserError, match=r"run\.data\.tokenizer\.path: .*nowhere does not exist"):
        pretrained_tokenizer.compare(run(folder, TokenizerConfig(name="x", vocabulary=300, path=tmp_path / "nowhere")))


def test_check_has_a_finding(folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from peer.commands.check import runner, training

    monkeypatch.setattr(runner, "topics", lambda config, *_: (("tokenizer", training.tokenizer(config)),))
    own = bpe(folder)

    def found(tokenizer: TokenizerConfig | None) -> list[Finding]:
        return list(findings(Config(run=run(folder, tokenizer))))

    assert [it.level for it in found(None)] == ["warn"] and "\n" not in found(None)[0].line()
    assert [it.level for it in found(own)] == ["ok"]
    assert list(findings(Config())) == []
    with caplog.at_level(logging.WARNING):
        pretrained_tokenizer.warn(run(folder, own))
        assert not caplog.records
        pretrained_tokenizer.warn(run(folder))
    assert len(caplog.records) == 1 and "\n" not in caplog.records[0].getMessage()


@pytest.mark.long
def test_train_says_it_in_a_line(folder: Path, tmp_path: Path) -> None:
    bpe(folder)
    keys = {
        "run.model": f"{{name: auto, source: {folder}, pretrained: true}}",
        "run.data": "{name: stdlib, sequence_length: 16}",
        "run.steps": 2,
        "run.inner_steps": 2,
        "run.dir": tmp_path / "runs",
        "run.evaluation.batches": 1,
        "peer.name": "alone",
        "peer.network.host": "127.0.0.1",
        "peer.device": "cpu",
    }
    (tmp_path / "run.yaml").write_text("run: {}\n", encoding="utf-8")
    program = [sys.executable, "-m", "peer", "train", "--config", str(tmp_path / "run.yaml")]
    program += [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
    done = subprocess.run(program, env=os.environ, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    said = [line for line in done.stderr.splitlines() if "run.data.tokenizer" in line]
    assert len(said) == 1 and " WARN" in said[0] and "unless you mean it" in said[0]
    assert said[0] in (tmp_path / "runs" / "alone" / "peer.log").read_text(encoding="utf-8")
