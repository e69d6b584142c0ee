"""The supervised set of the downstream benchmark: code that is cut inside a word, and four ends to choose from.

``...for name in sor#`` has the right answer ``ted(found):``. The three others are ends of lines elsewhere in the same
file, cut in the same way and of about the same length. So only knowledge of Python and its library helps. No file has a
``#`` inside a word: the model must learn to ignore it. The text is the standard library, which every machine has.
Questions to learn from are made of the files of the pre-training. Test questions are made of held-out files, from lines
that no other file has.
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

# Characters that occur in the text: tied embeddings of bytes that a model has never seen are all alike and useless.
ASK, END = b"#", b"\n"
INSIDE = re.compile(r"(?<=\w\w)(?=\w)")  # where a line is cut: inside a word, after at least two letters
BEFORE = 40  # bytes of the file before the cut; with question and answer they fit a window of 64
SHORTEST, LONGEST, NEAR = 4, 10, 1  # bytes of an answer; bytes by which the other answers may differ in length
ANSWERS = 4
FROM_A_FILE = 40  # at most so many questions per file, so that many files are used
CHOICE = 300
IGNORED = -100  # the default of cross_entropy


@dataclass(frozen=True)
class Question:
    """``prompt``: the text before the cut and ASK. ``answers``: the right one, then the others."""

    prompt: bytes
    answers: tuple[bytes, ...]


@dataclass(frozen=True)
class Task:
    """``choice``: the questions by which settings are chosen."""

    train: list[Question]
    choice: list[Question]
    test: list[Question]


@dataclass(frozen=True)
class Cut:
    """A cut line: the whole line without indentation, the text before the cut and the text after it."""

    line: str
    before: str
    end: str


def make(train: Tokens, held_out: Tokens, *, learn: int, test: int, seed: int) -> Task:
    """``learn`` questions, 300 to choose settings by, and at most ``test``; deterministic in text and ``seed``."""
    texts, others = documents(train), documents(held_out)
    known = {line.strip() for text in texts for line in text.split("\n")}
    chance = random.Random(seed)
    both = _questions(texts, learn + CHOICE, chance, ())
    return Task(both[:learn], both[learn:], _questions(others, test, chance, known))


def documents(tokens: Tokens) -> list[str]:
    """The files in a corpus of byte-level tokens."""
    ends = np.flatnonzero(tokens == SEPARATOR)
    starts = [0, *(ends[:-1] + 1)]
    pieces = (tokens[start:end] for start, end in zip(starts, ends, strict=True))
    return [piece.astype(np.uint8).tobytes().decode("utf-8", "replace") for piece in pieces]


def tensors(pairs: Sequence[tuple[bytes, bytes]]) -> tuple[Tensor, Tensor]:
    """Inputs and targets of prompts with answers, ``[pairs, tokens]``; targets before the answer are IGNORED."""
    width = max(len(prompt) + len(answer) for prompt, answer in pairs)
    inputs = torch.full((len(pairs), width), SEPARATOR, dtype=torch.int64)
    targets = torch.full_like(inputs, IGNORED)
    for row, (prompt, answer) in enumerate(pairs):
        text = prompt + answer
        inputs[row, : len(text)] = torch.tensor(list(text))
        targets[row, len(prompt) - 1 : len(text)] = torch.tensor(list(answer + END))
    return inputs, targets


def _questions(texts: list[str], count: int, chance: random.Random, known: Collection[str]) -> list[Question]:
    """Questions from files in random order, at most one for each distinct line."""
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
    """In random order. Lines and prompts in ``used`` are skipped; new ones are added to it."""
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
    """One cut of each line that can be cut."""
    start = 0
    for line in text.split("\n"):
        places = [it.start() for it in INSIDE.finditer(line) if SHORTEST <= len(line) - it.start() <= LONGEST]
        if places and line.isascii():
            place = chance.choice(places)
            before = text[max(0, start + place - BEFORE) : start + place]
            if before.isascii():
                yield Cut(line.strip(), before, line[place:])
        start += len(line) + 1
