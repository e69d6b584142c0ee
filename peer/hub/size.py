"""How many bytes a download from the hub is, before it begins."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatch

from peer.hub.answers import ASK_SECONDS, client, within

UNKNOWN_SIZE = "of a size that the hub does not tell"


def download_size(name: str, revision: str | None, patterns: tuple[str, ...]) -> str:
    """In words, the files of repository ``name`` that match ``patterns`` and are not in the local cache.

    Empty when all are here, and when the hub says no or is not reached: then the download itself says why.
    """
    from huggingface_hub import errors, try_to_load_from_cache

    try:
        info = within(lambda: client().model_info(name, revision=revision, files_metadata=True, timeout=ASK_SECONDS))
    except (TimeoutError, ValueError, KeyError, TypeError) as error:
        return "" if isinstance(error, errors.HFValidationError | errors.HfHubHTTPError) else UNKNOWN_SIZE
    except Exception as error:  # noqa: BLE001 - the clients of huggingface_hub's versions have different ones
        return UNKNOWN_SIZE if "Timeout" in type(error).__name__ else ""
    files = {it.rfilename: it.size for it in info.siblings or ()}
    wanted = [it for it in files if any(fnmatch(it, pattern) for pattern in patterns)]
    missing = [it for it in wanted if not isinstance(try_to_load_from_cache(name, it, revision=info.sha), str)]
    if wanted and not missing:
        return ""
    return in_words([files[it] for it in missing])


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
