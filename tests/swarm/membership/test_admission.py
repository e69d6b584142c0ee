"""An invited swarm: peers without an invitation are refused, and a revoked peer ends."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.swarm.support.harness import ROOT, SLOW_LINE, Process, Swarm, wait_for


class Invited:
    """An owner's bootstrap node, and peers with invitations."""

    def __init__(self, swarm: Swarm) -> None:
        self.swarm = swarm
        self.owner = swarm.folder / "owner.key"
        self.sets: tuple[str, ...] = ()
        said = self.invite("a")
        self.sets = ("run.admission=invite", re.search(r"run\.owner=\S+", said)[0])  # type: ignore[index]
        self.process, self.address = swarm.bootstrap("--owner", str(self.owner))

    def say(self, *words: str) -> str:
        """``noloco-bootstrap ...`` with the owner's key."""
        command = [sys.executable, "-m", "dht_bootstrap", *words, "--owner", str(self.owner)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def invite(self, name: str, *more: str) -> str:
        return self.say("invite", name, "--out", str(self.swarm.folder / f"{name}.invitation"), *more)

    def peer(self, name: str, *sets: str, invitation: str = "") -> Process:
        file = self.swarm.folder / f"{invitation or name}.invitation"
        return self.swarm.peer(name, *self.sets, f"peer.invitation={file}", *sets, address=self.address)


LONG = ("run.steps=1000000", "run.inner_steps=20", SLOW_LINE)


@pytest.fixture
def invited(swarm: Swarm) -> Invited:
    return Invited(swarm)


def refused(process: Process, *words: str, code: int = 2) -> None:
    """The process ends with one line that holds ``words``."""
    assert process.exit_code(60) == code, process.output()
    last = process.output().splitlines()[-1]
    assert last.startswith("error: ") and all(word in last for word in words), process.output()
    assert "Traceback" not in process.output()


@pytest.mark.smoke
def test_invited_peers_train_together_and_no_other_peer_is_admitted(invited: Invited) -> None:
    swarm, address = invited.swarm, invited.address
    invited.invite("b")
    peers = [invited.peer(name, *LONG, "peer.start_with=2") for name in ("a", "b")]
    for name in ("a", "b"):
        wait_for(lambda name=name: any(it["outcome"] == "merged" for it in swarm.rounds(name)), 60)  # type: ignore[misc]

    foreign = Invited.__new__(Invited)
    foreign.swarm, foreign.owner = swarm, swarm.folder / "other.key"
    said = foreign.invite("c")
    foreign.sets = ("run.admission=invite", re.search(r"run\.owner=\S+", said)[0])  # type: ignore[index]
    foreign.address = address
    stranger, copy = foreign.peer("c"), invited.peer("copy", *LONG, invitation="b")
    uninvited = swarm.peer("uninvited", "run.model={name: auto, source: /none}", address=address)
    invited.invite("d")
    last = invited.peer("d", *LONG)
    refused(uninvited, "invited peers", invited.sets[1], "peer.invitation")
    refused(stranger, "not admitted", "not signed by the owner")
    refused(copy, "same identity is alive", "peer.invitation")
    last.line("took the state of a member", 60)
    wait_for(lambda: any(it["outcome"] == "merged" for it in swarm.rounds("d")), 60)
    assert all(process.popen.poll() is None for process in (*peers, last))


def test_a_revoked_peer_gets_no_partner_and_ends_with_one_line(invited: Invited) -> None:
    swarm = invited.swarm
    invited.invite("b")
    invited.invite("c")
    processes = {name: invited.peer(name, *LONG, "peer.start_with=3") for name in ("a", "b", "c")}
    wait_for(lambda: any(it["partner"] == "c" and it["outcome"] == "merged" for it in swarm.rounds("a")), 60)
    invited.say("revoke", "c")
    assert processes["c"].exit_code(90) == 1, processes["c"].output()
    assert "the invitation was revoked; the state is saved" in processes["c"].output()
    before = {name: len(swarm.rounds(name)) for name in ("a", "b")}
    for name, other in (("a", "b"), ("b", "a")):
        rows = swarm.wait_for_rounds(name, before[name] + 6)[before[name] :]
        assert any((row["partner"], row["outcome"]) == (other, "merged") for row in rows), rows
        assert not any(row["partner"] == "c" for row in rows)
    refused(invited.peer("c2", invitation="c"), "not admitted", "revoked")
