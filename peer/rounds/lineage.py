"""Which averages of everyone a peer's slow weights contain."""

from __future__ import annotations

import hashlib
from typing import Annotated, NamedTuple

from pydantic import Field


class Lineage(NamedTuple):
    """Peers with the same ``digest`` have had the same averages of everyone, in the same order. ``contributions``: how
    many these averages contain; of two lineages the one with more contains more work.
    """

    digest: Annotated[str, Field(max_length=64)] = ""
    contributions: Annotated[int, Field(ge=0, le=2**53)] = 0

    def after(self, digest: str, members: int) -> Lineage:
        """One more round, whose average of ``members`` peers has this digest."""
        line = hashlib.sha256((self.digest + digest).encode()).hexdigest()[:32]
        return Lineage(line, self.contributions + members)


NO_ROUNDS = Lineage()
