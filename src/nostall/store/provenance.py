"""Provenance record of an optimised cubin: one JSON file, named by its hash."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from nostall.core.launch import StrictModel
from nostall.core.measurement import Comparison, Kind, Verdict
from nostall.core.tolerance import Tolerance
from nostall.store.errors import BadStore

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Verification(StrictModel):
    """The safety verifier's verdict on a pair of original and optimised cubin."""

    safe: bool
    checked: int
    """Instructions that were checked."""
    nostall: str
    """Version of nostall."""
    nvdisasm: str
    """Version of nvdisasm."""


class ComparisonRecord(StrictModel):
    """The comparison that decided for the optimised cubin, as stored.

    The fields are those of :class:`~nostall.core.measurement.Comparison`.
    """

    ratio: float
    low: float
    high: float
    null_low: float
    null_high: float
    triples: int
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


class Provenance(StrictModel):
    """Where an optimised cubin comes from, where it may be used, and how much faster it is."""

    schema_version: Literal[1] = 1
    original: Sha256
    optimised: Sha256
    kernel: str
    """Name of the kernel in the cubin."""
    origin: str
    """Where the original comes from, such as a file."""
    architecture: str
    """Such as ``sm_90``."""
    kind: Kind
    """Whether ``ratio`` is measured or modelled."""
    ratio: float = Field(gt=0)
    """Time of the original / time of the optimised cubin."""
    gpu: str | None
    """Name of the GPU of a measured ratio."""
    device: dict[str, str]
    """GPU, driver, clocks and temperature as read; empty if the ratio is modelled."""
    checks: int | None = None
    """Random inputs on which outputs were compared."""
    tolerance: Tolerance | None = None
    """Allowed difference of the outputs; None if they were compared bit by bit."""
    toolchain: dict[str, str]
    """Versions of the compilers and tools."""
    launch: dict[str, Any] | None
    """The launch specification of the measurement.  The cubin is equally safe with other sizes,
    but its gain was not measured there."""
    verified: Verification
    comparison: ComparisonRecord | None
    """The deciding comparison of a measured ratio."""
    settings: dict[str, Any]
    """Settings of the search."""
    notes: tuple[str, ...]
    created: str
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
            raise BadStore(f"{label}: {field}: {first['msg']}") from error
