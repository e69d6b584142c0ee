"""What the page says of a run's configuration: what most members have, from a member that does not lie."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from dht_bootstrap import configurations
from dht_bootstrap.configurations import Configurations, ReadRun
from dht_bootstrap.history import RunHistory
from peer.api.config import OwnRun
from peer.config.digest import canonical, digest_of
from peer.config.schema import LlamaModel, RunConfig
from peer.p2p.greeting import newcomer
from peer.p2p.stream import Refusal
from peer.swarm.directory.reader import Entry
from peer.swarm.directory.records import LIFETIME
from tests.unit.parts import member_record
from tests.unit.virtual import run, stream_pair

NOW = 1_700_000_000.0
OURS = canonical(RunConfig(name="ours"))
READ = configurations._checked


class Scene:
    """Members whose answers a test chooses: by what they have, as swarm/configuration.py has checked it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.watch: Any = SimpleNamespace(node=None, lock=threading.Lock(), runs={})
        self.found, self.asked = Configurations(self.watch), 0
        self.answers = True
        monkeypatch.setattr(configurations, "ask", self._ask)

    async def _ask(self, node: Any, name: str, digest: str, peer_id: str, addresses: Sequence[str]) -> str | None:
        self.asked += 1
        return self.texts[peer_id] if self.answers else None

    def see(self, name: str, texts: Sequence[str]) -> dict[str, Any] | None:
        """A run with a member for each text; the view of it after another look."""
        self.texts = {f"m{i}": text for i, text in enumerate(texts)}
        records = [member_record(it).model_copy(update={"config": digest_of(self.texts[it])}) for it in self.texts]
        history = RunHistory()
        history.see({it.peer_id: Entry(it, NOW + LIFETIME) for it in records}, NOW)
        run(self.found.learn({name: records}))
        return self.found.view(name, history)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


def test_the_configuration_of_most_is_shown_and_read_once(scene: Scene) -> None:
    other = canonical(RunConfig(name="ours", steps=7))
    for _ in range(3):
        view = scene.see("ours", [OURS, other, OURS])
        assert view is not None and (view["digest"], view["agreeing"]) == (digest_of(OURS), 2)
        assert canonical(RunConfig.model_validate(view["run"])) == OURS
    assert scene.asked == 1
    assert scene.see("ours", [OURS, other]) is None  # as many as others
    scene.see("ours", [OURS])
    assert scene.asked == 2  # what nobody had was forgotten


def test_a_member_that_does_not_answer_is_asked_again(scene: Scene) -> None:
    scene.answers = False
    assert (scene.see("ours", [OURS]) or {})["run"] is None
    scene.answers = True
    assert (scene.see("ours", [OURS]) or {})["run"]["name"] == "ours"


def test_runs_whose_members_are_silent_or_whose_text_is_an_error_keep_no_other_from_being_read(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anybody can invent a run. Each silent one took 15 s, and after an error no other was read."""

    async def ask(node: Any, name: str, *_: Any) -> str:
        if name.startswith("silent"):
            await asyncio.sleep(15.0)
        return {"ours": OURS}.get(name, "another")

    def checked(name: str, text: str) -> ReadRun:
        if name != "ours":
            raise KeyError("a defect")
        return READ(name, text)

    monkeypatch.setattr(configurations, "ask", ask)
    monkeypatch.setattr(configurations, "_checked", checked)
    names = ["error", *(f"silent{number:02}" for number in range(15)), "ours"]
    record = member_record("m").model_copy(update={"config": digest_of(OURS)})

    async def seconds() -> float:
        began = asyncio.get_running_loop().time()
        await scene.found.learn({name: [record] for name in sorted(names, key=lambda it: it == "ours")})
        return asyncio.get_running_loop().time() - began

    assert run(seconds()) < 16.0
    assert [name for name, _ in scene.found._read] == ["ours"]


@pytest.mark.parametrize(
    ("text", "why", "own_program"),
    [
        (canonical(OwnRun(name="ours")), "OuterLoop", True),
        (canonical(RunConfig(name="theirs")), "another run", False),
        ('{"name":"ours","model":1}', "not one of this version", False),
        (canonical(RunConfig(name="ours", model=LlamaModel(layers=2000))), "no run is that large", False),
    ],
)
def test_what_is_no_configuration_is_not_shown(scene: Scene, text: str, why: str, own_program: bool) -> None:
    view = scene.see("ours", [text])
    assert view is not None and view["run"] is None
    assert why in view["why"] and view["own_program"] is own_program


@pytest.mark.parametrize(
    ("read", "asks", "told", "reason"),
    [
        (OURS, "ours", OURS, "another configuration"),
        (canonical(OwnRun(name="ours")), "ours", canonical(OwnRun(name="ours")), "another configuration"),
        (OURS, "theirs", None, "has not read"),
        (None, "ours", None, "has not read"),
    ],
)
def test_a_newcomer_is_told_what_was_read(
    read: str | None, asks: str, told: str | None, reason: str, scene: Scene
) -> None:
    scene.answers = read is not None
    scene.see("ours", [read or OURS])

    async def ask() -> Refusal:
        ours, theirs = await stream_pair()
        telling = asyncio.ensure_future(scene.found.tell(theirs))
        await ours.send(newcomer(asks), 1)
        try:
            return await ours.receive(Refusal, 1)
        finally:
            ours.close()
            await telling

    refusal = run(ask())
    assert refusal.run == told and reason in refusal.reason
