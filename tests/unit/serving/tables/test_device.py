"""The device builder, in Triton's interpreter and compiled for sm_90."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.corpus.catalogue import OLD_TRITON
from tests.unit.fusion.codegen.interpreter_process import run_interpreted

pytest.importorskip("torch", reason="the device builder needs PyTorch")
ROOT = Path(__file__).resolve().parents[4]


MODULE = "tests.unit.serving.tables.interpreted_tables"
FEW = ("empty batch", "snake, default classes", "given, window", "prefixes")
"""Cases of `make test`: the smallest batches of two orders, with and without prefixes."""


@pytest.fixture(scope="module")
def few() -> Any:
    return run_interpreted(MODULE, *FEW)


def test_device_tables_of_small_batches_are_bit_equal_with_the_hosts(few: Any) -> None:
    assert few["different"] == {name: [] for name in FEW}
    assert few["units"]["snake, default classes"] > 0 and few["units"]["given, window"] > 0
    assert few["prefix rows"]["prefixes"] == 361


@pytest.mark.slow
def test_device_tables_are_bit_equal_with_the_hosts() -> None:
    interpreted = run_interpreted(MODULE)
    assert len(interpreted["different"]) > len(FEW)
    assert interpreted["different"] == {name: [] for name in interpreted["different"]}
    assert interpreted["units"]["snake"] > 100
    assert interpreted["units"]["one decode of many splits"] > 100
    shared = {name: rows for name, rows in interpreted["prefix rows"].items() if rows}
    assert shared == {
        "prefixes": 361, "prefixes, given": 361, "prefix of all": 40, "prefix of verifies": 72
    }  # fmt: skip


def test_a_batch_beyond_the_capacity_is_refused_with_the_capacity_needed(few: Any) -> None:
    for name, error in few["refused"].items():
        # Without prefixes, which do not fit, the batch needs more units.
        named = {"tiles": "query tiles", "prefix_rows": "units", "prefix_tiles": "units"}
        assert f" {named.get(name, name.replace('_', ' '))} (capacity " in error


def test_an_order_that_only_the_host_knows_is_refused() -> None:
    from nostall.serving.errors import BadTables
    from nostall.serving.tables.device import DeviceBuilder
    from nostall.serving.tables.settings import TableCapacity, TableSettings

    capacity = TableCapacity(1, 1, 1, 1, 1, 132)
    with pytest.raises(BadTables, match="does not know the order 'lpt'; allowed are given, snake"):
        DeviceBuilder.of(TableSettings(8, 8, 132, order="lpt"), capacity, "cpu")


@pytest.mark.parametrize("triton", ["installed", pytest.param("3.6.0", marks=pytest.mark.slow)])
def test_the_kernel_compiles_for_sm_90(triton: str) -> None:
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    if triton == "3.6.0":
        if not OLD_TRITON.is_dir():
            pytest.skip(f"{OLD_TRITON} does not exist; run `make test`")
        paths.insert(0, str(OLD_TRITON))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.unit.serving.tables.compiled_builder"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    version, sizes = json.loads(done.stdout)
    assert set(sizes) == {"prefix groups", "window", "leaders", "forest"}
    assert min(sizes.values()) > 1000
    assert len(set(sizes.values())) == 4
    assert version == triton or triton == "installed"
