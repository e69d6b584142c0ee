"""Does a pre-trained model read the ids that it was trained with?"""

from __future__ import annotations

from collections.abc import Iterator

from peer.commands.check.finding import Finding, ok, warn
from peer.config.schema import Config


def tokenizer(config: Config) -> Iterator[Finding]:
    """Nothing is said of fresh weights."""
    from peer.replica.pretrained_tokenizer import compare

    found = compare(config.run)
    if found is not None:
        yield warn("tokenizer", found.text, found.advice) if found.advice else ok("tokenizer", found.text)
