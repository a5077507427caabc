"""Provenance record of an optimised cubin: one JSON file, named by its hash."""

from __future__ import annotations

import math
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, ValidationError, model_validator

from nostall.core.launch import StrictModel
from nostall.core.measurement import Comparison, Kind, Verdict
from nostall.core.text.terminal import escape_controls, is_printable
from nostall.core.tolerance import Tolerance
from nostall.store.artefacts import CUBIN, RECIPE, SHA256_PATTERN
from nostall.store.errors import BadStore

MAX_TEXT = 1 << 16
"""Characters of a text; mangled names of C++ templates have thousands."""
_MAX_DEPTH = 20
"""Nesting of ``launch`` and ``settings``."""


def _check_text(text: str) -> str:
    """Refuse control characters: the text is printed on terminals."""
    if len(text) > MAX_TEXT or not is_printable(text):
        raise ValueError(
            f"{escape_controls(text[:60])!r} has control characters or more than {MAX_TEXT} "
            "characters"
        )
    return text


def _check_date(text: str) -> str:
    datetime.fromisoformat(text)  # raises ValueError
    return text


def _check_json(values: dict[str, Any]) -> dict[str, Any]:
    """Refuse numbers that are not finite, control characters and deep nesting."""
    _check_value(values, _MAX_DEPTH)
    return values


def _check_value(value: Any, depth: int) -> None:
    if depth == 0:
        raise ValueError(f"it is nested more than {_MAX_DEPTH} levels deep")
    if isinstance(value, dict):
        for key, item in value.items():
            _check_text(str(key))
            _check_value(item, depth - 1)
    elif isinstance(value, list | tuple):
        for item in value:
            _check_value(item, depth - 1)
    elif isinstance(value, str):
        _check_text(value)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"it holds the number {value}; numbers must be finite")


Sha256 = Annotated[str, Field(pattern=SHA256_PATTERN)]
Text = Annotated[str, AfterValidator(_check_text)]
Date = Annotated[Text, AfterValidator(_check_date)]
Json = Annotated[dict[str, Any], AfterValidator(_check_json)]
Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Positive = Annotated[float, Field(gt=0)]


class StoredModel(StrictModel):
    """Base class of what the store keeps and bundles carry: numbers are finite."""

    model_config = ConfigDict(allow_inf_nan=False)


class Verification(StoredModel):
    """The safety verifier's verdict on a pair of original and optimised cubin."""

    safe: bool
    checked: Count
    """Instructions that were checked."""
    nostall: Text
    """Version of nostall."""
    nvdisasm: Text
    """Version of nvdisasm."""


class ComparisonRecord(StoredModel):
    """The comparison that decided for the optimised cubin, as stored.

    The fields are those of :class:`~nostall.core.measurement.Comparison`.
    """

    ratio: Positive
    low: Positive
    high: Positive
    null_low: Positive
    null_high: Positive
    triples: Count
    """Interleaved triples (original, candidate, original) that were timed."""
    verdict: Verdict

    @classmethod
    def from_comparison(cls, comparison: Comparison, triples: int) -> ComparisonRecord:
        """The record of a comparison of ``triples`` triples."""
        return cls(
            ratio=comparison.ratio,
            low=comparison.low,
            high=comparison.high,
            null_low=comparison.null_low,
            null_high=comparison.null_high,
            triples=triples,
            verdict=comparison.verdict,
        )


class Provenance(StoredModel):
    """Where an optimised cubin comes from, where it may be used, and how much faster it is."""

    schema_version: Literal[1] = 1
    original: Sha256
    optimised: Sha256
    recipe: Sha256 | None = None
    """The file that says how ptxas made the optimised cubin; None if its instructions were only
    moved."""
    kernel: Text
    """Name of the kernel in the cubin."""
    origin: Text
    """Where the original comes from, such as a file."""
    architecture: Annotated[str, Field(pattern=r"^sm_[0-9]{2,3}[af]?$")]
    """Such as ``sm_90``."""
    kind: Kind
    """Whether ``ratio`` is measured or modelled."""
    ratio: Positive
    """Time of the original / time of the optimised cubin."""
    gpu: Text | None
    """Name of the GPU of a measured ratio."""
    device: dict[Text, Text]
    """GPU, driver, clocks and temperature as read; empty if the ratio is modelled."""
    checks: Count | None = None
    """Random inputs on which outputs were compared."""
    tolerance: Tolerance | None = None
    """Allowed difference of the outputs; None if they were compared bit by bit."""
    toolchain: dict[Text, Text]
    """Versions of the compilers and tools."""
    launch: Json | None
    """The launch specification of the measurement.  The cubin is equally safe with other sizes,
    but its gain was not measured there."""
    verified: Verification
    comparison: ComparisonRecord | None
    """The deciding comparison of a measured ratio."""
    settings: Json
    """Settings of the search."""
    dependent_launch: bool = False
    """Whether the optimised cubin is for launches with the attribute of programmatic dependent
    launch: it waits itself for the kernels before it, and ``ratio`` is that of a chain of launches
    over the original's chain without the attribute."""
    notes: tuple[Text, ...]
    created: Date
    """Date and time in ISO 8601."""

    @model_validator(mode="after")
    def _validate_consistency(self) -> Provenance:
        if self.original == self.optimised:
            raise ValueError("original and optimised are the same file")
        if self.kind == "measured" and (self.gpu is None or self.comparison is None):
            raise ValueError("a measured record needs its GPU and its comparison")
        if self.comparison is not None and self.comparison.verdict != "faster":
            raise ValueError(f"the comparison says {self.comparison.verdict!r}, not 'faster'")
        return self

    def files(self) -> tuple[tuple[str, str], ...]:
        """(sha256, suffix) of the files that it names."""
        cubins = ((self.original, CUBIN), (self.optimised, CUBIN))
        return (*cubins, (self.recipe, RECIPE)) if self.recipe is not None else cubins

    def to_bytes(self) -> bytes:
        """The content of the JSON file."""
        return (self.model_dump_json(indent=1) + "\n").encode()

    @classmethod
    def from_bytes(cls, data: bytes, label: str) -> Provenance:
        """Parse the content of a JSON file; ``label`` names it in messages.

        Raises :class:`BadStore`, which names the field, if the content is invalid.
        """
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"]) or "the file"
            raise BadStore(f"{label}: {escape_controls(field)}: {first['msg']}") from error
