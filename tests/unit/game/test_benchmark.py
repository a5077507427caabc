"""What the benchmark of the game says about its records."""

from __future__ import annotations

import pytest

pytest.importorskip("gymnasium", reason="the benchmark needs the extra nostall[rl]")
pytest.importorskip("sb3_contrib", reason="the benchmark needs the extra nostall[rl]")

from benchmarks.game import reached, summary


def record(strategy: str, seed: int, *curve: tuple[int, float]) -> dict:
    ratio = curve[-1][1]
    return {
        "kernel": "k",
        "strategy": strategy,
        "seed": seed,
        "ratio": ratio,
        "evaluations": 16,
        "curve": [list(point) for point in curve],
    }


def test_evaluations_to_a_ratio() -> None:
    curve = [[1, 1.0], [4, 1.1], [9, 1.2]]
    assert [reached(curve, r) for r in (1.0, 1.05, 1.2, 1.3)] == [1, 4, 9, None]


def test_the_best_known_is_over_all_strategies() -> None:
    rows = summary(
        [
            record("a", 0, (1, 1.0), (8, 1.2)),
            record("a", 1, (1, 1.0), (3, 1.195)),
            record("b", 0, (1, 1.0), (2, 1.1)),
        ]
    )
    first, second = rows
    assert (first["strategy"], first["evaluations_to_95"], first["reached_95"]) == ("a", [8, 3], 2)
    assert (second["evaluations_to_95"], second["best_known"]) == ([None], 1.2)
    assert first["curve"][0] == [1, 1.0, 1.0, 1.0] and first["curve"][-1][0] == 16
    at_four = next(row for row in first["curve"] if row[0] == 4)
    assert at_four == [4, 1.04875, 1.0975, 1.14625]
