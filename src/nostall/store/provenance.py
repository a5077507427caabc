"""What is written down about one optimised cubin: one JSON file, itself named by its hash."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from nostall.core.launch import Strict
from nostall.core.measurement import Answer, Comparison, Kind
from nostall.core.tolerance import Tolerance
from nostall.store.errors import BadStore

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Verification(Strict):
    """The verifier's answer on (original, optimised); ``checked`` counts instructions."""

    safe: bool
    checked: int
    nostall: str
    nvdisasm: str


class Compared(Strict):
    """The deciding comparison: ratio original / optimised with its 95 % interval, the null's
    interval, and how many interleaved triples were timed."""

    ratio: float
    low: float
    high: float
    null_low: float
    null_high: float
    triples: int
    verdict: Answer

    @classmethod
    def of(cls, comparison: Comparison, triples: int) -> Compared:
        return cls(
            ratio=comparison.ratio,
            low=comparison.low,
            high=comparison.high,
            null_low=comparison.null_low,
            null_high=comparison.null_high,
            triples=triples,
            verdict=comparison.verdict,
        )


class Provenance(Strict):
    """Where an optimised cubin comes from, for whom it may be used, and what it is worth.

    ``original`` and ``optimised`` are sha256 of the two files.  ``launch`` is what the gain was
    found with: the same bytes launched with other sizes are as safe, but were not measured.
    ``device`` is the GPU, driver, clocks and temperature as found; empty when ``kind`` is
    ``modelled``.  ``checks`` is the number of random inputs on which outputs were compared; bit by
    bit, unless ``tolerance`` says how far apart they were allowed to be.
    """

    schema_version: Literal[1] = 1
    original: Sha256
    optimised: Sha256
    kernel: str
    origin: str
    architecture: str
    kind: Kind
    ratio: float = Field(gt=0)
    gpu: str | None
    device: dict[str, str]
    checks: int | None = None
    tolerance: Tolerance | None = None
    toolchain: dict[str, str]
    launch: dict[str, Any] | None
    verified: Verification
    comparison: Compared | None
    settings: dict[str, Any]
    notes: tuple[str, ...]
    created: str

    @model_validator(mode="after")
    def _whole(self) -> Provenance:
        if self.original == self.optimised:
            raise ValueError("original and optimised are the same file")
        if self.kind == "measured" and (self.gpu is None or self.comparison is None):
            raise ValueError("a measured record needs its GPU and its comparison")
        if self.comparison is not None and self.comparison.verdict != "faster":
            raise ValueError(f"the comparison says {self.comparison.verdict!r}, not 'faster'")
        return self

    def to_bytes(self) -> bytes:
        return (self.model_dump_json(indent=1) + "\n").encode()

    @classmethod
    def from_bytes(cls, data: bytes, what: str) -> Provenance:
        """Read it back; anything unexpected is a :class:`BadStore` naming ``what``, the field."""
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "the file"
            raise BadStore(f"{what}: {where}: {first['msg']}") from error
