"""Cases of public reports: the renamed kernel differs in its name only."""

from __future__ import annotations

import pytest
from benchmarks.ptx.compilers.reported import REPORTS, make_case

from nostall.ptx.assemble.versions import find_assemblers, version_numbers

NEWEST = max(find_assemblers(), key=lambda a: version_numbers(a.version))


def test_each_report_is_public() -> None:
    assert all(reported.report.startswith("https://") for reported in REPORTS.values())
    assert len({reported.report for reported in REPORTS.values()}) == 3


@pytest.mark.slow
def test_a_case_compares_the_same_ptx_under_two_names() -> None:
    case = make_case("kernel name with cutlass", NEWEST, NEWEST, None)
    assert not isinstance(case, str)
    assert case.source.kernel == "cutlass_varlen_attention"
    assert case.older.label == "the same PTX:another_varlen_attention"
    assert case.older.properties.registers < case.newer.properties.registers
    assert "older-triton" in str(make_case("sparse decode, 8 warps", NEWEST, NEWEST, None))
