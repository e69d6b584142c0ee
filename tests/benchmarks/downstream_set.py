"""The supervised set of the downstream check: a line of Python without one of its keywords, and that keyword.

``if x ? not None:#`` is answered by ``is``. Made of the standard library, which every machine has. The lines to learn
from are of the files of the pre-training; those of the test are of files that were held out of it, and such as stand
in no other file. What a line has behind the gap counts as much as what it has before it, so this is another task than
the next-token prediction that a model comes from.
"""

from __future__ import annotations

import io
import keyword
import random
import tokenize
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from peer.tokenizer import SEPARATOR, Tokens

# Signs that the text has too: tied embeddings of bytes that a model has never seen are all alike, and of no use to it.
GAP, ASK, END = b"?", b"#", b"\n"
SHORTEST, LONGEST = 8, 46  # bytes of a line; with gap, question and answer it fits a window of 64
FROM_A_FILE = 60  # lines at the most, so that there are many files
CHOICE = 500
IGNORED = -100  # as cross_entropy has it


@dataclass(frozen=True)
class Example:
    """``prompt``: the line with a gap, and the sign that asks."""

    prompt: bytes
    answer: bytes


@dataclass(frozen=True)
class Task:
    """``choice``: what settings are chosen by. ``common``: how often the most frequent answer of the test is right."""

    train: list[Example]
    choice: list[Example]
    test: list[Example]

    @property
    def common(self) -> float:
        answers = [it.answer for it in self.test]
        return max(map(answers.count, set(answers))) / len(answers)


def make(train: Tokens, held_out: Tokens, *, learn: int, test: int, seed: int) -> Task:
    """``learn`` examples, 500 to choose by, and at most ``test``; the same ones for the same text and ``seed``."""
    texts, others = documents(train), documents(held_out)
    known = {line.strip() for text in texts for line in text.split("\n")}
    chance = random.Random(seed)
    both = _examples(texts, learn + CHOICE, chance, ())
    return Task(both[:learn], both[learn:], _examples(others, test, chance, known))


def documents(tokens: Tokens) -> list[str]:
    """The files that byte-level tokens were made of."""
    ends = np.flatnonzero(tokens == SEPARATOR)
    starts = [0, *(ends[:-1] + 1)]
    pieces = (tokens[start:end] for start, end in zip(starts, ends, strict=True))
    return [piece.astype(np.uint8).tobytes().decode("utf-8", "replace") for piece in pieces]


def tensors(examples: Sequence[Example]) -> tuple[Tensor, Tensor]:
    """Inputs and targets, both ``[examples, tokens]``; a target is IGNORED where no answer is asked for."""
    width = max(len(it.prompt) + len(it.answer) for it in examples)
    inputs = torch.full((len(examples), width), SEPARATOR, dtype=torch.int64)
    targets = torch.full_like(inputs, IGNORED)
    for row, it in enumerate(examples):
        answer = it.answer + END
        text = it.prompt + it.answer
        inputs[row, : len(text)] = torch.tensor(list(text))
        targets[row, len(it.prompt) - 1 : len(text)] = torch.tensor(list(answer))
    return inputs, targets


def _examples(texts: list[str], count: int, chance: random.Random, known: Collection[str]) -> list[Example]:
    """Of files in random order, one a line and each line once."""
    order = list(texts)
    chance.shuffle(order)
    used = set(known)
    found: list[Example] = []
    for text in order:
        gaps = [(line, *span) for line, *span in _gaps(text, chance) if line not in used]
        chance.shuffle(gaps)
        for line, start, stop in gaps[:FROM_A_FILE]:
            if line not in used:
                used.add(line)
                found.append(_example(line, start, stop))
        if len(found) >= count:
            break
    chance.shuffle(found)
    return list(islice(found, count))


def _example(line: str, start: int, stop: int) -> Example:
    before, answer, after = (it.encode() for it in (line[:start], line[start:stop], line[stop:]))
    return Example(before + GAP + after + ASK, answer)


def _gaps(text: str, chance: random.Random) -> Iterator[tuple[str, int, int]]:
    """A keyword of each line of code that has some: the line, bare of indentation, and where in it the keyword is."""
    lines = text.split("\n")
    places: dict[int, list[tuple[int, int]]] = {}
    for row, start, stop in _keywords(text):
        places.setdefault(row, []).append((start, stop))
    for row, spans in places.items():
        line = lines[row - 1]
        start, stop = chance.choice(spans)
        indent = len(line) - len(line.lstrip())
        bare = line.strip()
        plain = bare.isprintable() and not {*bare} & {GAP.decode(), ASK.decode()}
        if plain and SHORTEST <= len(bare.encode()) <= LONGEST:
            yield bare, start - indent, stop - indent


def _keywords(text: str) -> Iterator[tuple[int, int, int]]:
    """Row and columns of each keyword of code: none of comments, strings, or what no tokenizer understands."""
    lines = text.split("\n")
    try:
        for token in tokenize.generate_tokens(io.StringIO(text, newline="\n").readline):
            (row, start), (_, stop) = token.start, token.end
            word = token.string
            if token.type == tokenize.NAME and keyword.iskeyword(word) and lines[row - 1][start:stop] == word:
                yield row, start, stop
    except (tokenize.TokenError, SyntaxError):  # files of the library that show what is no Python
        return
