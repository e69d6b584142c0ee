"""Field types and the base classes of all sections of the configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

# Marks a field that says where something is on this machine; the run's digest leaves it out.
LOCAL: dict[str, Any] = {"local": True}

Positive = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Port = Annotated[int, Field(ge=0, le=65535)]


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _path(value: Any) -> Any:
    """YAML has strings, the code wants ``Path``."""
    try:
        return Path(value).expanduser() if isinstance(value, str) else value
    except RuntimeError:
        raise ValueError(f"there is no home directory for {value}") from None


PathText = Annotated[Path, BeforeValidator(_path)]
Words = Annotated[tuple[str, ...], BeforeValidator(_tuple)]  # a YAML list of strings


class Section(BaseModel):
    """Strict: unknown keys and wrong types are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class LocalPath(Section):
    """Base for sections with paths and without a discriminator; the others use :data:`PathText`."""

    @field_validator("*", mode="before")
    @classmethod
    def _paths(cls, value: Any, info: Any) -> Any:
        wants_path = cls.model_fields[info.field_name].annotation in (Path, Path | None)
        return _path(value) if wants_path else value
