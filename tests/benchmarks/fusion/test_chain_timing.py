"""Timing of the methods of a chain: interleaved rounds, layouts of inputs and verdicts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

import torch
from benchmarks.fusion.chains.timing import Inputs, Method, Run, compare_methods, time_interleaved


def test_a_verdict_needs_a_difference_beyond_the_null() -> None:
    steady = [100.0 + i % 3 for i in range(40)]
    half = [time / 2 for time in steady]
    samples = {"eager": steady, "eager again": steady, "compile": half}
    comparisons = compare_methods({**samples, "stitched": half})
    assert comparisons["eager"]["verdict"] == "faster"
    assert comparisons["compile"]["verdict"] == "same"
    noisy = [time * (1.2 if i % 2 else 0.8) for i, time in enumerate(steady)]
    comparisons = compare_methods(
        {**samples, "eager again": noisy, "stitched": [t * 0.49 for t in steady]}
    )
    assert comparisons["compile"]["verdict"] == "same"


def test_methods_are_interleaved_and_overwriting_methods_get_copies() -> None:
    order: list[str] = []
    sets = [[torch.zeros(2)], [torch.ones(2)]]
    seen: dict[str, Sequence[Inputs]] = {}

    def capture(run: Run, sets: Sequence[Inputs]) -> str:
        name = str(run([]))
        seen[name] = sets
        return name

    def time_run(name: str, runs: int) -> float:
        order.append(name)
        return float(len(order))

    methods = {"a": Method(lambda _: "a"), "b": Method(lambda _: "b", overwrites=True)}
    samples = time_interleaved(methods, sets, 2, capture, time_run)
    assert order == ["a", "b", "b", "a"] * 2 + ["a", "b"]
    assert samples == {"a": [8.0, 9.0], "b": [7.0, 10.0]}
    assert seen["a"][1][0] is sets[1][0] and seen["b"][1][0] is not sets[1][0]
    assert torch.equal(seen["b"][1][0], sets[1][0])


def test_layouts_have_their_own_inputs_and_equal_numbers_of_rounds() -> None:
    sets = [[torch.ones(2)]]
    seen: list[torch.Tensor] = []

    def capture(run: Run, sets: Sequence[Inputs]) -> int:
        seen.append(sets[0][0])
        return len(seen)

    methods = {"a": Method(lambda _: None)}
    samples = time_interleaved(
        methods, sets, 8, capture, lambda layout, runs: float(layout), layouts=4
    )
    assert samples == {"a": [1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0]}
    assert seen[0] is sets[0][0] and len({id(tensor) for tensor in seen}) == 4
    assert all(torch.equal(tensor, sets[0][0]) for tensor in seen)


def test_a_difference_in_only_some_layouts_gives_no_verdict() -> None:
    """The stitched chain is slower in half of the layouts, by more than its rounds differ."""
    steady = [100.0 + i % 3 / 100 for i in range(40)]
    half = [time * (1.01 if i // 10 % 2 else 1.0) for i, time in enumerate(steady)]
    samples = {"eager": steady, "eager again": steady, "compile": steady, "stitched": half}
    assert compare_methods({**samples, "stitched": [1.01 * t for t in steady]}, 4)["compile"] == {
        **compare_methods({**samples, "stitched": [1.01 * t for t in steady]})["compile"],
        "verdict": "slower",
    }
    assert compare_methods(samples, 4)["compile"]["verdict"] == "same"
