"""The device's leaders, forest and tables are those of the host, in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.fusion.codegen.interpreter_process import run_interpreted
from tests.unit.serving.tables.prefix.page_tables import BY_HAND

pytest.importorskip("torch", reason="the device builder needs PyTorch")
MODULE = "tests.unit.serving.tables.prefix.interpreted_forest"


@pytest.fixture(scope="module")
def few() -> Any:
    return run_interpreted(MODULE, "4")


def test_forests_and_tables_are_bit_equal_with_the_hosts(few: Any) -> None:
    different = {name: names for name, (names, _, _) in few["batches"].items() if names}
    assert len(few["batches"]) == len(BY_HAND) + 4
    assert different == {}
    saved = {name: ns for name, (_, _, ns) in few["batches"].items()}
    assert min(saved["two levels"], saved["a chain"], saved["long rows"]) > 0
    assert saved["null pages"] == saved["equal pages behind different ones"] == 0


def test_prefixes_beyond_the_capacity_are_left_out_and_counted(few: Any) -> None:
    assert few["cut"] == {name: [[], 0, -1] for name in ("prefix_rows", "prefix_tiles")}


@pytest.mark.slow
def test_many_random_forests() -> None:
    results = run_interpreted(MODULE, "60")["batches"]
    assert [name for name, (names, _, _) in results.items() if names] == []
    assert sum(rows > 0 for _, rows, _ in results.values()) > 12
