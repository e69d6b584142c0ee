"""The supervised set of the downstream check: a text cut within a word of code, and which of four ends is its own.

``...for name in sor#`` is answered by ``ted(found):``. The three others are ends of lines elsewhere in the same file,
cut in the same way and as long, so that only knowing Python and its library tells. ``#`` stands between a beginning and
its end in no file: that it is to be looked past has to be learnt. Made of the standard library, which every machine
has. The lines to learn from are of the files of the pre-training; those of the test are of files that were held out of
it, and such as stand in no other file.
"""

from __future__ import annotations

import random
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from peer.data.tokenizer import SEPARATOR, Tokens

# Signs that the text has too: tied embeddings of bytes that a model has never seen are all alike, and of no use to it.
ASK, END = b"#", b"\n"
INSIDE = re.compile(r"(?<=\w\w)(?=\w)")  # where a line is cut: in a word, two letters into it or later
BEFORE = 40  # bytes of the file before the cut; with question and answer they fit a window of 64
SHORTEST, LONGEST, NEAR = 4, 10, 1  # bytes of an answer, and by how many the others may be longer or shorter
ANSWERS = 4
FROM_A_FILE = 40  # questions at the most, so that there are many files
CHOICE = 300
IGNORED = -100  # as cross_entropy has it


@dataclass(frozen=True)
class Question:
    """``prompt``: what stands before the cut, and the sign that asks. ``answers``: the right one, then the others."""

    prompt: bytes
    answers: tuple[bytes, ...]


@dataclass(frozen=True)
class Task:
    """``choice``: what settings are chosen by."""

    train: list[Question]
    choice: list[Question]
    test: list[Question]


@dataclass(frozen=True)
class Cut:
    """A line that was cut: as a whole and bare of indentation, what stands before the cut, and what behind it."""

    line: str
    before: str
    end: str


def make(train: Tokens, held_out: Tokens, *, learn: int, test: int, seed: int) -> Task:
    """``learn`` questions, 300 to choose by, and at most ``test``; the same ones for the same text and ``seed``."""
    texts, others = documents(train), documents(held_out)
    known = {line.strip() for text in texts for line in text.split("\n")}
    chance = random.Random(seed)
    both = _questions(texts, learn + CHOICE, chance, ())
    return Task(both[:learn], both[learn:], _questions(others, test, chance, known))


def documents(tokens: Tokens) -> list[str]:
    """The files that byte-level tokens were made of."""
    ends = np.flatnonzero(tokens == SEPARATOR)
    starts = [0, *(ends[:-1] + 1)]
    pieces = (tokens[start:end] for start, end in zip(starts, ends, strict=True))
    return [piece.astype(np.uint8).tobytes().decode("utf-8", "replace") for piece in pieces]


def tensors(pairs: Sequence[tuple[bytes, bytes]]) -> tuple[Tensor, Tensor]:
    """Inputs and targets of prompts with an answer each, ``[pairs, tokens]``; targets before the answer are IGNORED."""
    width = max(len(prompt) + len(answer) for prompt, answer in pairs)
    inputs = torch.full((len(pairs), width), SEPARATOR, dtype=torch.int64)
    targets = torch.full_like(inputs, IGNORED)
    for row, (prompt, answer) in enumerate(pairs):
        text = prompt + answer
        inputs[row, : len(text)] = torch.tensor(list(text))
        targets[row, len(prompt) - 1 : len(text)] = torch.tensor(list(answer + END))
    return inputs, targets


def _questions(texts: list[str], count: int, chance: random.Random, known: Collection[str]) -> list[Question]:
    """Of files in random order, one a line and each line once."""
    order = list(texts)
    chance.shuffle(order)
    used = set(known)
    found: list[Question] = []
    for text in order:
        found += islice(_of_a_file(text, chance, used), FROM_A_FILE)
        if len(found) >= count:
            break
    chance.shuffle(found)
    return found[:count]


def _of_a_file(text: str, chance: random.Random, used: set[str]) -> Iterator[Question]:
    """In random order; what was asked about, and where, goes into ``used``, and is not asked about again."""
    cuts = list(_cuts(text, chance))
    chance.shuffle(cuts)
    for cut in cuts:
        if cut.line in used or cut.before in used:
            continue
        near = {it.end for it in cuts if abs(len(it.end) - len(cut.end)) <= NEAR} - {cut.end}
        if len(near) >= ANSWERS - 1:
            used |= {cut.line, cut.before}
            others = chance.sample(sorted(near), ANSWERS - 1)
            yield Question(cut.before.encode() + ASK, tuple(it.encode() for it in (cut.end, *others)))


def _cuts(text: str, chance: random.Random) -> Iterator[Cut]:
    """Each line that can be cut, at one place."""
    start = 0
    for line in text.split("\n"):
        places = [it.start() for it in INSIDE.finditer(line) if SHORTEST <= len(line) - it.start() <= LONGEST]
        if places and line.isascii():
            place = chance.choice(places)
            before = text[max(0, start + place - BEFORE) : start + place]
            if before.isascii():
                yield Cut(line.strip(), before, line[place:])
        start += len(line) + 1
