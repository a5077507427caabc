"""Products alone as the second candidate, from the measurement to the stored selection."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from tests.unit.fusion.codegen.interpreter_process import run_interpreted

pytestmark = pytest.mark.slow

REASONS = {
    "whole": "faster as a whole",
    "products": "faster as a whole (all kernels 0.800x, then products alone 1.250x)",
    "none": "slower as a whole (all kernels 0.800x, then products alone 0.900x)",
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("stores")
    module = "tests.unit.attach.torch_compile.selection.second_candidate_programs"
    found: dict[str, Any] = run_interpreted(module, folder)
    return found


@pytest.mark.parametrize("case", REASONS)
def test_the_reason_names_the_candidates_and_their_ratios(
    outcomes: dict[str, Any], case: str
) -> None:
    assert outcomes[case]["reason"] == REASONS[case]
    explained = outcomes[case]["explained"]
    assert ("compared before: all kernels, measured 0.800x" in explained) == (case != "whole")


def test_the_second_candidate_has_the_product_kernel_of_the_first_one_alone(
    outcomes: dict[str, Any],
) -> None:
    whole, products = outcomes["whole"]["kernels"], outcomes["products"]["kernels"]
    assert (len(whole), len(products)) == (2, 1)
    assert set(products) < set(whole)
    assert outcomes["none"]["kernels"] == []
    assert "this candidate has kernels of matrix products only" in outcomes["products"]["explained"]


def test_a_product_that_is_the_same_in_both_candidates_is_measured_once(
    outcomes: dict[str, Any],
) -> None:
    assert outcomes["whole"]["asked"] == outcomes["products"]["asked"] == outcomes["none"]["asked"]


@pytest.mark.parametrize("case", REASONS)
def test_the_next_run_starts_with_the_stored_selection(outcomes: dict[str, Any], case: str) -> None:
    first, again = outcomes[case], outcomes[f"{case}, again"]
    assert again["from store"] and again["asked"] == 0
    for name in ("state", "reason", "kernels"):
        assert again[name] == first[name]
    assert max(first["difference"], again["difference"]) < 1e-5


def test_nothing_that_prepares_candidates_is_kept(outcomes: dict[str, Any]) -> None:
    """Dynamo and PyTorch's compiled functions keep what they wrap."""
    assert {name: found["kept"] for name, found in outcomes.items()} == dict.fromkeys(outcomes, 0)
