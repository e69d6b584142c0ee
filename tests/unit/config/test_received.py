"""``run`` from another peer: what this version has written is read, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from peer.api.config import OwnRun
from peer.commands.join.configuration import WANTED
from peer.config.digest import LARGEST_TEXT, canonical
from peer.config.load import load
from peer.config.received import LARGEST, OwnProgram, received, require_hub_tokenizer
from peer.config.schema import Config, RunConfig
from peer.errors import UserError

CONFIGS = Path(__file__).parents[3] / "configs"
WRITTEN = canonical(RunConfig())
AUTO = (
    "run.model={name: auto, source: /secret/model, trust_remote_code: true, digest: 0123456789abcdef0123456789abcdef}"
)
DATA = {
    "text": "{name: text, train: [/secret/*.txt]}",
    "jsonl": "{name: jsonl, train: [/secret/*.jsonl]}",
    "parquet": "{name: parquet, train: [/secret/*.parquet]}",
    "c4": "{name: c4, folder: /secret}",
    "huggingface": "{name: huggingface, path: /secret, streaming: true}",
}


def config(*overrides: str) -> Config:
    return load([], overrides, environment={})


def text(**changes: Any) -> str:
    """The default run with other values at dotted keys; ``...`` deletes one."""
    tree = json.loads(WRITTEN)
    for dotted, value in changes.items():
        *parents, last = dotted.split("__")
        section = tree
        for key in parents:
            section = section[key]
        if value is ...:
            del section[last]
        else:
            section[last] = value
    return json.dumps(tree, sort_keys=True, separators=(",", ":"))


@pytest.mark.parametrize(
    "file", sorted(CONFIGS.glob("*.yaml")) + sorted(CONFIGS.glob("models/*")), ids=lambda it: it.name
)
def test_every_configuration_here_is_read_as_it_was_written(file: Path) -> None:
    written = canonical(load(file, environment={}).run)
    found = received(written)
    assert canonical(RunConfig.model_validate(found.tree)) == written and found.needed == ()
    require_hub_tokenizer(found.tree)


@pytest.mark.parametrize("name", DATA)
def test_what_lies_elsewhere_on_each_machine_must_be_said_by_it(name: str) -> None:
    written = canonical(config(f"run.data={DATA[name]}").run)
    assert "/secret" not in written and "streaming" not in written
    found = received(written)
    assert len(found.needed) == 1 and found.needed[0].startswith("run.data.")
    assert (
        f"--set '{found.needed[0]}=" in WANTED[found.needed[0]]
        or f"--set {found.needed[0]}=" in WANTED[found.needed[0]]
    )


def test_a_model_of_files_is_named_by_each_machine_and_its_digest_by_the_swarm() -> None:
    found = received(canonical(config(AUTO).run))
    assert found.needed == ("run.model.source",) and found.needed[0] in WANTED
    assert found.tree["model"] == {"name": "auto", "digest": "0123456789abcdef" * 2, "pretrained": False}


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        ("", "not a JSON object"),
        ("[1]", "not a JSON object"),
        ("[" * 10_000, "not a JSON object"),
        ("1" * 10_000, "not a JSON object"),
        (text(colour="blue"), "run.colour: unknown key"),
        (text(model__colour="blue"), "run.model.colour: unknown key"),
        (text(steps=...), "run.steps"),
        (text(steps="many"), "run.steps"),
        (text(steps=-1), "run.steps"),
        (text(outer__name="magic"), "run.outer.name: 'magic' is not known"),
        (text(outer={"name": "noloco", "bogus": 1, "noloco": {"bogus": 1}}), "run.outer.bogus: unknown key"),
        (text(inner__learning_rate=float("nan")), "run.inner.learning_rate"),
        (text(dir="/etc"), "run.dir is not set here"),
        (text(evaluation__sets={"a": ["/etc/passwd"]}), "run.evaluation.sets"),
        (text(data__tokenizer__path="/etc"), "run.data.tokenizer"),
        (text(admission="invite"), "admission: invite and owner: KEY belong together"),
        (WRITTEN.replace('"seed":0', '"seed":0,"seed":0'), "not written as here"),
        (WRITTEN.replace(":", ": "), "not written as here"),
    ],
)  # fmt: skip
def test_anything_else_is_refused_in_one_line(sent: str, said: str) -> None:
    with pytest.raises(UserError) as error:
        received(sent)
    assert said in str(error.value) and "\n" not in str(error.value) and len(str(error.value)) < 600


def test_code_and_places_do_not_come_from_others() -> None:
    """A text with keys that are local to a machine, as an honest peer never sends it."""
    tree = json.loads(canonical(config(AUTO).run))
    for key, value in (("trust_remote_code", True), ("source", "someone/model"), ("revision", "main")):
        more = {**tree, "model": {**tree["model"], key: value}}
        with pytest.raises(UserError, match=f"run.model.{key} is not set here|run.model"):
            received(json.dumps(more, sort_keys=True, separators=(",", ":")))


def test_a_large_text_is_not_even_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json, "loads", None)
    with pytest.raises(UserError, match="more than 16384"):
        received(" " * (LARGEST_TEXT + 1))


@pytest.mark.parametrize("key", LARGEST)
def test_sizes_that_no_run_has_are_refused(key: str) -> None:
    base = config(f"run.data={DATA['jsonl']}", "run.model.vocabulary=300")
    least = 2 if key == "model.hidden_size" else 1  # an odd one is refused for the size of its heads
    for more, refused in ((0, False), (least, True)):
        size = LARGEST[key] + more
        section, _, last = key.rpartition(".")
        changed = json.loads(canonical(base.run))
        place = changed
        for it in section.split(".") if section else ():
            place = place[it]
        place[last] = size
        if key == "model.heads":
            changed["model"] |= {"hidden_size": 2 * size}
        if key == "model.hidden_size":
            changed["model"] |= {"heads": 1, "kv_heads": None}
        sent = json.dumps(changed, sort_keys=True, separators=(",", ":"))
        if refused:
            with pytest.raises(UserError, match=f"run.{key} is {size}, more than"):
                received(sent)
        elif key not in ("data.shuffle", "data.sequence_length"):  # their product is bounded too
            received(sent)


def test_sequences_held_in_memory_are_bounded_together() -> None:
    with pytest.raises(UserError, match="held in memory"):
        received(
            canonical(
                config(f"run.data={DATA['jsonl']}", "run.data.shuffle=1048576", "run.data.sequence_length=512").run
            )
        )


def test_runs_of_programs_and_of_the_trainer_are_told_apart() -> None:
    own = canonical(OwnRun(name="own"))
    with pytest.raises(OwnProgram, match="OuterLoop"):
        received(own)
    assert received(own, OwnRun).tree["name"] == "own"
    with pytest.raises(UserError, match=r"noloco-peer join"):
        received(WRITTEN, OwnRun)


@pytest.mark.parametrize("name", ["bytes", "gpt2", "openai-community/gpt2", "meta-llama/Llama-3.1-8B"])
def test_a_tokenizer_of_the_hub_is_a_name(name: str) -> None:
    require_hub_tokenizer({"data": {"tokenizer": {"name": name}}})


@pytest.mark.parametrize(
    "name",
    ["/etc/passwd", "../secret", "./here", "~/mine", "a/b/c", "https://evil.example/t", "a b", "", "here/folder"],
)
def test_a_tokenizer_is_no_place_on_this_machine(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here" / "folder").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"--set run.data.tokenizer"):
        require_hub_tokenizer({"data": {"tokenizer": {"name": name}}})
