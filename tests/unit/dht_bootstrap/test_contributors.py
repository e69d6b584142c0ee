"""What peers have given: added up over restarts, believed as far as time allows, kept in a file."""

from __future__ import annotations

import errno
import logging
from pathlib import Path
from typing import Any

import pytest

from dht_bootstrap import contributors
from dht_bootstrap.contributors import KEPT_CONTRIBUTORS, Contributors
from peer.errors import UserError
from peer.swarm.directory.records import LIFETIME, MemberRecord, Report
from tests.unit.parts import member_record

NOW = 1_700_000_000.0
RATE = 100.0  # tokens a second of an honest peer


def record(name: str, tokens: float, merges: int = 0, rate: float = RATE) -> MemberRecord:
    report = Report(tokens=int(tokens), merges=merges)
    return member_record(f"Qm{name}").model_copy(update={"name": name, "tokens_per_second": rate, "report": report})


def given(book: Contributors, run: str = "demo", at: float = 0.0) -> dict[str, tuple[int, int]]:
    """Tokens and merges by name."""
    runs = {it["run"]: it["peers"] for it in book.view(NOW + at)}
    return {it["name"]: (it["tokens"], it["merges"]) for it in runs.get(run, [])}


def see(book: Contributors, at: float, *members: MemberRecord, run: str = "demo") -> None:
    book.see(run, members, NOW + at)
    book.looked = NOW + at


def trained(book: Contributors, begin: int, end: int, *, said: float = 0.0) -> None:
    """Three peers train from ``begin`` to ``end`` seconds. ``said``: what their processes had done before."""
    for at in range(begin, end + 1, 10):
        seconds = at - begin
        see(book, at, *(record(name, said + RATE * seconds, merges=seconds // 20) for name in "abc"))


def test_what_a_peer_has_given_is_added_up_over_restarts_of_its_process() -> None:
    book = Contributors()
    trained(book, 0, 600)
    for at in range(710, 1001, 10):  # the counters begin anew, and are read when they are above zero
        see(book, at, *(record(name, RATE * (at - 700), merges=(at - 700) // 10) for name in "abc"))
    assert given(book) == dict.fromkeys("abc", (int(RATE * 900), 60))


def test_it_outlives_the_node_and_counts_what_was_done_meanwhile(tmp_path: Path) -> None:
    book = Contributors.kept_in(tmp_path / "state.json")
    trained(book, 0, 600)
    book.write(book.model_dump_json())
    again = Contributors.kept_in(tmp_path / "state.json")
    assert given(again) == given(book)
    see(again, 1000, *(record(name, RATE * 1000, merges=50) for name in "abc"))
    assert given(again) == dict.fromkeys("abc", (int(RATE * 1000), 50))
    newcomer = Contributors.kept_in(tmp_path / "state.json")
    see(newcomer, 1000, *(record(name, RATE * 400) for name in "abcd"))  # d came while the node was away
    assert given(newcomer)["d"][0] == RATE * 400
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]


def test_a_peer_is_believed_as_far_as_time_allows() -> None:
    book = Contributors()
    for at in range(0, 601, 10):
        honest = [record(name, RATE * at, merges=at // 20) for name in "abc"]
        see(book, at, *honest, record("liar", 2**53 if at else 0, merges=2**53, rate=1e12))
    tokens, merges = given(book)["liar"]
    assert tokens <= 2 * RATE * (600 + LIFETIME)  # twice the second highest rate
    assert merges <= 10 * (600 + LIFETIME)
    assert given(book)["a"] == (RATE * 600, 30)


def test_what_a_peer_did_before_a_pause_is_counted_after_it() -> None:
    book = Contributors()
    trained(book, 0, 600)
    others = [record(name, RATE * 600, merges=30) for name in "ab"]
    last = record("c", RATE * 610, merges=31, rate=0.0).model_copy(update={"state": "paused"})
    see(book, 620, *others, last)
    assert given(book)["c"] == (RATE * 600, 30)
    see(book, 1000, *others, record("c", RATE * 610, merges=31))
    assert given(book)["c"] == (RATE * 610, 31)


def test_a_new_process_is_counted_from_its_first_record_on_and_one_that_leaves_in_a_pause_loses_nothing() -> None:
    book = Contributors()
    others = [record(name, RATE * 100) for name in "ab"]
    see(book, 0, *others, record("c", 0))
    see(book, 10, *others, record("c", RATE * 10))
    see(book, 12, *others, record("c", 0, rate=0.0).model_copy(update={"state": "training"}))
    see(book, 40, *others, record("c", RATE * 25))
    assert given(book)["c"][0] == RATE * 35
    see(book, 41, *others, record("c", RATE * 26, rate=0.0).model_copy(update={"state": "left"}))
    see(book, 80, *others, record("c", RATE * 27))  # it is back
    assert given(book)["c"][0] == RATE * 37


def test_a_counter_that_goes_up_and_down_gains_nothing() -> None:
    book = Contributors()
    for at in range(0, 601, 2):
        liar = record("liar", (at % 4) * 10**9, merges=at % 4 * 99)
        see(book, at, *(record(name, RATE * at) for name in "abc"), liar)
    assert given(book)["liar"][0] <= 2 * RATE * (600 + LIFETIME)
    assert given(book)["liar"][1] <= 10 * (600 + LIFETIME)


def test_what_a_peer_says_it_did_before_the_node_ran_is_not_counted() -> None:
    book = Contributors()
    see(book, 0, *(record(name, 10**12) for name in "abc"))
    assert given(book)["a"][0] <= 2 * RATE * LIFETIME


def test_who_trains_while_all_others_are_paused_is_counted() -> None:
    """Two paused every night; what the third one did meanwhile was never counted."""
    book = Contributors()
    trained(book, 0, 600)
    paused = [record(name, RATE * 600, 30, rate=0.0).model_copy(update={"state": "paused"}) for name in "bc"]
    for at in range(610, 1201, 10):
        see(book, at, record("a", RATE * at, merges=30), *paused)
    assert given(book)["a"] == (RATE * 1200, 30)


def test_a_newcomer_is_counted_when_the_book_is_full() -> None:
    """It began at nothing at each look, for as long as it trained."""
    book = Contributors()
    for at in (0, 600):
        see(book, at, *(record(f"old{number}", RATE * at) for number in range(KEPT_CONTRIBUTORS)))
    for at in range(700, 4301, 10):
        trains = [record(name, RATE * (at - 700)) for name in ("new", "b", "c")]
        book.see("another", [record(f"short{at}-{number}", 0) for number in range(20)], NOW + at)
        see(book, at, *trains)
    assert {given(book)[name][0] for name in ("new", "b", "c")} == {RATE * 3600}
    assert sum(it["count"] for it in book.view(NOW)) <= KEPT_CONTRIBUTORS


def test_a_flood_of_ids_and_of_runs_is_bounded_and_keeps_those_that_gave_most(tmp_path: Path) -> None:
    book = Contributors.kept_in(tmp_path / "state.json")
    trained(book, 0, 600)
    for at in range(601, 606):
        for run in range(8):
            flood = [record(f"x{at}-{run}-{number}", RATE) for number in range(200)]
            see(book, at, *flood, run=f"run-{run}")
    assert given(book) == dict.fromkeys("abc", (int(RATE * 600), 30))
    assert sum(it["count"] for it in book.view(NOW)) <= KEPT_CONTRIBUTORS
    assert all(len(it["peers"]) <= contributors.SHOWN_CONTRIBUTORS for it in book.view(NOW))
    book.write(book.model_dump_json())
    assert (tmp_path / "state.json").stat().st_size < contributors.STATE_BYTES
    assert given(Contributors.kept_in(tmp_path / "state.json")) == given(book)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[1]",
        b'{"looked": NaN}',
        b'{"looked": 1e300}',
        b'{"runs": {"../x": {}}}',
        b'{"runs": {"demo": {"Qm": {"name": "a b", "since": 1, "seen": 1, "paid": 1}}}}',
        b'{"runs": {"demo": {"Qm": {"name": "a", "since": 1, "seen": 1, "paid": 1, "tokens": -1}}}}',
        b'{"runs": ' + b"[" * 100_000,
        b'{"runs": {}}' + b" " * contributors.STATE_BYTES,
    ],
)
def test_a_damaged_file_is_one_line_and_a_new_beginning(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("noloco"), "propagate", True)
    file = tmp_path / "state.json"
    file.write_bytes(content)
    book = Contributors.kept_in(file)
    (line,) = [it.getMessage() for it in caplog.records]
    assert str(file) in line and "\n" not in line and len(line) < 400
    assert (tmp_path / "state.json.damaged").read_bytes() == content
    trained(book, 0, 60)
    book.write(book.model_dump_json())
    assert given(Contributors.kept_in(file))["a"][0] == RATE * 60


def test_a_disk_that_cannot_be_written_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    book = Contributors.kept_in(tmp_path / "gone" / "state.json")
    trained(book, 0, 60)
    book.write(book.model_dump_json())
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        Contributors.kept_in(tmp_path / "state.json").write("{}")
    assert len(caplog.records) == 2
    assert given(book)["a"][0] == RATE * 60
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match="--state"):
        Contributors.kept_in(tmp_path / "folder")


def test_the_view_has_the_largest_first_and_ages() -> None:
    book = Contributors()
    for at in range(0, 101, 10):
        see(book, at, record("small", at), record("large", RATE * at), record("none", 0))
    (run,) = book.view(NOW + 160)
    assert (run["run"], run["tokens"], run["count"]) == ("demo", 10_100, 2)
    rows: list[Any] = [(it["name"], it["age"], it["since_age"]) for it in run["peers"]]
    assert rows == [("large", 60.0, 160 + LIFETIME), ("small", 60.0, 160 + LIFETIME)]
