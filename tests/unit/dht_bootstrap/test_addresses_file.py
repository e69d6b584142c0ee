"""The file of the node's addresses follows them, and a disk that is full does not end the node."""

from __future__ import annotations

import errno
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dht_bootstrap import cli, monitor
from dht_bootstrap.addresses_file import AddressesFile
from peer.p2p import identity, node

OLD, NEW = ("/ip4/198.51.100.4/tcp/31337/p2p/QmA",), ("/ip4/203.0.113.7/tcp/31337/p2p/QmA",)


class Moving:
    """It has other addresses from its second look on, and fails after its sixth."""

    def __init__(self, *_: object) -> None:
        self.looks = 0

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def kill(self) -> None: ...

    @property
    def addresses(self) -> tuple[str, ...]:
        self.looks += 1
        return OLD if self.looks == 1 else NEW

    @property
    def failure(self) -> str:
        return "the daemon has ended" if self.looks > 6 else ""


class Silent:
    """A monitor."""

    address = "127.0.0.1:9400"

    def __init__(self, *_: object) -> None: ...
    def watch(self) -> None: ...
    def save(self) -> None: ...
    def close(self) -> None: ...


@pytest.fixture
def serving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a node."""
    monkeypatch.setattr(node, "Node", Moving)
    monkeypatch.setattr(monitor, "Monitor", Silent)
    monkeypatch.setattr(identity, "load_or_create", lambda _: "QmA")
    monkeypatch.setattr(cli, "WATCH_SECONDS", 0.0)
    monkeypatch.setattr(cli, "FOLLOW_SECONDS", 0.0)
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {number: signal.getsignal(number) for number in numbers}
    root = logging.getLogger("noloco")
    before = (root.handlers[:], root.propagate, root.level)
    yield tmp_path
    root.handlers[:], root.propagate = before[:2]
    root.setLevel(before[2])
    for number, handler in handlers.items():
        signal.signal(number, handler)


def serve(file: Path, folder: Path) -> Any:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--host", "127.0.0.1", "--identity", str(folder / "key"), "--addresses-file", str(file)])
    return ended.value.code


def test_a_node_whose_addresses_change_writes_them_again(serving: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A provider gave another address: the file, and all that read it, had the old one until a restart."""
    file = serving / "addresses"
    assert serve(file, serving) == 1  # as the node fails at last
    assert file.read_text() == f"{NEW[0]}\n"
    said = capsys.readouterr()
    assert said.out == f"initial peer: {OLD[0]}\n"
    assert said.err.count(f"peers join at: {NEW[0]}") == 1


def test_a_file_that_cannot_be_written_does_not_end_the_node(serving: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, after which systemd does not start it again."""
    assert serve(serving / "none" / "addresses", serving) == 1
    said = capsys.readouterr().err
    assert said.count("the addresses are not written: --addresses-file") == 1 and "ready: " in said


@pytest.mark.parametrize("output", ["a pipe", "/dev/full"])
def test_a_node_goes_on_when_nobody_reads_its_output_or_its_disk_is_full(
    output: str, serving: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``noloco-bootstrap | head -1`` ended with its second line, in a traceback."""
    if output == "a pipe":
        reader, descriptor = os.pipe()
        os.close(reader)
    else:
        descriptor = os.open(output, os.O_WRONLY)
    with os.fdopen(descriptor, "w", encoding="utf-8") as unread:
        monkeypatch.setattr("sys.stdout", unread)
        assert serve(serving / "addresses", serving) == 1  # as the node fails at last
    said = capsys.readouterr().err
    assert "ready: " in said and "Traceback" not in said
    assert (serving / "addresses").read_text() == f"{NEW[0]}\n"


def test_it_is_written_when_there_is_room_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "addresses"
    file = AddressesFile(path, OLD)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        for _ in range(3):
            file.follow(OLD)
    assert len(caplog.records) == 1
    file.follow(OLD)
    assert path.read_text() == f"{OLD[0]}\n"


def test_another_order_and_none_are_no_change(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "addresses"
    file = AddressesFile(path, [*OLD, *NEW])
    for addresses in ((*OLD, *NEW), (*NEW, *OLD), ()):
        with caplog.at_level(logging.INFO):
            file.follow(addresses)
        assert path.read_text().split() == [*OLD, *NEW]
    assert not caplog.records
