"""The settings of a user's own loop: the configuration without what the user's program decides itself.

A file has the same two halves, ``run`` and ``peer``, and is checked as strictly. Model, data, inner optimizer and batch
are the program's; keys for them are refused rather than ignored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from peer.config import load
from peer.config.fields import Name, Section
from peer.config.schema import MemberConfig, PeerConfig, RunConfig, SwarmRunConfig
from peer.errors import UserError


def _without(value: Any, whole: type[Section], section: type[Section]) -> Any:
    if isinstance(value, dict):
        for key in value:
            if key in whole.model_fields and key not in section.model_fields:
                raise ValueError(f"{key} is your own program's affair; leave it out")
    return value


class OwnRun(SwarmRunConfig):
    """Equal in the whole swarm, with the model's layout, which is compared as well."""

    name: Name
    steps: int | None = Field(default=None, gt=0)  # inner steps of the run, when they are known: its end is finer then
    tag: str = Field(default="", max_length=200)  # what else must be equal, in words: data, tokenizer, code version

    @model_validator(mode="before")
    @classmethod
    def _not_the_programs(cls, value: Any) -> Any:
        return _without(value, RunConfig, cls)


class OwnMember(MemberConfig):
    """This machine only."""

    @model_validator(mode="before")
    @classmethod
    def _not_the_programs(cls, value: Any) -> Any:
        return _without(value, PeerConfig, cls)


class OwnConfig(Section):
    """A whole configuration of a user's own loop."""

    run: OwnRun
    peer: OwnMember = OwnMember()


# Keywords of OuterLoop.start and their places.
KEYWORDS = {
    "run": "run.name",
    "method": "run.outer.name",
    "inner_steps": "run.inner_steps",
    "steps": "run.steps",
    "tag": "run.tag",
    "initial_peers": "peer.initial_peers",
    "name": "peer.name",
}


def resolve(
    config: OwnConfig | Path | str | None,
    keywords: Mapping[str, Any],
    others: Mapping[str, Any],
    environment: Mapping[str, str] | None = None,
) -> OwnConfig:
    """Defaults < file < environment < ``keywords`` (those that are not ``None``) < ``others``, by their whole keys."""
    if isinstance(config, OwnConfig):
        if given := [key for key, value in keywords.items() if value is not None] + list(others):
            raise UserError(f"OuterLoop: {given[0]} stands beside a config that is complete; put it into that")
        return config
    if config is not None and not isinstance(config, str | Path):
        raise UserError(f"OuterLoop: config is a file or an OwnConfig, not {type(config).__name__}")
    return load.resolve(OwnConfig, None if config is None else Path(config), _values(keywords, others), environment)


def _values(keywords: Mapping[str, Any], others: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in keywords.items():
        if value is not None:
            several = key == "initial_peers" and isinstance(value, str)
            yield KEYWORDS[key], value.replace(",", " ").split() if several else _listed(value)
    for path, value in others.items():
        yield path, _listed(value)


def _listed(value: Any) -> Any:
    """Any sequence as YAML would have it."""
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
