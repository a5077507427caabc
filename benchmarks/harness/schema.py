"""Data model of measured result files, from which ``harness/schema.json`` is generated.

    python -m benchmarks page schema    # write benchmarks/harness/schema.json

Times are microseconds per launch, measured in one fresh process at the end of a search, with the
launches of original and candidate interleaved. A ratio is the original's time divided by the
candidate's, so the candidate is faster if the ratio is above 1.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from benchmarks.harness.rank_agreement import agreement
from benchmarks.harness.result_file import ROOT, load
from nostall.core.files.atomic import write_atomically

SCHEMA = Path(__file__).with_name("schema.json")
MIN_CONFIGURATIONS = 20
"""Smallest number of compiler configurations of a baseline."""
_ROUNDING = 2e-3
"""Allowed relative distance of a ratio from that of its samples, which have four digits."""
_DRIFT = 0.05
"""Allowed relative distance of the ratio of medians from the median of paired ratios."""

Positive = Field(gt=0, allow_inf_nan=False)
Size = Literal["published", "filling"]
"""The problem size: one published for this kernel, or one that fills the GPU."""
Instructions = Literal["mma", "wgmma"]
"""Matrix instructions: of one warp (``mma``), or of four warps (``wgmma``, Hopper)."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Shape(_Strict):
    """Grid in blocks, block in threads."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]


class Options(_Strict):
    """One set of Triton compile options; null in ``tile`` and ``maxnreg`` is the default."""

    num_warps: int = Field(ge=1)
    num_stages: int = Field(ge=1)
    tile: tuple[int, ...] | None = None
    maxnreg: int | None = Field(default=None, ge=1)


class Configuration(Options):
    """Compile options with the measured time ``us``, null if they do not compile or run."""

    us: float | None = Field(gt=0, allow_inf_nan=False)
    failure: str = ""

    @property
    def options(self) -> Options:
        return Options.model_validate(self.model_dump(exclude={"us", "failure"}))


class Samples(_Strict):
    """Microseconds per launch of the original, the candidate and the null (the original again).

    The samples with the same index ran directly after each other.
    """

    original: tuple[float, ...] = Field(min_length=2)
    candidate: tuple[float, ...] = Field(min_length=2)
    null: tuple[float, ...] = Field(min_length=2)
    loads: int = Field(default=1, ge=1)
    """Number of times that the modules were loaded; samples are in equal shares, by load."""


class Modelled(_Strict):
    """Modelled and measured times of a uniform sample of the measured candidates.

    ``us``: (modelled, measured) microseconds per launch of each candidate; ``kendall_tau``: rank
    agreement (tau-b; null if all modelled or all measured times are equal); ``error``: the median
    of abs(modelled / measured - 1).
    """

    us: tuple[tuple[float, float], ...] = Field(min_length=2)
    kendall_tau: float | None = Field(ge=-1, le=1)
    error: float = Field(ge=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _consistent(self) -> Modelled:
        tau, error = agreement(self.us)
        same = math.isclose(error, self.error, abs_tol=1e-6)
        if tau is None or self.kendall_tau is None:
            same = same and tau is self.kendall_tau
        else:
            same = same and math.isclose(tau, self.kendall_tau, abs_tol=1e-6)
        if not same:
            raise ValueError(
                f"kendall_tau and error are {self.kendall_tau}, {self.error}; `us` says {tau}, "
                f"{error}"
            )
        return self


class Record(_Strict):
    """One search on one kernel with one seed.

    ``baseline`` lists the compiler configurations that were timed; the fastest is the original.
    Null: none was timed, and the original is the kernel as its author wrote it. ``best_us`` is the
    time of the best candidate, deployed or not. ``deployed_ratio`` is what a user gets: 1 if the
    original is kept. ``ci_*`` and ``null_*`` bound the bootstrap 95 % intervals of the median ratio
    of the candidate and of the null. These numbers, ``best_us``, ``ratio`` and ``samples`` are null
    if the best candidate failed in the last comparison (``failure`` has the reason). ``faults``
    counts candidates that faulted, hung or computed a wrong result. ``modelled`` compares the SM
    model with the measured candidates; null if the model was not run.
    """

    kernel: str
    size: Size | None = None
    instructions: Instructions | None = None
    shape: Shape
    strategy: str
    seed: int = Field(ge=0)
    kind: Literal["measured"] = "measured"
    baseline: tuple[Configuration, ...] | None = Field(min_length=MIN_CONFIGURATIONS)
    original_us: float = Positive
    best_us: float | None = Positive
    ratio: float | None = Positive
    deployed_ratio: float = Positive
    ci_low: float | None = Positive
    ci_high: float | None = Positive
    null_low: float | None = Positive
    null_high: float | None = Positive
    candidates: int = Field(ge=0)
    faults: int = Field(ge=0)
    seconds: float = Positive
    gpu: str
    driver: str
    versions: dict[str, str]
    command: str
    date: datetime
    samples: Samples | None
    modelled: Modelled | None = None
    failure: str = ""
    details: dict[str, Any] = {}

    @property
    def faster(self) -> bool:
        """Whether the interval of the candidate is above 1 and above the interval of the null."""
        if self.ci_low is None or self.null_high is None:
            return False
        return self.ci_low > max(1.0, self.null_high)

    @model_validator(mode="after")
    def _consistent(self) -> Record:
        """Check that the numbers agree with each other and with the samples."""
        if self.baseline is not None and all(c.us is None for c in self.baseline):
            raise ValueError("no configuration of the baseline ran")
        if self.deployed_ratio != 1.0 and not (self.faster and self.deployed_ratio == self.ratio):
            raise ValueError(
                f"deployed_ratio is {self.deployed_ratio}; allowed is 1, or the ratio if its "
                "interval is above 1 and above the null"
            )
        numbers = [self.ratio, self.best_us, self.ci_low, self.ci_high, self.null_low]
        numbers.append(self.null_high)
        if any((value is None) != bool(self.failure) for value in [*numbers, self.samples]):
            raise ValueError("numbers of the last comparison stand where there is no failure")
        if self.samples is not None:
            self._check_samples(self.samples, *(value for value in numbers if value is not None))
        return self

    def _check_samples(
        self,
        samples: Samples,
        ratio: float,
        best: float,
        low: float,
        high: float,
        null_low: float,
        null_high: float,
    ) -> None:
        if len({len(samples.original), len(samples.candidate), len(samples.null)}) != 1:
            raise ValueError("samples.original, candidate and null differ in length")
        sample_ratio = float(np.median(np.divide(samples.original, samples.candidate)))
        if not math.isclose(sample_ratio, ratio, rel_tol=_ROUNDING):
            raise ValueError(f"ratio is {ratio}, the samples say {sample_ratio:.4f}")
        if not low <= ratio <= high or null_low > null_high:
            raise ValueError(f"ratio {ratio} is not in [{low}, {high}], or the null is upside down")
        if not math.isclose(self.original_us / best, ratio, rel_tol=_DRIFT):
            raise ValueError(f"original_us / best_us is far from the ratio {ratio}")


class ResultFile(_Strict):
    """A file of GPU results; date, command and versions are those of the last run."""

    date: datetime
    command: str
    python: str
    processor: str
    versions: dict[str, str]
    records: tuple[Record, ...]


class BadResults(Exception):
    """A file does not conform to the schema; the text has the file, the field and the reason."""


def read(path: Path) -> ResultFile:
    """Read a result file; raises BadResults if it does not conform to the schema."""
    try:
        return ResultFile.model_validate(load(path))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        count = error.error_count()
        raise BadResults(f"{path}: {where}: {first['msg']} ({count} problems)") from error


def measured_files(folder: Path = ROOT) -> list[Path]:
    """The result files below ``folder`` with measured records of kernels."""
    paths = [*folder.rglob("results/*.json"), *folder.rglob("results/*.json.gz")]
    return [path for path in sorted(paths) if _is_measured(path)]


def schema() -> dict[str, Any]:
    """The JSON Schema of :class:`ResultFile`."""
    return ResultFile.model_json_schema()


def schema_text() -> str:
    return json.dumps(schema(), indent=1) + "\n"


def _is_measured(path: Path) -> bool:
    body = load(path)
    records = body.get("records") if isinstance(body, Mapping) else None
    if not isinstance(records, list) or not all(isinstance(r, dict) for r in records):
        return False
    return any(r.get("kind") == "measured" and "kernel" in r for r in records)


def write() -> None:
    """Write the JSON Schema."""
    write_atomically(SCHEMA, schema_text().encode())
