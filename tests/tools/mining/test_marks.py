"""Register marks that are derived from the shape of an instruction."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.mining.marks import Marks, shape_of

from nostall.sass.binary.cubin import Cubin
from nostall.sass.binary.listing import Register, Row, disassemble

CORPUS = Path(__file__).resolve().parents[2] / "corpus" / "nvcc"


def row(text: str, defs: list[Register], uses: list[Register]) -> Row:
    return Row(0, text, 0, tuple(defs), tuple(uses))


def registers(names: str) -> list[Register]:
    """The registers in a list of names such as ``R4 P1``."""
    return [(name.rstrip("0123456789"), int(name.lstrip("PRU"))) for name in names.split()]


def test_a_shape_has_no_register_numbers_immediates_or_signs() -> None:
    shape, named = shape_of("@!P0 IADD3 R4, -R5.reuse, 0x10, RZ")
    assert shape == shape_of("@P3 IADD3 R1, R2, 0xff, RZ")[0]
    assert named == (("P", 0), ("R", 4), ("R", 5))


def test_a_texture_mask_belongs_to_the_shape() -> None:
    assert (
        shape_of("TEX.LL RZ, R4, R4, R6, 0x0, 2D, 0x1")[0]
        != (shape_of("TEX.LL RZ, R4, R4, R6, 0x0, 2D, 0x3")[0])
    )


def test_the_widths_of_operands_are_learnt() -> None:
    marks = Marks()
    wide = row("IMAD.WIDE R10, R4, 0x4, R20", [("R", 10), ("R", 11)], [("R", 4), ("R", 20)])
    wide = row(wide.text, [*wide.defs], [*wide.uses, ("R", 21)])
    marks.learn(wide)
    assert marks.derive("IMAD.WIDE R30, R7, 0x8, R2") == (
        (("R", 30), ("R", 31)),
        (("R", 7), ("R", 2), ("R", 3)),
    )


def test_an_ambiguous_instruction_teaches_nothing() -> None:
    marks = Marks()
    marks.learn(row("DADD R4, R4, R6", [("R", 4), ("R", 5)], [("R", n) for n in range(4, 8)]))
    assert marks.derive("DADD R10, R12, R14") is None


@pytest.mark.parametrize(
    "text, result, sources",
    [
        ("HSETP2.EQ.OR P1, PT, R11.H0_H0, R4, P1", "P1", "R11 R4 P1"),
        ("@P1 HSETP2.EQ.OR P1, PT, R11.H0_H0, R4, P2", "P1", "P1 R11 R4 P2"),
        ("HSETP2.NAN.AND P1, PT, R4.H0_H0, R4.H0_H0, P1", "P1", "R4 P1"),
        ("@P1 ISETP.GE.U32.OR P2, PT, R4, R8, P1", "P2", "P1 R4 R8"),
    ],
)
def test_a_predicate_that_is_result_and_source_is_learnt(
    text: str, result: str, sources: str
) -> None:
    """The first operand of the name is the result; another instruction may use other predicates."""
    marks = Marks()
    assert marks.lesson(text)[1]
    marks.learn(row(text, registers(result), registers(sources)))
    assert marks.derive(text) is not None
    other = text.replace("P1", "P6").replace("R4", "R30")
    renamed = {"P1": "P6", "R4": "R30"}
    derived = marks.derive(other)
    assert derived is not None
    assert set(derived[0]) == set(registers(renamed.get(result, result)))
    assert set(derived[1]) == set(registers(" ".join(renamed.get(r, r) for r in sources.split())))


def test_a_wide_result_that_is_also_a_source_is_learnt() -> None:
    """The accumulator of a matrix product is its result; both have four registers."""
    marks = Marks()
    text = "HMMA.1688.F32 R76, R114, R89, R76"
    assert marks.lesson(text)[1]
    quad = [("R", number) for number in range(76, 80)]
    marks.learn(row(text, quad, [("R", 114), ("R", 115), ("R", 89), *quad]))
    derived = marks.derive("HMMA.1688.F32 R4, R20, R22, R8")
    assert derived is not None
    assert set(derived[0]) == {("R", number) for number in range(4, 8)}
    assert set(derived[1]) == {("R", n) for n in (20, 21, 22, *range(8, 12))}


def test_a_wide_source_that_two_operands_name_teaches_nothing() -> None:
    marks = Marks()
    marks.learn(row("DSETP.NAN.AND P0, PT, R4, R4, PT", registers("P0"), registers("R4 R5")))
    assert marks.derive("DSETP.NAN.AND P0, PT, R6, R8, PT") is None


def test_a_shape_that_disagrees_is_discarded() -> None:
    marks = Marks()
    marks.learn(row("MUFU.RCP R4, R9", [("R", 4)], [("R", 9)]))
    marks.learn(row("MUFU.RCP R4, R9", [("R", 4), ("R", 5)], [("R", 9)]))
    assert marks.derive("MUFU.RCP R1, R7") is None
    assert marks.disagreements == 1


@pytest.mark.parametrize("name", ["arithmetic.sm_75", "memory.sm_90", "tensor.sm_120"])
def test_derived_marks_are_those_of_nvdisasm(name: str) -> None:
    """Marks learnt from each other function equal nvdisasm's own in all that they cover."""
    listings = disassemble(Cubin.parse((CORPUS / f"{name}.cubin").read_bytes())).values()
    marks = Marks()
    derived = total = 0
    for listing in listings:
        for seen in listing.rows:
            expected = marks.derive(seen.text)
            total += 1
            if expected is not None and "[" not in seen.text:
                derived += 1
                assert set(expected[0]) == set(seen.defs), seen.text
                assert set(expected[1]) == set(seen.uses), seen.text
            marks.learn(seen)
    assert marks.disagreements == 0
    assert derived > total / 4
