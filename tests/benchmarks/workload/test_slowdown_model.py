"""Fitted slow-downs: the fit finds what made the steps, and its interval holds what it should."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nostall.core import BadInput
from nostall.workload.hardware import Curve
from nostall.workload.model.slowdown import MeasuredStep, SlowdownFit, fit_slowdown, last_share

PEAK = 6.25e9
TRUTH = SlowdownFit(Curve(0.12, 4e-3), 0.3, PEAK, pair_share=0.5)
SIZES = {"small": 6e6, "middle": 50e6, "large": 400e6}


def steps(noise: float, seed: int = 0, off: Mapping[str, float] = SIZES) -> list[MeasuredStep]:
    """120 steps of each group, on two, three or four machines; noise is relative."""
    rng = np.random.default_rng(seed)
    found = []
    for group, size in off.items():
        for _ in range(120):
            compute = float(np.exp(rng.uniform(np.log(0.005), np.log(0.5))))
            factor = float(rng.choice([1.0, 4 / 3, 1.5]))
            pair = factor == 1.0
            last = last_share(size, 25e6)
            real = TRUTH.seconds(compute, size * factor, last, pair)
            real *= float(np.exp(rng.normal(0, noise)))
            found.append(MeasuredStep(group, compute, size * factor, real, last, pair))
    return found


def test_the_fit_finds_what_made_the_steps() -> None:
    found = fit_slowdown(steps(0.0), PEAK)
    assert found.curve.share == pytest.approx(0.12, rel=0.02)
    assert found.curve.overhead == pytest.approx(4e-3, rel=0.1)
    assert found.hidden == pytest.approx(0.3, abs=0.02)
    assert found.pair_share == pytest.approx(0.5, rel=0.03)
    assert fit_slowdown(steps(0.0), PEAK) == found


def test_the_interval_holds_what_it_should_of_new_steps() -> None:
    found = fit_slowdown(steps(0.1), PEAK)
    new = steps(0.1, seed=1)
    assert 0.85 < _inside(found, new) < 0.95


def test_with_enough_groups_the_interval_is_for_a_group_that_nobody_fitted() -> None:
    """Groups that differ as a whole: residuals within the fit are too narrow for a new one."""
    factors = {"a": 0.8, "b": 1.0, "c": 1.25}
    made = []
    for at, (group, factor) in enumerate(factors.items()):
        own = steps(0.02, at, {group: 200e6 * 0.8**at})
        made += [replace(s, seconds=s.seconds * factor) for s in own]
    found = fit_slowdown(made, PEAK)
    spread = np.quantile(found.spread, [0.05, 0.95])
    within = [s.seconds / found.seconds(s.compute, s.moved, s.last, s.pair) for s in made]
    assert np.ptp(spread) > 1.05 * np.ptp(np.quantile(within, [0.05, 0.95]))


def _inside(found: SlowdownFit, new: list[MeasuredStep]) -> float:
    bounds = [found.interval(s.compute, s.moved, s.last, s.pair) for s in new]
    return float(
        np.mean([low <= s.seconds <= high for s, (low, high) in zip(new, bounds, strict=True)])
    )


def test_computation_never_hides_more_than_there_is() -> None:
    assert TRUTH.seconds(10.0, 1e6) == 10.0
    assert TRUTH.seconds(1e-3, 0.0) == 1e-3


def test_the_last_bucket_hides_behind_nothing() -> None:
    assert [last_share(size, 25e6) for size in (0.0, 6e6, 25e6, 100e6)] == [0.0, 1.0, 1.0, 0.25]
    whole = TRUTH.curve.seconds(6e6, PEAK)
    assert TRUTH.seconds(10.0, 6e6, 1.0) == pytest.approx(10.0 + whole)
    quarter = TRUTH.curve.seconds(25e6, PEAK)
    assert TRUTH.seconds(10.0, 100e6, 0.25) == pytest.approx(10.0 + quarter)
    # Where computation hides little, the last bucket changes nothing.
    assert TRUTH.seconds(1e-3, 100e6, 0.25) == TRUTH.seconds(1e-3, 100e6)


def test_too_little_to_fit() -> None:
    with pytest.raises(BadInput, match="two different amounts"):
        fit_slowdown(steps(0)[:1], PEAK)
    with pytest.raises(BadInput, match="no interval"):
        TRUTH.interval(1.0, 1.0)


def test_measured_slowdowns_are_predicted_far_better_than_at_a_flat_efficiency() -> None:
    """Public measurements, where they are; the committed figures say how well."""
    covered, seen = 0.0, 0
    for fitted, flat in _left_out().values():
        assert fitted["mape"] < 0.15 < flat["mape"]
        covered += fitted["covered_by_90"] * fitted["steps"]
        seen += fitted["steps"]
    assert 0.8 < covered / seen < 0.97


@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="with two models to learn from the interval is too narrow for CIFAR-10 "
    "(benchmarks/results/workload_slowdown.json); the aim stands",
)
def test_the_interval_covers_each_model_by_itself() -> None:
    assert all(0.8 < fitted["covered_by_90"] < 0.97 for fitted, _ in _left_out().values())


def _left_out() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Each public model judged by a fit on the others, and by a flat efficiency."""
    root = os.environ.get("NOSTALL_PUBLIC_DATA")
    if not root or not (Path(root) / "pollux").is_dir():
        pytest.skip("NOSTALL_PUBLIC_DATA does not name a folder that holds pollux/")
    from benchmarks.workload.slowdown import ETHERNET, PARAMETERS, judged, measured

    models = {model: measured(Path(root), model) for model in PARAMETERS}
    flat = SlowdownFit(Curve(0.7), 0.0, ETHERNET)
    found = {}
    for model, own in models.items():
        others = [s for name, some in models.items() if name != model for s in some]
        found[model] = judged(own, fit_slowdown(others, ETHERNET)), judged(own, flat)
    return found
