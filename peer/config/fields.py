"""Field types and the base class of all sections of the configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

# Marks a field that says where something is on this machine; the run's digest leaves it out.
LOCAL: dict[str, Any] = {"local": True}

Positive = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Port = Annotated[int, Field(ge=0, le=65535)]


def _path(value: Any) -> Any:
    """YAML has strings, the code wants ``Path``."""
    try:
        return Path(value).expanduser() if isinstance(value, str) else value
    except RuntimeError:
        raise ValueError(f"there is no home directory for {value}") from None


PathText = Annotated[Path, BeforeValidator(_path)]
# of a tuple that YAML gives as a list
Sequence = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
Words = Annotated[tuple[str, ...], Sequence]


class Section(BaseModel):
    """Strict: unknown keys and wrong types are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
