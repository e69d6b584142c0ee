"""What ``noloco-peer status`` shows on a terminal."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from peer.commands.status import LastFigures, in_words
from peer.errors import RunError
from peer.swarm.directory.reader import Entry, Onlooker
from peer.swarm.directory.records import LIFETIME
from tests.unit.parts import member_record

NOW = 1_700_000_000.0


def entries(at: float, count: int = 2, **changes: Any) -> dict[str, Entry]:
    records = [member_record(f"Qm{number}").model_copy(update=changes) for number in range(count)]
    return {it.peer_id: Entry(it, NOW + at + LIFETIME) for it in records}


def shown(figures: LastFigures, found: Any, at: float) -> str:
    console = Console(width=160)
    with console.capture() as text:
        console.print(*figures.tables(found, NOW + at))
    return text.get()


def test_a_run_that_has_ended_keeps_its_last_figures_and_says_since_when() -> None:
    figures = LastFigures({})
    assert "demo: 2 peers, 2 tokens/s" in shown(figures, {"demo": entries(0.0, step=70)}, 1.0)
    shown(figures, {"demo": entries(2.0, state="left", step=71)}, 3.0)
    last = shown(figures, {}, 183.0)  # all records have expired
    assert "demo: ended 3 min ago, these are its last figures: 2 peers, 2 tokens/s" in last
    assert last.count(" 70 ") == 2 and last.count(" lost ") == 2
    assert "demo: 2 peers, 2 tokens/s" in shown(figures, {"demo": entries(200.0)}, 201.0)  # it goes on


def test_a_run_that_has_just_ended_is_shown_from_the_records_of_those_that_left() -> None:
    last = shown(LastFigures({}), {"demo": entries(0.0, state="left")}, 20.0)
    assert "demo: ended 20 s ago" in last and last.count(" left ") == 2


def test_invented_runs_do_not_fill_the_screen() -> None:
    figures = LastFigures({})
    for number in range(40):
        shown(figures, {f"run-{number}": entries(float(number))}, float(number))
    assert shown(figures, {}, 900.0).count(": ended ") == 16


def test_a_directory_that_does_not_answer_in_time_is_one_line() -> None:
    def call(work: Any, seconds: float) -> None:
        work.close()
        raise TimeoutError

    with pytest.raises(RunError, match="directory does not answer"):
        Onlooker(SimpleNamespace(call=call)).read()  # type: ignore[arg-type]


def test_what_others_saw_end_is_shown_and_a_run_that_lives_again_replaces_it() -> None:
    figures = LastFigures({"demo": (NOW - 7200, entries(-7200.0, step=70))})
    last = shown(figures, {}, 0.0)
    assert "demo: ended 2 h 0 min ago" in last and last.count(" 70 ") == 2
    assert "demo: 2 peers, 2 tokens/s" in shown(figures, {"demo": entries(0.0)}, 1.0)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(-3, "0 s"), (59.4, "59 s"), (61, "1 min"), (3540, "59 min"), (7510, "2 h 5 min"), (200_000, "2 days")],
)
def test_times_in_words(seconds: float, words: str) -> None:
    assert in_words(seconds) == words
