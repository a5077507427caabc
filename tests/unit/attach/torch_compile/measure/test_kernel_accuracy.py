"""Search of inaccurate kernels: each on its own, by bisection, and in a compiled program."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")
pytest.importorskip("torch")

from nostall.attach.torch_compile.measure.kernel_accuracy import culprits
from tests.unit.fusion.codegen.interpreter_process import run_interpreted


@pytest.mark.slow
def test_an_inaccurate_kernel_is_named_and_only_it_stays_with_inductor(tmp_path: Path) -> None:
    outcomes = run_interpreted("tests.unit.attach.torch_compile.accuracy_programs", tmp_path)
    right, damaged = outcomes["1.0"], outcomes["1.001"]
    assert (right["state"], right["kernels"], right["inaccurate"]) == ("stitched", 2, [])
    assert (damaged["state"], damaged["kernels"]) == ("stitched", 1)
    (text,) = damaged["inaccurate"]
    assert "div" in text and "7x5" in text and "rounding errors" in text
    assert text in damaged["explained"]
    assert damaged["difference"] < 1e-6


KEYS = [f"k{index}" for index in range(13)]


@given(st.sampled_from(KEYS))
def test_bisection_finds_the_kernel_without_which_the_graph_is_accurate(wrong: str) -> None:
    asked: list[Collection[str]] = []

    def is_accurate_without(keys: Collection[str]) -> bool:
        asked.append(keys)
        return wrong in keys

    assert culprits(KEYS, is_accurate_without, 100) == {wrong}
    assert len(asked) <= 8
    found = culprits(KEYS, is_accurate_without, 3)
    assert not found or (wrong in found and len(found) < len(KEYS))


def test_bisection_finds_nothing_if_kernels_of_both_halves_are_inaccurate() -> None:
    wrong = {KEYS[0], KEYS[-1]}
    assert culprits(KEYS, lambda keys: wrong <= set(keys), 100) == frozenset()
    assert culprits([], lambda keys: True, 100) == frozenset()
