"""The device builder, in Triton's interpreter and compiled for sm_90."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.fusion.codegen.interpreter_process import run_interpreted

pytest.importorskip("torch", reason="the device builder needs PyTorch")


@pytest.fixture(scope="module")
def interpreted() -> Any:
    return run_interpreted("tests.unit.serving.tables.interpreted_tables")


def test_device_tables_are_bit_equal_with_the_hosts(interpreted: Any) -> None:
    assert interpreted["different"] == {name: [] for name in interpreted["different"]}
    assert interpreted["units"]["snake"] > 100
    assert interpreted["units"]["one decode of many splits"] > 100


def test_a_batch_beyond_the_capacity_is_refused_with_the_capacity_needed(interpreted: Any) -> None:
    for name, error in interpreted["refused"].items():
        what = {"tiles": "query tiles", "scratch_rows": "scratch rows"}.get(name, name)
        assert f" {what} (capacity " in error


def test_an_order_that_only_the_host_knows_is_refused() -> None:
    from nostall.serving.errors import BadTables
    from nostall.serving.tables.device import DeviceBuilder
    from nostall.serving.tables.settings import TableCapacity, TableSettings

    capacity = TableCapacity(1, 1, 1, 1, 1, 132)
    with pytest.raises(BadTables, match="does not know the order 'lpt'; allowed are given, snake"):
        DeviceBuilder.of(TableSettings(8, 8, 132, order="lpt"), capacity, "cpu")
