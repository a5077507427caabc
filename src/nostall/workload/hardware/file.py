"""Reader for hardware files (TOML) and for the presets of the package, which are such files.

Job tables without ``--hardware`` get the oldest preset that has their precisions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from nostall.core.errors import BadHardware, BadInput
from nostall.core.text.plurals import pluralize
from nostall.core.validation import parse_toml
from nostall.workload.hardware.description import (
    EfficiencyCurve,
    Hardware,
    OperatorTimeModel,
    flat_efficiency,
)
from nostall.workload.jobs.record import Job, OperatorKind, Resource, canonical_precision
from nostall.workload.jobs.table import BINARY_PREFIXES, DECIMAL_PREFIXES, printable

_QUANTITY = re.compile(
    r"\s*([0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?)\s*([KMGT]i|[kKMGTP])?(FLOP/s|FLOPS|B/s|b/s|bit/s|"
    r"bps|B|s)\s*"
)
_UNITS = {
    "FLOP/s": ("FLOP/s", 1.0),
    "FLOPS": ("FLOP/s", 1.0),
    "B/s": ("B/s", 1.0),
    "b/s": ("B/s", 0.125),
    "bit/s": ("B/s", 0.125),
    "bps": ("B/s", 0.125),
    "B": ("B", 1.0),
    "s": ("s", 1.0),
}
"""Base unit of each unit, and the factor that converts to it."""
_EXAMPLES = {"FLOP/s": "11 TFLOP/s", "B/s": "25 Gb/s or 10 GB/s", "B": "16 GB", "s": "0.001 s"}


def parse_quantity(text: str, base_unit: str) -> float:
    """The value of ``text`` in ``base_unit`` ('FLOP/s', 'B/s', 'B' or 's').

    Gb are bits and GB are bytes.  Raises :class:`~nostall.core.errors.BadInput` for text without a
    unit, because a bare number does not say whether it is bits or bytes, giga or gibi.
    """
    match = _QUANTITY.fullmatch(text)
    if match:
        number, prefix, unit = match.groups()
        parsed_base, factor = _UNITS[unit]
        if parsed_base == base_unit:
            return float(number) * {**DECIMAL_PREFIXES, **BINARY_PREFIXES}[prefix or ""] * factor
    raise BadInput(
        f"{text!r} is not an amount in {base_unit}; write a number and a unit, such as "
        f"{_EXAMPLES[base_unit]}"
    )


CANDIDATES = ("pai-2018", "v100-dgx1", "a100-dgx", "h100-dgx", "h200-dgx")
"""Presets by age.  The first one is that of arXiv:1910.05930, which has fp32 only."""


def default_hardware(jobs: Iterable[Job]) -> Hardware:
    """The first of :data:`CANDIDATES` on which the most jobs can run, by their precisions."""
    precisions = [job.precision for job in jobs]

    def can_run(hardware: Hardware) -> int:
        return sum(precision in hardware.flops for precision in precisions)

    return max((load_hardware(name) for name in CANDIDATES), key=can_run)


MAX_BYTES = 1 << 20
"""Size limit of a hardware file, so that another kind of file is not read by mistake."""


def _quantity_in(base_unit: str) -> BeforeValidator:
    def parse(value: object) -> float:
        if not isinstance(value, str):
            raise ValueError(f"{value!r} has no unit; write it as text with a unit ({base_unit})")
        try:
            return parse_quantity(value, base_unit)
        except BadInput as error:
            raise ValueError(str(error)) from error

    return BeforeValidator(parse)


Flops = Annotated[float, _quantity_in("FLOP/s")]
Rate = Annotated[float, _quantity_in("B/s")]
Size = Annotated[float, _quantity_in("B")]
Seconds = Annotated[float, _quantity_in("s")]


class _CurveTable(BaseModel):
    """Schema of an ``[efficiency.RESOURCE]`` table."""

    model_config = ConfigDict(extra="forbid")
    share: float = Field(gt=0, le=1)
    overhead: Seconds = 0.0


class _OperatorTable(BaseModel):
    """Schema of an ``[operators.KIND]`` table."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    overhead: Seconds = 0.0
    compute: float = Field(default=0.0, ge=0)
    memory: float = Field(default=0.0, ge=0)


class HardwareFile(BaseModel):
    """Schema of a hardware file; the fields are those of :class:`Hardware`."""

    model_config = ConfigDict(extra="forbid")
    name: Annotated[str, AfterValidator(printable)]
    flops: dict[str, Flops] = Field(min_length=1)
    memory: Rate
    memory_size: Size
    pcie: Rate
    nvlink: Rate = 0.0
    ethernet: Rate = 0.0
    gpus_per_server: int = Field(ge=1, le=4096)
    pcie_links: int = Field(default=1, ge=1, le=4096)
    contention: float = Field(default=0.0, ge=0, lt=1)
    collective_wait: Seconds = 0.0
    efficiency: dict[Resource, _CurveTable] = Field(default_factory=dict)
    operators: dict[OperatorKind, _OperatorTable] = Field(default_factory=dict)
    sources: dict[str, str] = Field(default_factory=dict)

    def to_hardware(self) -> Hardware:
        """The description; resources without an efficiency have the published flat one."""
        curves = {r: EfficiencyCurve(c.share, c.overhead) for r, c in self.efficiency.items()}
        operators = {k: OperatorTimeModel(**dict(c)) for k, c in self.operators.items()}
        fields = self.model_dump(exclude={"efficiency", "operators"})
        fields["flops"] = self._flops_by_precision()
        return Hardware(**fields, efficiency={**flat_efficiency(), **curves}, operators=operators)

    def _flops_by_precision(self) -> dict[str, float]:
        flops: dict[str, float] = {}
        for name, rate in self.flops.items():
            precision = canonical_precision(name)
            if precision in flops:
                raise BadHardware(
                    f"flops has two rates for {precision} (one is {name!r}); remove one of them"
                )
            flops[precision] = rate
        return flops


def presets() -> list[str]:
    """Names of the hardware descriptions in the package."""
    files = resources.files("nostall.workload.hardware").joinpath("presets").iterdir()
    return sorted(f.name.removesuffix(".toml") for f in files if f.name.endswith(".toml"))


def load_hardware(name_or_path: str) -> Hardware:
    """Load a preset by its name, or a TOML file by its path.

    Raises :class:`~nostall.core.errors.BadHardware` with the file and the field if it is not valid.
    """
    if name_or_path in presets():
        folder = resources.files("nostall.workload.hardware").joinpath("presets")
        return _parse(folder.joinpath(f"{name_or_path}.toml").read_text("utf-8"), name_or_path)
    path = Path(name_or_path)
    if not path.is_file():
        raise BadHardware(
            f"{name_or_path!r} is neither a file nor a preset; give a TOML file or one of "
            f"{', '.join(presets())}"
        )
    if path.stat().st_size > MAX_BYTES:
        raise BadHardware(
            f"{path} is larger than {MAX_BYTES} bytes and cannot be a hardware file; give a TOML "
            "file"
        )
    try:
        return _parse(path.read_text("utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise BadHardware(f"cannot read {path}: {error}; give a TOML file in UTF-8") from error


def _parse(text: str, source: str) -> Hardware:
    """Parse the text of a hardware file; ``source`` names it in error messages."""
    try:
        table = parse_toml(text)
    except ValueError as error:
        raise BadHardware(
            f"{source} is not TOML: {error}; the presets in nostall/workload/hardware/presets are "
            "examples"
        ) from error
    try:
        return HardwareFile.model_validate(table).to_hardware()
    except BadInput as error:  # the schema allows the values, the dataclasses do not
        raise BadHardware(f"{source}: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise BadHardware(
            f"{source}: {field}: {first['msg'].removeprefix('Value error, ')}"
            f" ({pluralize(error.error_count(), 'such problem')}); correct the file, "
            "docs/reference/hardware-file.md has all keys"
        ) from error
