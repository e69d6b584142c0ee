"""``run.data``: the source of the training text and its tokenizer.

Paths are local to a machine (``LOCAL``); everything else is equal in the whole swarm.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from peer.config.fields import LOCAL, PathText, Section, Words

BYTES = "bytes"
BYTE_VOCABULARY = 257  # the bytes and the end of a document


class TokenizerConfig(Section):
    """``bytes``, or a Hugging Face tokenizer by name, or by any name and the ``path`` of a folder or tokenizer.json."""

    name: str = Field(default=BYTES, min_length=1)
    vocabulary: int = Field(default=BYTE_VOCABULARY, gt=1)  # the model's; at least as many as the tokenizer has
    end: str | None = None  # the token that ends a document; none: the tokenizer's own end of text
    path: PathText | None = Field(default=None, json_schema_extra=LOCAL)

    @model_validator(mode="after")
    def _embedded(self) -> TokenizerConfig:
        if self.name == BYTES and (self.vocabulary < BYTE_VOCABULARY or self.end or self.path):
            raise ValueError(f"the tokenizer bytes has {BYTE_VOCABULARY} tokens, no end and no path of its own")
        return self


class Data(Section):
    """Fields of every source."""

    sequence_length: int = Field(default=128, gt=0)  # tokens
    tokenizer: TokenizerConfig = TokenizerConfig()


class StdlibData(Data):
    """The Python standard library's sources: real text that every machine has, about 6 MB."""

    name: Literal["stdlib"] = "stdlib"


class TextData(Data):
    """Local text files, given as glob patterns. With no ``validation`` every 20th file or part is held out."""

    name: Literal["text"]
    train: Words = Field(min_length=1, json_schema_extra=LOCAL)
    validation: Words = Field(default=(), json_schema_extra=LOCAL)


class Streamed(Data):
    """Sources of any size: read piece by piece during the run, never whole in memory. One row in 100 is held out, and
    validated on where there is no validation data; not beside a ``validation_split``, which all peers have.
    """

    shuffle: int = Field(default=1024, gt=0)  # sequences that are shuffled together, and held in memory


class JsonlData(Streamed):
    """JSON Lines, also .gz, given as glob patterns."""

    name: Literal["jsonl"]
    train: Words = Field(min_length=1, json_schema_extra=LOCAL)
    validation: Words = Field(default=(), json_schema_extra=LOCAL)
    column: str = "text"


class C4Data(Streamed):
    """A local copy of C4 English as it is distributed: ``c4-train.*.json.gz`` and ``c4-validation.*.json.gz``."""

    name: Literal["c4"]
    folder: PathText = Field(json_schema_extra=LOCAL)


class ParquetData(Streamed):
    """Parquet with texts or token ids, as ``noloco-peer tokenize`` writes it or with padding and ``attention_mask``."""

    name: Literal["parquet"]
    train: Words = Field(min_length=1, json_schema_extra=LOCAL)
    validation: Words = Field(default=(), json_schema_extra=LOCAL)
    column: str = "input_ids"


class HuggingFaceData(Streamed):
    """A data set by its name on the Hub or a local path, read by the ``datasets`` library. A token for a set that is
    not public comes from the environment (``HF_TOKEN``).
    """

    name: Literal["huggingface"]
    path: str = Field(min_length=1, json_schema_extra=LOCAL)
    subset: str | None = None
    split: str = "train"
    validation_split: str | None = None
    column: str = "text"  # of texts, or of lists of token ids
    streaming: bool = Field(default=False, json_schema_extra=LOCAL)  # read over the network; false: download first

    @property
    def on_hub(self) -> bool:
        try:
            return not Path(self.path).expanduser().exists()
        except RuntimeError:  # the home of a user who is not here
            return False


AnyData = Annotated[
    StdlibData | TextData | JsonlData | C4Data | ParquetData | HuggingFaceData, Field(discriminator="name")
]
