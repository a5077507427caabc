"""Simulation-based calibration: ranks of a right and of a wrong sampler."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="the learners need the extra nostall[learn]")

from benchmarks.learners.simulated_calibration import (
    LEAST_P,
    PROBLEMS,
    Values,
    ranks,
    uniformity,
)


def normal(width: float) -> object:
    """x ~ N(m, 1), m ~ N(0, 1); draws of m are exact, but for a factor of their width."""

    def problem(rng: np.random.Generator) -> tuple[Values, Iterator[Values]]:
        mean = rng.standard_normal()
        x = mean + rng.standard_normal()

        def draws() -> Iterator[Values]:
            while True:
                yield {"m": x / 2 + width * np.sqrt(0.5) * rng.standard_normal()}

        return {"m": mean}, draws()

    return problem


def test_ranks_of_exact_draws_are_uniform_and_those_of_narrow_draws_are_not() -> None:
    assert uniformity(ranks(normal(1.0), 200)["m"])[1] > LEAST_P  # type: ignore[arg-type]
    assert uniformity(ranks(normal(0.4), 200)["m"])[1] < LEAST_P  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("name", PROBLEMS)
def test_each_problem_ranks_its_values(name: str) -> None:
    for values in ranks(PROBLEMS[name], 2).values():
        assert len(values) == 2 and all(0 <= rank <= 31 for rank in values)
