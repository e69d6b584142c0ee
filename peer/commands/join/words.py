"""What a peer says before it trains the swarm's configuration: what is trained, and what must be downloaded."""

from __future__ import annotations

from collections.abc import Iterator

from peer.config.data import BYTES, HuggingFaceData
from peer.config.fields import expanded
from peer.config.model import AutoModel, LlamaModel
from peer.config.schema import Config, RunConfig
from peer.hub.size import data_size, download_size
from peer.replica.model_source import TOKENIZER_FILES
from peer.swarm.configuration import OfferedRun


def outlined(config: Config, offer: OfferedRun) -> Iterator[str]:
    run = config.run
    whose = f"of {offer.agreeing} of {offer.members} members" if offer.members else "of the last join: nobody is there"
    yield f"{run.name}: the configuration {offer.digest}, {whose}"
    exchange = run.exchange
    length = f"{run.inner_time:g} s" if run.inner_time else f"{run.inner_steps} inner steps"
    swap = f"codec {exchange.codec}{', overlapped' if exchange.overlap else ''}"
    yield f"method: {run.outer.name}, a round every {length}, {swap}; {run.steps} steps of {run.inner.optimizer}"
    yield f"model: {_model(run)}"
    data = run.data
    batch = f"{run.batch_size} sequences of {data.sequence_length} tokens a step"
    yield f"data: {data.name}, tokenizer {data.tokenizer.name}, {batch}"


def _model(run: RunConfig) -> str:
    model = run.model
    if isinstance(model, LlamaModel):
        return f"llama, {model.layers} layers of {model.hidden_size}, {model.heads} heads, fresh weights"
    return f"{model.source}, {'its own' if model.pretrained else 'fresh'} weights, digest {model.digest}"


def downloads(config: Config) -> Iterator[str]:
    """What comes from the Hugging Face hub, with its size; nothing of what is here already.

    The model's size is said when its files are located (model_source.py).
    """
    model, data = config.run.model, config.run.data
    if isinstance(model, AutoModel) and not expanded(model.source).is_dir():
        what = "weights and configuration" if model.pretrained else "configuration"
        yield f"download: {what} of the model {model.source}"
    tokenizer = data.tokenizer
    if tokenizer.name != BYTES and tokenizer.path is None:
        size = download_size(tokenizer.name, None, ("config.json", *TOKENIZER_FILES))
        if size:
            yield f"download: the tokenizer {tokenizer.name}, {size}"
    if isinstance(data, HuggingFaceData) and data.on_hub:
        how, splits = "as a whole before the first step", set()  # the library downloads all splits
        if data.streaming:
            how, splits = "piece by piece", {data.split, data.validation_split}
        size = data_size(data.path, data.subset, splits)
        if size:
            yield f"download: the data set {data.path}, {how}, {size}"
