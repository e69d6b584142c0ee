"""How many bytes a download from the hub is, before it begins."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from fnmatch import fnmatch
from typing import Any

from peer.hub.answers import ASK_SECONDS, client, within

UNKNOWN_SIZE = "of a size that the hub does not tell"


def download_size(name: str, revision: str | None, patterns: tuple[str, ...]) -> str:
    """In words, the files of the model repository ``name`` that match ``patterns`` and are not in the local cache.

    Empty when all are here, and when the hub says no or is not reached: then the download itself says why.
    """
    return _size("model", name, revision, lambda info: patterns)


def data_size(name: str, subset: str | None, splits: Collection[str | None]) -> str:
    """As :func:`download_size`, of a data set's files as its card lists them, for these ``splits``; none: for all."""
    return _size("dataset", name, None, lambda info: [*_data_files(info.card_data or {}, subset, splits)])


def _size(kind: str, name: str, revision: str | None, patterns_of: Callable[[Any], Sequence[str]]) -> str:
    from huggingface_hub import errors, try_to_load_from_cache

    how = {"repo_type": kind, "revision": revision, "files_metadata": True, "timeout": ASK_SECONDS}
    try:
        info = within(lambda: client().repo_info(name, **how))
        patterns = patterns_of(info)
    except (TimeoutError, ValueError, KeyError, TypeError, AttributeError) as error:
        return "" if isinstance(error, errors.HFValidationError | errors.HfHubHTTPError) else UNKNOWN_SIZE
    except Exception as error:  # noqa: BLE001 - the clients of huggingface_hub's versions have different ones
        return UNKNOWN_SIZE if "Timeout" in type(error).__name__ else ""
    files = {it.rfilename: it.size for it in info.siblings or ()}
    wanted = [it for it in files if any(fnmatch(it, pattern) for pattern in patterns)]
    here = (try_to_load_from_cache(name, it, revision=info.sha, repo_type=kind) for it in wanted)
    missing = [files[it] for it, path in zip(wanted, here, strict=True) if not isinstance(path, str)]
    return "" if wanted and not missing else in_words(missing)


def _data_files(card: Any, subset: str | None, splits: Collection[str | None]) -> Iterator[str]:
    """The patterns in ``configs`` of a data set's card; none when it has no such list."""
    configs: Any = card.get("configs") or ()
    names = {subset} if subset else {"default", configs[0]["config_name"] if len(configs) == 1 else "default"}
    for config in configs:
        if config["config_name"] in names or (not subset and config.get("default")):
            of_config = config["data_files"]
            for entry in of_config if isinstance(of_config, list) else [of_config]:
                if isinstance(entry, str):
                    yield entry
                elif not splits or entry["split"] in splits:
                    yield from [entry["path"]] if isinstance(entry["path"], str) else entry["path"]


def in_words(sizes: Sequence[int | None]) -> str:
    """For a person, in decimal units as on the hub; files without a size are said to be so."""
    known = [it for it in sizes if isinstance(it, int) and it >= 0]
    if not known:
        return UNKNOWN_SIZE
    more = f", and {len(sizes) - len(known)} {UNKNOWN_SIZE}" if len(known) < len(sizes) else ""
    total = float(sum(known))
    for unit in ("bytes", "kB", "MB", "GB"):
        if total < 1000 or unit == "GB":
            break
        total /= 1000
    return f"{total:.4g} {unit} in {len(known)} file{'s' if len(known) > 1 else ''}{more}"
