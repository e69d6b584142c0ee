"""Tokenizers: bytes (built in, 257 ids) or any Hugging Face tokenizer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from peer.config.data import BYTE_VOCABULARY, BYTES, TokenizerConfig
from peer.errors import UserError
from peer.hub.answers import library_errors

SEPARATOR = 256  # ends a document of bytes
END_OF_TEXT = "<|endoftext|>"  # its string in an exported byte tokenizer
# Tokenizers of the same tokens may differ in how they treat these.
PROBE = "It's  A  naïve e\u0301 ﬁle:\n\tf(x) = 3.14159 * 2026\r\n\n漢字 🙂 "

Tokens = NDArray[np.unsignedinteger[Any]]


class Tokenizer(Protocol):
    """``known``: the number of the tokenizer's ids. ``vocabulary``: the number of the model's ids, not less than that.
    ``start``: the ids before every document, often none; ``end``: the id after it.
    """

    name: str
    known: int
    vocabulary: int
    start: tuple[int, ...]
    end: int

    def encode(self, texts: Sequence[str | bytes]) -> list[Tokens]:
        """The ids of each text, without ``start`` and ``end``. A text in bytes may be anything, also not UTF-8."""

    def tokens(self) -> dict[str, int]:
        """The id of each token, in the notation of transformers."""


class Bytes:
    """A token is a byte."""

    name, known, end = BYTES, BYTE_VOCABULARY, SEPARATOR
    start: tuple[int, ...] = ()

    def __init__(self, vocabulary: int = BYTE_VOCABULARY) -> None:
        self.vocabulary = vocabulary

    def encode(self, texts: Sequence[str | bytes]) -> list[Tokens]:
        every = (text.encode("utf-8") if isinstance(text, str) else text for text in texts)
        return [np.frombuffer(data, dtype=np.uint8).astype(np.uint16) for data in every]

    def tokens(self) -> dict[str, int]:
        return {**{letter: byte for byte, letter in enumerate(byte_letters())}, END_OF_TEXT: SEPARATOR}


class HuggingFace:
    """A tokenizer that transformers can load."""

    def __init__(self, settings: TokenizerConfig) -> None:
        self.name, self.vocabulary = settings.name, settings.vocabulary
        self._tokenizer = open_any(settings)
        self.known = known = 1 + max(self._tokenizer.get_vocab().values())
        if known > settings.vocabulary:
            raise UserError(
                f"run.data.tokenizer.vocabulary: {settings.vocabulary} is too small, {self.name} has {known} tokens; "
                f"set it to {known} or more"
            )
        self.start, self.end = self._start(), self._end(settings.end)
        self._dtype = dtype(self.vocabulary)
        self._fast = getattr(self._tokenizer, "backend_tokenizer", None)  # None: a tokenizer in Python
        if self._fast is not None:
            self._fast.no_padding()
            self._fast.no_truncation()
            self._fast.encode_special_tokens = True  # "</s>" in a text is text and does not end the document

    def encode(self, texts: Sequence[str | bytes]) -> list[Tokens]:
        if not texts:
            return []
        every = [text if isinstance(text, str) else text.decode("utf-8", "replace") for text in texts]
        if self._fast is not None:
            found = self._fast.encode_batch_fast(every, add_special_tokens=False)
            return [np.array(it.ids, dtype=self._dtype) for it in found]
        ids = self._tokenizer(every, add_special_tokens=False, split_special_tokens=True, verbose=False)
        return [np.array(it, dtype=self._dtype) for it in ids["input_ids"]]

    def tokens(self) -> dict[str, int]:
        return dict(self._tokenizer.get_vocab())

    def save(self, folder: Path) -> None:
        """Write the files that transformers loads."""
        self._tokenizer.save_pretrained(folder)

    def _start(self) -> tuple[int, ...]:
        """What the tokenizer itself puts before a text: who loads an exported folder puts it there too."""
        bare, whole = (self._tokenizer("a", add_special_tokens=it)["input_ids"] for it in (False, True))
        found = (at for at in range(len(whole)) if whole[at : at + len(bare)] == bare)
        return tuple(whole[: next(found, 0)])

    def _end(self, wish: str | None) -> int:
        found = self._tokenizer.eos_token_id if wish is None else self._tokenizer.get_vocab().get(wish)
        if found is None:
            lack = "end-of-text token; name the token that ends a document" if wish is None else f"token {wish!r}"
            raise UserError(f"run.data.tokenizer.end: {self.name} has no {lack}")
        return int(found)


def load(settings: TokenizerConfig) -> Tokenizer:
    """Raises :class:`UserError` for a tokenizer that is missing or does not fit the configuration."""
    return Bytes(settings.vocabulary) if settings.name == BYTES else HuggingFace(settings)


def unframed(ids: NDArray[Any], tokenizer: Tokenizer) -> NDArray[Any]:
    """``ids`` of a document without its start and end, which the rows of token files may have or not."""
    size = len(tokenizer.start)
    begins = size if tuple(ids[:size].tolist()) == tokenizer.start else 0
    return ids[begins : len(ids) - int(len(ids) > begins and ids[-1] == tokenizer.end)]


def framed(ids: Tokens, tokenizer: Tokenizer) -> Tokens:
    """``ids`` of a document with its start and its end, each once."""
    start, end = (np.array(it, dtype=ids.dtype) for it in (tokenizer.start, [tokenizer.end]))
    return np.concatenate((start, unframed(ids, tokenizer), end))


def fingerprint(tokenizer: Tokenizer) -> str:
    """A digest of its tokens and of the ids of a text; its files are not the same in every version of the library."""
    ids = tokenizer.encode([PROBE])[0].tolist()
    return hashlib.sha256(json.dumps([sorted(tokenizer.tokens().items()), ids]).encode()).hexdigest()[:16]


def dtype(vocabulary: int) -> type[np.uint16] | type[np.uint32]:
    """The smallest type for the ids."""
    return np.uint16 if vocabulary <= 2**16 else np.uint32


def byte_letters() -> list[str]:
    """The letter of each byte in byte-level tokenizers: the byte itself if printable, else a letter from 256 on."""
    seen = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = [byte for byte in range(256) if byte not in seen]
    return [chr(byte) if byte in seen else chr(256 + hidden.index(byte)) for byte in range(256)]


def open_any(settings: TokenizerConfig) -> Any:
    """The tokenizer of transformers by the path or the name in ``settings``, without checks."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    where = settings.path or settings.name
    advice = (
        "; give a folder or a tokenizer.json by run.data.tokenizer.path, or a name on the Hugging Face Hub "
        "(HF_TOKEN in the environment if not public)"
    )
    with library_errors(f"run.data.tokenizer: cannot load {where}", advice):
        if settings.path and not settings.path.exists():
            raise UserError(f"run.data.tokenizer.path: {settings.path} does not exist")
        if settings.path and settings.path.is_file():
            return PreTrainedTokenizerFast(tokenizer_file=str(settings.path))
        return AutoTokenizer.from_pretrained(str(where), trust_remote_code=False)
