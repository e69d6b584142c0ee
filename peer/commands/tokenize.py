"""``noloco-peer tokenize``: text, JSON Lines or Parquet into Parquet with token ids, for ``run.data.name: parquet``.

Each file becomes one file, written whole or not at all: a second call continues where the first was interrupted. Two at
once each write it whole. A row is a document with its start and end tokens; row groups have about a million tokens,
pages a checksum.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from zlib import crc32

import numpy as np

from peer.config.data import BYTES, TokenizerConfig
from peer.config.fields import expanded
from peer.data.sources.documents import Split
from peer.data.sources.opening import by_ending
from peer.data.sources.parquet import FINGERPRINT, MADE_OF, TOKENIZER
from peer.data.sources.source import MASK_COLUMN, paths, size
from peer.data.tokenizer import Tokenizer, Tokens, fingerprint, load
from peer.errors import RunError, UserError

ROW_GROUP = 2**20  # tokens
ANY_VOCABULARY = 2**31 - 1  # larger than every tokenizer's

SayLine = Callable[[str], None]


def run(patterns: Sequence[str], out: Path, wish: str, *, end: str | None, column: str, say: SayLine) -> None:
    """Tokenise the files that match ``patterns`` into the folder ``out``. Raises :class:`UserError`."""
    settings = _settings(wish, end)
    tokenizer = load(settings)
    made_with = {TOKENIZER: tokenizer.name.encode(), FINGERPRINT: fingerprint(tokenizer).encode()}
    found = paths(patterns, "SOURCE")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"OUT: cannot make the folder {out}: {error.strerror}") from None
    targets: set[Path] = set()
    for path in found:
        stem = Path(path.name.removesuffix(".gz")).stem.encode(errors="replace").decode()  # pyarrow wants UTF-8
        mark = crc32(str(path).encode(errors="surrogateescape"))  # two folders may have files of the same name
        target = out / f"{stem}-{mark:08x}.parquet"
        targets.add(target)
        made_of = {"file": str(path), "bytes": size(path), "changed": path.stat().st_mtime_ns, "column": column}
        made_of |= {"vocabulary": tokenizer.known, "end": tokenizer.end}
        made_of |= {"start": tokenizer.start} if tokenizer.start else {}  # files without any are not made again
        metadata = {**made_with, MADE_OF: json.dumps(made_of).encode()}
        if target.exists() and metadata.items() <= _metadata(target).items():
            say(f"{path}: {target} is there already")
            continue
        rows, tokens = _write(path, target, tokenizer, column, metadata)
        say(f"{path}: {rows:,} documents, {tokens:,} tokens: {target}")
    _tell_of_others(out, targets, say)
    known = f"name: {tokenizer.name}, vocabulary: {tokenizer.known}"
    known += "".join(f", {key}: {json.dumps(str(it))}" for key in ("end", "path") if (it := getattr(settings, key)))
    say(f"train on them with run.data: {{name: parquet, train: ['{out}/*.parquet'], tokenizer: {{{known}}}}}")


def _settings(wish: str, end: str | None) -> TokenizerConfig:
    if wish == BYTES:
        if end is not None:
            raise UserError("--end: the tokenizer bytes has an end of its own")
        return TokenizerConfig()
    path = expanded(wish)
    if not path.exists():
        return TokenizerConfig(name=wish, vocabulary=ANY_VOCABULARY, end=end)
    path = path.resolve()
    name = path.parent.name if path.is_file() else path.name
    if name in ("", BYTES):
        raise UserError(
            f"--tokenizer: the folder of {path} names the tokenizer, which cannot be {name!r}; use another folder"
        )
    return TokenizerConfig(name=name, vocabulary=ANY_VOCABULARY, end=end, path=path)


def _tell_of_others(out: Path, targets: set[Path], say: SayLine) -> None:
    """A file that another machine mounts elsewhere, or that has a new name, is another source: its documents are there
    twice. The line names one whose source has the name of a source of this call, if there is any.
    """
    others = {path: _source(path) for path in sorted(set(out.glob("*.parquet")) - targets)}
    others = {path: source for path, source in others.items() if source}
    stems = {_stem(target) for target in targets}
    if others:
        path = min(others, key=lambda path: _stem(path) not in stems)
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        say(
            f"{out} also has {path.name} made of {others[path]}{more}, which this call does not name; "
            f"{out}/*.parquet trains on both: remove what is there twice"
        )


def _stem(target: Path) -> str:
    """Of the source's name, as :func:`run` puts it into that of the file."""
    return target.stem.rpartition("-")[0]


def _source(path: Path) -> str | None:
    """What an earlier call, or one on another machine, made the file of; ``None`` of a file of another origin."""
    try:
        return str(json.loads(_metadata(path)[MADE_OF])["file"])
    except (KeyError, TypeError, ValueError, RecursionError):
        return None


def _metadata(target: Path) -> dict[bytes, bytes]:
    """What a file says of the source and the tokenizer that it was made with; empty if it cannot be read."""
    import pyarrow
    from pyarrow.parquet import read_schema

    try:
        return read_schema(target).metadata or {}
    except (pyarrow.ArrowException, OSError):
        return {}


def _write(
    path: Path, target: Path, tokenizer: Tokenizer, column: str, metadata: dict[bytes, bytes]
) -> tuple[int, int]:
    """Returns the numbers of documents and tokens."""
    import pyarrow
    from pyarrow.parquet import ParquetWriter

    ids, mask = pyarrow.list_(pyarrow.int32()), pyarrow.list_(pyarrow.int8())
    schema = pyarrow.schema([("input_ids", ids), (MASK_COLUMN, mask)], metadata=metadata)
    source = by_ending([path], "SOURCE", (column,), tokenizer)
    # of this call alone: jobs on several machines may tokenise the same files into one shared folder
    temporary = target.with_suffix(f".{os.getpid()}-{secrets.token_hex(4)}.tmp")
    documents = tokens = 0
    try:
        with ParquetWriter(temporary, schema, compression="zstd", write_page_checksum=True) as file:
            for group in _groups(Split(source, tokenizer)):
                masks = [np.ones(len(it), dtype=np.int8) for it in group]
                file.write_table(pyarrow.table([pyarrow.array(group, ids), pyarrow.array(masks, mask)], schema=schema))
                documents, tokens = documents + len(group), tokens + sum(map(len, group))
        if not documents:
            raise UserError(f"{path} has no text in it")
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.replace(target)
    except OSError as error:
        raise RunError(f"cannot write {target}: {error.strerror or error}") from None
    finally:
        temporary.unlink(missing_ok=True)
    return documents, tokens


def _groups(split: Split) -> Iterator[list[Tokens]]:
    """Documents in groups of about a million tokens."""
    group: list[Tokens] = []
    count = 0
    for tokens in split.in_order():
        group.append(tokens)
        count += len(tokens)
        if count >= ROW_GROUP:
            yield group
            group, count = [], 0
    if group:
        yield group
