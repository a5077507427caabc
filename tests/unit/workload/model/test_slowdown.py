"""Fitted slow-down model: the fit recovers known parameters, and its interval has its coverage."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nostall.core import BadInput
from nostall.workload.hardware.description import EfficiencyCurve
from nostall.workload.model.slowdown import (
    MeasuredStep,
    SlowdownModel,
    fit_slowdown,
    last_bucket_share,
)

PEAK = 6.25e9
TRUTH = SlowdownModel(EfficiencyCurve(0.12, 4e-3), 0.3, PEAK, pair_share=0.5)
GRADIENT_BYTES = {"small": 6e6, "middle": 50e6, "large": 400e6}


def make_steps(
    noise: float, seed: int = 0, gradient_bytes: Mapping[str, float] = GRADIENT_BYTES
) -> list[MeasuredStep]:
    """120 steps per group on two, three or four nodes, with relative noise."""
    rng = np.random.default_rng(seed)
    steps = []
    for group, size in gradient_bytes.items():
        for _ in range(120):
            compute = float(np.exp(rng.uniform(np.log(0.005), np.log(0.5))))
            factor = float(rng.choice([1.0, 4 / 3, 1.5]))
            last_share = last_bucket_share(size, 25e6)
            exact = MeasuredStep(group, compute, size * factor, 0.0, last_share, factor == 1.0)
            seconds = TRUTH.seconds(exact) * float(np.exp(rng.normal(0, noise)))
            steps.append(replace(exact, seconds=seconds))
    return steps


def modelled_seconds(compute: float, moved_bytes: float, last_share: float = 0.0) -> float:
    return TRUTH.seconds(MeasuredStep("", compute, moved_bytes, 0.0, last_share))


def test_the_fit_recovers_the_parameters_of_exact_steps() -> None:
    fit = fit_slowdown(make_steps(0.0), PEAK)
    assert fit.curve.share == pytest.approx(0.12, rel=0.02)
    assert fit.curve.overhead == pytest.approx(4e-3, rel=0.1)
    assert fit.hidden_share == pytest.approx(0.3, abs=0.02)
    assert fit.pair_share == pytest.approx(0.5, rel=0.03)
    assert fit_slowdown(make_steps(0.0), PEAK) == fit


def test_the_90_percent_interval_covers_about_90_percent_of_new_steps() -> None:
    fit = fit_slowdown(make_steps(0.1), PEAK)
    assert 0.85 < _coverage(fit, make_steps(0.1, seed=1)) < 0.95


def test_with_enough_groups_the_spread_is_that_of_held_out_groups() -> None:
    """If groups differ as a whole, residuals of the fit itself are too narrow for a new group."""
    factors = {"a": 0.8, "b": 1.0, "c": 1.25}
    steps = []
    for seed, (group, factor) in enumerate(factors.items()):
        own = make_steps(0.02, seed, {group: 200e6 * 0.8**seed})
        steps += [replace(step, seconds=step.seconds * factor) for step in own]
    fit = fit_slowdown(steps, PEAK)
    spread = np.quantile(fit.spread, [0.05, 0.95])
    residuals = [step.seconds / fit.seconds(step) for step in steps]
    assert np.ptp(spread) > 1.05 * np.ptp(np.quantile(residuals, [0.05, 0.95]))


def _coverage(fit: SlowdownModel, steps: list[MeasuredStep]) -> float:
    intervals = [fit.interval(step) for step in steps]
    return float(
        np.mean(
            [
                low <= step.seconds <= high
                for step, (low, high) in zip(steps, intervals, strict=True)
            ]
        )
    )


def test_computation_hides_at_most_all_communication() -> None:
    assert modelled_seconds(10.0, 1e6) == 10.0
    assert modelled_seconds(1e-3, 0.0) == 1e-3


def test_nothing_hides_the_last_bucket() -> None:
    shares = [last_bucket_share(size, 25e6) for size in (0.0, 6e6, 25e6, 100e6)]
    assert shares == [0.0, 1.0, 1.0, 0.25]
    small = TRUTH.curve.seconds(6e6, PEAK)
    assert modelled_seconds(10.0, 6e6, 1.0) == pytest.approx(10.0 + small)
    bucket = TRUTH.curve.seconds(25e6, PEAK)
    assert modelled_seconds(10.0, 100e6, 0.25) == pytest.approx(10.0 + bucket)
    # If computation hides little, the last bucket changes nothing.
    assert modelled_seconds(1e-3, 100e6, 0.25) == modelled_seconds(1e-3, 100e6)


def test_too_few_steps_cannot_be_fitted() -> None:
    with pytest.raises(BadInput, match="two different amounts"):
        fit_slowdown(make_steps(0)[:1], PEAK)
    with pytest.raises(BadInput, match="no interval"):
        TRUTH.interval(MeasuredStep("", 1.0, 1.0, 0.0))


def test_fitted_predictions_of_public_measurements_are_better_than_flat_ones() -> None:
    covered, steps = 0.0, 0
    for fitted, flat in _held_out_evaluations().values():
        assert fitted["mape"] < 0.15 < flat["mape"]
        covered += fitted["covered_by_90"] * fitted["steps"]
        steps += fitted["steps"]
    assert 0.8 < covered / steps < 0.97


@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="a fit to two models has an interval that is too narrow for CIFAR-10 "
    "(benchmarks/workload/results/slowdown.json); the target remains",
)
def test_the_interval_covers_each_model_by_itself() -> None:
    assert all(
        0.8 < fitted["covered_by_90"] < 0.97 for fitted, _ in _held_out_evaluations().values()
    )


def _held_out_evaluations() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Evaluation of each public model with a fit to the others, and with a flat efficiency."""
    root = os.environ.get("NOSTALL_PUBLIC_DATA")
    if not root or not (Path(root) / "pollux").is_dir():
        pytest.skip("NOSTALL_PUBLIC_DATA is not a folder that contains pollux/")
    from benchmarks.workload.slowdown import ETHERNET, PARAMETERS, evaluate, read_steps

    steps = {model: read_steps(Path(root), model) for model in PARAMETERS}
    flat = SlowdownModel(EfficiencyCurve(0.7), 0.0, ETHERNET)
    evaluations = {}
    for model, held_out in steps.items():
        others = [step for name, some in steps.items() if name != model for step in some]
        fit = fit_slowdown(others, ETHERNET)
        evaluations[model] = evaluate(held_out, fit), evaluate(held_out, flat)
    return evaluations
