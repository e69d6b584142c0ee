"""Load a checked :class:`peer.config.schema.Config` from files, environment and ``--set``.

Precedence: defaults < files (a later one wins) < environment < ``--set``. Every mistake is one line that names the key.
"""

from __future__ import annotations

import copy
import difflib
import os
import re
import typing
import warnings
from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from peer.config.schema import Config
from peer.errors import UserError
from peer.logs import get_logger

log = get_logger("config")
C = TypeVar("C", bound=BaseModel)

# Few on purpose: addresses, paths and secrets. Everything else belongs into the file.
ENVIRONMENT = {
    "NOLOCO_INITIAL_PEERS": "peer.initial_peers",  # separated by commas or spaces
    "NOLOCO_PEER_NAME": "peer.name",
    "NOLOCO_IDENTITY": "peer.identity",
    "NOLOCO_INVITATION": "peer.invitation",
    "NOLOCO_RUN_DIR": "run.dir",
}
OTHER_VARIABLES = {"NOLOCO_LOG_LEVEL"}
_BOOL, _FLOAT = "tag:yaml.org,2002:bool", "tag:yaml.org,2002:float"


class _Loader(yaml.SafeLoader):
    """YAML with three differences: ``3e-4`` is a number, ``no`` is a string, a repeated key is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key) for key, _ in node.value]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise yaml.MarkedYAMLError(problem=f"the key {twice!r} is given twice", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in (_BOOL, _FLOAT)]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_BOOL, re.compile(r"^(true|True|false|False)$"), list("tTfF"))
_Loader.add_implicit_resolver(
    _FLOAT,
    re.compile(r"^[-+]?(\d[\d_]*\.[\d_]*([eE][-+]?\d+)?|\.\d[\d_]*([eE][-+]?\d+)?|\d[\d_]*[eE][-+]?\d+|\.(inf|nan))$"),
    list("-+.0123456789"),
)


class _Dumper(yaml.SafeDumper):
    """Quotes strings that :class:`_Loader` would not read back as strings."""


_Dumper.yaml_implicit_resolvers = {
    first: yaml.SafeDumper.yaml_implicit_resolvers.get(first, []) + _Loader.yaml_implicit_resolvers.get(first, [])
    for first in {*yaml.SafeDumper.yaml_implicit_resolvers, *_Loader.yaml_implicit_resolvers}
}


def load(
    files: Path | Sequence[Path] | None, overrides: Iterable[str] = (), environment: Mapping[str, str] | None = None
) -> Config:
    """The checked configuration. Raises :class:`UserError` for anything that is wrong."""
    return resolve(Config, files, overridden(overrides), environment)


def overridden(overrides: Iterable[str]) -> Iterable[tuple[str, Any]]:
    """Keys and values of ``--set`` texts, for :func:`resolve`."""
    for override in overrides:
        path, equals, text = override.partition("=")
        if not equals or not path:
            raise UserError(f"--set {override}: write --set section.key=value, for example --set run.steps=200")
        try:
            value = _parse(text, f"--set {override}")
        except UserError:
            if text.endswith(("]", "}")):  # a list or a section with a mistake in it
                raise
            value = text  # such as *.txt, which YAML takes for an alias
        yield path, value


def resolve(
    kind: type[C],
    files: Path | Sequence[Path] | None,
    values: Iterable[tuple[str, Any]] = (),
    environment: Mapping[str, str] | None = None,
    base: Mapping[str, Any] | None = None,
) -> C:
    """A configuration of this ``kind``; ``values``: keys such as ``run.steps`` with values that override all else.
    ``base``: sections that all else overrides.
    """
    files = [] if files is None else [files] if isinstance(files, Path) else files
    tree: dict[str, Any] = copy.deepcopy(dict(base or {}))
    for file in files:
        _merge(tree, _read(file))
    given: set[str] = set()
    for path, value in chain(from_environment(os.environ if environment is None else environment), values):
        _put(tree, path, value, given)
        given.add(path)
    source = " ".join(map(str, files)) or "configuration"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            config = kind.model_validate(tree)
        except ValidationError as error:
            raise UserError(f"{source}: {explain(error, tree, kind)}") from None
    for warning in caught:
        log.warning("%s: %s", source, warning.message)
    return config


def dump(config: Config) -> str:
    """``config`` as YAML that :func:`load` reads back to an equal one."""
    return yaml.dump(config.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False)


def _read(file: Path) -> dict[str, Any]:
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{file}: cannot read the configuration: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{file}: the configuration is not UTF-8 text") from None
    tree = _parse(text, str(file))
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise UserError(f"{file}: expected the sections run: and peer:, found {type(tree).__name__}")
    return {key: {} if value is None else value for key, value in tree.items()}


def _parse(text: str, where: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, RecursionError, ValueError, LookupError, AttributeError, TypeError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        raise UserError(f"{where}:{line} {getattr(error, 'problem', None) or 'not valid YAML'}") from None


def from_environment(environment: Mapping[str, str]) -> Iterable[tuple[str, Any]]:
    """Keys and values from the environment. Raises :class:`UserError` for an unknown ``NOLOCO_`` variable."""
    for name in sorted(environment):
        if not name.startswith("NOLOCO_") or name in OTHER_VARIABLES:
            continue
        path = ENVIRONMENT.get(name)
        if path is None:
            raise UserError(f"environment: {name} is not known{_nearest(name, ENVIRONMENT)}")
        text = environment[name]
        yield path, text.replace(",", " ").split() if path == "peer.initial_peers" else text


def _merge(tree: dict[str, Any], later: dict[str, Any]) -> None:
    """Merge ``later`` into ``tree``, section by section. Another method replaces the one before and its settings."""
    for key, value in later.items():
        mine = tree.get(key)
        if isinstance(mine, dict) and isinstance(value, dict) and not (key == "outer" and _another(mine, value)):
            _merge(mine, value)
        else:
            tree[key] = value


def _another(section: dict[str, Any], later: dict[str, Any]) -> bool:
    return "name" in section and "name" in later and section["name"] != later["name"]


def _put(tree: dict[str, Any], path: str, value: Any, given: Container[str]) -> None:
    """Set one key. Another method replaces the one before and its settings, as in :func:`_merge`, but for those that
    are ``given`` as ``value`` is: their order says nothing.
    """
    *parents, last = path.split(".")
    for key in parents:
        if tree.get(key) is None:
            tree[key] = {}
        if not isinstance(tree[key], dict):
            raise UserError(f"{path}: {key} is a value, not a section")
        tree = tree[key]
    if parents[-1:] == ["outer"] and _another(tree, {last: value}):
        for key in [it for it in tree if ".".join((*parents, it)) not in given]:
            del tree[key]
    tree[last] = value


def explain(error: ValidationError, tree: Any, kind: type[BaseModel]) -> str:
    """The first mistake of a validation, in one line, with the key's path and the nearest right key."""
    mistakes = error.errors(include_url=False)
    first = mistakes[0]
    path = _path(first["loc"], tree, kind, missing=first["type"] == "missing")
    more = f" (and {len(mistakes) - 1} more)" if len(mistakes) > 1 else ""
    if first["type"] == "extra_forbidden":
        parents, last = path[:-1], path[-1]
        valid = _sections(kind, parents, tree)[0].model_fields
        return f"{_dotted(path)}: unknown key{_nearest(last, valid)}{more}"
    if first["type"].startswith("union_tag"):
        tag = first.get("ctx", {}).get("tag")
        said = f"{_dotted(path)}.name: {tag!r} is not known" if tag else f"{_dotted(path)}.name is missing"
        return f"{said}, choose one of: {', '.join(_fitting_names(kind, path, tree))}{more}"
    text = first["msg"].removeprefix("Value error, ")
    text = text[0].lower() + text[1:]
    value = first.get("input")
    given = f" (given: {value!r})" if isinstance(value, str | int | float | bool) or value is None else ""
    return f"{_dotted(path) + ': ' if path else ''}{text}{given}{more}"


def _path(location: tuple[int | str, ...], tree: Any, kind: type[BaseModel], missing: bool) -> list[str]:
    """pydantic's location without the union tags that it puts between the keys; a missing key is not in ``tree``.

    The tag that follows a union's key is no key, also when ``tree`` has one of that name by mistake.
    """
    path: list[str] = []
    section, tag_follows = kind, False
    for depth, key in enumerate(location):
        inside = isinstance(tree, dict) and key in tree and not tag_follows
        if inside or isinstance(key, int) or (missing and depth == len(location) - 1):
            path.append(str(key))
        tag_follows = False
        if inside:
            tree, field = tree[key], section.model_fields.get(str(key))
            sections = _models(field.annotation) if field is not None else []
            tag_follows = len(sections) > 1
            named = chosen_section(field.annotation, tree.get("name")) if field and isinstance(tree, dict) else []
            section = next(iter(named or sections), BaseModel)
    return path


def _dotted(path: list[str]) -> str:
    return ".".join(key if key.isprintable() else repr(key) for key in path)


def _fitting_names(kind: type[BaseModel], path: list[str], tree: Any) -> list[str]:
    """The names of the sections that may stand at ``path``: those that have all keys that are given there, if any."""
    sections = _sections(kind, path, tree)
    for key in path:
        tree = tree[key]
    given = set(tree) - {"name"}
    fitting = [it for it in sections if given <= it.model_fields.keys()]
    return [str(name) for it in fitting or sections for name in _names(it)]


def _sections(kind: type[BaseModel], path: list[str], tree: Any) -> list[type[BaseModel]]:
    """The sections that may stand at ``path``. Of a union it is the one whose name is given, if it is known."""
    sections = [kind]
    for key in path:
        tree = tree.get(key, {}) if isinstance(tree, dict) else {}
        field = sections[0].model_fields[key].annotation
        sections = chosen_section(field, tree.get("name")) or _models(field)
    return sections


def chosen_section(annotation: Any, name: Any) -> list[type[BaseModel]]:
    """The section of a union that is called ``name``."""
    kinds = [kind for kind in _models(annotation) if "name" in kind.model_fields]
    return [kind for kind in kinds if name in _names(kind)]


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in typing.get_args(annotation) for model in _models(part)]


def _names(model: type[BaseModel]) -> tuple[Any, ...]:
    return typing.get_args(model.model_fields["name"].annotation)


def _nearest(word: str, choices: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.5)
    return f", did you mean {near[0]}?" if near else f", choose from: {', '.join(choices)}"
