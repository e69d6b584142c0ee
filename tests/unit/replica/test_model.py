"""Any causal language model: from a folder or the hub, fresh or pre-trained, equal on every machine or refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from torch import nn

from peer.commands import cli
from peer.config.data import StdlibData
from peer.config.digest import canonical, digest, first_difference
from peer.config.model import AutoModel, LlamaModel
from peer.config.schema import Config, RunConfig
from peer.data import corpus
from peer.errors import UserError
from peer.outer.slow_weights import SlowWeights
from peer.process import LoopContext
from peer.replica import model, model_source
from peer.training import replica

ROOT = Path(__file__).parents[3]
TEXT = b"the quick brown fox jumps over the lazy dog. " * 40


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders as people have them: a configuration alone, and a whole model of another family."""
    from transformers import GPT2Config, GPTNeoXConfig, GPTNeoXForCausalLM

    root = tmp_path_factory.mktemp("models")
    GPT2Config(vocab_size=300, n_positions=32, n_embd=16, n_layer=2, n_head=2).save_pretrained(root / "gpt2")
    torch.manual_seed(5)
    neox = GPTNeoXConfig(
        vocab_size=300,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        hidden_dropout=0.0,
    )
    GPTNeoXForCausalLM(neox).to(torch.bfloat16).save_pretrained(root / "neox")
    return root


def auto(source: object, **keys: Any) -> AutoModel:
    return AutoModel(name="auto", source=str(source), **keys)


def built(settings: LlamaModel | AutoModel, seed: int = 0) -> nn.Module:
    return model.build(RunConfig(model=settings, data=StdlibData(sequence_length=16), seed=seed))


def flat(network: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in network.parameters()])


def test_fresh_weights_come_from_the_seed_and_nothing_else(sources: Path) -> None:
    for source in ("gpt2", "neox"):
        torch.manual_seed(1)
        first = flat(built(auto(sources / source)))
        torch.manual_seed(2)
        before = torch.get_rng_state()
        assert torch.equal(first, flat(built(auto(sources / source))))
        assert torch.equal(before, torch.get_rng_state())
        assert not torch.equal(first, flat(built(auto(sources / source), seed=1)))


def test_fresh_weights_leave_the_generators_of_accelerators_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run's dropout goes on where it was when a model is built beside it."""
    seeded: list[str] = []
    for name, seed_all in (("cuda", "manual_seed_all"), ("xpu", "manual_seed_all"), ("mps", "manual_seed")):
        monkeypatch.setattr(getattr(torch, name), seed_all, lambda seed, name=name: seeded.append(name))
    torch.manual_seed(3)
    assert "cuda" in seeded, "the doubles are asked"
    seeded.clear()
    before = torch.get_rng_state()
    model.build(RunConfig(model=LlamaModel(hidden_size=16, intermediate_size=32, layers=1, heads=2)))
    assert seeded == [] and torch.equal(before, torch.get_rng_state())


def test_a_pre_trained_one_has_the_sources_weights_in_fp32(sources: Path) -> None:
    from transformers import AutoModelForCausalLM

    network = built(auto(sources / "neox", pretrained=True))
    theirs = AutoModelForCausalLM.from_pretrained(sources / "neox", dtype=torch.float32)
    assert {parameter.dtype for parameter in network.parameters()} == {torch.float32}
    assert torch.equal(flat(network), flat(theirs))


def test_a_pre_trained_one_trains_what_a_fresh_one_trains(tmp_path: Path) -> None:
    """Its frozen positions were trained, and the ranks of a peer had other weights at an index than rank 0."""
    from transformers import AutoModelForCausalLM, RoFormerConfig

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = RoFormerConfig(vocab_size=300, is_decoder=True, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    run = RunConfig(model=auto(tmp_path, pretrained=True), data=StdlibData(sequence_length=16))
    shapes = [SlowWeights(it.named_parameters()).layout() for it in (model.untrained(run), model.build(run))]
    assert shapes[0] == shapes[1] and "embed_positions" not in shapes[0]
    assert model.parameters_of(run) == model.parameter_count(model.build(run))


@pytest.mark.parametrize("pretrained", [False, True])
def test_a_token_for_padding_is_trained_as_any_other(pretrained: bool, tmp_path: Path) -> None:
    """The end of a text was the padding of an exported model: its embedding had no gradient, and fresh ones were 0."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    for name, padding in (("plain", None), ("padded", 256)):
        config = LlamaConfig(vocab_size=300, pad_token_id=padding, **sizes)
        LlamaForCausalLM(config).save_pretrained(tmp_path / name)
    network = built(auto(tmp_path / "padded", pretrained=pretrained))
    network(input_ids=torch.tensor([[65, 256, 66]])).logits.square().mean().backward()
    table: Any = network.get_input_embeddings()  # type: ignore[operator]
    assert table.weight.grad[256].norm() > 0
    if not pretrained:
        other: Any = built(auto(tmp_path / "plain")).get_input_embeddings()  # type: ignore[operator]
        rows = (table.weight != other.weight).any(1).nonzero().flatten()
        assert rows.tolist() == [256] and table.weight[256].std().item() == pytest.approx(0.02, rel=0.5)


@pytest.mark.parametrize("source", ["gpt2", "neox"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_it_trains(source: str, checkpointing: bool, sources: Path, tmp_path: Path) -> None:
    for name in ("text", "held-out"):
        (tmp_path / name).write_bytes(TEXT)
    data = {"name": "text", "train": [str(tmp_path / "text")], "validation": [str(tmp_path / "held-out")]}
    run = {
        "model": {"name": "auto", "source": str(sources / source)},
        "data": {**data, "sequence_length": 16},
        "inner": {"learning_rate": 0.01, "warmup_steps": 2},
    }
    config = Config.model_validate({"run": run, "peer": {"gradient_checkpointing": checkpointing}})
    tokens = corpus.load(config.run.data).train
    state = replica.replica(config, tokens, stream=1, device=torch.device("cpu"), context=LoopContext())
    report = state.inner.run(state.stream.take(20))
    assert report.first_loss == pytest.approx(5.7, abs=0.3)  # ln 300
    assert state.inner.run(state.stream.take(1)).loss < report.first_loss - 1
    assert state.scalars()["origin"]["architecture"]["vocab_size"] == 300


def test_gradient_checkpointing_changes_no_gradient() -> None:
    gradients = []
    for checkpointing in (False, True):
        network = built(LlamaModel(hidden_size=16, intermediate_size=32, layers=2, heads=2)).train()
        if checkpointing:
            model.checkpoint_activations(network)
        network(input_ids=torch.arange(12)[None]).logits.square().mean().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in network.parameters() if p.grad is not None]))
    assert torch.equal(*gradients)


# -- the same model on every machine


def test_what_is_in_the_files_is_compared_and_not_where_they_are(sources: Path, tmp_path: Path) -> None:
    import shutil

    def run(folder: Path, **keys: Any) -> RunConfig:
        return model_source.pinned(Config(run=RunConfig(model=auto(folder, **keys)))).run

    shutil.copytree(sources / "neox", tmp_path / "copy")
    here, there = (run(folder, pretrained=True) for folder in (sources / "neox", tmp_path / "copy"))
    assert digest(here) == digest(there)
    config = json.loads((tmp_path / "copy" / "config.json").read_text())
    (tmp_path / "copy" / "config.json").write_text(json.dumps({**config, "transformers_version": "9"}))
    assert digest(run(tmp_path / "copy", pretrained=True)) == digest(here)

    weights = tmp_path / "copy" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    other = run(tmp_path / "copy", pretrained=True)
    assert first_difference(canonical(here), canonical(other)).startswith("run.model.digest is")
    assert digest(run(tmp_path / "copy")) == digest(run(sources / "neox"))  # fresh: its weights do not matter

    (tmp_path / "copy" / "config.json").write_text(json.dumps({**config, "rotary_pct": 0.5}))
    assert digest(run(tmp_path / "copy")) != digest(run(sources / "neox"))
    with pytest.raises(UserError, match="have the digest"):
        run(tmp_path / "copy", digest="0" * 32)
    assert model_source.pinned(Config()) == Config()


# -- mistakes, each one line


def _config(folder: Path, **changes: Any) -> None:
    folder.mkdir()
    keys = {"model_type": "gpt2", "vocab_size": 300, "n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2}
    (folder / "config.json").write_text(json.dumps({**keys, **changes}))


def _llama(folder: Path, **changes: Any) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    _config(folder, **{"model_type": "llama", **sizes, **changes})


@pytest.mark.parametrize(
    ("make", "keys", "says"),
    [
        (lambda folder: None, {}, "there is no folder"),
        (lambda folder: folder.mkdir(), {}, "has no config.json"),
        (lambda folder: _config(folder, model_type="t5"), {}, "is not a causal language model"),
        (lambda folder: _config(folder, model_type="nothing"), {}, "cannot be used"),
        (lambda folder: _config(folder, vocab_size=100), {}, "has 100 tokens, the data's tokenizer 257"),
        (lambda folder: _config(folder, n_positions=8), {}, "is more than the 8 positions"),
        (lambda folder: _config(folder), {"pretrained": True}, "has no model.safetensors"),
        (
            lambda folder: _config(folder, model_type="vit", vocab_size=None),
            {},
            "no whole number as vocab_size; choose",
        ),
        (lambda folder: _llama(folder, hidden_size=30), {}, "(30) is not a multiple of the number of attention heads"),
        (lambda folder: _llama(folder, vocab_size="300"), {}, "Field 'vocab_size' expected int, got str"),
        (lambda folder: _llama(folder, vocab_size=None), {}, "Field 'vocab_size' expected int, got NoneType"),
        (lambda folder: _llama(folder, num_attention_heads=0), {}, "a number of heads in its config.json is 0"),
        (
            lambda folder: _config(folder, model_type="own", auto_map={"AutoConfig": "code.Config"}),
            {},
            "run.model.trust_remote_code: true",
        ),
    ],
)
def test_a_folder_that_is_no_model_for_this(
    make: Callable[[Path], None], keys: dict[str, Any], says: str, tmp_path: Path
) -> None:
    make(tmp_path / "model")
    with pytest.raises(UserError) as caught:
        built(auto(tmp_path / "model", **keys))
    assert says in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("kind", ["bert", "bert-generation", "roc_bert", "xlm", "cpmant"])
def test_a_model_that_sees_the_tokens_to_predict_is_refused(kind: str, tmp_path: Path) -> None:
    """Of those that transformers has for masked tokens too it was seen by their class, of others it was not."""
    sizes = {"emb_dim": 16, "n_layers": 1, "n_heads": 2}
    sizes |= {"dim_model": 16, "dim_head": 8, "dim_ff": 32} if kind == "cpmant" else {}
    _llama(tmp_path / "model", model_type=kind, **sizes)
    with pytest.raises(UserError, match="sees the tokens that it has to predict; set is_decoder: true"):
        built(auto(tmp_path / "model"))


@pytest.mark.parametrize("kind", ["bert", "bart", "gpt_neox"])
def test_a_decoder_does_not_see_the_tokens_to_predict(kind: str, tmp_path: Path) -> None:
    """Of every one of these types a configuration may say is_decoder: false."""
    _llama(tmp_path / "model", model_type=kind, **({"is_decoder": True} if kind == "bert" else {}))
    network = built(auto(tmp_path / "model")).eval()
    logits = [network(input_ids=torch.tensor([[1, 2, 3, last]])).logits[0, :-1] for last in (4, 5)]
    torch.testing.assert_close(*logits)


def test_a_llama_with_too_small_a_vocabulary_is_refused() -> None:
    with pytest.raises(UserError, match=r"run\.model\.vocabulary has 100 tokens"):
        built(LlamaModel(vocabulary=100))
    assert built(LlamaModel(vocabulary=300)).config.vocab_size == 300  # type: ignore[union-attr]


def test_weights_that_lack_a_layer_are_refused_and_not_drawn(sources: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(sources / "neox", tmp_path / "more")
    config = json.loads((tmp_path / "more" / "config.json").read_text())
    (tmp_path / "more" / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(UserError, match=r"lack gpt_neox\.layers\.2"):
        built(auto(tmp_path / "more", pretrained=True))


class _Hub(BaseHTTPRequestHandler):
    """A hub on loopback that has two models: one is gated, the other is not there."""

    def _answer(self) -> None:
        gated = "gated" in self.path
        self.send_response(403 if gated else 404)
        self.send_header("X-Error-Code", "GatedRepo" if gated else "RepoNotFound")
        self.send_header("X-Error-Message", "no")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_HEAD = do_POST = _answer

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def show(source: str) -> list[str]:
    config = ["--config", str(ROOT / "configs" / "demo.yaml")]
    return ["show-config", *config, "--set", f"run.model={{name: auto, source: '{source}'}}"]


@pytest.mark.parametrize(
    ("source", "changed", "code", "says"),
    [
        ("someone/none", {}, 2, "neither a folder here nor a model on the Hugging Face hub"),
        ("no name!", {}, 2, "neither a folder here nor a name"),
        ("someone/model", {"ENDPOINT": "http://127.0.0.1:9"}, 1, "hub does not answer: "),  # a service tries again
        ("someone/model", {"HF_HUB_OFFLINE": True}, 2, "outgoing traffic has been disabled"),
    ],
)
def test_the_hub_says_no_in_one_line(
    source: str,
    changed: dict[str, Any],
    code: int,
    says: str,
    hub: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    known = {"ENDPOINT": hub, "HF_TOKEN_PATH": str(tmp_path / "no-login"), "HF_HUB_CACHE": str(tmp_path), **changed}
    known["HUGGINGFACE_CO_URL_TEMPLATE"] = known["ENDPOINT"] + "/{repo_id}/resolve/{revision}/{filename}"
    for name, value in known.items():  # huggingface_hub has read them from the environment
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setenv("HF_TOKEN", "")
    model_source._download.cache_clear()
    with pytest.raises(SystemExit) as ended:
        cli.main(show(source))
    said = capsys.readouterr().err
    assert ended.value.code == code, said
    assert says in said
    assert len(said.splitlines()) == 1, said


def test_the_hub_says_no_in_one_line_of_a_new_process(hub: str, tmp_path: Path) -> None:
    known = {"HF_ENDPOINT": hub, "HF_HOME": str(tmp_path), "HF_TOKEN": ""}
    done = subprocess.run(
        [sys.executable, "-m", "peer", *show("someone/gated")],
        env={**os.environ, **known},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "is gated: accept its terms on its page, then set HF_TOKEN" in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr


def test_what_transformers_computes_as_it_loads_is_not_on_the_meta_device() -> None:
    """With torch 2.6 ``show-config`` and ``check`` of a configuration ended in a traceback."""
    code = (
        "import sys, torch\n"
        "from peer.config.schema import RunConfig\n"
        "from peer.replica import model\n"
        "class Look:\n"
        "    def find_spec(self, name, *_):\n"
        "        assert name != 'transformers.masking_utils' or torch.empty(0).device.type == 'cpu'\n"
        "sys.meta_path.insert(0, Look())\n"
        "assert 'transformers.masking_utils' not in sys.modules\n"
        "model.outline(RunConfig())\n"
        "assert 'transformers.masking_utils' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
