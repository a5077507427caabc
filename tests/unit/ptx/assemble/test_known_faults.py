"""Versions of ptxas that are reported to assemble a pattern wrongly are not used for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.corpus.ptx_catalogue import ptx_texts
from tests.unit.tuning.assembler.kernel import make_source

from nostall.ptx.assemble.known_faults import FAULTS, known_faults
from nostall.ptx.assemble.versions import Assembler, find_assemblers, version_numbers
from nostall.ptx.program.module import parse
from nostall.tuning.assembler import commands

WGMMA = """\
.version 8.0
.target sm_90a
.address_size 64
.visible .entry f()
{
	.reg .b32 %r<9>; .reg .f32 %f<5>; .reg .b64 %d<3>; .reg .pred %p<2>;
	wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f0,%f1,%f2,%f3}, OPERAND, %d1, %p0, 1, 1;
	ret;
}
"""
IN_REGISTERS = parse(WGMMA.replace("OPERAND", "{%r0,%r1,%r2,%r3}").replace("1, 1;", "1, 1, 0;"))
IN_SHARED = parse(WGMMA.replace("OPERAND", "%d0").replace("1, 1;", "1, 1, 0, 0;"))
REFERENCE = Path(__file__).resolve().parents[4] / "docs" / "reference" / "regress.md"
REGISTERS, HOPPER, BLACKWELL, PACKED, REPEATED = FAULTS


@pytest.mark.parametrize(
    ("version", "faults"),
    [("12.8.93", {REGISTERS, HOPPER}), ("12.9.86", {REGISTERS, HOPPER}),
     ("13.0.88", {REGISTERS, HOPPER}), ("13.1.80", {REGISTERS}), ("13.2.86", {REGISTERS}),
     ("13.3.33", set()), ("13.5.37", set())],
)  # fmt: skip
def test_register_operands_of_wgmma_need_13_3(version: str, faults: set[object]) -> None:
    assert set(known_faults(IN_REGISTERS, version)) == faults
    assert set(known_faults(IN_SHARED, version)) == faults - {REGISTERS}


@pytest.mark.parametrize("version", ["12.8.93", "13.0.88", "13.1.80", "13.1.115", "13.5.37"])
def test_a_fault_concerns_its_architectures_only(version: str) -> None:
    assert not known_faults(IN_REGISTERS, version, "sm_80")
    on_blackwell = known_faults(IN_SHARED, version, "sm_100a")
    assert (BLACKWELL in on_blackwell) == (version_numbers(version)[:2] in ((13, 0), (13, 1)))


def test_kernels_without_matrix_instructions_may_use_each_version() -> None:
    for name in ("rmsnorm-512x128.sm_90", "softmax-128x512.sm_90", "atomics.sm_80"):
        assert not known_faults(parse(ptx_texts()[name]), "12.8.93")


def test_an_accumulator_that_is_one_register_twice() -> None:
    product = "mma.sync.aligned.m16n8k32.row.col.f16.e4m3.e4m3.f16"
    inputs = "{%r2,%r3,%r4,%r5}, {%r6,%r7}"
    start, end = WGMMA.index("\twgmma"), WGMMA.index("\tret")
    for accumulators, twice in (("%r0,%r0", True), ("%r0,%r1", False)):
        line = f"\t{product} {{%r0,%r1}}, {inputs}, {{{accumulators}}};\n"
        module = parse(WGMMA[:start] + line + WGMMA[end:])
        for version, target, wrong in (
            ("13.4.92", "sm_100a", twice), ("13.5.37", "sm_100a", False),
            ("13.4.92", "sm_120", False),
        ):  # fmt: skip
            assert (REPEATED in known_faults(module, version, target)) == wrong


def test_a_pattern_in_a_device_function_counts() -> None:
    text = IN_REGISTERS.text.replace(".visible .entry f()", ".func f()")
    assert REGISTERS in known_faults(parse(text), "12.9.86")


def test_the_search_leaves_out_other_versions_with_a_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = find_assemblers()[0]
    twin = Assembler(own.path, "12.0.1")
    source = make_source(own)
    assert commands.find_command(source, [own, twin]).assemblers == (own, twin)
    monkeypatch.setattr(commands, "known_faults", lambda module, version, target: [REGISTERS])
    assert commands.find_command(source, [own, twin]).assemblers == (own,)


def test_each_fault_names_its_report() -> None:
    for fault in FAULTS:
        assert fault.source in REFERENCE.read_text("utf-8") and fault.since < fault.until
