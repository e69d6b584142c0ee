"""Findings that need no network, and what a machine needs of memory."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from peer import __version__
from peer.commands import cli
from peer.commands.check import local, network, training
from peer.commands.check.finding import Finding, ok, warn
from peer.commands.check.members import _versions, members
from peer.commands.check.reach import reachability
from peer.config.digest import canonical, digest_of
from peer.config.load import load
from peer.config.schema import Config, RunConfig
from peer.data import corpus
from peer.outer.method import vector_names
from peer.p2p.admission.invitation import INVITED_KEY, Owner, accept, invite
from peer.p2p.greeting import WIRE_VERSION, MemberIdentity
from peer.p2p.reachability.decide import View
from peer.p2p.reachability.dialback import Answer, Heard
from peer.p2p.stream import Refused
from peer.process import LoopContext
from peer.replica import memory
from peer.replica.memory import estimate
from peer.swarm.directory.reader import Reader
from peer.swarm.state_transfer.donor import CLIENTS
from peer.training import replica
from peer.training.run_folder import next_name
from tests.unit.hub.server import Hub
from tests.unit.parts import member_record

TEXT, OTHER = (canonical(RunConfig(steps=steps)) for steps in (10, 20))
DIGEST = digest_of(TEXT)


def config(*sets: str) -> Config:
    return load(None, sets, environment={})


def levels(found: Any) -> list[str]:
    return [it.level for it in found]


def test_a_finding_is_one_line_whatever_is_in_it() -> None:
    line = warn("reachability", "seen as \x1b[2J\n1.2.3.4", "open TCP 31338").line()
    assert line == r"warn  reachability  seen as \x1b[2J\n1.2.3.4; open TCP 31338"


@pytest.mark.parametrize(
    ("observed", "sets", "relayed"),
    [("192.168.1.2", (), True), ("192.168.1.2", ("peer.network.reach=public",), False), ("45.1.2.3", (), False)],
)
def test_who_is_dialled_by_a_private_address_hears_of_a_relay_where_it_will_have_one(
    observed: str, sets: tuple[str, ...], relayed: bool
) -> None:
    answer = Answer(now=0.0, observed=observed, tried=[])
    seen = View("/ip4/45.0.0.1/tcp/1/p2p/Qm", Heard(answer, 0.0), {f"/ip4/{observed}/tcp/4001": "reached"})
    (found,) = reachability([seen], config(*sets).peer.network)
    assert found.level == "ok" and ("through a relay" in found.line()) is relayed


def test_a_port_that_is_taken_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = list(local.port(config("peer.network.host=127.0.0.1", f"peer.network.port={port}")))
        assert levels(found) == ["fail"]
        assert str(port) in found[0].text and "peer.network.port" in found[0].advice
    assert levels(local.port(config("peer.network.host=127.0.0.1", f"peer.network.port={port}"))) == ["ok"]
    assert levels(local.port(config("peer.network.host=203.0.113.9"))) == ["fail"]  # not of this machine


def test_an_identity_that_others_can_read_is_found(tmp_path: Path) -> None:
    key = tmp_path / "identity.key"
    assert "new" in next(iter(local.identity(config(f"peer.identity={key}")))).text
    key.write_bytes(b"key")
    key.chmod(0o644)
    found = list(local.identity(config(f"peer.identity={key}")))
    assert levels(found) == ["warn"] and f"chmod 600 {key}" in found[0].advice
    key.chmod(0o600)
    assert levels(local.identity(config(f"peer.identity={key}"))) == ["ok"]


def test_a_peer_that_runs_in_the_same_folder_is_found(tmp_path: Path) -> None:
    sets = (f"run.dir={tmp_path}", "peer.name=a")
    (tmp_path / "a").mkdir()
    lock = os.open(tmp_path / "a" / ".lock", os.O_RDWR | os.O_CREAT)
    assert levels(local.identity(config(*sets))) == ["ok"]
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert levels(local.identity(config(*sets))) == ["warn", "ok"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        sets = (*sets, "peer.network.host=127.0.0.1", f"peer.network.port={taken.getsockname()[1]}")
        assert levels(local.port(config(*sets))) == ["warn"]
        owner = "run.owner=gMTUeqiR4baJ+F/D0QgfAfbToe6ngcBr9DgY6HC4vpk="
        invited = config(*sets, "run.admission=invite", owner, f"peer.invitation={tmp_path / 'invitation'}")
        (found,) = network.network(invited)  # without its key, which the peer uses
        assert found.level == "warn" and str(tmp_path / "a") in found.text
        os.close(lock)
        assert levels(local.port(config(*sets))) == ["fail"]


@pytest.mark.parametrize("name", ["", "peer.name=check"])
def test_the_running_peer_of_an_invitation_is_found_by_its_key(tmp_path: Path, name: str) -> None:
    """It has the default name: a second node with its key was started beside it, and said that the key was copied."""
    owner = Owner(Ed25519PrivateKey.generate())
    (file := tmp_path / "ann.invitation").write_text(invite(owner, "ann", 2e9).model_dump_json())
    folder = tmp_path / "runs" / "machine-1"
    folder.mkdir(parents=True)
    accept(file, folder / INVITED_KEY, owner.public)
    sets = (f"run.dir={tmp_path / 'runs'}", "run.admission=invite", f"run.owner={owner.public}", *filter(None, [name]))
    ann = config(*sets, f"peer.invitation={file}")
    assert local.own_folder(ann) is None
    lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert local.own_folder(ann) == folder
    (other := tmp_path / "bob.invitation").write_text(invite(owner, "bob", 2e9).model_dump_json())
    assert local.own_folder(config(*sets, f"peer.invitation={other}")) is None
    other.write_text("{")
    assert local.own_folder(config(*sets, f"peer.invitation={other}")) is None  # other checks say what is wrong
    os.close(lock)


def test_without_an_invitation_there_is_no_way_in() -> None:
    owner = "run.owner=gMTUeqiR4baJ+F/D0QgfAfbToe6ngcBr9DgY6HC4vpk="
    assert levels(local.identity(config("run.admission=invite", owner))) == ["fail"]


def test_too_little_disk_and_memory_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = config(f"run.dir={tmp_path / 'not' / 'yet'}", "peer.device=cpu")
    assert levels(training.disk(small)) == ["ok"] and levels(training.memory(small, 1)) == ["ok"]
    assert not (tmp_path / "not").exists()  # a check leaves nothing behind
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    monkeypatch.setattr(memory, "available_memory", lambda: 2**28)
    found = [*training.disk(small), *training.memory(small, 1)]
    assert levels(found) == ["fail", "fail"]
    assert "peer.checkpoint.keep" in found[0].advice and "peer.micro_batch" in found[1].advice


def test_a_push_needs_disk_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one ran, saves failed on a full disk."""
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=62 * 2**20))
    sets = (f"run.dir={tmp_path}", "peer.checkpoint.keep=2")
    assert levels(training.disk(config(*sets))) == ["ok"]  # three of 20 MiB are needed
    (found,) = training.disk(config(*sets, "peer.push.to=me/model"))
    assert found.level == "fail" and found.text.startswith("checkpoints and a push need ")


@pytest.mark.parametrize("name", ["ann", None])
def test_old_checkpoints_are_room_for_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str | None
) -> None:
    full = config(f"run.dir={tmp_path}", "peer.checkpoint.keep=2", *([f"peer.name={name}"] if name else []))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=30 * 2**20))
    assert levels(training.disk(full)) == ["fail"]  # three of 20 MiB are needed
    for step in ("step_00000500", "step_00001000"):
        old = tmp_path / (name or next_name(tmp_path)) / "checkpoints" / step
        old.mkdir(parents=True)
        (old / "model.safetensors").write_bytes(bytes(20 * 2**20))
    assert levels(training.disk(full)) == ["ok"]


@pytest.mark.parametrize(
    "sets",
    [
        ("run.outer.name=noloco",),
        ("run.outer.name=diloco",),
        ("run.outer.name=diloco", "run.exchange.codec=int2"),
        ("run.outer.name=decoupled",),
        ("run.outer.name=local",),
        ("run.inner.optimizer=muon",),
    ],
    ids=["noloco", "diloco", "int2", "decoupled", "local", "muon"],
)
def test_the_disk_needs_what_the_checkpoints_of_the_method_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sets: tuple[str, ...]
) -> None:
    """With int2 it was ok on a disk on which the training then refused to begin."""
    small = config(f"run.dir={tmp_path}", "peer.device=cpu", "run.model.layers=1", "peer.checkpoint.keep=1", *sets)
    text = corpus.load(small.run.data)
    state = replica.replica(small, text.train, stream=1, device=torch.device("cpu"), context=LoopContext())
    assert vector_names(small.run) == tuple(state.saved_vectors())
    usage = shutil.disk_usage(tmp_path)
    for missing, level in ((0, "ok"), (1, "fail")):  # bytes of those of one that is kept, and of one more
        free = 2 * state.checkpoint_bytes - missing
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: usage._replace(free=free))
        assert levels(training.disk(small)) == [level], missing


def test_memory_that_is_short_only_while_newcomers_are_served_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    large = config("peer.device=cpu", "run.model.hidden_size=1024")
    needed = estimate(large.run, large.peer)
    usual, served = needed.device_bytes + needed.host_bytes, CLIENTS * needed.giving_bytes + needed.taking_bytes
    for free, level in ((usual + served / 2, "warn"), (1.2 * (usual + served), "ok"), (usual / 2, "fail")):
        monkeypatch.setattr(memory, "available_memory", lambda free=free: int(free))
        assert levels(training.memory(large, 1)) == [level], free


def test_the_memory_line_counts_what_a_late_join_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counted newcomers only, so a machine on which all was ok had no memory when the peer itself was one."""
    large = config("peer.device=cpu", "run.model.hidden_size=1024")
    needed = estimate(large.run, large.peer)
    most = needed.device_bytes + needed.host_bytes + CLIENTS * needed.giving_bytes + needed.taking_bytes
    for free, level in ((most, "ok"), (most - needed.taking_bytes, "warn")):
        monkeypatch.setattr(memory, "available_memory", lambda free=free: int(free / memory.TIGHT_SHARE) + 1)
        (found,) = training.memory(large, 1)
        assert found.level == level and "more while it or newcomers download weights" in found.text, free


class Greeted:
    """The node of a check, whose greeting each member answers as it is; one that is ``None`` does not answer."""

    def __init__(self, *members: MemberIdentity | None, wire: int = WIRE_VERSION) -> None:
        self.member = MemberIdentity("check", "demo", DIGEST, TEXT, layout="")
        self._greeting = self.member.greeting.model_copy(update={"wire": wire})
        self._members = {f"m{number}": member for number, member in enumerate(members)}

    async def refused_by(self, peer_id: str, protocol: str, addresses: Sequence[str]) -> Refused | None:
        member = self._members[peer_id]
        refusal = member.refusal(self._greeting) if member is not None else None
        return None if refusal is None else Refused(refusal)

    def call(self, work: Coroutine[Any, Any, Any], timeout: float) -> Any:
        return asyncio.run(work)

    def other(self, patched: pytest.MonkeyPatch, *, same: bool) -> list[Finding]:
        """What is found of the first member, which names another digest than this peer, and the next ones do not."""
        found = [member_record(it).model_copy(update={"config": DIGEST}) for it in self._members]
        found[0] = found[0].model_copy(update={"config": digest_of(OTHER)})
        patched.setattr(Reader, "refresh_all", lambda _: found if same else found[:1])
        patched.setattr("peer.commands.check.members._duplicate", lambda *_: ())
        patched.setattr(self, "join", lambda *_, **__: asyncio.sleep(0), raising=False)
        own: Any = SimpleNamespace(run=RunConfig(steps=10))
        found_of_it = members(self, own, None, (), speed=False)  # type: ignore[arg-type]
        return [it for it in found_of_it if "m0" in it.text]

    def versions(self) -> list[Finding]:
        return list(_versions(self, [member_record(it) for it in self._members]))  # type: ignore[arg-type]


def test_a_member_that_fits_is_told_from_one_that_is_silent_or_trains_something_else() -> None:
    fits = MemberIdentity("member", "demo", DIGEST, TEXT, "layout")
    own, silent, other = Greeted(fits, None, replace(fits, config=digest_of(OTHER), canonical=OTHER)).versions()
    assert own.line().endswith(f"m0 understands this noloco-peer ({__version__})") and own.level == "ok"
    assert silent.level == "warn" and silent.text == "m1 does not answer"
    assert other.level == "fail" and "m2 refuses this peer: run.steps is " in other.text


def test_a_member_of_another_wire_version_is_a_failure() -> None:
    (found,) = Greeted(MemberIdentity("member", "demo", DIGEST, TEXT, "layout"), wire=WIRE_VERSION - 1).versions()
    assert found.level == "fail" and f"(wire version {WIRE_VERSION})" in found.text


@pytest.mark.parametrize("same", [False, True])
def test_a_member_of_another_version_and_digest_is_one_of_another_version(
    *, same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was told as a difference of the configuration, with the advice to take the swarm's file."""
    other = MemberIdentity("member", "demo", digest_of(OTHER), OTHER, "layout")
    (found,) = Greeted(other, None, wire=WIRE_VERSION - 1).other(monkeypatch, same=same)
    assert (found.topic, found.level) == ("version", "warn" if same else "fail")
    assert f"(wire version {WIRE_VERSION})" in found.text and found.advice.startswith("install the same version")
    (found,) = Greeted(other, None).other(monkeypatch, same=same)
    assert (found.topic, found.level) == ("config", "warn" if same else "fail") and "run.steps is " in found.text


def test_exit_codes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from peer.commands.check import runner

    for level, code in (("ok", 0), ("warn", 0), ("fail", 1)):
        found = Finding(level, "topic", "text", "advice")  # type: ignore[arg-type]
        monkeypatch.setattr(runner, "topics", lambda *_, found=found: (("topic", iter([found])),))
        with pytest.raises(SystemExit) as ended:
            cli.main(["check", "--config", "configs/demo.yaml"])
        assert ended.value.code == code
        assert f"{level:<5} topic" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        cli.main(["check", "--config", "configs/demo.yaml", "--set", "peer.network.reach=nowhere"])
    assert ended.value.code == 2 and "peer.network.reach" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--config is needed, or --own-loop"),
        (["--own-loop", "--set", "run.name=x", "--set", "run.seed=3"], "seed is your own program's affair"),
        (["--own-loop", "--set", "run.name=x", "--ranks", "2"], "--ranks is for a peer of several GPUs"),
        (["--own-loop", "--config", "configs/demo.yaml"], "is your own program's affair"),
    ],
)
def test_which_of_the_two_configurations_is_checked(
    capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["check", *words])
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_the_right_to_push_is_checked(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not list(training.push(config()))
    wish = config("peer.push.to=me/model")
    assert levels(training.push(wish)) == ["ok"] and not hub.repositories
    monkeypatch.setenv("HF_TOKEN", "")
    found = list(training.push(wish))
    assert levels(found) == ["warn"] and "set HF_TOKEN" in found[0].text


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (TimeoutError(), "no answer in time"),
        (PermissionError(errno.EACCES, "Permission denied", "/runs/a"), "/runs/a: Permission denied; "),
        (OSError(errno.EMFILE, "Too many open files"), "Too many open files"),
        (OSError(errno.ENOSPC, "No space left on device", "/tmp/a"), "No space left on device: '/tmp/a'; correct"),
    ],
)
def test_a_topic_that_breaks_is_a_finding_and_the_next_one_follows(
    error: OSError, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peer.commands.check import runner

    topics = (("broken", iter(Mock(side_effect=error), None)), ("next", iter([ok("next", "fine")])))
    monkeypatch.setattr(runner, "topics", lambda *_: topics)
    broken, fine = runner.findings(config())
    assert (broken.level, fine.level) == ("fail", "ok") and said in f"{broken.text}; {broken.advice}"


def test_nothing_big_is_loaded_before_it_is_needed() -> None:
    program = (
        "import sys\nfrom peer.commands.check import local, runner\nfrom peer.config.schema import Config\n"
        "[*local.limits(), *local.port(Config()), *local.identity(Config())]\n"
        "print([it for it in ('torch', 'hivemind', 'transformers') if it in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
