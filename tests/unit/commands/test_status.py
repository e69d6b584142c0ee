"""What ``noloco-peer status`` shows on a terminal."""

from __future__ import annotations

from rich.console import Console

from peer.commands.status import _screen


def test_when_the_last_record_has_expired_it_says_so() -> None:
    console = Console(width=80)
    with console.capture() as shown:
        console.print(_screen({}))
    assert shown.get().strip() == "nobody is there any more"
