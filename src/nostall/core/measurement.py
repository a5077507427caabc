"""What a number is: its unit, its samples, and whether a GPU or a model said it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from nostall.core.errors import ContractBroken

Kind = Literal["measured", "modelled"]
Answer = Literal["faster", "slower", "same"]


@dataclass(frozen=True, slots=True)
class Measurement:
    """The cost of one state; lower is better.

    ``samples`` are in ``unit``; an empty tuple means that the state could not be evaluated and
    ``failure`` says why.
    """

    unit: str
    samples: tuple[float, ...]
    kind: Kind
    provenance: Mapping[str, str] = field(default_factory=dict[str, str])
    failure: str | None = None

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
        # Searches ask this at every step, and models give one sample.
        if len(self.samples) == 1:
            return self.samples[0]
        return float(np.median(self.samples)) if self.samples else math.inf

    def __str__(self) -> str:
        if self.failure is not None:
            return f"failed ({self.failure})"
        said = "modelled " if self.kind == "modelled" else ""
        return f"{said}{self.value:.6g} {self.unit}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Original against candidate from interleaved samples.

    ``ratio`` is original / candidate (above 1 the candidate is faster); ``low`` and ``high`` bound
    its bootstrap 95 % interval; ``null_low`` and ``null_high`` are the same interval for the
    original against itself.
    """

    ratio: float
    low: float
    high: float
    null_low: float
    null_high: float
    kind: Kind

    @property
    def verdict(self) -> Answer:
        """``faster`` only when the whole interval is above 1 and above the null's upper end."""
        if self.low > max(1.0, self.null_high):
            return "faster"
        if self.high < min(1.0, self.null_low):
            return "slower"
        return "same"

    @classmethod
    def of(
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

        Without ``null`` (a deterministic model has no noise) the null interval is [1, 1].
        Samples of several ``loads`` (equal shares, in order) are not independent: the bootstrap
        then draws loads, and samples within them, so that what a load is worth by chance is part
        of the interval (the two-stage bootstrap of Davison and Hinkley, 1997, section 3.8).
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
    """Median paired ratio a/b and its bootstrap 95 % interval."""
    ratios = np.asarray(a, dtype=np.float64) / np.asarray(b, dtype=np.float64)
    if loads > 1:
        draws = _drawn_by_load(len(ratios), rng, resamples, loads)
    else:
        draws = rng.integers(0, len(ratios), size=(resamples, len(ratios)))
    medians = np.median(ratios[draws], axis=1)
    low, high = np.quantile(medians, [0.025, 0.975])
    return float(np.median(ratios)), float(low), float(high)


def _drawn_by_load(
    count: int, rng: np.random.Generator, resamples: int, loads: int
) -> NDArray[np.int64]:
    """Indices of samples: ``loads`` drawn loads, from each as many samples as the largest has."""
    parts = np.array_split(np.arange(count), loads)
    sizes = np.array([len(part) for part in parts])
    firsts = np.array([part[0] for part in parts])
    chosen = rng.integers(0, loads, size=(resamples, loads))
    within = rng.random((resamples, loads, int(sizes.max()))) * sizes[chosen][..., None]
    indices: NDArray[np.int64] = firsts[chosen][..., None] + within.astype(np.int64)
    return indices.reshape(resamples, -1)
