"""What the mined tables say about pairs that a GPU proved wrong, and how evidence is counted."""

from __future__ import annotations

from collections import Counter

import pytest

from nostall.sass.binary.encoding import Control
from nostall.sass.program import queues, registers
from nostall.sass.program.instruction import Instruction, parse_text
from nostall.sass.safety import evidence, pairing
from nostall.sass.safety.latency import Floors

R, UR = (lambda i: registers.number("R", i)), (lambda i: registers.number("UR", i))


def made(text: str, defs: list[int], uses: list[int], at: int = 0, **control: int) -> Instruction:
    """An instruction with its registers given by hand."""
    guard, opcode, operands = parse_text(text)
    fields = {"stall": 1, "yields": False, "write_sb": 7, "read_sb": 7, "wait": 0, "reuse": 0}
    return Instruction(
        at,
        text,
        at,
        Control(**{**fields, **control}),  # type: ignore[arg-type]
        opcode,
        guard,
        operands,
        tuple(defs),
        tuple(uses),
        (),
        frozenset(),
    )


WIDE = made("IMAD.WIDE.U32 R10, R4, 0x2, R6", [R(10), R(11)], [R(4), R(6), R(7)])


def test_names_tell_the_words_of_a_wide_operand_apart() -> None:
    move = made("IMAD.MOV.U32 R7, RZ, RZ, R9", [R(7)], [R(9)])
    assert pairing.exact(move, WIDE, R(7), "RAW") == ["IMAD.MOV>R|IMAD.WIDE.3+1"]
    move = made("IMAD.MOV.U32 R6, RZ, RZ, R9", [R(6)], [R(9)])
    assert pairing.exact(move, WIDE, R(6), "RAW") == ["IMAD.MOV>R|IMAD.WIDE.3"]


def test_the_result_operand_is_no_source() -> None:
    add = made("IADD3 R4, R4, R5, RZ", [R(4)], [R(4), R(5)])
    assert pairing.exact(add, add, R(4), "RAW") == ["IADD3>R|IADD3.1"]


def test_a_register_in_two_operands_has_two_names() -> None:
    square = made("FMUL R1, R2, R2", [R(1)], [R(2)])
    add = made("FADD R2, R3, R4", [R(2)], [R(3), R(4)])
    assert pairing.exact(add, square, R(2), "RAW") == ["FADD>R|FMUL.1", "FADD>R|FMUL.2"]


@pytest.mark.parametrize(
    ("first", "second", "register", "kind", "least"),
    [
        ("IMAD R7, R1, R2, R3", "IMAD.IADD R8, R7, 0x1, R9", R(7), "RAW", 4),
        ("IMAD.HI R7, R1, R2, R3", "IMAD.HI R8, R7, R2, R3", R(7), "RAW", 6),
        ("R2UR UR12, R3", "IMAD.U32 R2, RZ, RZ, UR12", UR(12), "RAW", 13),
        (
            "UIADD3.X UR5, UR8, UR11, URZ, UP0, !UPT",
            "ULDC.64 UR10, c[0x0][0x218]",
            UR(11),
            "WAR",
            3,
        ),
    ],
)
def test_pairs_that_an_h200_computed_wrongly_below_this(
    first: str, second: str, register: int, kind: pairing.Kind, least: int
) -> None:
    writes = kind == "RAW"
    one = made(first, [register] if writes else [UR(5)], [] if writes else [UR(8), register])
    two = made(second, [R(60)] if writes else [UR(10), UR(11)], [register] if writes else [])
    assert Floors.of(90).usual(one, two, register, kind) >= least


def test_an_addend_s_high_word_may_follow_at_two() -> None:
    move = made("IMAD.MOV.U32 R7, RZ, RZ, R9", [R(7)], [R(9)])
    assert Floors.of(90).usual(move, WIDE, R(7), "RAW") == 2
    move = made("IMAD.MOV.U32 R6, RZ, RZ, R9", [R(6)], [R(9)])
    assert Floors.of(90).usual(move, WIDE, R(6), "RAW") >= 4


def test_special_registers_answer_in_no_order_but_for_uniform_ones() -> None:
    assert queues.result_queue(made("S2R R1, SR_TID.X", [R(1)], []), 90) == ""
    uniform = made("S2UR UR4, SR_CTAID.X", [UR(4)], [])
    assert queues.result_queue(uniform, 90) == "s2ur"


def test_what_computes_with_its_own_address_is_a_wall() -> None:
    assert made("LEPC R20, `(.L_x_0)", [R(20)], []).is_wall
    assert made("LEPC R20", [R(20)], []).is_wall


def _seen(*order: Instruction) -> Counter[tuple[str, str, int]]:
    found: evidence.Sightings = Counter()
    evidence.sight(order, 90, found)
    return Counter({(k, n, d): c for (k, n, _, d), c in found.items()})


def test_evidence_counts_straight_lines_only() -> None:
    one = made("FADD R2, R3, R4", [R(2)], [R(3), R(4)], at=0, stall=5)
    two = made("FMUL R5, R2, R6", [R(5)], [R(2), R(6)], at=1)
    assert _seen(one, two)["RAW", "FADD>R|FMUL.1", 5] == 1
    waits = made("FMUL R5, R2, R6", [R(5)], [R(2), R(6)], at=1, wait=1)
    assert not any(kind == "RAW" for kind, *_ in _seen(one, waits))
    guarded = made("@P0 FADD R2, R3, R4", [R(2)], [R(3), R(4)], at=0, stall=5)
    assert not any(kind == "RAW" for kind, *_ in _seen(guarded, two))
