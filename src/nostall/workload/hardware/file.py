"""Hardware files: TOML in, :class:`Hardware` out; the presets are such files."""

from __future__ import annotations

import tomllib
from importlib import resources
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from nostall.core.errors import BadHardware, BadInput
from nostall.workload.hardware.description import Hardware
from nostall.workload.hardware.efficiency import Curve, flat
from nostall.workload.hardware.operators import OperatorCurve
from nostall.workload.hardware.quantity import quantity
from nostall.workload.jobs.operators import OperatorKind
from nostall.workload.jobs.record import Resource

MOST_BYTES = 1 << 20
"""A hardware file is a page of text; anything larger is something else."""


def _amount(dimension: str) -> BeforeValidator:
    def read(value: object) -> float:
        if not isinstance(value, str):
            raise ValueError(f"{value!r} has no unit; write it as text with a unit ({dimension})")
        try:
            return quantity(value, dimension)
        except BadInput as error:
            raise ValueError(str(error)) from error

    return BeforeValidator(read)


Flops = Annotated[float, _amount("FLOP/s")]
Rate = Annotated[float, _amount("B/s")]
Size = Annotated[float, _amount("B")]
Seconds = Annotated[float, _amount("s")]


class _CurveFile(BaseModel):
    model_config = ConfigDict(extra="forbid")
    share: float = Field(gt=0, le=1)
    overhead: Seconds = 0.0


class _OperatorFile(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    overhead: Seconds = 0.0
    compute: float = Field(default=0.0, ge=0)
    memory: float = Field(default=0.0, ge=0)


class HardwareFile(BaseModel):
    """Schema of a hardware file.  ``sources`` names where each number was read."""

    model_config = ConfigDict(extra="forbid")
    name: str
    flops: dict[str, Flops] = Field(min_length=1)
    memory: Rate
    memory_size: Size
    pcie: Rate
    nvlink: Rate = 0.0
    ethernet: Rate = 0.0
    gpus_per_server: int = Field(ge=1, le=4096)
    pcie_links: int = Field(default=1, ge=1, le=4096)
    efficiency: dict[Resource, _CurveFile] = Field(default_factory=dict)
    operators: dict[OperatorKind, _OperatorFile] = Field(default_factory=dict)
    sources: dict[str, str] = Field(default_factory=dict)

    def hardware(self) -> Hardware:
        """The description, with the published flat efficiency where the file gives none."""
        given = {r: Curve(c.share, c.overhead) for r, c in self.efficiency.items()}
        operators = {k: OperatorCurve(**dict(c)) for k, c in self.operators.items()}
        fields = self.model_dump(exclude={"efficiency", "operators"})
        return Hardware(**fields, efficiency={**flat(), **given}, operators=operators)


def presets() -> list[str]:
    """Names that :func:`load_hardware` takes besides a path."""
    found = resources.files("nostall.workload.hardware").joinpath("presets").iterdir()
    return sorted(p.name.removesuffix(".toml") for p in found if p.name.endswith(".toml"))


def load_hardware(name_or_path: str) -> Hardware:
    """A preset by name, or a TOML file by path.

    Raises :class:`~nostall.core.errors.BadHardware` naming the file and the field.
    """
    if name_or_path in presets():
        place = resources.files("nostall.workload.hardware").joinpath("presets")
        return _parse(place.joinpath(f"{name_or_path}.toml").read_text("utf-8"), name_or_path)
    path = Path(name_or_path)
    if not path.is_file():
        raise BadHardware(
            f"no hardware {name_or_path!r}; give a TOML file or one of {', '.join(presets())}"
        )
    if path.stat().st_size > MOST_BYTES:
        raise BadHardware(f"{path} is larger than {MOST_BYTES} bytes; a hardware file is TOML text")
    try:
        return _parse(path.read_text("utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise BadHardware(f"cannot read {path}: {error}; give a TOML file") from error


def _parse(text: str, where: str) -> Hardware:
    try:
        return HardwareFile.model_validate(tomllib.loads(text)).hardware()
    except tomllib.TOMLDecodeError as error:
        raise BadHardware(f"{where} is not TOML: {error}; see the presets for the form") from error
    except BadInput as error:  # a curve that the schema allows and nothing can have
        raise BadHardware(f"{where}: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise BadHardware(
            f"{where}: {field}: {first['msg'].removeprefix('Value error, ')}"
            f" ({error.error_count()} such problems); correct the file"
        ) from error
