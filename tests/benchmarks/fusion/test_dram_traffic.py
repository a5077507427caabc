"""Tests of parsing DRAM bytes from ncu's output."""

from __future__ import annotations

import csv
import io

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

from benchmarks.fusion.chains.mechanisms.dram_traffic import parse_traffic, summary_line

SPIN_KERNEL = "at::cuda::<unnamed>::spin_kernel(long)"
COLUMNS = ["ID", "Process ID", "Kernel Name", "dram__bytes_read.sum", "dram__bytes_write.sum"]


def ncu_page(launches: list[tuple[str, int, int]], unit: str = "byte") -> list[str]:
    """ncu's raw page as CSV: messages of ncu, column names, units, then one row for each launch."""
    text = io.StringIO()
    writer = csv.writer(text, quoting=csv.QUOTE_ALL)
    writer.writerow(COLUMNS)
    writer.writerow(["", "", "", unit, unit])
    for number, (name, read_bytes, written_bytes) in enumerate(launches):
        writer.writerow([number, 4711, name, f"{read_bytes:,}", f"{written_bytes:,}"])
    remarks = ["==PROF== Connected to process 4711 (/usr/bin/python3.12)"]
    return [*remarks, *text.getvalue().splitlines(), "==PROF== Disconnected from process 4711"]


MARKER = (SPIN_KERNEL, 512, 0)
FLUSH = ("void at::native::reduce_kernel<512, 1, ...>(T3)", 536_870_912, 3_000_000)


def test_bytes_are_those_between_markers_and_writes_of_the_flush() -> None:
    launches = [
        *(MARKER, ("triton_red_fused_0", 2_000, 1_000), ("triton_poi_fused_1", 500, 0)),
        *(MARKER, FLUSH, MARKER, ("triton_per_fused_0", 1_500, 900), MARKER, FLUSH),
        *(MARKER, ("stitched_sum_warp_1a2b", 1_000, 800), MARKER, FLUSH, FLUSH),
    ]
    traffic = parse_traffic(ncu_page(launches), "")
    assert traffic["compile"]["kernels"] == 2 and traffic["compile"]["read_bytes"] == 2_500
    assert traffic["compile"]["written_bytes"] == 3_001_000
    assert traffic["stitched"]["written_bytes"] == 6_000_800
    assert traffic["stitched"]["names"] == ["stitched_sum_warp_1a2b"]
    assert summary_line(traffic).endswith("stitched 6.0 MB in 1")


def test_a_method_without_kernels_is_an_error() -> None:
    launches = [MARKER, MARKER, FLUSH, MARKER, MARKER]
    with pytest.raises(
        ValueError, match=r"counted \[0, 1, 0, 0\] kernels after the marker kernels"
    ):
        parse_traffic(ncu_page(launches), "")


def test_other_units_and_missing_permission_are_errors() -> None:
    with pytest.raises(ValueError, match=r"dram__bytes_read\.sum in Mbyte"):
        parse_traffic(ncu_page([MARKER], unit="Mbyte"), "")
    with pytest.raises(ValueError, match="ERR_NVGPUCTRPERM"):
        parse_traffic(["==ERROR== ERR_NVGPUCTRPERM - The user does not have permission"], "")
