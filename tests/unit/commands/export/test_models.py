"""Models with more than trained parameters, classes of their own, and a run that begins from an exported folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from peer.commands.cli import main
from peer.config.schema import Config
from peer.errors import UserError
from peer.replica import model_source
from peer.replica.model import build, outline
from peer.training.checkpoint import Checkpoints
from peer.training.replica import origin
from peer.training.state import PeerState
from tests.unit.commands.test_export import config, export, loaded, loss_of, saved, trained

IDS = torch.arange(48).reshape(3, 16)
SMALL = {
    "vocab_size": 257,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
OWN_CLASS = """
import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

class OwnConfig(PretrainedConfig):
    model_type = "own"

    def __init__(self, vocab_size=257, **others):
        self.vocab_size = vocab_size
        super().__init__(**others)

class OwnModel(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.rows, self.head = torch.nn.Embedding(config.vocab_size, 8), torch.nn.Linear(8, config.vocab_size)
        self.register_buffer("seen", torch.zeros(1))
        self.post_init()

    def forward(self, input_ids, **others):
        if self.training:
            self.seen += 1
        return CausalLMOutput(logits=self.head(self.rows(input_ids)) * (1 + self.seen))
"""


def roformer(folder: Path) -> dict[str, Any]:
    """``run.model``: its positions are a frozen parameter."""
    from transformers import RoFormerConfig

    RoFormerConfig(**SMALL, is_decoder=True, max_position_embeddings=32, hidden_dropout_prob=0.0).save_pretrained(
        folder
    )
    return {"name": "auto", "source": str(folder)}


def lfm2_moe(folder: Path) -> dict[str, Any]:
    """``run.model``: pre-trained, with a persistent buffer that chooses the experts."""
    from transformers import Lfm2MoeConfig, Lfm2MoeForCausalLM

    experts = {"num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "num_dense_layers": 1}
    layers = {"num_key_value_heads": 2, "layer_types": ["conv", "full_attention"], "max_position_embeddings": 64}
    network = Lfm2MoeForCausalLM(Lfm2MoeConfig(**SMALL, **experts, **layers))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_()
        network.get_buffer("model.layers.1.feed_forward.expert_bias").copy_(torch.tensor([5.0, -5.0, 0.0, 0.0]))
    network.save_pretrained(folder)
    return {"name": "auto", "source": str(folder), "pretrained": True}


def roberta(folder: Path) -> dict[str, Any]:
    """``run.model``: its positions begin after the number of its padding token."""
    from transformers import RobertaConfig

    sizes = {"max_position_embeddings": 32, "hidden_dropout_prob": 0.0}
    RobertaConfig(**SMALL, **sizes, is_decoder=True, pad_token_id=1).save_pretrained(folder)
    return {"name": "auto", "source": str(folder)}


def mamba(folder: Path) -> dict[str, Any]:
    """``run.model``: its configuration has an infinite number."""
    from transformers import Mamba2Config

    heads = {"state_size": 8, "num_heads": 4, "head_dim": 8, "n_groups": 1, "chunk_size": 8}
    Mamba2Config(**{"vocab_size": 257, "hidden_size": 16, "num_hidden_layers": 1, **heads}).save_pretrained(folder)
    return {"name": "auto", "source": str(folder)}


def llama(folder: Path, **generation: Any) -> dict[str, Any]:
    """``run.model``: pre-trained, with settings of generation."""
    from transformers import LlamaConfig, LlamaForCausalLM

    LlamaForCausalLM(LlamaConfig(**SMALL)).save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return {"name": "auto", "source": str(folder), "pretrained": True}


def own_class(folder: Path) -> dict[str, Any]:
    """``run.model``: a class without generation, with a buffer that training changes."""
    folder.mkdir()
    (folder / "modeling_own.py").write_text(OWN_CLASS)
    classes = '{"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"}'
    (folder / "config.json").write_text(f'{{"model_type": "own", "auto_map": {classes}}}')
    return {"name": "auto", "source": str(folder), "trust_remote_code": True}


def same(network: nn.Module, state: PeerState) -> bool:
    state.inner.model.eval()
    return torch.equal(network(input_ids=IDS).logits, state.inner.model(input_ids=IDS).logits)


@pytest.mark.parametrize("make", [roformer, lfm2_moe, roberta, mamba])
def test_what_is_not_trained_is_exported_too(make: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A frozen parameter was refused, and a persistent buffer had its initial value."""
    settings = config(tmp_path, model=make(tmp_path / "source"))
    states = [trained(settings, number) for number in (1, 2)]
    homes = [saved(tmp_path, f"peer-{number}", state) for number, state in enumerate(states)]
    (tmp_path / "source").rename(tmp_path / "elsewhere")  # a checkpoint is enough
    code, said = export(capsys, homes[0], tmp_path / "out")
    assert code == 0, said
    assert f"validation loss: {loss_of(states[0].inner.model, settings):.4f}" in said
    assert same(loaded(tmp_path / "out"), states[0])
    code, said = export(capsys, *homes, tmp_path / "average")
    for state in states:
        assert f"validation loss {loss_of(state.inner.model, settings):.4f}" in said


def test_peers_with_the_model_in_other_places_are_averaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It was another run to each of them: the path was compared, and the version of transformers."""
    source = llama(tmp_path / "of alice")
    shutil.copytree(tmp_path / "of alice", tmp_path / "of bob")
    homes = []
    for number, name in enumerate(("alice", "bob")):
        settings = config(tmp_path, model={**source, "source": str(tmp_path / f"of {name}")})
        state = trained(model_source.pinned(settings), number)
        state._origin["architecture"]["transformers_version"] = f"5.{number}"
        homes.append(saved(tmp_path, name, state))
    code, said = export(capsys, *homes, tmp_path / "out", "--no-evaluate")
    assert code == 0, said
    assert said.count("from the average") == 2


def test_a_model_that_transformers_refuses_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = trained(config(tmp_path), 1)
    state._origin["architecture"] |= {"hidden_size": "wide", "transformers_version": "5.99"}
    code, said = export(capsys, saved(tmp_path, "alice", state), tmp_path / "out")
    assert code == 2 and "refuses its model; install 5.99, which trained it: " in said


@pytest.mark.parametrize(
    ("theirs", "ends", "padding"),
    [
        ({"do_sample": True, "top_p": 0.9, "eos_token_id": [10, 128001], "pad_token_id": 0}, [10, 256], 0),
        ({"temperature": 0.6, "eos_token_id": 256, "pad_token_id": -1}, 256, 256),  # only a warning when it is loaded
    ],
)
def test_the_sources_generation_is_kept(
    theirs: dict[str, Any], ends: Any, padding: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the ends of a text that the run's tokenizer has, and the run's own."""
    settings = config(tmp_path, model=llama(tmp_path / "source", **theirs))
    code, said = export(capsys, saved(tmp_path, "alice", trained(settings, 1)), tmp_path / "out", "--no-evaluate")
    assert code == 0, said
    kept = loaded(tmp_path / "out").generation_config.to_diff_dict()
    del kept["transformers_version"]
    assert kept == {**theirs, "eos_token_id": ends, "pad_token_id": padding, "use_cache": True}
    fresh = config(tmp_path, model={**settings.run.model.model_dump(), "pretrained": False})
    assert export(capsys, saved(tmp_path, "bob", trained(fresh, 1)), tmp_path / "fresh", "--no-evaluate")[0] == 0
    network = loaded(tmp_path / "fresh")
    assert network.generation_config.eos_token_id == 256 and network.generation_config.top_p is None


@pytest.mark.parametrize("theirs", [{"top_p": 0.9, "eos_token_id": [10, 256]}, {}])
def test_a_peer_of_several_ranks_keeps_the_sources_generation(theirs: dict[str, Any], tmp_path: Path) -> None:
    """Its network is an outline, whose settings are those of transformers: they were kept as the source's."""
    run = config(tmp_path, model=llama(tmp_path / "source", **theirs)).run
    assert origin(run, outline(run))["generation"] == theirs
    assert origin(run, outline(run)) == origin(run, build(run))


def test_a_source_without_a_file_for_generation_has_the_settings_of_its_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It lost its end tokens: its exports had those of the run's tokenizer alone."""
    settings, source = config(tmp_path, model=llama(tmp_path / "source")), tmp_path / "source"
    (source / "generation_config.json").unlink()
    older = {"eos_token_id": [10, 11], "pad_token_id": 0, "top_p": 0.9}  # versions before 5 had its sampling there
    kept = {**older, "bos_token_id": 1, "use_cache": False}
    content = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**content, **kept}))
    assert origin(settings.run, outline(settings.run))["generation"] == kept
    network = build(settings.run)
    assert origin(settings.run, outline(settings.run)) == origin(settings.run, network)
    theirs: Any = network.generation_config
    assert json.loads(theirs.to_json_string(ignore_metadata=True)) == kept
    code, said = export(capsys, saved(tmp_path, "alice", trained(settings, 1)), tmp_path / "out", "--no-evaluate")
    assert code == 0, said
    written = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert written == {**kept, "eos_token_id": [10, 11, 256], "use_cache": True}


def test_what_transformers_does_not_save_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = saved(tmp_path, "alice", trained(config(tmp_path), 1))
    with (
        patch("transformers.PreTrainedModel.save_pretrained", side_effect=ValueError("It is invalid:\nfix it")),
        pytest.raises(SystemExit) as ended,
    ):
        main(["export", str(home), str(tmp_path / "out"), "--no-evaluate"])
    said = capsys.readouterr().err.splitlines()
    assert ended.value.code == 1 and len(said) == 1 and "cannot be written: It is invalid: fix it" in said[0]


def test_a_class_without_generation_is_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It ended in a traceback, after all the work."""
    from transformers import AutoModelForCausalLM

    settings = config(tmp_path, model=own_class(tmp_path / "source"))
    state = trained(settings, 1)
    code, said = export(capsys, saved(tmp_path, "alice", state), tmp_path / "out")
    assert code == 0, said
    network = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True).eval()
    assert network.get_buffer("seen") == 6
    assert same(network, state)
    run = config(tmp_path, model={**own_class(tmp_path / "pretrained"), "pretrained": True}).run
    assert "generation" not in origin(run, outline(run))


def test_an_error_leaves_no_temporary_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = saved(tmp_path, "alice", trained(config(tmp_path), 1))
    with (
        patch("peer.commands.export.folder.save_byte_tokenizer", side_effect=AttributeError("unforeseen")),
        pytest.raises(AttributeError, match="unforeseen"),
    ):
        export(capsys, home, tmp_path / "out")
    assert not list(tmp_path.glob(".tmp-*")) and not (tmp_path / "out").exists()


def test_the_card_names_no_path_of_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = config(tmp_path, model=lfm2_moe(tmp_path / "source"), dir=str(tmp_path / "runs"))
    assert export(capsys, saved(tmp_path, "alice", trained(settings, 1)), tmp_path / "out")[0] == 0
    for file in (tmp_path / "out").iterdir():
        assert str(tmp_path).encode() not in file.read_bytes(), file


def test_a_run_with_another_learning_rate_goes_on_with_the_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the refusal to resume says."""
    settings = config(tmp_path)
    state = trained(settings, 1)
    home = saved(tmp_path, "alice", state)
    inner = settings.run.inner.model_copy(update={"learning_rate": 1e-4})
    lower = Config.model_validate({"run": {**dict(settings.run), "inner": inner}})
    with pytest.raises(UserError, match="to go on with its weights, export it") as refused:
        Checkpoints(home / "checkpoints", 2).newest(trained(lower, 1, steps=0).refusal)
    model = str(refused.value).rpartition("run.model: ")[2]
    assert model == "{name: auto, source: OUT, pretrained: true}"
    assert export(capsys, home, tmp_path / "OUT")[0] == 0
    settings = config(
        tmp_path, name="lower", inner=inner, model={"name": "auto", "source": str(tmp_path / "OUT"), "pretrained": True}
    )
    again = trained(settings, 1, steps=0)
    assert same(again.inner.model.eval(), state)
    before = loss_of(again.inner.model, settings)
    again.inner.run(again.stream.take(6))
    assert loss_of(again.inner.model, settings) < before
