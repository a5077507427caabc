"""Measurements and comparisons: samples, their unit, and whether they are measured or modelled."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from nostall.core.errors import ContractBroken

Kind = Literal["measured", "modelled"]
"""Where a number comes from: ``measured`` on a GPU or CPU, or ``modelled`` by a cost model."""
Verdict = Literal["faster", "slower", "same"]


@dataclass(frozen=True, slots=True)
class Measurement:
    """The cost of one state of a search space; lower is better."""

    unit: str
    samples: tuple[float, ...]
    """Finite values >= 0, in ``unit``; empty if the state could not be evaluated."""
    kind: Kind
    provenance: Mapping[str, str] = field(default_factory=dict[str, str])
    """Where the samples come from, such as the GPU and its driver."""
    failure: str | None = None
    """Why there are no samples; None if there are."""

    def __post_init__(self) -> None:
        if not self.samples and self.failure is None:
            raise ContractBroken(
                "a Measurement has neither samples nor a failure; give at least one sample, "
                "or say in `failure` why there is none"
            )
        if any(not math.isfinite(s) or s < 0 for s in self.samples):
            raise ContractBroken(
                f"a Measurement has samples {self.samples[:4]}; allowed are finite values >= 0"
            )

    @property
    def value(self) -> float:
        """Median of the samples; infinity when there are none."""
        # A fast path: searches read the value at every step, and models give one sample.
        if len(self.samples) == 1:
            return self.samples[0]
        return float(np.median(self.samples)) if self.samples else math.inf

    def __str__(self) -> str:
        if self.failure is not None:
            return f"failed ({self.failure})"
        prefix = "modelled " if self.kind == "modelled" else ""
        return f"{prefix}{self.value:.6g} {self.unit}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Ratio of original to candidate with bootstrap intervals, from interleaved samples."""

    ratio: float
    """Median of original / candidate; above 1 the candidate is faster."""
    low: float
    """Lower end of the ratio's 95 % bootstrap interval."""
    high: float
    """Upper end of the ratio's 95 % bootstrap interval."""
    null_low: float
    """Lower end of the 95 % interval of the original against itself (the null)."""
    null_high: float
    """Upper end of the 95 % interval of the original against itself (the null)."""
    kind: Kind

    @property
    def verdict(self) -> Verdict:
        """``faster`` if the whole interval is above 1 and above the null's upper end.

        ``slower`` if it is below 1 and below the null's lower end; otherwise ``same``.
        """
        if self.low > max(1.0, self.null_high):
            return "faster"
        if self.high < min(1.0, self.null_low):
            return "slower"
        return "same"

    @classmethod
    def from_samples(
        cls,
        original: Sequence[float],
        candidate: Sequence[float],
        null: Sequence[float] | None = None,
        *,
        kind: Kind,
        seed: int = 0,
        resamples: int = 2000,
        loads: int = 1,
    ) -> Comparison:
        """Compare paired samples: ``original[i]`` ran next to ``candidate[i]`` (and ``null[i]``).

        ``null``: samples of the original, measured a second time.  Without them (a deterministic
        model has no noise) the null interval is [1, 1].

        ``loads``: how many times the modules were loaded; samples are in order of the loads, in
        equal shares.  Samples of one load are not independent, because the address of a module
        changes its time.  The bootstrap therefore resamples loads first and then samples within
        them (two-stage bootstrap: Davison and Hinkley, 1997, section 3.8).

        Raises :class:`ContractBroken` if the samples are not paired, or fewer than ``loads``.
        """
        if len(original) != len(candidate) or not original:
            raise ContractBroken(
                f"Comparison got {len(original)} original and {len(candidate)} candidate samples; "
                "interleaved samples come in equal numbers, at least one each"
            )
        if not 1 <= loads <= len(original):
            raise ContractBroken(
                f"Comparison got {len(original)} samples of {loads} loads; each has one or more"
            )
        rng = np.random.default_rng(seed)
        ratio, low, high = _interval(original, candidate, rng, resamples, loads)
        _, null_low, null_high = (
            (1.0, 1.0, 1.0) if null is None else _interval(original, null, rng, resamples, loads)
        )
        return cls(ratio, low, high, null_low, null_high, kind)


def _interval(
    a: Sequence[float], b: Sequence[float], rng: np.random.Generator, resamples: int, loads: int
) -> tuple[float, float, float]:
    """Median of the paired ratios a/b, and the ends of its 95 % bootstrap interval."""
    ratios = np.asarray(a, dtype=np.float64) / np.asarray(b, dtype=np.float64)
    if loads > 1:
        draws = _resample_by_load(len(ratios), rng, resamples, loads)
    else:
        draws = rng.integers(0, len(ratios), size=(resamples, len(ratios)))
    medians = np.median(ratios[draws], axis=1)
    low, high = np.quantile(medians, [0.025, 0.975])
    return float(np.median(ratios)), float(low), float(high)


def _resample_by_load(
    count: int, rng: np.random.Generator, resamples: int, loads: int
) -> NDArray[np.int64]:
    """Sample indices of a two-stage bootstrap, one row for each of ``resamples``.

    Each row draws ``loads`` loads, and from each of them as many samples as the largest load has.
    """
    parts = np.array_split(np.arange(count), loads)
    sizes = np.array([len(part) for part in parts])
    firsts = np.array([part[0] for part in parts])
    chosen = rng.integers(0, loads, size=(resamples, loads))
    within = rng.random((resamples, loads, int(sizes.max()))) * sizes[chosen][..., None]
    indices: NDArray[np.int64] = firsts[chosen][..., None] + within.astype(np.int64)
    return indices.reshape(resamples, -1)
