"""Diagnostics of Markov chains."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.learners.convergence import convergence, convergence_of


def test_chains_that_agree_and_chains_that_do_not() -> None:
    rng = np.random.default_rng(4)
    independent = convergence(rng.standard_normal((4, 500)))
    assert independent.r_hat == pytest.approx(1, abs=0.02) and independent.effective_draws > 1000
    apart = convergence(rng.standard_normal((2, 100)) + np.array([[0.0], [5.0]]))
    assert apart.r_hat > 2


def test_chains_of_different_length_are_compared_as_far_as_both_go() -> None:
    rows = [{"a": float(n % 2), "b": 1.0} for n in range(9)]
    found = convergence_of([rows, rows[:8]])
    assert found["a"].mean == 0.5 and found["b"].r_hat == 1.0
