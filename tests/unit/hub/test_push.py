"""A folder reaches the hub whole, at the given rate; whatever the hub refuses is one line, said before the work."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from huggingface_hub import constants

from peer import clock
from peer.errors import RunError, UserError
from peer.hub import answers
from peer.hub.push import PacedFile, push, rights
from tests.unit.hub.server import OTHER, READ, WRITE, Hub, Repository

CARD = "---\nlibrary_name: transformers\n---\n\n# a model\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    (made / "code").mkdir(parents=True)
    (made / "model.safetensors").write_bytes(os.urandom(300_000))
    (made / "README.md").write_text(CARD)
    (made / "code" / "config.json").write_text("{}")
    return made


def content(folder: Path) -> dict[str, bytes]:
    return {str(it.relative_to(folder)): it.read_bytes() for it in folder.rglob("*") if it.is_file()}


@pytest.mark.parametrize("part", [0, 70_000], ids=["one part", "five parts"])
def test_all_files_are_there_as_one_commit(hub: Hub, folder: Path, part: int) -> None:
    hub.part = part
    said = push(folder, "me/model", private=True, message="demo, step 7", rate=None)
    made = hub.repositories["me/model"]
    assert made.files == content(folder) and made.commits == ["demo, step 7"] and made.private
    assert said.startswith(f"{hub.url}/me/model/commit/")
    (folder / "model.safetensors").write_bytes(b"more")
    push(folder, "me/model", private=True, message="demo, step 8", rate=None)
    assert made.files == content(folder) and made.commits == ["demo, step 7", "demo, step 8"]


def test_a_repository_is_private_unless_it_is_said_or_was_there(hub: Hub, folder: Path) -> None:
    hub.repositories["me/known"] = Repository(private=False)
    push(folder, "me/known", private=True, message="m", rate=None)
    push(folder, "me/open", private=False, message="m", rate=None)
    assert not hub.repositories["me/known"].private and not hub.repositories["me/open"].private


def test_what_will_happen_is_said_and_nothing_is_written(hub: Hub) -> None:
    assert rights("me/new", True) == "me/new: not there yet, it will be made, private"
    assert rights("me/new", False) == "me/new: not there yet, it will be made, for all to see"
    assert rights("lab/new", True).startswith("lab/new: not there yet")
    hub.repositories["me/known"] = Repository(private=True)
    assert rights("me/known", True) == "me/known: there already, and this token may write to it"
    assert all(it.startswith("GET ") for it in hub.requests)
    assert list(hub.repositories) == ["me/known"]


@pytest.mark.parametrize(
    ("token", "name", "says"),
    [
        ("", "me/new", "no token here; set HF_TOKEN"),
        ("hf_wrong", "me/new", "does not accept the token"),
        (READ, "me/new", "the token may only read"),
        (READ, "me/known", "the token may not write there"),
        (OTHER, "me/new", "me is neither other nor an organization"),
        (OTHER, "me/known", "me is neither other nor an organization"),  # a private one is not seen
        (OTHER, "me/open", "the token may not write there"),
        (WRITE, "me/a--b", "not a name that the Hugging Face hub could have"),
    ],
)
def test_a_refusal_is_one_line_without_the_token(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, token: str, name: str, says: str
) -> None:
    hub.repositories |= {"me/known": Repository(private=True), "me/open": Repository(private=False)}
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(UserError) as refused:
        rights(name, True)
    text = str(refused.value)
    assert says in text and text.startswith(f"{name}: ") and "\n" not in text and "hf_" not in text


def test_rights_that_end_during_the_night_are_one_line(hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repositories["me/known"] = Repository(private=True)
    monkeypatch.setenv("HF_TOKEN", READ)
    with pytest.raises(UserError, match=r"^me/known: the token may not write there; take one with write access"):
        push(folder, "me/known", private=True, message="m", rate=None)
    assert not hub.repositories["me/known"].files


def test_an_error_of_the_hub_is_one_line_without_the_query_of_an_address(hub: Hub, folder: Path) -> None:
    hub.broken = "/commit/"
    with pytest.raises(RunError, match=r"^me/new: the network or .* hub does not answer: .*'500 ") as failed:
        push(folder, "me/new", private=True, message="m", rate=None)
    assert "\n" not in str(failed.value)
    assert answers.reason(OSError("PUT https://store/x?X-Signature=secret&b=1 failed")) == "PUT https://store/x failed"


def test_without_a_network_it_is_one_line(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(RunError, match=r"^me/new: the network or the Hugging Face hub does not answer: ") as failed:
        rights("me/new", True)
    assert "\n" not in str(failed.value)


def test_a_silent_hub_is_not_waited_for(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(answers, "SILENCE", 0.3)
    others = set(threading.enumerate())
    hub.silent.set()
    with pytest.raises(RunError, match=r"^me/new: the network or the Hugging Face hub does not answer: "):
        rights("me/new", True)
    answering = set(threading.enumerate()) - others
    hub.silent.clear()
    for thread in answering:
        thread.join(60)
    assert answering and capsys.readouterr().err == ""  # the test's hub takes it that its client has hung up


def test_a_question_has_a_deadline_whatever_is_heard() -> None:
    ended = threading.Event()
    with pytest.raises(TimeoutError):
        answers.within(lambda: ended.wait(60), 0.2)
    ended.set()


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds of each sleep, in which a clock goes on that does not go on by itself."""
    seconds: list[float] = []
    monkeypatch.setattr(clock, "monotonic", lambda: sum(seconds))
    monkeypatch.setattr(clock, "sleep", seconds.append)
    return seconds


@pytest.mark.parametrize("rate", [None, 1e5])
def test_a_file_is_read_at_the_rate_and_not_faster(tmp_path: Path, slept: list[float], rate: float | None) -> None:
    (tmp_path / "file").write_bytes(bytes(1_000_000))
    with PacedFile(tmp_path / "file") as file:
        assert len(file.read()) == 1_000_000 and not slept
        file.rate = rate
        file.seek(0)
        while file.read(2**16):
            pass
    assert sum(slept) == pytest.approx(10 if rate else 0, rel=0.1)


@pytest.mark.parametrize("part", [0, 70_000], ids=["one part", "five parts"])
def test_a_push_takes_the_line_for_its_bytes_once(hub: Hub, folder: Path, slept: list[float], part: int) -> None:
    hub.part = part
    push(folder, "me/model", private=True, message="m", rate=1e5)
    assert sum(slept) == pytest.approx(3, rel=0.3)  # 300 kB
