"""The data of a run: a training split, in memory (tokens) or not (a split of a source), and validation sets.

This module reads the two kinds of data that are held in memory. sources/ reads the other kinds.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np

from peer.config.data import AnyData, StdlibData, TextData
from peer.data.sources import opening
from peer.data.sources.documents import TOKENISED_AT_ONCE, Split
from peer.data.sources.source import paths, without
from peer.data.sources.text import PIECE_BYTES, pieces
from peer.data.tokenizer import Bytes, Tokenizer, Tokens, dtype, framed
from peer.data.tokenizer import load as load_tokenizer
from peer.errors import UserError, of_disk
from peer.logs import get_logger

log = get_logger("data")

HELD_OUT_DOCUMENTS = 20  # about one document in 20 is held out for validation
# Of a source that is not in memory there are as many validation tokens as an evaluation uses, within these bounds.
VALIDATION_TOKENS = 2**18  # the fewest
LARGEST_VALIDATION = 2**24  # twice what the largest preset evaluates; 64 MiB a set, and 128 MiB of windows
LARGEST_HELD_OUT = 2**21  # of held-out rows: 100 times as much is read for them, about 1 GB of text at each start
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class Corpus:
    """``validation`` and ``others``, by name: 1-D token ids."""

    train: Tokens | Split
    validation: Tokens
    others: Mapping[str, Tokens] = field(default_factory=dict)

    @property
    def in_memory(self) -> Tokens:
        """The training split as 1-D token ids. Raises :class:`UserError` if it is not in memory."""
        if isinstance(self.train, Split):
            raise UserError("run.data: this needs all tokens in memory, use run.data.name: stdlib or text")
        return self.train


def load(settings: AnyData, sets: Mapping[str, tuple[str, ...]] | None = None, needed: int = 0) -> Corpus:
    """Open the data, and read and tokenise what is held in memory. ``sets``: file patterns of further validation sets.
    ``needed``: the number of tokens that an evaluation uses of each set.

    Raises :class:`UserError` for data that is missing, unreadable or too short.
    """
    tokenizer, sets = load_tokenizer(settings.tokenizer), sets or {}
    left_out = [path for name, patterns in sets.items() for path in paths(patterns, f"run.evaluation.sets.{name}")]
    train, validation = _load(settings, tokenizer, left_out, needed)
    column = getattr(settings, "column", "text")
    opened = {name: opening.files(patterns, name, tokenizer, column) for name, patterns in sets.items()}
    others = {name: _validation(split, needed) for name, split in opened.items()}
    splits = {"train": train, "validation": validation}
    splits |= {f"run.evaluation.sets.{name}": tokens for name, tokens in others.items()}
    for split, tokens in splits.items():
        if not isinstance(tokens, Split) and len(tokens) < settings.sequence_length + 2:
            lower = ", or lower run.data.sequence_length" if len(tokens) else ""
            raise UserError(
                f"run.data: the {split} split has {len(tokens)} tokens, too few for one sequence of "
                f"{settings.sequence_length}; add text, name files to validate on{lower}"
            )
    return Corpus(train, validation, others)


def _load(settings: AnyData, tokenizer: Tokenizer, left_out: list[Path], needed: int) -> tuple[Tokens | Split, Tokens]:
    """The training split, without the files ``left_out``, and the validation split."""
    if isinstance(settings, StdlibData):
        return _split(_stdlib(), tokenizer)
    if isinstance(settings, TextData):
        others = paths(settings.validation, "run.data.validation")
        files = without(paths(settings.train, "run.data.train"), (*others, *left_out))
        train = _texts(files, "train", tokenizer)
        if not others:
            return _split(((text, text) for text in train), tokenizer)
        return _tokens(train, tokenizer), _tokens(_texts(others, "validation", tokenizer), tokenizer)
    opened, validation = opening.splits(settings, tokenizer, left_out)
    return opened, _validation(validation, needed)


def _validation(split: Split, needed: int) -> Tokens:
    largest = LARGEST_HELD_OUT if split.held_out else LARGEST_VALIDATION
    return split.heads(min(max(needed, VALIDATION_TOKENS), largest))


def _stdlib() -> Iterator[tuple[bytes, bytes]]:
    root = Path(sysconfig.get_path("stdlib"))
    found = False
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(set(folders) - SKIPPED)  # os.walk skips the removed folders: site-packages can be huge
        for path in (Path(folder, name) for name in sorted(names) if name.endswith(".py")):
            found = True
            yield str(path.relative_to(root)).encode(), path.read_bytes()
    if not found:
        raise UserError(f"run.data: {root} has no Python sources; use run.data.name: text with your own files")


def _texts(files: list[Path], key: str, tokenizer: Tokenizer) -> Iterator[bytes]:
    for path in files:
        yield from _any_bytes(path, key) if isinstance(tokenizer, Bytes) else pieces(path)


def _any_bytes(path: Path, key: str) -> Iterator[bytes]:
    """The pieces of a file for the byte tokenizer, which accepts any bytes."""
    try:
        with path.open("rb") as file:
            yield from iter(partial(file.read, PIECE_BYTES), b"")
    except OSError as error:
        raise of_disk(f"run.data.{key}: cannot read {path}", error) from None


def _split(documents: Iterable[tuple[bytes, bytes]], tokenizer: Tokenizer) -> tuple[Tokens, Tokens]:
    """Hold out documents (key and text) by their key, as every other peer does: a text is its own key. In the standard
    library it is the file's name, because the texts differ between versions of Python.

    Equal texts are on one side. Of two or more different ones at least one is held out, and one is not.
    """
    found = [(hashlib.sha256(key).digest(), text) for key, text in documents]
    held_out = [hashed[0] % HELD_OUT_DOCUMENTS == 0 for hashed, _ in found]
    if len(found) > 1 and len(set(held_out)) == 1:
        smallest = min(hashed for hashed, _ in found)
        held_out = [hashed == smallest for hashed, _ in found]
        log.warning(
            "run.data: of so few documents (%d) one is held out that peers with other files may train on; give "
            "run.data.validation",
            len(found),
        )
    sides: tuple[list[bytes], list[bytes]] = ([], [])
    for (_, text), held in zip(found, held_out, strict=True):
        sides[held].append(text)
    return _tokens(sides[0], tokenizer), _tokens(sides[1], tokenizer)


def _tokens(documents: Iterable[bytes], tokenizer: Tokenizer) -> Tokens:
    kind = dtype(tokenizer.vocabulary)
    found: list[Tokens] = []
    left = iter(documents)
    while some := list(islice(left, TOKENISED_AT_ONCE)):
        found += (framed(tokens, tokenizer) for tokens in tokenizer.encode(some))
    return np.concatenate(found).astype(kind, copy=False) if found else np.empty(0, dtype=kind)
