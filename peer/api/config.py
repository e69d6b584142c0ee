"""The settings of a program's own loop: the configuration without the keys that the program decides.

A file has the same two halves, ``run`` and ``peer``, and the same checks. The program decides model, data, inner
optimizer and batch; keys for them are refused. What the program does not say comes from the swarm that it joins, or
from the state that it resumes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from peer.config import load
from peer.config.fields import Section
from peer.config.schema import MemberConfig, PeerConfig, RunConfig, SwarmRunConfig
from peer.errors import UserError
from peer.rounds.types import Name

KEYWORDS = {  # what OuterLoop.start has keywords for
    "run": "run.name",
    "method": "run.outer.name",
    "inner_steps": "run.inner_steps",
    "steps": "run.steps",
    "tag": "run.tag",
    "peers": "peer.initial_peers",
    "name": "peer.name",
}


def _refuses(whole: type[Section]) -> Any:
    """A validator for a section that refuses the other keys of ``whole``."""

    @classmethod  # type: ignore[misc]
    def check(section: type[Section], value: Any) -> Any:
        for key in value if isinstance(value, dict) else ():
            if key in whole.model_fields and key not in section.model_fields:
                raise ValueError(f"{key} is your own program's affair; leave it out")
        return value

    return model_validator(mode="before")(check)


class OwnRun(SwarmRunConfig):
    """Equal in the whole swarm, like the model's layout."""

    name: Name
    steps: int | None = Field(default=None, gt=0)  # inner steps of the run, if known: its last phases are shorter then
    tag: str = Field(default="", max_length=200)  # names what else must be equal: data, tokenizer, code version

    _refused = _refuses(RunConfig)


class OwnMember(MemberConfig):
    """Settings of this machine only."""

    _refused = _refuses(PeerConfig)


class OwnConfig(Section):
    """The whole configuration of a program's own loop."""

    run: OwnRun
    peer: OwnMember = OwnMember()


class _OwnHalf(Section):
    """What is known before the swarm is asked."""

    run: dict[str, Any] = Field(default_factory=dict)
    peer: OwnMember = OwnMember()


def resolve(
    config: OwnConfig | Path | str | None,
    values: Mapping[str, Any],
    environment: Mapping[str, str] | None = None,
    ask: Callable[[OwnMember, Mapping[str, Any], Any], dict[str, Any]] | None = None,
    state: Any = None,
) -> OwnConfig:
    """Defaults < swarm < file < environment < ``values``, by keys such as ``run.steps``.

    ``ask``: for keys of ``run`` that the swarm has, by this machine's settings, the keys that are given and ``state``,
    which the program resumes.
    """
    if isinstance(config, OwnConfig):
        if values:
            raise UserError(f"OuterLoop: {next(iter(values))} is given with a complete config; put it into the config")
        return config
    if config is not None and not isinstance(config, str | Path):
        raise UserError(f"OuterLoop: config is a file or an OwnConfig, not {type(config).__name__}")
    listed = [(key, _listed(key, value)) for key, value in values.items()]
    file = None if config is None else Path(config)
    own = load.resolve(_OwnHalf, file, listed, environment)
    base = {} if ask is None else {"run": ask(own.peer, own.run, state)}
    return load.resolve(OwnConfig, file, listed, environment, base)


def of_keywords(**keywords: Any) -> dict[str, Any]:
    """Those that a program gives, by their keys in the configuration."""
    return {KEYWORDS[name]: value for name, value in keywords.items() if value is not None}


def settings_of(settings: Any) -> Mapping[str, Any]:
    """The ``settings`` that a program gives. Raises :class:`UserError` for what is no mapping of keys."""
    if settings is None:
        return {}
    if not isinstance(settings, Mapping) or not all(isinstance(key, str) for key in settings):
        raise UserError('OuterLoop: settings is a mapping of keys, such as {"run.exchange.codec": "int4"}')
    return settings


def _listed(key: str, value: Any) -> Any:
    """Sequences become lists, as in YAML; a string of addresses too."""
    if isinstance(value, str):
        return value.replace(",", " ").split() if key == "peer.initial_peers" else value
    return list(value) if isinstance(value, Sequence) else value
