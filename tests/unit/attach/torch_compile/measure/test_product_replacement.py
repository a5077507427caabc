"""Products and stitched kernels that compute the same readers: the larger saving wins."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from nostall.attach.torch_compile.measure import product_replacement
from nostall.attach.torch_compile.measure.product_comparison import NotComparable, is_promising
from nostall.attach.torch_compile.measure.product_replacement import Replacement, _SavingsComparison
from nostall.attach.torch_compile.store.records import KernelComparisonRecord, RegionRecord
from tests.unit.fusion.codegen.interpreter_process import run_interpreted

REGION = RegionRecord(steps=(), not_fused={})


def record(inductor: float, stitched: float) -> KernelComparisonRecord:
    """A measurement without noise, in seconds."""
    samples = (inductor,) * 12
    return KernelComparisonRecord(
        kernels=("k",),
        kind="measured",
        clock="recorded",
        inductor=samples,
        stitched=(stitched,) * 12,
        null=samples,
    )


SMALL_PRODUCT = record(5.0, 3.5)
"""A product kernel that is chosen beside the stitched kernel; it saves 1.5 seconds."""


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_replacement, "region_key", lambda graph: graph)
    monkeypatch.setattr(product_replacement, "measured_region", lambda case, record: REGION)


def product(place: int, *reader_kernels: str, kernel: str = "large") -> Any:
    """A product at one place of a graph."""
    found = SimpleNamespace(kernel=SimpleNamespace(graph=kernel))
    case = SimpleNamespace(found=found)
    return SimpleNamespace(
        found=found,
        case=case,
        places=frozenset({(0, f"mm_{place}")}),
        reader_kernels=frozenset(reader_kernels),
    )


def decided(
    measured: KernelComparisonRecord | None,
    same: list[Any],
    stitched: dict[frozenset[str], KernelComparisonRecord],
    counts: dict[str, int],
    current: Any = (),
) -> tuple[Replacement, list[str]]:
    outcomes = {"key": "measured"}
    products = SimpleNamespace(
        measured=lambda case, compiler, note: ("key", measured),
        outcomes=outcomes,
        records={"small": SMALL_PRODUCT},
    )
    found = Replacement()
    comparison = _SavingsComparison(products, None, stitched, counts, current)  # type: ignore[arg-type]
    comparison.decide(same, found)
    return found, [*outcomes.values()]


ONE = {frozenset({"norm"}): record(5.0, 4.0)}
"""One stitched kernel, which saves a second."""


@pytest.mark.parametrize(("stitched_s", "wins"), [(4.5, True), (1.5, False)])
def test_the_larger_saving_wins(stitched_s: float, wins: bool) -> None:
    stitched = {frozenset({"norm"}): record(5.0, stitched_s)}
    found, (line,) = decided(record(6.0, 4.0), [product(0, "norm")], stitched, {"norm": 1})
    assert (found.kernels, found.regions) == (
        ({"norm"}, {"large": REGION}) if wins else (set(), {})
    )
    saved = 1e6 * (5.0 - stitched_s)
    assert line == (
        "measured; with all kernels: saves 2000000.0 us, the kernels that it would replace "
        f"{saved:.1f} us, so {'it replaces them' if wins else 'they stay'}"
    )


@pytest.mark.parametrize(("products", "kernels", "wins"), [(3, 3, True), (1, 3, False)])
def test_all_occurrences_count(products: int, kernels: int, wins: bool) -> None:
    """A replaced kernel is lost in all layers, and each layer with the product gains."""
    same = [product(place, "norm") for place in range(products)]
    found, _ = decided(record(6.0, 4.0), same, ONE, {"norm": kernels})
    assert bool(found.kernels) == wins


@pytest.mark.parametrize(("is_taken", "wins"), [(True, False), (False, True)])
def test_a_product_kernel_that_is_lost_counts(is_taken: bool, wins: bool) -> None:
    other = product(0 if is_taken else 1, kernel="small")
    found, _ = decided(record(6.0, 4.0), [product(0, "norm")], ONE, {"norm": 1}, [other])
    assert bool(found.kernels) == wins


def test_kernels_that_were_measured_together_are_lost_together() -> None:
    stitched = {frozenset({"first", "second"}): record(5.0, 4.0)}
    counts = {"first": 1, "second": 1}
    found, _ = decided(record(6.0, 4.0), [product(0, "first")], stitched, counts)
    assert found.kernels == {"first", "second"}


@pytest.mark.parametrize(
    ("measured", "reader_kernels"),
    [
        (record(6.0, 4.0), "unmeasured"),
        (None, "norm"),
        (record(6.0, 5.95), "norm"),
    ],
    ids=["a kernel without a measurement", "no time", "no gain"],
)
def test_without_a_proven_gain_stitched_kernels_stay(
    measured: KernelComparisonRecord | None, reader_kernels: str
) -> None:
    stitched = {frozenset({"norm"}): record(5.0, 5.0)}
    found, lines = decided(measured, [product(0, reader_kernels)], stitched, {reader_kernels: 1})
    assert found == Replacement()
    assert lines == ["measured"]


def test_no_kernel_is_replaced_by_a_product_without_a_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(case: Any, record: Any) -> RegionRecord:
        raise NotComparable("the measured kernel is not generated any more")

    monkeypatch.setattr(product_replacement, "measured_region", fail)
    found = Replacement()
    products = SimpleNamespace(
        measured=lambda case, compiler, note: ("key", record(6.0, 4.0)), outcomes={"key": ""}
    )
    comparison = _SavingsComparison(products, None, ONE, {"norm": 1}, ())  # type: ignore[arg-type]
    with pytest.raises(NotComparable):
        comparison.decide([product(0, "norm")], found)
    assert found == Replacement()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("stores")
    module = "tests.unit.attach.torch_compile.measure.replacement_programs"
    found: dict[str, Any] = run_interpreted(module, folder)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("case", ["product", "slow kernel"])
def test_a_product_takes_its_reader_and_the_bias_gradient_from_a_stitched_kernel(
    outcomes: dict[str, Any], case: str
) -> None:
    found = outcomes[case]
    assert found["before"] == 0, "the stitched kernel computes the only reader"
    assert (found["replaced"], found["products"], found["kernels"]) == (1, 1, 1)
    assert found["sums"] == 0 and "add, exp, sum, for its stitched readers" in found["lines"][0]
    assert "another kernel of this product saves more" in found["lines"][1], "the one without sum"
    assert found["asked"] == 4, "for each kernel one measurement of all tiles, one comparison"


@pytest.mark.slow
@pytest.mark.parametrize("case", ["kernel", "unmeasured", "late"])
def test_the_stitched_kernel_stays(outcomes: dict[str, Any], case: str) -> None:
    found = outcomes[case]
    assert (found["replaced"], found["products"], found["kernels"]) == (0, 0, 1)
    assert found["sums"] == 0
    assert (found["asked"] > 0) == (case == "kernel")


@pytest.mark.slow
def test_the_results_are_right_with_either_kernel(outcomes: dict[str, Any]) -> None:
    assert max(found["difference"] for found in outcomes.values()) < 1e-4


def test_kernels_of_kinds_that_never_gained_are_not_compiled() -> None:
    """Functions in front of wide products, and sums that stitched kernels compute, too."""

    def promising(behind: str, in_front: str = "", columns: int = 4096, **how: Any) -> bool:
        names = [*behind.split(), *in_front.split(), *(["cast"] if in_front else [])]
        first = len(behind.split())
        kernel = SimpleNamespace(
            graph=[SimpleNamespace(op=name) for name in names],
            epilogue=range(first),
            prologue=range(first, len(names)),
            shape=SimpleNamespace(columns=columns, depth=how.get("depth", 768)),
        )
        found: Any = SimpleNamespace(kernel=kernel)
        return is_promising(found, replaces=how.get("replaces", False))

    assert promising("add cast") and promising("cast mul erf add", replaces=True)
    assert not promising("add cast mul", replaces=True)
    assert promising("add cast mul", replaces=True, depth=16)
    assert promising("cast", "copy") and promising("cast", "exp mul", columns=128)
    assert not promising("cast", "exp mul")
