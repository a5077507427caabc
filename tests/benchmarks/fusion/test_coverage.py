"""Tests of the coverage table: it is current, and no operator of Core ATen lacks a reason."""

from __future__ import annotations

import warnings

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("expecttest", reason="PyTorch's package of operator samples imports it")

from benchmarks.fusion.coverage import (  # noqa: E402
    FUSED,
    LEFT_TO_INDUCTOR,
    OVER_LISTS,
    PAGE,
    PARTS,
    REFUSED,
    RESULT,
    rows,
    sample_reasons,
    text,
)
from benchmarks.harness.result_file import load, results  # noqa: E402

RECORD = load(results("fusion") / RESULT)
is_same_version = torch.__version__.split("+")[0] == RECORD["pytorch"]
needs_same_version = pytest.mark.skipif(
    not is_same_version, reason=f"the table is of PyTorch {RECORD['pytorch']}"
)
TRACED = ["nn.functional.celu", "softmax", "nn.functional.huber_loss", "logaddexp", "cumprod"]
"""OpInfos that are traced again; all of them take minutes."""


def test_the_committed_page_is_up_to_date() -> None:
    assert PAGE.read_text() == text(), "run `python -m benchmarks page fusion-coverage`"


@needs_same_version
def test_the_rows_are_those_of_the_rules() -> None:
    assert rows(RECORD["sampled"]) == RECORD["rows"], "run `benchmarks run fusion.coverage`"


@pytest.mark.slow
@needs_same_version
def test_decompositions_of_samples_are_still_fused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = sample_reasons(TRACED)
    status = {row["operator"]: row["status"] for row in RECORD["rows"]}
    checked = [name for name in found if status.get(name) == PARTS]
    assert len(checked) >= 3
    assert {name: found[name] for name in checked} == {name: [] for name in checked}


def test_operators_that_inductors_passes_put_into_graphs_are_fused_or_have_a_reason() -> None:
    """The passes are those for GPUs, so no graph of a CPU has these operators."""
    passes = {row["operator"]: row for row in RECORD["rows"] if row["source"] == "passes"}
    assert passes["prims.prepare_softmax_online.default"]["status"] == FUSED
    assert all(row["due"] for row in passes.values() if row["status"] == LEFT_TO_INDUCTOR)
    refused = [name for name, row in passes.items() if row["status"] == REFUSED]
    # A cast to the scales of microscaling formats, which sm_90 does not have.
    assert refused == ["prims.inductor_cvt_e8m0_rceil.default"]


def test_most_operators_of_lists_are_fused() -> None:
    lists = [row for row in RECORD["rows"] if row["source"] == "lists"]
    assert len(lists) >= 70
    assert sum(row["status"] == OVER_LISTS for row in lists) >= 0.75 * len(lists)
    assert all(row["due"] for row in lists if row["status"] == LEFT_TO_INDUCTOR)


def test_every_operator_of_core_aten_is_fused_or_has_a_reason() -> None:
    core = [row for row in RECORD["rows"] if row["source"] == "Core ATen"]
    assert len(core) >= 170
    assert [row["operator"] for row in core if row["status"] == REFUSED] == []
    assert all(row["due"] for row in core if row["status"] == LEFT_TO_INDUCTOR)
    assert sum(row["status"] in (FUSED, PARTS) for row in core) >= 0.65 * len(core)
