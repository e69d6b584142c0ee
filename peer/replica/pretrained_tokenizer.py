"""Compare the run's tokenizer with the one that a pre-trained model was trained with.

Another tokenizer is no error: a run may teach it to the model. By mistake (the default is bytes) it makes the
embeddings useless, and the only sign is a high initial loss. So ``train`` logs a line and ``check`` has a finding.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from peer.config.data import BYTES, TokenizerConfig
from peer.config.model import AutoModel
from peer.config.schema import RunConfig
from peer.data import tokenizer
from peer.errors import UserError
from peer.logs import get_logger
from peer.replica.model_source import TOKENIZER_FILES, locate

log = get_logger("tokenizer")

TOLERATED = 0.01  # share of ids whose token may differ: a renamed reserved token does not make another tokenizer


@dataclass(frozen=True)
class Comparison:
    """``advice``: empty if the run's tokenizer is the model's own."""

    text: str
    advice: str = ""


def compare(run: RunConfig) -> Comparison | None:
    """``None`` for fresh weights, which suit any tokenizer.

    Raises :class:`UserError` if the run's tokenizer cannot be loaded.
    """
    if not isinstance(run.model, AutoModel) or not run.model.pretrained:
        return None
    folder, name, source = locate(run.model), run.data.tokenizer.name, run.model.source
    own = _own_tokens(folder)
    if own is None:
        return Comparison(f"{source} contains no tokenizer to compare with {name}")
    of_id = {number: token for token, number in own.items()}
    tokens = tokenizer.load(run.data.tokenizer).tokens()
    shared = {token: number for token, number in tokens.items() if number in of_id}  # the run may have added tokens
    other = sum(of_id[number] != token for token, number in shared.items())
    if other <= TOLERATED * len(shared):
        return Comparison(f"{name} has the ids of {source}'s own")
    return Comparison(
        f"{name} is not {source}'s own: {other:,} of {len(shared):,} ids mean another token there, so its "
        "embeddings are useless",
        f"set run.data.tokenizer={{{_by_place(run.model, folder)}, vocabulary: {max(of_id) + 1}}}, unless you mean it",
    )


def warn(run: RunConfig) -> None:
    """A line in the log when the run's tokenizer is not the pre-trained model's own."""
    found = compare(run)
    if found is not None and found.advice:
        log.warning("run.data.tokenizer: %s; %s", found.text, found.advice)


def _own_tokens(folder: Path) -> dict[str, int] | None:
    """The tokens of the tokenizer in a model's folder; ``None`` if there is none or it cannot be loaded."""
    if not any(any(folder.glob(pattern)) for pattern in TOKENIZER_FILES):
        return None  # transformers would create an empty one
    try:
        return dict(tokenizer.open_any(TokenizerConfig(name="own", path=folder)).get_vocab()) or None
    except UserError:
        return None


def _by_place(model: AutoModel, folder: Path) -> str:
    """Name and path for ``run.data.tokenizer``. A folder may have any name but that of the built-in tokenizer."""
    if Path(model.source).expanduser() != folder:
        return f"name: {model.source}"
    return f"name: {'own' if folder.name in ('', BYTES) else folder.name}, path: {folder}"
