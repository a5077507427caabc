"""Messages of ptxas, as printed by its versions 12.8, 13.0 and 13.4."""

from __future__ import annotations

from collections import Counter

from nostall.ptx.safety.assembler_messages import added_repairs, count_repairs, parse_messages

_SERIALIZED = (
    "ptxas-blackwell info    : (C7514) Potential Performance Loss: wgmma.mma_async instructions "
    "are serialized due to non wgmma instructions reading accumulator registers of  a wgmma "
    "between start and end of the pipeline stage in the function 'gemm' in line 0\n"
)
_INJECTED = (
    "ptxas info    : (C7517) Potential Performance Loss: wgmma.wait_group is injected in around "
    "line 12 by compiler to allow use of registers defined by GMMA in function 'other'\n"
)
_OTHER = (
    "ptxas-blackwell info    : 0 bytes gmem\n"
    "ptxas-blackwell info    : Compiling entry function 'gemm' for 'sm_90a'\n"
    "ptxas kernel.ptx, line 7; warning : (C7509) something else in the function 'gemm'\n"
    "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
)


def test_messages_are_read_with_code_and_function() -> None:
    messages = parse_messages(_OTHER + _SERIALIZED + _INJECTED)
    assert [(m.code, m.severity, m.function) for m in messages] == [
        ("C7509", "warning", "gemm"),
        ("C7514", "info", "gemm"),
        ("C7517", "info", "other"),
    ]
    assert "serialized" in messages[1].text


def test_repairs_are_counted_by_code() -> None:
    assert count_repairs(_OTHER) == Counter()
    assert count_repairs(2 * _SERIALIZED + _INJECTED) == Counter(C7514=2, C7517=1)


def test_only_repairs_that_the_original_lacks_count() -> None:
    assert not added_repairs(_SERIALIZED + _OTHER, _SERIALIZED)
    assert added_repairs(_SERIALIZED, 2 * _SERIALIZED + _INJECTED) == Counter(C7514=1, C7517=1)
    assert added_repairs("", "") == Counter()
