"""What is exported is, to the bit, what was trained; several peers' are averaged; what cannot be is one line."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from peer.commands.cli import main
from peer.commands.export import work
from peer.commands.export.folder import save_byte_tokenizer
from peer.config.data import BYTE_VOCABULARY, HuggingFaceData
from peer.config.digest import canonical, digest
from peer.config.schema import Config
from peer.data.open import corpus_of, validation
from peer.data.tokenizer import END_OF_TEXT, SEPARATOR
from peer.errors import RunError, UserError
from peer.process import LoopContext
from peer.replica import inner_loop
from peer.replica.inner_loop import mean_loss, mean_loss_by_rows
from peer.training import checkpoint, replica
from peer.training.checkpoint import Checkpoints
from peer.training.state import PeerState
from tests.saved import save_checkpoint
from tests.unit.data.harness import bpe, text_with_a_set
from tests.unit.hub.server import Hub

CPU = torch.device("cpu")
TINY = {"hidden_size": 16, "intermediate_size": 32, "layers": 2, "heads": 2}


def config(folder: Path, **run: Any) -> Config:
    for name in ("text.txt", "held_out.txt"):
        (folder / name).write_text("the quick brown fox jumps over the lazy dog. " * 400, encoding="utf-8")
    files = {"train": [str(folder / "text.txt")], "validation": [str(folder / "held_out.txt")]}
    data = {"name": "text", "sequence_length": 16, **files}
    shared = {"steps": 20, "batch_size": 4, "model": TINY, "data": data, "evaluation": {"batches": 2}, **run}
    return Config.model_validate({"run": shared})


def trained(settings: Config, stream: int, steps: int = 6) -> PeerState:
    tokens = corpus_of(settings.run).train
    state = replica.replica(settings, tokens, stream=stream, device=CPU, context=LoopContext())
    state.counters.tokens = state.inner.run(state.stream.take(steps)).tokens
    return state


def saved(folder: Path, peer: str, state: PeerState) -> Path:
    """The folder of a peer with a checkpoint in it, and what it wrote beside it."""
    home = folder / peer
    save_checkpoint(Checkpoints(home / "checkpoints", 2), state.inner.step, state.scalars(), state.tensors())
    row = {"round": 1, "step": state.inner.step, "partner": "elsewhere", "outcome": "merged"}
    (home / "rounds.jsonl").write_text(json.dumps(row) + "\n{broken", encoding="utf-8")
    return home


def export(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    with pytest.raises(SystemExit) as exit:
        main(["export", *map(str, arguments)])
    captured = capsys.readouterr()
    if exit.value.code:
        assert captured.out == ""
        lines = [line for line in captured.err.splitlines() if " WARN" not in line]
        assert len(lines) == 1 and lines[0].startswith("error: "), captured.err
    return int(exit.value.code or 0), captured.out + captured.err


def loaded(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).eval()


def loss_of(network: Any, settings: Config) -> float:
    return mean_loss(network, validation(settings.run, corpus_of(settings.run).validation), CPU)


def test_the_folder_is_the_training_model_to_the_bit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = config(tmp_path, **text_with_a_set(tmp_path))
    state = trained(settings, 1)
    with patch.object(inner_loop, "batch_loss", wraps=inner_loop.batch_loss) as losses:
        code, said = export(capsys, saved(tmp_path, "alice", state), tmp_path / "out")
    assert code == 0, said
    assert {len(it.args[1]) for it in losses.call_args_list} == {1}  # the logits of a whole batch may be 250 GiB
    network = loaded(tmp_path / "out")
    ids = torch.randint(0, 257, (3, 16))
    state.inner.model.eval()
    assert torch.equal(network(input_ids=ids).logits, state.inner.model(input_ids=ids).logits)
    assert network.dtype == torch.float32
    assert network.generation_config.eos_token_id == network.generation_config.pad_token_id == 256
    assert network.config.pad_token_id is None
    assert f"validation loss: {loss_of(network, settings):.4f}" in said
    out = network.generate(ids[:1], max_new_tokens=4, do_sample=False)
    assert out.shape[1] <= 20


def test_a_run_with_a_tokenizer_of_its_own_has_it_in_the_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoTokenizer

    own = bpe(tmp_path / "small")
    settings = config(tmp_path)
    data = settings.run.data.model_copy(update={"tokenizer": own})
    settings = settings.model_copy(update={"run": settings.run.model_copy(update={"data": data})})
    code, said = export(capsys, saved(tmp_path, "alice", trained(settings, 1)), tmp_path / "out")
    assert code == 0, said
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = tokenizer("the quick brown fox")["input_ids"]
    assert tokenizer.decode(ids) == "the quick brown fox" and len(tokenizer) == 300
    network = loaded(tmp_path / "out")
    assert network.config.vocab_size == 300
    assert network.generation_config.eos_token_id == tokenizer.eos_token_id


def test_the_card_says_what_was_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = config(tmp_path)
    homes = [saved(tmp_path, name, trained(settings, number)) for number, name in enumerate(("alice", "bob"))]
    assert export(capsys, *homes, tmp_path / "out")[0] == 0
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert yaml.safe_load(card.split("---")[1])["tags"] == ["noloco"]
    for words in (
        digest(settings.run),
        "| tokens | 768 ",
        "| inner steps | 6 of 20 |",
        "2 exported, 3 seen",
        "| bob |",
    ):
        assert words in card
    resolved = yaml.safe_load(card.split("```yaml\n")[1].split("```")[0])
    assert resolved == {"run": json.loads(canonical(settings.run))}


def test_several_peers_are_averaged_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = config(tmp_path)
    states = [trained(settings, number) for number in range(3)]
    homes = [saved(tmp_path, f"peer-{number}", state) for number, state in enumerate(states)]
    code, said = export(capsys, *homes, tmp_path / "out", "--evaluate")
    assert code == 0, said
    network = loaded(tmp_path / "out")
    thetas = [torch.cat([p.detach().flatten() for p in state.inner.model.parameters()]) for state in states]
    mean = torch.stack(thetas).double().mean(0)
    theta = torch.cat([p.detach().flatten() for p in network.parameters()])
    torch.testing.assert_close(theta.double(), mean, rtol=1e-5, atol=1e-7)
    lines = said.splitlines()
    for line, state, vector in zip(lines, states, thetas, strict=False):
        assert f"{float((vector - mean).norm() / mean.norm()):.3%} from the average" in line
        assert f"validation loss {loss_of(state.inner.model, settings):.4f}" in line
    assert lines[3] == f"validation loss of the average: {loss_of(network, settings):.4f}"


def test_bf16_halves_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = saved(tmp_path, "alice", trained(config(tmp_path), 1))
    for dtype in ("fp32", "bf16"):
        assert export(capsys, home, tmp_path / dtype, "--dtype", dtype, "--no-evaluate")[0] == 0
    sizes = [(tmp_path / dtype / "model.safetensors").stat().st_size for dtype in ("fp32", "bf16")]
    assert sizes[1] < 0.6 * sizes[0]
    assert loaded(tmp_path / "bf16").dtype == torch.bfloat16


def test_a_full_disk_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = saved(tmp_path, "alice", trained(config(tmp_path), 1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))  # bytes of a file; the weights have more
    try:
        with pytest.raises(SystemExit) as ended:
            main(["export", str(home), str(tmp_path / "out"), "--no-evaluate"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    said = capsys.readouterr().err
    assert ended.value.code == 1 and len(said.splitlines()) == 1
    assert f"{tmp_path / 'out'}: cannot be written: " in said
    assert not [it for it in tmp_path.iterdir() if it.name == "out" or it.name.startswith(".tmp")]


def test_a_checkpoint_its_folder_and_the_peers_folder_are_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = saved(tmp_path, "alice", trained(config(tmp_path), 1))
    for number, path in enumerate((home, home / "checkpoints", home / "checkpoints" / "step_00000006")):
        assert export(capsys, path, tmp_path / f"out-{number}", "--no-evaluate")[0] == 0
    files = [(tmp_path / f"out-{number}" / "model.safetensors").read_bytes() for number in range(3)]
    assert files[0] == files[1] == files[2]


def test_without_the_text_there_is_no_loss_unless_it_was_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = saved(tmp_path, "alice", trained(config(tmp_path), 1))
    (tmp_path / "text.txt").unlink()
    code, said = export(capsys, home, tmp_path / "out", "--evaluate")
    assert (code, "no file matches" in said) == (2, True)
    code, said = export(capsys, home, tmp_path / "out")
    assert (code, "validation loss not computed" in said) == (0, True)


@pytest.mark.parametrize(
    ("error", "code"), [(RunError("the Hugging Face hub does not answer"), 1), (UserError("no such data set"), 2)]
)
def test_a_data_set_on_the_hub_is_read_only_if_that_was_asked_for(
    error: Exception, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was downloaded in silence, or, if the hub was away, there was no folder."""
    run = config(tmp_path).run
    tokens = corpus_of(run).train
    run = run.model_copy(update={"data": HuggingFaceData(name="huggingface", path="me/books", sequence_length=16)})
    home = saved(
        tmp_path, "alice", replica.replica(Config(run=run), tokens, stream=1, device=CPU, context=LoopContext())
    )
    monkeypatch.setattr(work, "corpus_of", read := Mock(side_effect=error))
    assert export(capsys, home, tmp_path / "first", "--evaluate") == (code, f"error: {error}\n")
    assert read.call_count == 1
    found, said = export(capsys, home, tmp_path / "second")
    reason = "not computed: the data set me/books is on the Hugging Face hub; --evaluate reads it"
    assert (found, reason in said, read.call_count) == (0, True, 1)
    monkeypatch.chdir(tmp_path)
    Path("me/books").mkdir(parents=True)  # the same name is a local folder now
    found, said = export(capsys, home, tmp_path / "third")
    assert (found, f"validation loss not computed: {error}" in said) == (0, True)


def test_on_a_gpu_without_room_the_cpu_evaluates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was a traceback and no folder: by default export evaluates, and the GPU may be training."""
    settings = config(tmp_path)
    homes = [saved(tmp_path, name, trained(settings, number)) for number, name in enumerate(("alice", "bob"))]
    asked = []

    def loss(network: Any, batches: Any, device: torch.device) -> float:
        asked.append(device.type)
        if device.type != "cpu":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return mean_loss_by_rows(network, batches, device)

    monkeypatch.setattr(torch.nn.Module, "to", lambda self, device: self)  # there is no such device
    monkeypatch.setattr(work, "pick_device", lambda wish: torch.device("meta"))
    monkeypatch.setattr(work, "mean_loss_by_rows", loss)
    code, said = export(capsys, *homes, tmp_path / "out")
    assert (code, asked) == (0, ["meta", "cpu", "cpu", "cpu"])
    assert f"validation loss of the average: {loss_of(loaded(tmp_path / 'out'), settings):.4f}" in said
    assert said.count("meta has no memory left: the CPU computes the validation loss") == 1
    monkeypatch.setattr(work, "mean_loss_by_rows", Mock(side_effect=RuntimeError("shapes do not match")))
    with pytest.raises(RuntimeError, match="shapes"):
        main(["export", str(homes[0]), str(tmp_path / "another")])


def open_files(folder: Path) -> list[str]:
    numbers = (Path("/proc/self/fd", it) for it in os.listdir("/proc/self/fd"))  # noqa: PTH208
    names = (str(it.readlink()) for it in numbers if it.is_symlink())  # that of the listing is gone
    return [it for it in names if it.startswith(str(folder))]


@pytest.mark.parametrize(
    "paths",
    [
        ["alice"],
        ["alice/checkpoints/step_00000006"],
        ["alice/checkpoints/step_00000006", "bob/checkpoints/step_00000006"],
        ["elsewhere/step_00000006", "elsewhere/of-bob"],  # copied by hand
    ],
)
def test_newer_checkpoints_of_a_peer_that_trains_replace_the_exported_one(
    paths: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was called damaged, in the middle of the work, also with OUT on another file system; and of several those that
    were not read yet.
    """
    homes = [saved(tmp_path, name, trained(config(tmp_path), stream)) for stream, name in enumerate(("alice", "bob"))]
    checkpoints = [home / "checkpoints" / "step_00000006" for home in homes]
    for checkpoint_, copy in zip(checkpoints, ("step_00000006", "of-bob"), strict=True):
        shutil.copytree(checkpoint_, tmp_path / "elsewhere" / copy)
    there = set(tmp_path.rglob("*"))

    def digest_of(file: Path) -> str:
        for path in (*checkpoints, *(tmp_path / "elsewhere").iterdir()):
            shutil.rmtree(path, ignore_errors=True)
        assert set(tmp_path.rglob("*")) < there, "a killed command leaves files"
        return whole(file)

    whole = checkpoint._digest
    monkeypatch.setattr("os.link", Mock(side_effect=OSError(errno.EXDEV, "Invalid cross-device link")))
    monkeypatch.setattr(checkpoint, "_digest", digest_of)
    code, said = export(capsys, *(tmp_path / path for path in paths), tmp_path / "out", "--no-evaluate")
    assert code == 0 and f"{tmp_path / paths[-1]}" in said and said.count(": step 6") == len(paths), said
    assert not list((tmp_path / "alice" / "checkpoints").glob("step_*")) and not list(tmp_path.glob(".tmp-*"))
    if paths == ["alice"]:
        assert f"{checkpoints[0]}: step 6" in said
        assert "1 exported, 2 seen by them" in (tmp_path / "out" / "README.md").read_text()
    assert not open_files(tmp_path), "they would keep their bytes on the disk while the model is pushed"


def test_a_system_without_proc_reads_the_checkpoint_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "NAMES_OF_OPEN_FILES", tmp_path / "none")
    homes = [saved(tmp_path, name, trained(config(tmp_path), 1)) for name in ("alice", "bob")]
    assert export(capsys, *homes, tmp_path / "out", "--no-evaluate")[0] == 0


def _flip(home: Path) -> None:
    file = home / "checkpoints" / "step_00000006" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\0")


def _old(home: Path) -> None:
    state = trained(config(home.parent), 1)
    state._origin = {}
    shutil.rmtree(home)
    saved(home.parent, home.name, state)


@pytest.mark.parametrize(
    ("harm", "path", "says"),
    [
        (_flip, "alice", "every checkpoint in it is damaged"),
        (_flip, "alice/checkpoints/step_00000006", "is damaged: model.safetensors does not match its digest"),
        (_old, "alice", "was written by another version of noloco-peer (None)"),
        (lambda home: None, ".", "several peers' folders, say which"),
        (lambda home: None, "nobody", "no checkpoint here"),
    ],
)
def test_what_cannot_be_exported_is_one_line(
    harm: Callable[[Path], None], path: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = saved(tmp_path, "alice", trained(config(tmp_path), 1))
    harm(home)
    code, said = export(capsys, tmp_path / path, tmp_path / "out")
    assert code == 2
    assert says in said
    assert not (tmp_path / "out").exists()


def test_unlike_ones_and_the_same_one_twice_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alice = saved(tmp_path, "alice", trained(config(tmp_path), 1))
    bob = saved(tmp_path, "bob", trained(config(tmp_path, seed=1), 1))
    code, said = export(capsys, alice, bob, tmp_path / "out")
    assert (code, "run.seed is 0 in" in said) == (2, True)
    code, said = export(capsys, alice, alice / "checkpoints", tmp_path / "out")
    assert (code, "is given twice" in said) == (2, True)


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = saved(tmp_path, "alice", trained(config(tmp_path), 1))
    (tmp_path / "out").mkdir()
    assert export(capsys, home, tmp_path / "out", "--no-evaluate")[0] == 0  # an empty folder is no loss
    code, said = export(capsys, home, tmp_path / "out")
    assert (code, "is there already" in said) == (2, True)


def test_the_folder_is_pushed(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = saved(tmp_path, "alice", trained(config(tmp_path), 1))
    code, said = export(capsys, home, tmp_path / "out", "--no-evaluate", "--push", "me/model", "--public")
    assert code == 0, said
    assert "me/model: not there yet, it will be made, for all to see" in said
    assert f"pushed: {hub.url}/me/model/commit/" in said
    made = hub.repositories["me/model"]
    assert made.files == {it.name: it.read_bytes() for it in (tmp_path / "out").iterdir()}
    assert made.commits == ["demo, step 6"] and not made.private


@pytest.mark.parametrize(
    ("token", "words", "says"),
    [
        ("", ["--push", "me/model"], "no token here"),
        ("hf_read", ["--push", "me/model"], "may only read"),
        ("hf_write", ["--push", "other/model"], "other is neither me nor an organization"),
    ],
)
def test_a_push_that_will_fail_is_refused_before_the_work(
    hub: Hub,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    token: str,
    words: list[str],
    says: str,
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    code, said = export(capsys, saved(tmp_path, "alice", trained(config(tmp_path), 1)), tmp_path / "out", *words)
    assert code == 2 and says in said and "hf_" not in said
    assert not (tmp_path / "out").exists() and not hub.repositories


@pytest.mark.parametrize("words", [["--push", "model"], ["--push", "me/model", "--max-upload", "20"]])
def test_wrong_words_for_a_push_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["export", "checkpoint", "out", *words])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and ("give OWNER/NAME" in said or "did you mean 20mbit?" in said)


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    save_byte_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


@settings(max_examples=200)
@given(text=st.text().filter(lambda text: END_OF_TEXT not in text))  # hypothesis tries constants of the code, too
def test_a_byte_is_its_id_and_any_text_comes_back(text: str, byte_tokenizer: Any) -> None:
    ids = byte_tokenizer(text)["input_ids"]
    assert ids == list(text.encode())
    assert byte_tokenizer.decode(ids) == text


def test_the_end_of_a_text_is_the_separator(byte_tokenizer: Any) -> None:
    assert byte_tokenizer.eos_token_id == SEPARATOR
    assert len(byte_tokenizer) == BYTE_VOCABULARY
    assert byte_tokenizer(f"a{END_OF_TEXT}b")["input_ids"] == [97, 256, 98]
