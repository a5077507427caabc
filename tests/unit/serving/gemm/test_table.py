"""The table over M: look-up, file, and refusal of damaged or foreign files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nostall.core.errors import BadInput
from nostall.serving.gemm.config import GemmConfig, LinearShape
from nostall.serving.gemm.table import (
    Cublas,
    GemmTable,
    LtAlgorithm,
    Padded,
    Row,
    load_tables,
    save_tables,
)

SHAPE = LinearShape(4096, 14336)
VERSIONS = {"torch": "2.11.0", "cuda": "13.0", "triton": "3.6.0"}
ROWS = (
    Row(4, GemmConfig(16, 64, 128, split=2, swap=True), 1.1, 1.05),
    Row(15, Padded(16), 1.02, 1.01),
    Row(16, LtAlgorithm(bytes(range(64))), 1.03, 1.02),
    Row(64, Cublas()),
)
TABLE = GemmTable(SHAPE, "NVIDIA H100", tuple(VERSIONS.items()), ROWS)


def saved(tmp_path: Path) -> Path:
    path = tmp_path / "table.json"
    save_tables(path, [TABLE])
    return path


@pytest.mark.parametrize(("m", "row"), [(1, 0), (4, 0), (5, 1), (15, 1), (16, 2), (17, 3), (64, 3)])
def test_an_entry_holds_up_to_its_m(m: int, row: int) -> None:
    assert TABLE.entry(m) is ROWS[row].entry


def test_behind_the_last_row_cublas_runs() -> None:
    assert TABLE.entry(65) == Cublas()


def test_a_file_restores_the_table(tmp_path: Path) -> None:
    assert load_tables(saved(tmp_path), TABLE.gpu, VERSIONS) == {SHAPE: TABLE}


@pytest.mark.parametrize(("gpu", "triton"), [("NVIDIA H200", "3.6.0"), ("NVIDIA H100", "3.9.0")])
def test_a_table_of_another_gpu_or_version_is_refused(
    tmp_path: Path, gpu: str, triton: str
) -> None:
    with pytest.raises(BadInput, match=r"NVIDIA H100 with .*3\.6\.0.*nostall serving tune"):
        load_tables(saved(tmp_path), gpu, VERSIONS | {"triton": triton})


@pytest.mark.parametrize(
    "change",
    [
        {"format": "other"},
        {"layers": [{"columns": 4096, "depth": 14336, "dtype": "bfloat16"}]},
        {"layers": [{"columns": 4090, "depth": 14336, "dtype": "bfloat16", "rows": []}]},
        {"layers": [{"columns": 16, "depth": 16, "dtype": "int8", "rows": []}]},
        {"extra": 1},
    ],
)
def test_damage_is_an_error_of_one_line(tmp_path: Path, change: dict[str, object]) -> None:
    path = saved(tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(BadInput) as caught:
        load_tables(path, TABLE.gpu, VERSIONS)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "row",
    [
        {"m": 1, "kind": "cublaslt", "algorithm": "00"},
        {"m": 1, "kind": "cublaslt", "algorithm": "xy"},
        {"m": 1, "kind": "triton"},
        {"m": 1, "kind": "triton", "config": [16, 64, 4096, 1, 4, 4, False, 8]},
        {"m": 1, "kind": "triton", "config": [16, 48, 128, 1, 4, 4, False, 8]},
        {"m": 1, "kind": "triton", "config": [16, 64, 128, 0, 4, 4, False, 8]},
        {"m": 0, "kind": "cublas"},
    ],
)
def test_damaged_rows(tmp_path: Path, row: dict[str, object]) -> None:
    path = saved(tmp_path)
    data = json.loads(path.read_text())
    data["layers"][0]["rows"] = [row]
    path.write_text(json.dumps(data))
    with pytest.raises(BadInput, match="nostall serving tune"):
        load_tables(path, TABLE.gpu, VERSIONS)


def test_a_cut_file(tmp_path: Path) -> None:
    path = saved(tmp_path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(BadInput, match="nostall serving tune"):
        load_tables(path, TABLE.gpu, VERSIONS)


def test_rows_out_of_order(tmp_path: Path) -> None:
    path = saved(tmp_path)
    data = json.loads(path.read_text())
    data["layers"][0]["rows"].reverse()
    path.write_text(json.dumps(data))
    with pytest.raises(BadInput, match="not ascending"):
        load_tables(path, TABLE.gpu, VERSIONS)
