"""From the configuration to the splits of a source. Only this module chooses a source's class."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from peer.config.data import C4Data, HuggingFaceData, JsonlData, ParquetData
from peer.data.sources import huggingface
from peer.data.sources.documents import Split
from peer.data.sources.jsonl import JsonLines
from peer.data.sources.parquet import Parquet
from peer.data.sources.source import DocumentSource, paths, without
from peer.data.sources.text import Texts
from peer.data.tokenizer import Tokenizer
from peer.errors import UserError

C4_TRAIN, C4_VALIDATION = "c4-train.*.json.gz", "c4-validation.*.json.gz"
JSON_ENDINGS = (".jsonl", ".json", ".jsonl.gz", ".json.gz")


def splits(
    settings: JsonlData | C4Data | ParquetData | HuggingFaceData, tokenizer: Tokenizer, left_out: Iterable[Path] = ()
) -> tuple[Split, Split]:
    """The training split, without the files ``left_out``, and the validation split: validation data, or the rows that
    are held out of the training data.

    Raises :class:`UserError` for missing data.
    """
    match settings:
        case HuggingFaceData():
            train = huggingface.load(settings, settings.split, left_out)
            wish = settings.validation_split
            validation = huggingface.load(settings, wish) if wish else None
        case C4Data():
            train = JsonLines(without(_c4(settings.folder, C4_TRAIN), left_out), ("text",))
            own = any(settings.folder.glob(C4_VALIDATION))
            validation = JsonLines(_c4(settings.folder, C4_VALIDATION), ("text",)) if own else None
        case JsonlData():
            train, validation = _both(settings, left_out, lambda files: JsonLines(files, (settings.column,)))
        case ParquetData():
            columns = (settings.column,)
            train, validation = _both(settings, left_out, lambda files: Parquet(files, columns, tokenizer))
    if validation is None:
        return Split(train, tokenizer, held_out=False), Split(train, tokenizer, held_out=True)
    # Who has no validation files, which are local, validates on held-out rows; ``validation_split`` is every peer's.
    held_out = None if isinstance(settings, HuggingFaceData) else False
    return Split(train, tokenizer, held_out), Split(validation, tokenizer)


def files(patterns: Iterable[str], name: str, tokenizer: Tokenizer, column: str) -> Split:
    """The validation set ``name``. The files' suffix says their kind. ``column``: of the training data."""
    key, columns = f"run.evaluation.sets.{name}", tuple(dict.fromkeys((column, "text")))
    return Split(by_ending(paths(patterns, key), key, columns, tokenizer, ids=("input_ids",)), tokenizer)


def by_ending(
    found: list[Path], key: str, columns: tuple[str, ...], tokenizer: Tokenizer, *, ids: tuple[str, ...] = ()
) -> DocumentSource:
    """The source of the files ``found``, which must all be of one kind; of ``columns`` the first that exists, and in
    Parquet of ``ids`` before them.
    """
    kinds = {_kind(path) for path in found}
    if len(kinds) > 1:
        raise UserError(f"{key}: {found[0]} and the others are of different kinds ({', '.join(sorted(kinds))})")
    match kinds.pop():
        case "Parquet":
            return Parquet(found, (*ids, *columns), tokenizer)
        case "JSON Lines":
            return JsonLines(found, columns)
        case _:
            return Texts(found)


def _kind(path: Path) -> str:
    if path.name.endswith(JSON_ENDINGS):
        return "JSON Lines"
    return "Parquet" if path.suffix == ".parquet" else "text"


def _both(
    settings: JsonlData | ParquetData, left_out: Iterable[Path], opened: Callable[[list[Path]], DocumentSource]
) -> tuple[DocumentSource, DocumentSource | None]:
    validation = paths(settings.validation, "run.data.validation")
    train = without(paths(settings.train, "run.data.train"), (*validation, *left_out))
    return opened(train), opened(validation) if validation else None


def _c4(folder: Path, pattern: str) -> list[Path]:
    return paths([str(folder / pattern)], "run.data.folder")
