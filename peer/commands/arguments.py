"""Types of command-line arguments: each returns the value or says in a few words what is wrong."""

from __future__ import annotations

import argparse
import re

from pydantic import TypeAdapter, ValidationError

from peer.config.fields import REPOSITORY, Bitrate, bytes_a_second


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def repository(text: str) -> str:
    if not re.fullmatch(REPOSITORY, text):
        raise argparse.ArgumentTypeError("give OWNER/NAME")
    return text


def bitrate(text: str) -> float:
    try:
        return bytes_a_second(TypeAdapter(Bitrate).validate_python(text)) or 0.0
    except ValidationError as error:
        raise argparse.ArgumentTypeError(error.errors()[0]["msg"].removeprefix("Value error, ")) from None
