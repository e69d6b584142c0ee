"""Does a pre-trained model read the ids that it was trained with?

Another tokenizer than its own is no error: somebody may want to teach it one. By mistake (the default is bytes) it
throws the embeddings away, which is most of what such a model knows, and all that shows is a loss that starts high. So
``train`` says it in a line and ``check`` has a finding.
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

TOLERATED = 0.01  # share of ids whose word may have changed: a reserved token that got a name is not another tokenizer


@dataclass(frozen=True)
class Comparison:
    """``advice`` where the run's tokenizer is not the model's own."""

    text: str
    advice: str = ""


def compare(run: RunConfig) -> Comparison | None:
    """``None`` where the weights are fresh: they are as good for any ids.

    Raises :class:`UserError` when the run's own tokenizer cannot be loaded.
    """
    if not isinstance(run.model, AutoModel) or not run.model.pretrained:
        return None
    folder, name, source = locate(run.model), run.data.tokenizer.name, run.model.source
    own = _own_words(folder)
    if own is None:
        return Comparison(f"{source} brings none along that could be compared with {name}")
    words = tokenizer.load(run.data.tokenizer).tokens()
    of_id = {token: word for word, token in own.items()}
    shared = {word: token for word, token in words.items() if token in of_id}  # further ones may have been added
    other = sum(of_id[token] != word for word, token in shared.items())
    if other <= TOLERATED * len(shared):
        return Comparison(f"{name} has the ids of {source}'s own")
    return Comparison(
        f"{name} is not {source}'s own: {other:,} of {len(shared):,} ids stand for something else there, so its "
        "embeddings are noise to this text",
        f"set run.data.tokenizer={{{_by_place(run.model, folder)}, vocabulary: {max(of_id) + 1}}}, unless you mean it",
    )


def warn(run: RunConfig) -> None:
    """A line in the log when the run's tokenizer is not the pre-trained model's own."""
    found = compare(run)
    if found is not None and found.advice:
        log.warning("run.data.tokenizer: %s; %s", found.text, found.advice)


def _own_words(folder: Path) -> dict[str, int] | None:
    """Of the tokenizer in a model's folder; ``None`` without one, or with one that cannot be loaded here."""
    if not any(any(folder.glob(pattern)) for pattern in TOKENIZER_FILES):
        return None  # transformers would make an empty one up
    try:
        return dict(tokenizer.open_any(TokenizerConfig(name="own", path=folder)).get_vocab()) or None
    except UserError:
        return None


def _by_place(model: AutoModel, folder: Path) -> str:
    """As ``run.data.tokenizer`` takes it: a folder has any name but that of the embedded one."""
    if Path(model.source).expanduser() != folder:
        return f"name: {model.source}"
    return f"name: {'own' if folder.name in ('', BYTES) else folder.name}, path: {folder}"
