"""A peer that writes parts of its overlapped swaps to files, so that a test can check the arithmetic.

python -m tests.swarm.programs.shadowed_peer train ...        SHADOW=<folder> in the environment

Of each pair of peers one part in ``EACH`` is looked at: what is sent, before it is sent, and what is decoded from the
partner's bytes with the correction that is taken from it. It changes nothing. See tests/swarm/support/shadow.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from peer.commands.cli import main
from peer.config.schema import CodecName
from peer.exchange.codec import BLOCK, Buffer
from peer.exchange.modulo import Modulo
from peer.exchange.pair.mailbox import SwapMailbox, overlapped_parts
from peer.exchange.pair.overlapped import OverlappedPairExchange
from peer.rounds.contribution import Averaged
from peer.rounds.types import Group
from tests.swarm.support.shadow import EACH, ID, sent_file

swap, encode, decode = OverlappedPairExchange._swap, Modulo.encode, Modulo.decode
take_corrections = SwapMailbox.take_corrections


@dataclass
class Shadow:
    """Of the swap that runs: ids of both, and what was decoded by the first element of its part."""

    folder: Path
    me: str = ""
    partner: str = ""
    size: int = BLOCK  # elements of a part
    decoded: dict[int, dict[str, Any]] = field(default_factory=dict)
    numbers: count[int] = field(default_factory=count)

    def begin(self, me: str, partner: str, numel: int) -> None:
        if me != self.me:
            (self.folder / ID).write_text(me)
        self.me, self.partner, self.decoded = me, partner, {}
        self.size = overlapped_parts(numel)[0][1]

    def looks_at(self, start: int) -> bool:
        """The same parts on both sides."""
        pair = xxhash.xxh32_intdigest(" ".join(sorted((self.me, self.partner))).encode())
        return (start // self.size + pair) % EACH == 0

    def write(self, start: int, correction: Tensor) -> None:
        """A correction is taken. Renamed when it is whole: the peer may be killed at any time."""
        file = self.folder / f"taken-{os.getpid()}-{next(self.numbers)}.npz"
        with file.with_suffix(".tmp").open("wb") as out:
            np.savez(out, correction=correction.numpy(), partner=self.partner, **self.decoded.pop(start))
        file.with_suffix(".tmp").rename(file)


def main_with(shadow: Shadow) -> None:
    def shadowed_swap(self: OverlappedPairExchange, group: Group, *more: Any) -> Averaged:
        node: Any = self.network
        shadow.begin(node.peer_id, group.links[0].peer_id, self.numel)
        return swap(self, group, *more)

    def shadowed_encode(self: Modulo, start: int, part: Tensor) -> bytes:
        data = encode(self, start, part)
        if shadow.looks_at(start):
            np.save(shadow.folder / sent_file(data, shadow.partner), part.numpy())
        return data

    def shadowed_decode(self: Modulo, name: CodecName, start: int, data: Buffer, own: Tensor, out: Tensor) -> int:
        unresolved = decode(self, name, start, data, own, out)
        if shadow.looks_at(start):
            row = {"codec": name, "data": np.frombuffer(bytes(data), np.uint8)}
            shadow.decoded[start] = {**row, "own": own.numpy().copy(), "decoded": out.numpy().copy()}
        return unresolved

    def shadowed_corrections(self: SwapMailbox) -> list[tuple[int, Tensor]]:
        taken = take_corrections(self)
        for index, correction in taken:
            start = self.parts[index][0]
            if shadow.looks_at(start):
                shadow.write(start, correction)
        return taken

    replace: Callable[[Any, str, Any], None] = setattr
    replace(OverlappedPairExchange, "_swap", shadowed_swap)
    replace(Modulo, "encode", shadowed_encode)
    replace(Modulo, "decode", shadowed_decode)
    replace(SwapMailbox, "take_corrections", shadowed_corrections)
    main()


if __name__ == "__main__":
    torch.set_num_threads(1)
    here = Path(os.environ["SHADOW"])
    main_with(Shadow(here))
