"""The steps of ``noloco-peer export``: find the checkpoints, average them, evaluate, write the folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from peer.commands.export import folder, sources
from peer.commands.export.sources import ExportSource, Mixed, mix
from peer.config.data import HuggingFaceData
from peer.config.model import AutoModel
from peer.data.open import corpus_of, validation
from peer.data.tokenizer import load as load_tokenizer
from peer.device.accelerator import pick_device
from peer.device.memory import is_out_of_memory
from peer.errors import RunError, UserError, one_line
from peer.hub.push import push, rights
from peer.logs import get_logger
from peer.replica import model
from peer.replica.inner_loop import mean_loss_by_rows

log = get_logger("export")


@dataclass(frozen=True)
class Target:
    """A repository of the Hugging Face hub, and the most bytes a second of the push to it."""

    name: str
    private: bool
    rate: float | None


def export(
    checkpoints: Sequence[Path], out: Path, *, dtype: str, evaluate: bool | None, push_to: Target | None = None
) -> Iterator[str]:
    """Yields the lines to print. ``evaluate``: compute the validation loss; ``None``: when this machine has the text.

    Raises :class:`UserError` for what cannot be exported or pushed, before the work where that can be known.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder.require_free(out)
    with ExitStack() as held:
        found = sources.find(checkpoints, held)
        if push_to is not None:
            yield rights(push_to.name, push_to.private)
        tokenizer = load_tokenizer(found[0].run.data.tokenizer)  # an error comes before the work, not after it
        loss_of, why_not = _evaluation(found[0], evaluate)
        network = _network(found[0])
        mixed = mix(network, found, loss_of)
    yield from _in_words(found, mixed)
    if why_not:
        yield f"validation loss not computed: {why_not}"
    parameters = model.parameter_count(network)
    card = folder.card(found, mixed, parameters, dtype)
    folder.write(network, out, dtype=dtype, card=card, tokenizer=tokenizer, kept=found[0].generation)
    yield f"{out}: {parameters:,} parameters in {dtype}, with tokenizer and model card"
    if push_to is not None:
        message = f"{found[0].run.name}, step {max(source.step for source in found)}"
        to, private, rate = push_to.name, push_to.private, push_to.rate
        yield f"pushed: {push(out, to, private=private, message=message, rate=rate)}"


def _in_words(found: Sequence[ExportSource], mixed: Mixed) -> Iterator[str]:
    for index, source in enumerate(found):
        said = f"{source.path}: step {source.step}, {source.tokens:,} tokens"
        if mixed.distances:
            said += f", {mixed.distances[index]:.3%} from the average"
        if mixed.losses:
            said += f", validation loss {mixed.losses[index]:.4f}"
        yield said
    if mixed.loss is not None:
        yield f"validation loss{' of the average' if len(found) > 1 else ''}: {mixed.loss:.4f}"


def _network(source: ExportSource) -> Any:
    settings = source.run.model
    own_class = isinstance(settings, AutoModel) and settings.trust_remote_code
    return model.untrained(source.run) if own_class else _transformers_model(source)  # only the source has the class


def _transformers_model(source: ExportSource) -> Any:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    others = json.loads(json.dumps(source.architecture), object_hook=_number)
    kind = others.pop("model_type", None)
    try:
        config = AutoConfig.for_model(kind, **others)
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{source.path}: this version of transformers does not know its model type {kind}") from None
    except StrictDataclassError as error:
        trained = source.architecture.get("transformers_version")
        raise UserError(
            f"{source.path}: this version of transformers refuses its model; install {trained}, which trained it: "
            f"{one_line(error, 200)}"
        ) from None
    return model.fresh(config, seed=source.run.seed)


def _number(value: dict[str, Any]) -> Any:
    """transformers writes an infinite float as ``{"__float__": "Infinity"}``, and decodes it only in what it loads."""
    return float(value["__float__"]) if value.keys() == {"__float__"} else value


def _evaluation(source: ExportSource, wish: bool | None) -> tuple[Callable[[nn.Module], float] | None, str]:
    """How to compute the validation loss, or why it is not computed."""
    if wish is False:
        return None, ""
    data = source.run.data
    if wish is None and isinstance(data, HuggingFaceData) and data.on_hub:  # it may be large
        return None, f"the data set {data.path} is on the Hugging Face hub; --evaluate reads it"
    try:
        batches = validation(source.run, corpus_of(source.run).validation)
    except (UserError, RunError) as error:
        if wish:
            raise
        return None, str(error)
    device = pick_device("auto")

    def loss_of(network: nn.Module) -> float:
        nonlocal device
        try:
            return mean_loss_by_rows(network.to(device), batches, device)
        except RuntimeError as error:
            if device.type == "cpu" or not is_out_of_memory(error):
                raise
        finally:
            network.to(torch.device("cpu"))
        log.warning("%s has no memory left: the CPU computes the validation loss (--no-evaluate leaves it out)", device)
        device = torch.device("cpu")
        return mean_loss_by_rows(network, batches, device)

    return loss_of, ""
