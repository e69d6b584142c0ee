"""Field types and the base class of all sections of the configuration."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

# Marks a field that says where something is on this machine; the run's digest leaves it out.
LOCAL: dict[str, Any] = {"local": True}

REPOSITORY = r"^[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}$"  # OWNER/NAME of the Hugging Face hub

Positive = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Port = Annotated[int, Field(ge=0, le=65535)]


def _path(value: Any) -> Any:
    """YAML has strings, the code wants ``Path``."""
    try:
        return Path(value).expanduser() if isinstance(value, str) else value
    except RuntimeError:
        raise ValueError(f"there is no home directory for {value}") from None


def expanded(text: str) -> Path:
    """With the user's home for a ``~``. One of no user stays as it is, and is a path where nothing is."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        return Path(text)


PathText = Annotated[Path, BeforeValidator(_path)]


def _tuple(value: Any) -> Any:
    """YAML gives a list; one string is a list of one."""
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


Sequence = BeforeValidator(_tuple)  # of a tuple of strings
Words = Annotated[tuple[str, ...], Sequence]


UNITS = {"kbit": 125, "mbit": 125_000, "gbit": 125_000_000}  # bytes a second, as in tc
LEAST_BITRATE = 500  # kbit: below it neither a swap nor a state is worth waiting for (rounds/transfer_rule.py)
_BITRATE = re.compile(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)")
_MEANT = re.compile(r"([\d_]+(?:\.\d+)?)\s*([kmg]?)i?(b|bits?|bytes?)?(?:ps|/s|/sec)?", re.IGNORECASE)


def bytes_a_second(bitrate: str | None) -> float | None:
    """Of a checked :data:`Bitrate`."""
    found = _BITRATE.fullmatch(bitrate or "")
    return float(found[1]) * UNITS[found[2]] if found else None


def _bitrate(value: Any) -> str:
    text = str(value)
    rate = bytes_a_second(text)
    if rate is None:
        raise ValueError(f"a rate is a number with kbit, mbit or gbit{_nearest_bitrate(text)}")
    if rate < LEAST_BITRATE * UNITS["kbit"]:
        raise ValueError(f"below {LEAST_BITRATE}kbit no swap is worth waiting for; at least {LEAST_BITRATE}kbit")
    return text


def _nearest_bitrate(text: str) -> str:
    """What may have been meant; a number alone is read as mbit, or as bits where that would be absurd."""
    found = _MEANT.fullmatch(text.strip())
    if found is None:
        return ", such as 20mbit"
    number, prefix, unit = float(found[1]), found[2].lower(), found[3] or ""
    prefix = prefix or ("" if number >= 1e5 else "m")
    bits = 8 if unit == "B" or unit.lower().startswith("byte") else 1
    mbit = number * bits * {"": 1e-6, "k": 1e-3, "m": 1, "g": 1e3}[prefix]
    return f", did you mean {mbit:.10g}mbit?"


# as in tc: kbit, mbit, gbit a second
Bitrate = Annotated[str, BeforeValidator(_bitrate)]


_HOURS = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)")


def minutes_of(hours: str) -> tuple[int, int]:
    """Begin and end of checked :data:`Hours`, in minutes of the day; they may go over midnight."""
    found = _HOURS.fullmatch(hours)
    assert found is not None, "checked with the configuration"
    begin_hour, begin, end_hour, end = map(int, found.groups())
    return 60 * begin_hour + begin, 60 * end_hour + end


def _hours(value: Any) -> str:
    if not isinstance(value, str) or not _HOURS.fullmatch(value):
        raise ValueError("hours are begin and end of a day's training in local time, such as 20:00-08:00")
    begin, end = minutes_of(value)
    if begin == end:
        raise ValueError("these hours have no length; leave them out to train always")
    return value


Hours = Annotated[str, BeforeValidator(_hours)]


class Section(BaseModel):
    """Strict: unknown keys and wrong types are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
