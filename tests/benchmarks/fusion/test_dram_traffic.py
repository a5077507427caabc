"""Bytes of a chain's methods out of what ncu prints."""

from __future__ import annotations

import csv
import io

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

from benchmarks.fusion.chains.dram_traffic import counted, line

SPIN = "at::cuda::<unnamed>::spin_kernel(long)"
HEAD = ["ID", "Process ID", "Kernel Name", "dram__bytes_read.sum", "dram__bytes_write.sum"]


def page(launches: list[tuple[str, int, int]], unit: str = "byte") -> list[str]:
    """ncu's raw page: its own remarks, names, units, then the launches."""
    text = io.StringIO()
    table = csv.writer(text, quoting=csv.QUOTE_ALL)
    table.writerow(HEAD)
    table.writerow(["", "", "", unit, unit])
    for number, (name, read, written) in enumerate(launches):
        table.writerow([number, 4711, name, f"{read:,}", f"{written:,}"])
    remarks = ["==PROF== Connected to process 4711 (/usr/bin/python3.12)"]
    return [*remarks, *text.getvalue().splitlines(), "==PROF== Disconnected from process 4711"]


MARKED = (SPIN, 512, 0)
BEHIND = ("void at::native::reduce_kernel<512, 1, ...>(T3)", 536_870_912, 3_000_000)


def test_bytes_are_those_between_marks_and_what_was_left_to_be_written() -> None:
    launches = [
        *(MARKED, ("triton_red_fused_0", 2_000, 1_000), ("triton_poi_fused_1", 500, 0)),
        *(MARKED, BEHIND, MARKED, ("triton_per_fused_0", 1_500, 900), MARKED, BEHIND),
        *(MARKED, ("stitched_sum_warp_1a2b", 1_000, 800), MARKED, BEHIND, BEHIND),
    ]
    found = counted(page(launches), "")
    assert found["compile"]["kernels"] == 2 and found["compile"]["read_bytes"] == 2_500
    assert found["compile"]["written_bytes"] == 3_001_000
    assert found["stitched"]["written_bytes"] == 6_000_800
    assert found["stitched"]["names"] == ["stitched_sum_warp_1a2b"]
    assert line(found).endswith("stitched 6.0 MB in 1")


def test_a_method_without_kernels_is_no_count() -> None:
    launches = [MARKED, MARKED, BEHIND, MARKED, MARKED]
    with pytest.raises(ValueError, match=r"counted \[0, 1, 0, 0\] kernels between marks"):
        counted(page(launches), "")


def test_other_units_and_no_permission_are_said() -> None:
    with pytest.raises(ValueError, match=r"dram__bytes_read\.sum in Mbyte"):
        counted(page([MARKED], unit="Mbyte"), "")
    with pytest.raises(ValueError, match="ERR_NVGPUCTRPERM"):
        counted(["==ERROR== ERR_NVGPUCTRPERM - The user does not have permission"], "")
