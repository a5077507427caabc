"""Which products are replaced, by what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from tests.unit.fusion.codegen.interpreter_process import run_interpreted

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("store")
    module = "tests.unit.attach.torch_compile.measure.product_programs"
    found: dict[str, Any] = run_interpreted(module, folder)
    return found


def test_a_faster_kernel_replaces_the_product(outcomes: dict[str, Any]) -> None:
    assert outcomes["faster"]["kernels"] == 2, "one with its readers, one with its left operand"
    assert all("one kernel, measured 2.000 x" in line for line in outcomes["faster"]["lines"])


def test_of_several_kernels_of_a_product_the_fastest_replaces_it(outcomes: dict[str, Any]) -> None:
    for name, has_prologue in (("prologue", True), ("epilogue", False)):
        lines = outcomes[name]["lines"]
        assert len(lines) == 3, "readers, prologue, and both"
        faster = [line for line in lines if "one kernel" in line]
        surpassed = [line for line in faster if "another kernel of this product" in line]
        assert len(surpassed) == len(faster) - 1
        (chosen,) = outcomes[name]["prologues"]
        assert chosen is has_prologue


def test_slower_kernels_leave_products_to_cublas(outcomes: dict[str, Any]) -> None:
    assert outcomes["slower"]["kernels"] == 0
    lines = outcomes["slower"]["lines"]
    assert len(lines) == 4, "the pair, each of its products, and the product behind them"
    assert ["in front" in line for line in lines] == [False, False, False, True]
    assert all("stays with cuBLAS, measured 0.500 x" in line for line in lines)


def test_without_a_clock_nothing_is_replaced(outcomes: dict[str, Any]) -> None:
    assert outcomes["without a clock"] == {
        "kernels": 0,
        "lines": [],
        "asked": 0,
        "prologues": [],
    }


def test_what_is_not_measured_in_time_stays_apart(outcomes: dict[str, Any]) -> None:
    assert outcomes["late"]["kernels"] == 0
    assert "not measured, the time was up" in outcomes["late"]["lines"][0]


def test_a_stored_measurement_is_not_repeated(outcomes: dict[str, Any]) -> None:
    assert outcomes["stored"]["kernels"] == 2 and outcomes["stored"]["asked"] == 0
