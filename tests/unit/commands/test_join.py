"""``noloco-peer join``: the swarm's run and this machine's settings become one configuration."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from peer.commands import cli
from peer.commands.join import configuration, micro_batch
from peer.commands.join.configuration import JoinOptions, joining
from peer.commands.join.kept import keep
from peer.commands.join.micro_batch import fitting
from peer.config.digest import canonical, digest_of
from peer.config.load import ENVIRONMENT, load
from peer.config.model import AutoModel
from peer.config.schema import Config, MemberConfig, RunConfig
from peer.device.memory import DeviceMemory
from peer.errors import RunError, UserError
from peer.replica import memory
from peer.swarm.configuration import OfferedRun
from peer.training.run_folder import claim, next_name
from tests.unit.device.doubles import plug_in

ADDRESS = "/ip4/127.0.0.1/tcp/1/p2p/QmA"
JSONL = "run.data={name: jsonl, train: [x], sequence_length: 16}"


def config(*overrides: str) -> Config:
    return load([], overrides, environment={})


class Joining:
    """The swarm offers one run, as test_configuration.py has it from members."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self._monkeypatch, self.folder = monkeypatch, folder
        self.said: list[str] = []
        self.digest = "d"
        self.asked: list[tuple[MemberConfig, str | None, str | None]] = []
        self.joined: OfferedRun | None = None

    def __call__(
        self,
        run: RunConfig | None,
        *sets: str,
        addresses: Sequence[str] = (ADDRESS,),
        files: Sequence[Path] = (),
        name: str | None = "wanted",
        digest: bool = True,
    ) -> Config:
        """``name`` and ``digest``: does the command line have them?"""
        offer = None
        sets = (f"run.dir={self.folder}", *sets)
        if run is not None:
            self.digest = digest_of(canonical(run))
            offer = OfferedRun(run.name, self.digest, canonical(run), agreeing=2, members=3)

        def offered(*asked: Any, joined: OfferedRun | None) -> OfferedRun | None:
            self.asked.append(asked)
            self.joined = joined
            return offer

        self._monkeypatch.setattr(configuration, "offered", offered)
        options = JoinOptions(addresses, files, sets, name, self.digest if digest else None, invitation=None)
        joined = joining(options, self.said.append)
        keep(joined, joined.peer.name or next_name(self.folder))  # as a start that is not refused
        return joined


@pytest.fixture
def join(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Joining:
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    return Joining(monkeypatch, tmp_path / "runs")


def test_the_run_is_the_swarms_and_the_rest_this_machines(join: Joining, tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("peer: {name: me, device: cpu, network: {port: 31338}}")
    run = config("run.name=ours", "run.steps=7", "run.outer={name: diloco}").run
    found = join(run, "peer.threads=1", files=[own])
    assert found.run == run.model_copy(update={"dir": join.folder})
    assert (found.peer.name, found.peer.threads, found.peer.network.port) == ("me", 1, 31338)
    assert found.peer.initial_peers == (ADDRESS,) and join.asked[0][1:] == ("wanted", join.digest)
    assert "ours: the configuration" in join.said[0] and "2 of 3 members" in join.said[0]
    assert 4 <= len(join.said) <= 6 and all("\n" not in line for line in join.said)


def test_a_swarm_on_this_machine_is_joined_on_loopback(join: Joining) -> None:
    run = RunConfig()
    assert join(run).peer.network.host == "127.0.0.1"
    assert join(run, "peer.network.host=10.0.0.1").peer.network.host == "10.0.0.1"
    assert join(run, addresses=["/ip4/203.0.113.7/tcp/1/p2p/QmA"]).peer.network.host == "0.0.0.0"


def test_addresses_come_from_the_environment_too(join: Joining, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="give an ADDRESS"):
        join(RunConfig(), addresses=[])
    monkeypatch.setenv("NOLOCO_INITIAL_PEERS", ADDRESS)
    assert join(RunConfig(), addresses=[]).peer.initial_peers == (ADDRESS,)


def test_where_nobody_trains_the_first_peer_is_told_what_to_do(join: Joining) -> None:
    with pytest.raises(RunError, match=r"nobody trains wanted there yet; .* noloco-peer train --config FILE"):
        join(None)


def test_a_restart_when_nobody_is_there_goes_on_with_the_last_configuration(join: Joining) -> None:
    """At the same address only, and after the same checks as of a swarm's."""
    run, elsewhere = config("run.name=wanted", "run.steps=7").run, "/ip4/127.0.0.1/tcp/2/p2p/QmB"
    assert join(run).run.steps == 7 and join.joined is None
    again = join(None)
    assert join.joined is not None and join.joined.text == canonical(run)  # it decides where there are several answers
    assert canonical(again.run) == canonical(run) and "of the last join" in join.said[-4]
    file = join.folder / "joined" / next_name(join.folder) / "wanted.json"
    assert canonical(load(file, environment={}).run) == canonical(run)
    with pytest.raises(RunError, match=r"nobody trains wanted"):
        join(None, addresses=[elsewhere])
    moved = ADDRESS.replace("127.0.0.1/tcp/1", "127.0.0.2/tcp/7")  # the same node
    assert join(None, addresses=[moved]).run.steps == 7
    changed = {"run": {"name": "wanted"}, "peer": {"initial_peers": [ADDRESS]}}
    file.write_text(json.dumps(changed))
    with pytest.raises(RunError, match=r"nobody trains wanted"):  # it has another digest than the wanted one
        join(None)


def test_of_several_runs_a_restart_goes_on_with_the_one_that_was_joined_last(join: Joining) -> None:
    """It forgot all: a service ended for ever where several are trained, or where nobody had been started again."""
    for name in "aba":
        join(config(f"run.name={name}").run)
        assert join(None, name=None, digest=False).run.name == name
        assert join.joined is not None and join.joined.name == name
        os.utime(join.folder / "joined" / next_name(join.folder) / f"{name}.json", (1, 1))  # long ago


def last_joined(join: Joining, *sets: str) -> str:
    """The run of a restart that no member answers."""
    return join(None, *sets, name=None, digest=False).run.name


def test_two_services_of_one_machine_restart_into_their_own_runs(join: Joining) -> None:
    """A service's start decided what the other one joined next. Both had begun with one run."""
    for run, peer in (("a", "gpu-0"), ("a", "gpu-1"), ("b", "gpu-1")):
        join(config(f"run.name={run}").run, f"peer.name={peer}")
    for path in join.folder.glob("joined/*/a.json"):
        os.utime(path, (1, 1))  # long ago
    assert last_joined(join, "peer.name=gpu-2") == "b"  # it has joined none itself
    assert last_joined(join, "peer.name=gpu-0") == "a"
    assert last_joined(join, "peer.name=gpu-1") == "b"


def test_a_peer_without_a_name_restarts_into_the_run_of_the_folder_that_it_takes(join: Joining) -> None:
    first = claim(join.folder, None)
    keep(config("run.name=a", f"run.dir={join.folder}", f"peer.initial_peers=[{ADDRESS}]"), first.name)
    os.utime(join.folder / "joined" / first.name / "a.json", (1, 1))  # long ago
    join(config("run.name=b").run)  # beside it
    assert last_joined(join) == "b"
    first.release()
    assert last_joined(join) == "a"


def test_what_an_earlier_version_has_kept_is_read(join: Joining) -> None:
    """It lay in one folder for all peers."""
    join(config("run.name=a").run, "peer.name=gpu-0")
    of_all = join.folder / "joined"
    (of_all / "gpu-0" / "a.json").rename(of_all / "a.json")
    assert last_joined(join, "peer.name=gpu-0") == "a"


def test_a_start_that_is_refused_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody tried another run by hand, and the service that trained ours joined it ever after."""

    @contextmanager
    def assembled(config: Config, *_: object) -> Iterator[Any]:
        if config.run.name == "theirs":
            raise UserError("its checkpoint is of another run")
        yield Mock(**{"member.resources.folder.name": "the-folders"})

    def start(name: str) -> None:
        run = config(f"run.name={name}").run
        offer = OfferedRun(name, digest_of(canonical(run)), canonical(run), agreeing=1, members=1)
        monkeypatch.setattr(configuration, "offered", lambda *_, **__: offer)
        cli._train(cli._parser().parse_args(["join", ADDRESS, "--set", f"run.dir={tmp_path}"]))

    monkeypatch.setattr("peer.training.assemble.assembled", assembled)
    monkeypatch.setattr(cli, "Signals", Mock())
    start("ours")
    with pytest.raises(UserError, match="of another run"):
        start("theirs")
    assert [it.relative_to(tmp_path) for it in tmp_path.rglob("*.json")] == [Path("joined/the-folders/ours.json")]


def test_a_disk_that_is_full_keeps_nobody_from_joining(
    join: Joining, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Under systemd it was the end of the peer: exit code 2."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "mkdir", full)
    assert join(config("run.name=wanted", "run.steps=7").run).run.steps == 7
    assert "wanted.json: No space left on device" in caplog.text


@pytest.mark.parametrize("text", ["", "[", "{}", '{"run": 1, "peer": 2}', "[" * 10_000])
def test_a_broken_file_of_the_last_join_is_none(join: Joining, text: str) -> None:
    (folder := join.folder / "joined" / next_name(join.folder)).mkdir(parents=True)
    (folder / "wanted.json").write_text(text)
    with pytest.raises(RunError, match=r"nobody trains wanted"):
        join(None)


@pytest.mark.parametrize("where", ["set", "file"])
def test_what_is_equal_for_all_cannot_be_changed(join: Joining, where: str, tmp_path: Path) -> None:
    (file := tmp_path / "own.yaml").write_text("run: {steps: 7}")
    with pytest.raises(UserError, match=r"run.steps is 7 here and 1000 there: it is equal for all"):
        join(RunConfig(), *["run.steps=7"][: where == "set"], files=[file][: where == "file"])
    assert join(RunConfig(), "run.steps=1000").run.steps == 1000  # the same is no change


def test_data_that_lie_elsewhere_are_asked_for_by_name(join: Joining) -> None:
    run = config(JSONL).run
    with pytest.raises(UserError, match=r"needs of this machine run.data.train: .*--set 'run.data.train=\[PATTERN\]'"):
        join(run)
    both = config(JSONL, "run.model={name: auto, source: a}").run
    with pytest.raises(UserError, match=r"(data.train|model.source): .*; and run\.(data.train|model.source): "):
        join(both)
    assert join(run, "run.data.train=[y]").run.data == run.data.model_copy(update={"train": ("y",)})


def test_a_model_of_files_is_asked_for_and_code_of_it_runs_by_a_local_decision_only(
    join: Joining, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = "{name: auto, source: a/b, trust_remote_code: true, digest: 0123456789abcdef0123456789abcdef}"
    run = config(f"run.model={model}").run
    with pytest.raises(UserError, match=r"needs of this machine run.model.source: .*--set run.model.source=NAME"):
        join(run)
    monkeypatch.setattr(configuration.model_source, "pinned", lambda it: it)
    monkeypatch.setattr(configuration, "fitting", lambda it, _: it.peer.micro_batch)
    found: Any = join(run, "run.model.source=c/d").run.model
    assert (found.source, found.trust_remote_code, found.digest) == ("c/d", False, "0123456789abcdef" * 2)
    assert any("download" in line and "c/d" in line for line in join.said)
    found = join(run, "run.model.source=c/d", "run.model.trust_remote_code=true").run.model
    assert found.trust_remote_code is True


def test_the_home_of_nobody_is_a_line(join: Joining) -> None:
    run = config("run.name=ours").run
    with pytest.raises(UserError, match=r"^configuration: run\.dir: there is no home directory for ~nobody-here/runs"):
        join(run, "run.dir=~nobody-here/runs")
    of_files = run.model_copy(update={"model": AutoModel(name="auto", source="a/b", digest="0123456789abcdef" * 2)})
    with pytest.raises(UserError, match=r"^run\.model\.source: there is no folder ~nobody-here/model"):
        join(of_files, "run.model.source=~nobody-here/model")


def test_a_place_as_a_tokenizer_is_asked_for(join: Joining) -> None:
    run = config("run.data={name: stdlib, tokenizer: {name: /etc/secret, vocabulary: 300}}").run
    with pytest.raises(UserError, match=r"run.data.tokenizer.path=PATH"):
        join(run)
    assert join(run, "run.data.tokenizer.path=/mine").run.data.tokenizer.path == Path("/mine")


def test_the_text_of_another_run_is_refused(join: Joining, monkeypatch: pytest.MonkeyPatch) -> None:
    text = canonical(RunConfig(name="b"))
    monkeypatch.setattr(configuration, "offered", lambda *_, **__: OfferedRun("a", digest_of(text), text, 1, 1))
    with pytest.raises(UserError, match="the configuration of another run"):
        joining(JoinOptions([ADDRESS], [], [], None, None, None), print)


# -- the micro-batch that fits


BATCH = "run={batch_size: 12, model: {layers: 1, hidden_size: 32, heads: 2}}"


def need(size: int) -> int:
    it = config(BATCH, f"peer.micro_batch={size}", "peer.device=cpu")
    found = memory.estimate(it.run, it.peer)
    return found.device_bytes + found.host_bytes


@pytest.mark.parametrize(("size", "found"), [(12, None), (6, 6), (4, 4), (3, 3), (1, 1)])
def test_the_largest_divisor_that_fits_is_taken(size: int, found: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    free = int((need(size) + 1) / memory.TIGHT_SHARE)
    monkeypatch.setattr(memory, "available_memory", lambda: free)
    assert fitting(config(BATCH, "peer.device=cpu")) == found


def test_a_run_that_does_not_fit_needs_a_word_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 2**20)
    monkeypatch.setattr(memory, "machine_memory", lambda: 2**20)
    said = r"does not fit this machine: .* needed, .* free; take a larger machine, .* --set peer.micro_batch=1"
    with pytest.raises(UserError, match=said):
        fitting(config(BATCH, "peer.device=cpu"))
    assert fitting(config(BATCH, "peer.device=cpu", "peer.micro_batch=4")) == 4


@pytest.mark.parametrize(("free", "total"), [(2**20, 1.01), (0.9, 1.01), (2**20, 0.99), (0.9, 0.99)])
def test_memory_that_others_use_now_is_asked_for_again(
    free: float, total: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a restart of a service: with exit code 2 it was not started again. Weights or one sequence are too much."""
    least = need(1) / memory.TIGHT_SHARE
    monkeypatch.setattr(memory, "available_memory", lambda: int(free if free > 1 else free * least))
    monkeypatch.setattr(memory, "machine_memory", lambda: int(total * least))
    with pytest.raises((RunError, UserError)) as error:
        fitting(config(BATCH, "peer.device=cpu"))
    assert error.type is (RunError if total > 1 else UserError)
    assert ("end other programs" in str(error.value)) is (total > 1)


def test_memory_of_a_gpu_that_others_use_now_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in(monkeypatch, "cuda")
    asked = config(BATCH, "peer.device=cuda")
    for total, kind in ((2**36, RunError), (2**21, UserError)):
        found = DeviceMemory("GPU", total, 2**20)
        for module in (memory, micro_batch):
            monkeypatch.setattr(module, "device_memory", lambda _, found=found: found)
        with pytest.raises(kind, match=r"GiB of GPU memory needed, 0\.00 GiB free"):
            fitting(asked)
    for module in (memory, micro_batch):
        monkeypatch.setattr(module, "device_memory", lambda _: DeviceMemory("GPU", 2**36, 2**20))
    for name in ("available_memory", "machine_memory"):
        monkeypatch.setattr(memory, name, lambda: 2**10)
    with pytest.raises(UserError, match="GiB of memory needed"):  # the GPU may be free later, the host is too small
        fitting(asked)


def test_a_model_of_any_size_is_refused_by_its_parameters_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "estimate", None)  # it would take minutes
    largest = "run.model={layers: 1024, hidden_size: 131072, heads: 1024, intermediate_size: 1048576}"
    with pytest.raises(UserError, match=r"about 3,[0-9]{3},[0-9.]+ GiB of memory needed"):
        fitting(config(largest, "peer.device=cpu"))


def test_where_the_free_memory_is_unknown_the_batch_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: None)
    assert fitting(config(BATCH, "peer.device=cpu")) is None
