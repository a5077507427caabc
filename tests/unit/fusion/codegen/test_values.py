"""Tests of the values that stitched kernels compute, in Triton's interpreter in a subprocess."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks.harness.result_file import load, results

from tests.unit.fusion.codegen.interpreter_process import run_interpreted
from tests.unit.fusion.pattern_tables import PACKED, PATTERNS

pytest.importorskip("triton")
pytest.importorskip("torch")

pytestmark = pytest.mark.slow

EXAMPLES = 5


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("kernels")
    return run_interpreted("tests.unit.fusion.codegen.interpreted.interpreting", folder, EXAMPLES)


@pytest.mark.parametrize("name", PATTERNS)
def test_patterns_are_correct_in_all_schemes(interpreted: Any, name: str) -> None:
    assert interpreted["chains"][name] == []


def test_one_kernel_is_correct_for_several_numbers_of_rows(interpreted: Any) -> None:
    assert len(interpreted["dynamic"]) == 8
    assert [wrong for wrong in interpreted["dynamic"].values() if wrong] == []


def test_kernels_of_random_graphs_are_correct_for_several_dynamic_sizes(interpreted: Any) -> None:
    assert [wrong for wrong in interpreted["several sizes"].values() if wrong] == []


@pytest.mark.parametrize("name", PACKED)
def test_packed_kernels_are_correct(interpreted: Any, name: str) -> None:
    assert interpreted["packed"][name] == []


def test_random_graphs_are_stitched_and_correct(interpreted: Any) -> None:
    assert interpreted["random"] == []
    assert interpreted["seen"]["graphs"] == 20 * EXAMPLES
    assert interpreted["seen"]["kernels"] > 20 * EXAMPLES


@pytest.mark.parametrize("where", ["h200", "interpreted"])
def test_recorded_runs_of_the_same_graphs_had_no_errors(interpreted: Any, where: str) -> None:
    kept = load(results("fusion") / f"random_graphs_{where}.json")
    if where == "h200" and kept["digest of the graphs drawn"] != interpreted["digest"]:
        pytest.skip(
            "the graphs of the run on a GPU were drawn otherwise; record it again with "
            "`python -m benchmarks run fusion.random_graphs --graphs 300`"
        )
    assert kept["digest of the graphs drawn"] == interpreted["digest"]
    assert kept["seen"]["graphs"] == 300
    assert kept["seen"]["graphs once more in bf16"] > 100 or where == "interpreted"
    assert kept["wrong"] == []


def test_random_numbers_are_the_same_in_all_kernels(interpreted: Any) -> None:
    assert len(interpreted["drawn"]) == 24
    assert {name: wrong for name, wrong in interpreted["drawn"].items() if wrong} == {}


def test_random_graphs_of_small_dots_are_one_correct_kernel(interpreted: Any) -> None:
    wrong, seen = interpreted["dots"]
    assert wrong == []
    assert seen == 2 * EXAMPLES


def test_rows_in_shared_memory_are_correct_with_all_rematerialization_options(
    interpreted: Any,
) -> None:
    wrong, kernels = interpreted["on chip"]
    assert wrong == []
    assert kernels > EXAMPLES


def test_unaligned_rows_in_shared_memory_are_correct(interpreted: Any) -> None:
    wrong, kernels = interpreted["odd on chip"]
    assert wrong == []
    assert min(kernels["read"], kernels["ahead"]) >= EXAMPLES and kernels["demoted"]


def test_index_splitting_at_label_columns_is_correct(interpreted: Any) -> None:
    assert interpreted["marked"] == []
    assert len(interpreted["broken marks"]) == 3
    assert [name for name, wrong in interpreted["broken marks"].items() if not wrong] == []


def test_casts_to_e5m2_overflow_to_infinity(interpreted: Any) -> None:
    assert interpreted["infinities"] == []


def test_halves_round_to_the_even_integer(interpreted: Any) -> None:
    assert interpreted["halves"] == []


def test_damaged_kernels_are_detected(interpreted: Any) -> None:
    assert len(interpreted["broken"]) == 8
    assert [name for name, wrong in interpreted["broken"].items() if not wrong] == []
    assert len(interpreted["broken on chip"]) == 4
    assert [name for name, wrong in interpreted["broken on chip"].items() if not wrong] == []


def test_dropout_is_the_same_in_both_passes_and_for_the_same_seed(interpreted: Any) -> None:
    found = interpreted["fused"]["dropout"]
    assert found["refused"] == 0
    assert len(found["kernels"]) == 2
    assert found["again"] and found["fresh"]
    # Tolerance: six standard deviations of two independent masks of 3072 elements.
    assert found["kept"] == pytest.approx([0.75, 0.5], abs=0.055)
    assert found["together"] == pytest.approx(0.375, abs=0.055)
    assert found["forward"] < 1e-2  # absolute, for fp32 values up to 5439
    assert found["backward"] < 1e-2


def test_a_fused_module_has_the_same_results_and_gradients(interpreted: Any) -> None:
    result = interpreted["fused"]
    assert result["forward"] < 1e-5
    assert result["backward"] < 1e-4
    forward, backward = result["graphs"]
    assert forward >= 3
    assert backward >= 3
    assert result["dynamic"]["largest"] < 1e-5
    assert len(result["dynamic"]["kernels"]) == 2  # forward and backward, for all batch sizes
    assert min(result["dynamic"]["kernels"]) >= 2
    assert result["structure"].keys() == {"sum", "sorted"}
    assert max(result["structure"].values()) < 1e-5
    assert result["refused"] == ["aten.sort.default: sorting"]


def test_assertions_are_not_fused(interpreted: Any) -> None:
    found = interpreted["fused"]["asserted"]
    assert found["difference"] < 1e-6
    assert found["refused"] == ["aten._assert_async.msg"]
    assert "smaller than num_classes" in found["said"]
