"""The papers' models and methods as configurations that are given together: they resolve to what is written down in
presets.json, their shapes count up to what the papers say, and only one thing differs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from peer.commands.cli import main
from peer.config import load as settings
from peer.config.digest import digest
from peer.config.schema import Config, LlamaModel, RunConfig
from peer.replica import model

CONFIGS = Path(__file__).parents[3] / "configs"

# (configuration, parameters in the paper's words, of the layers and norms here, how far that may be from the paper's).
# NoLoCo's figures are of models with two matrices in a feed-forward layer. Llama's, which its code trains, has three.
SIZES = [
    ("noloco-125m", 125e6, 113_265_408, 0.10),
    ("noloco-1.3b", 1.3e9, 1_610_713_088, 0.25),
    ("noloco-6.8b", 6.8e9, 8_590_200_832, 0.27),
    ("opendiloco-150m", 150e6, 149_447_680, 0.01),
    ("opendiloco-1b", 1.1e9, 968_976_384, 0.13),  # the paper's 1.1B has the embeddings in it: see below
]
METHODS = ("noloco", "diloco", "fsdp")
NAMES = [f"{method}-{size}" for method in METHODS for size in ("125m", "1.3b", "6.8b")]
# What a preset needs besides its model and its method: a number that is neither's alone.
SETS = {
    "fsdp-125m": ["run.batch_size=512"],
    "fsdp-1.3b": ["run.batch_size=1024"],
    "fsdp-6.8b": ["run.batch_size=2048"],
    "opendiloco-1b": ["run.inner_steps=125"],
}
MUON = CONFIGS / "inner" / "muon.yaml"
PRESETS = json.loads((Path(__file__).parent / "presets.json").read_text())


def files(name: str, *data: str) -> list[Path]:
    """Model, method and data of a preset."""
    method, _, size = name.partition("-")
    size = {"1b": "1.1b"}.get(size, size)
    words = (f"models/llama-{size}", f"methods/{method}", *(f"data/{it}" for it in data))
    return [CONFIGS / f"{it}.yaml" for it in words]


def resolved(name: str, *data: str) -> Config:
    return settings.load(files(name, *data), [f"run.name={name}", *SETS.get(name, ())], environment={})


def load(name: str, *data: str) -> RunConfig:
    return resolved(name, *data).run


@pytest.mark.parametrize("name", [*NAMES, "opendiloco-150m", "opendiloco-1b"])
def test_model_and_method_resolve_to_the_preset(name: str) -> None:
    config, expected = resolved(name), Config.model_validate(PRESETS[name])
    assert config == expected
    assert digest(config.run) == digest(expected.run)


def test_every_file_is_part_of_a_preset() -> None:
    of_presets = {file for name in PRESETS if name != "data" for file in files(name, *PRESETS["data"])}
    assert of_presets | {MUON} == {file for folder in CONFIGS.iterdir() if folder.is_dir() for file in folder.iterdir()}


def test_muon_goes_with_any_preset_and_changes_the_optimizer_alone() -> None:
    for name in PRESETS:
        if name != "data":
            run = load(name)
            inner = run.inner.model_copy(update={"optimizer": "muon"})
            assert run.inner.optimizer == "adamw"
            changed = settings.load([*files(name), MUON], [f"run.name={name}", *SETS.get(name, ())], environment={})
            assert changed.run == run.model_copy(update={"inner": inner}) and digest(changed.run) != digest(run)


def layers_of(shape: LlamaModel) -> int:
    """By hand: attention, three matrices of the feed-forward layer, and norms."""
    d, kv = shape.hidden_size, shape.hidden_size * (shape.kv_heads or shape.heads) // shape.heads
    return shape.layers * (2 * d * d + 2 * d * kv + 3 * d * shape.intermediate_size + 2 * d) + d


@pytest.mark.parametrize(("name", "paper", "layers", "tolerance"), SIZES)
def test_a_preset_has_the_papers_size(name: str, paper: float, layers: int, tolerance: float) -> None:
    run = load(name)
    assert isinstance(run.model, LlamaModel)
    outline = model.outline(run)
    assert {parameter.device.type for parameter in outline.parameters()} == {"meta"}
    embeddings = model.embedding_count(outline)
    assert embeddings == 2 * (run.model.vocabulary or 0) * run.model.hidden_size
    assert model.parameter_count(outline) - embeddings == layers == layers_of(run.model)
    assert layers == pytest.approx(paper, rel=tolerance)


def test_a_model_of_two_matrices_would_have_the_papers_figure() -> None:
    """The paper does not say what its 125M, 1.3B and 6.8B count; a GPT of these shapes and 50,272 tokens has them."""
    for name, paper, *_ in SIZES[:3]:
        shape = load(name).model
        assert isinstance(shape, LlamaModel)
        gpt = layers_of(shape) - shape.layers * shape.hidden_size * shape.intermediate_size
        assert gpt + 50_272 * shape.hidden_size == pytest.approx(paper, rel=0.03)


def test_opendilocos_1b_is_1_1b_with_its_embeddings() -> None:
    run = load("opendiloco-1b")
    assert model.parameters_of(run) == pytest.approx(1.1e9, rel=0.01)


@pytest.mark.parametrize("size", ["125m", "1.3b", "6.8b"])
def test_the_methods_of_a_size_differ_in_the_method_alone(size: str) -> None:
    runs = {method: load(f"{method}-{size}") for method in METHODS}

    def rest(run: RunConfig) -> dict[str, Any]:
        noloco_alone = {"overlap", "codec"}
        return run.model_dump(
            exclude={"name": True, "outer": True, "inner_steps": True, "batch_size": True, "exchange": noloco_alone}
        )

    assert rest(runs["noloco"]) == rest(runs["diloco"]) == rest(runs["fsdp"])
    peers = runs["fsdp"].batch_size // runs["noloco"].batch_size
    assert runs["diloco"].batch_size == runs["noloco"].batch_size
    assert runs["fsdp"].batch_size == peers * runs["noloco"].batch_size
    assert (runs["noloco"].inner_steps, runs["diloco"].inner_steps) == (50, 100)
    tokens = runs["fsdp"].batch_size * runs["fsdp"].data.sequence_length
    assert tokens == {"125m": 2**19, "1.3b": 2**20, "6.8b": 2**21}[size]


@pytest.mark.parametrize("data", ["c4", "reddit"])
@pytest.mark.parametrize("name", NAMES)
def test_every_preset_goes_with_the_papers_data(name: str, data: str) -> None:
    alone, run = load(name), load(name, data)
    assert run.data.model_dump(mode="json", exclude_defaults=True) == PRESETS["data"][data]
    assert isinstance(run.model, LlamaModel) and run.model.vocabulary == run.data.tokenizer.vocabulary
    assert run.model_copy(update={"model": alone.model, "data": alone.data}) == alone


@pytest.mark.parametrize("name", ["demo", "opendiloco-150m"])
def test_show_config_says_how_many_parameters(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = [CONFIGS / "demo.yaml"] if name == "demo" else files(name)
    with pytest.raises(SystemExit) as exit:
        main(["show-config", "--config", *map(str, given)])
    assert not exit.value.code
    said = {"demo": "1,022,464 parameters, 32,896", "opendiloco-150m": "214,983,680 parameters, 65,536,000"}[name]
    assert f"# {said} of them embeddings\n" in capsys.readouterr().out
