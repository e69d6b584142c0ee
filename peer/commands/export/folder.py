"""Writes the Hugging Face folder: configuration, weights, tokenizer and model card. All of it, or nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import SafetensorError

from peer import __version__
from peer.commands.export.sources import ExportSource, Mixed
from peer.config.digest import shared
from peer.data.tokenizer import END_OF_TEXT, SEPARATOR, HuggingFace, Tokenizer, byte_letters
from peer.errors import RunError, UserError

EXPORT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def require_free(out: Path) -> None:
    """Raise :class:`UserError` when ``out`` is a file or has files in it: nothing is overwritten."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(f"{out} is there already; choose another name, or move it away")


def write(
    network: Any, out: Path, *, dtype: str, card: str, tokenizer: Tokenizer, kept: dict[str, Any] | None = None
) -> None:
    """``network`` (a transformers model) in ``dtype``, with ``tokenizer``, and with ``card`` as its README. ``kept``:
    the generation settings of its pre-trained source.

    A temporary folder is written and then renamed to ``out``. Raises :class:`RunError` when writing fails.
    """
    temporary = out.absolute().with_name(f".tmp-{out.name}")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        settings = _generation(kept or {}, tokenizer)
        # Its padding stays: some models count positions from it, and who loads it would never train that token's row.
        network.config.use_cache, network.config.eos_token_id = True, tokenizer.end
        if getattr(network, "generation_config", None) is not None:
            network.generation_config.update(**settings)
        network.to(EXPORT_DTYPES[dtype]).save_pretrained(temporary)
        if kept is not None:  # transformers refuses to save some that are on the hub, once they are changed
            whole = json.dumps({**kept, **settings}, indent=2, sort_keys=True)
            (temporary / "generation_config.json").write_text(whole, encoding="utf-8")
        if isinstance(tokenizer, HuggingFace):
            tokenizer.save(temporary)
        else:
            save_byte_tokenizer(temporary)
        (temporary / "README.md").write_text(card, encoding="utf-8")
        if out.exists():
            out.rmdir()
        temporary.rename(out.absolute())
    except (OSError, ValueError, SafetensorError) as error:
        raise RunError(f"{out}: cannot be written: {getattr(error, 'strerror', None) or error}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _generation(kept: dict[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """How the exported model generates: a text ends where ``kept`` ends it, in ids that the run's tokenizer has, and
    where the run's texts end. Training does without the cache of keys and values; generation needs it.
    """
    ends, padding = (
        [number for number in (it if isinstance(it, list) else [it]) if number in range(tokenizer.known)]
        for it in (kept.get("eos_token_id"), kept.get("pad_token_id"))
    )
    ends += [] if tokenizer.end in ends else [tokenizer.end]
    return {
        "use_cache": True,
        "eos_token_id": ends if len(ends) > 1 else ends[0],
        "pad_token_id": padding[0] if padding else tokenizer.end,
    }


def save_byte_tokenizer(folder: Path) -> None:
    """Write the byte-level tokenizer as files that ``AutoTokenizer`` loads: a byte is its own id, 256 ends a text."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as FastTokenizer
    from transformers import PreTrainedTokenizerFast

    vocabulary = {letter: byte for byte, letter in enumerate(byte_letters())}
    tokenizer = FastTokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True)])
    assert tokenizer.token_to_id(END_OF_TEXT) == SEPARATOR
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT, clean_up_tokenization_spaces=False
    )
    fast.save_pretrained(folder)


def card(sources: Sequence[ExportSource], mixed: Mixed, parameters: int, dtype: str) -> str:
    """The model card: what was trained, how, and by which peers, as the checkpoints say."""
    first = sources[0]
    run = first.run
    head = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": sorted({"noloco", run.outer.name}),
    }
    steps = sorted({source.step for source in sources})
    members = frozenset().union(*(source.partners for source in sources), {source.peer for source in sources})
    rows = {
        "run": run.name,
        "method": f"{run.outer.name}, an outer step every {run.inner_steps} inner steps",
        "parameters": f"{parameters:,} ({dtype})",
        "inner steps": " to ".join(f"{step:,}" for step in sorted({steps[0], steps[-1]})) + f" of {run.steps:,}",
        "tokens": f"{sum(source.tokens for source in sources):,} by the exported peers",
        "peers": f"{len(sources)} exported, {len(members)} seen by them",
        "validation loss": "not computed" if mixed.loss is None else f"{mixed.loss:.4f} nats a token",
        "configuration digest": f"`{first.config}`",
        "written by": f"noloco-peer {__version__}",
    }
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    resolved = yaml.safe_dump({"run": shared(run)}, sort_keys=False)
    return (
        f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n\n# {run.name}\n\n"
        "Trained by peers that exchange their weights over the internet, with noloco-peer.\n\n"
        f"| | |\n|---|---|\n{table}\n\n{_peers(sources, mixed)}"
        f"The weights are the peers' fast weights{', averaged' if len(sources) > 1 else ''}. "
        f"The whole shared configuration:\n\n```yaml\n{resolved}```\n"
    )


def _peers(sources: Sequence[ExportSource], mixed: Mixed) -> str:
    """A table of the averaged peers; nothing for one peer."""
    if len(sources) == 1:
        return ""
    rows = ["| peer | step | tokens | distance to the average | validation loss |", "|---|---|---|---|---|"]
    for index, source in enumerate(sources):
        loss = f"{mixed.losses[index]:.4f}" if mixed.losses else "not computed"
        distance = f"{mixed.distances[index]:.3%}"
        rows.append(f"| {source.peer} | {source.step:,} | {source.tokens:,} | {distance} | {loss} |")
    return "\n".join(rows) + "\n\n"
