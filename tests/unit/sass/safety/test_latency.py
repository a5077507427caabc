"""Mined latency tables: names of pairs, pairs that failed on a GPU, and counted distances."""

from __future__ import annotations

from collections import Counter

import pytest

from nostall.sass.binary.encoding import Control
from nostall.sass.program import registers
from nostall.sass.program.cover_rules import RULES, Claim, group
from nostall.sass.program.instruction import Instruction, parse_text
from nostall.sass.safety import latency, pairing
from nostall.sass.safety.latency import _DONE_BEFORE_VARIABLE, LatencyTable
from tools.mining import floors as mining

R, UR = (lambda i: registers.number("R", i)), (lambda i: registers.number("UR", i))


def instruction(
    text: str, defs: list[int], uses: list[int], at: int = 0, **control: int
) -> Instruction:
    """An instruction with these register numbers; ``control`` are fields of its control word."""
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


WIDE = instruction("IMAD.WIDE.U32 R10, R4, 0x2, R6", [R(10), R(11)], [R(4), R(6), R(7)])


def test_names_distinguish_the_words_of_a_wide_operand() -> None:
    move = instruction("IMAD.MOV.U32 R7, RZ, RZ, R9", [R(7)], [R(9)])
    assert pairing.exact_names(move, WIDE, R(7), "RAW") == ["IMAD.MOV>R|IMAD.WIDE.3+1"]
    move = instruction("IMAD.MOV.U32 R6, RZ, RZ, R9", [R(6)], [R(9)])
    assert pairing.exact_names(move, WIDE, R(6), "RAW") == ["IMAD.MOV>R|IMAD.WIDE.3"]


@pytest.mark.parametrize(
    ("text", "register", "places"),
    [
        # R5 is the second word of R4 only where the opcode reads two words, or four.
        ("IADD3 R0, R4, R5, RZ", 5, ["2"]),
        ("IADD3 R0, R4, R5, RZ", 4, ["1"]),
        ("IADD3 R0, R3, R4, R5", 5, ["3"]),
        ("IMAD.WIDE R0, R4, R5, RZ", 5, ["1+1", "2"]),
        ("IMAD.WIDE R0, R4, R6, RZ", 6, ["2"]),
        ("DADD R0, R4, R5", 5, ["1+1", "2"]),
        ("DADD R0, R4, R6", 6, ["2"]),
        ("STG.128 [R2], R4", 7, ["1+3"]),
        ("STG.128 [R6], R4", 7, ["0+1", "1+3"]),
        ("STG [R6], R7", 7, ["1"]),
        ("HMMA.16816.F32 R0, R4, R8, R12", 7, ["1+3"]),
        ("HMMA.16816.F32 R0, R4, R6, R12", 7, ["1+3", "2+1"]),
        ("HMMA.16816.F32 R0, R3, R8, R12", 7, ["1+4"]),
    ],
)
def test_words_belong_to_the_operands_that_reach_them(
    text: str, register: int, places: list[str]
) -> None:
    consumer = instruction(text, [R(0)] if "STG" not in text else [], [R(register)])
    producer = instruction(f"MOV R{register}, R20", [R(register)], [R(20)])
    expected = [f"MOV>R|{consumer.opcode}.{place}" for place in places]
    assert pairing.exact_names(producer, consumer, R(register), "RAW") == expected


def test_the_result_operand_is_not_a_source() -> None:
    add = instruction("IADD3 R4, R4, R5, RZ", [R(4)], [R(4), R(5)])
    assert pairing.exact_names(add, add, R(4), "RAW") == ["IADD3>R|IADD3.1"]


def test_a_register_in_two_operands_gives_two_names() -> None:
    square = instruction("FMUL R1, R2, R2", [R(1)], [R(2)])
    add = instruction("FADD R2, R3, R4", [R(2)], [R(3), R(4)])
    assert pairing.exact_names(add, square, R(2), "RAW") == ["FADD>R|FMUL.1", "FADD>R|FMUL.2"]


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
def test_pairs_that_failed_on_an_h200_below_this_distance(
    first: str, second: str, register: int, kind: pairing.HazardKind, least: int
) -> None:
    writes = kind == "RAW"
    producer = instruction(
        first, [register] if writes else [UR(5)], [] if writes else [UR(8), register]
    )
    consumer = instruction(
        second, [R(60)] if writes else [UR(10), UR(11)], [register] if writes else []
    )
    assert LatencyTable.load(90).safe_distance(producer, consumer, register, kind) >= least


@pytest.mark.parametrize("sm", [90, 100, 120])
@pytest.mark.parametrize("writer", ["I2F.RP R3, R7", "LDS R3, [R7]", "S2R R3, SR_TID.X"])
def test_a_variable_latency_result_may_follow_as_closely_as_any_fixed_one(
    writer: str, sm: int
) -> None:
    """Triton's grouped GEMMs have I2F two cycles after R2UR; few sightings of it had three."""
    reader = instruction("R2UR UR6, R3", [UR(6)], [R(3)])
    late = instruction(writer, [R(3)], [R(7)] if "R7" in writer else [])
    early = instruction("IMAD.MOV.U32 R3, RZ, RZ, R9", [R(3)], [R(9)])
    table = LatencyTable.load(sm)
    needed = table.min_distance(reader, late, R(3), "WAR")
    assert needed <= max(1, table.min_distance(reader, early, R(3), "WAR"))


@pytest.mark.parametrize("sm", [75, 80, 90, 100, 120])
def test_a_uniform_operand_may_be_overwritten_late_after_one_cycle(sm: int) -> None:
    """ptxas 11.8 for sm_75 leaves one cycle between UIMAD.WIDE and S2UR to its operand."""
    reader = instruction(
        "UIMAD.WIDE.U32 UR4, UR6, UR7, UR4", [UR(4), UR(5)], [UR(6), UR(7), UR(4), UR(5)]
    )
    late = instruction("S2UR UR6, SR_CTAID.X", [UR(6)], [])
    early = instruction("UMOV UR6, 0x1", [UR(6)], [])
    table = LatencyTable.mined(sm)
    assert table.min_distance(reader, late, UR(6), "WAR") == 1
    # The floor of a write with fixed latency is the table's.
    assert table.min_distance(reader, early, UR(6), "WAR") == (2 if sm == 75 else 1)
    assert table.safe_distance(reader, early, UR(6), "WAR") >= 3


def test_pipes_that_have_written_have_read() -> None:
    assert set(_DONE_BEFORE_VARIABLE["WAW"]) <= set(_DONE_BEFORE_VARIABLE["WAR"])


def test_the_high_word_of_an_addend_may_be_read_after_two_cycles() -> None:
    move = instruction("IMAD.MOV.U32 R7, RZ, RZ, R9", [R(7)], [R(9)])
    assert LatencyTable.load(90).safe_distance(move, WIDE, R(7), "RAW") == 2
    move = instruction("IMAD.MOV.U32 R6, RZ, RZ, R9", [R(6)], [R(9)])
    assert LatencyTable.load(90).safe_distance(move, WIDE, R(6), "RAW") >= 4


@pytest.mark.parametrize(("sm", "distance"), [(80, 5), (90, 3), (100, 3), (120, 3)])
def test_the_high_word_of_an_addend_has_a_lower_floor_than_the_producers_form(
    sm: int, distance: int
) -> None:
    # On sm_120 the form IADD3.X was never seen closer than 5 cycles; ptxas 12.9 leaves 3 here.
    carry = instruction("IADD3.X R7, PT, PT, RZ, RZ, RZ, P1, !PT", [R(7)], [])
    reader = instruction(
        "IMAD.WIDE.U32.X R10, R4, R5, R6, P3", [R(10), R(11)], [R(4), R(5), R(6), R(7)]
    )
    table = LatencyTable.mined(sm)
    assert table.min_distance(carry, reader, R(7), "RAW") == distance
    # No schedule is changed to a distance that compilers do not keep for this very pair.
    assert table.safe_distance(carry, reader, R(7), "RAW") >= 5


def test_only_single_results_in_the_high_word_of_an_addend_are_read_late() -> None:
    reader = instruction("IMAD.WIDE R10, R4, R5, R6", [R(10), R(11)], [R(4), R(5), R(6), R(7)])
    move = instruction("MOV R7, R1", [R(7)], [R(1)])
    assert pairing.is_upper_addend(move, reader, R(7))
    assert not pairing.is_upper_addend(instruction("MOV R6, R1", [R(6)], [R(1)]), reader, R(6))
    wide = instruction("IMAD.WIDE R6, R2, R3, R8", [R(6), R(7)], [R(2), R(3), R(8), R(9)])
    assert not pairing.is_upper_addend(wide, reader, R(7))
    narrow = instruction("IMAD R10, R4, R5, R7", [R(10)], [R(4), R(5), R(7)])
    assert not pairing.is_upper_addend(move, narrow, R(7))


def test_only_s2ur_delivers_special_registers_in_order() -> None:
    special = group(instruction("S2R R1, SR_TID.X", [R(1)], []), 90)
    uniform = group(instruction("S2UR UR4, SR_CTAID.X", [UR(4)], []), 90)
    in_order = {(rule.earlier, rule.later) for rule in RULES if rule.claim is Claim.RESULT}
    assert {pair for pair in in_order if uniform in pair} == {(uniform, uniform)}
    assert not any(special in pair for pair in in_order)


def test_lepc_depends_on_its_own_address_and_is_a_barrier() -> None:
    assert instruction("LEPC R20, `(.L_x_0)", [R(20)], []).is_barrier
    assert instruction("LEPC R20", [R(20)], []).is_barrier


def count_distances(*order: Instruction) -> Counter[tuple[str, str, int]]:
    """(kind, exact name, cycles) -> occurrences in one block."""
    sightings: mining.Sightings = Counter()
    mining.count_distances(order, 90, sightings)
    return Counter({(k, n, d): c for (k, n, _, d), c in sightings.items()})


def test_distances_across_waits_or_guards_are_not_counted() -> None:
    producer = instruction("FADD R2, R3, R4", [R(2)], [R(3), R(4)], at=0, stall=5)
    consumer = instruction("FMUL R5, R2, R6", [R(5)], [R(2), R(6)], at=1)
    assert count_distances(producer, consumer)["RAW", "FADD>R|FMUL.1", 5] == 1
    waits = instruction("FMUL R5, R2, R6", [R(5)], [R(2), R(6)], at=1, wait=1)
    assert not any(kind == "RAW" for kind, *_ in count_distances(producer, waits))
    guarded = instruction("@P0 FADD R2, R3, R4", [R(2)], [R(3), R(4)], at=0, stall=5)
    assert not any(kind == "RAW" for kind, *_ in count_distances(guarded, consumer))


def test_a_form_without_evidence_does_not_raise_the_floor_above_its_class() -> None:
    product = instruction("HMUL2 R5, R0, R1", [R(5)], [R(0), R(1)])
    total = instruction("HFMA2 R9, R5, R0, -RZ", [R(9)], [R(5), R(0)])
    for sm in (80, 86, 89, 100, 120):
        assert LatencyTable.load(sm).min_distance(product, total, R(5), "RAW") == 4


def test_a_pair_of_a_rarely_seen_class_has_its_attested_distance() -> None:
    add = instruction("IADD3 R4, R4, R5, RZ", [R(4)], [R(4), R(5)])
    class_name = pairing.coarse_names(add, add, R(4), "RAW")[1]
    pair = {"RAW": {"IADD3>R|IADD3.1": latency.Row(6, 3)}}

    def least(seen: int, attested: latency.Rows) -> int:
        floors = {"RAW": {class_name: latency.Row(9, seen)}}
        tables = latency.MinedTables(floors, attested, {}, {})
        return LatencyTable(90, tables).min_distance(add, add, R(4), "RAW")

    assert least(40, pair) == 9  # three sightings of a pair lower no well-observed class
    assert least(39, pair) == 6
    assert least(39, {}) == 9  # the smallest row of the producer
    assert LatencyTable(90, latency.MinedTables({}, {}, {}, {})).min_distance(
        add, add, R(4), "RAW"
    ) > 9  # fmt: skip


def test_an_overwrite_by_a_later_unit_needs_no_more_than_one_by_an_earlier_unit() -> None:
    move = instruction("MOV R4, R1", [R(4)], [R(1)])
    half = instruction("HADD2.F32 R4, -RZ, R2.H0_H0", [R(4)], [R(2)])
    single = instruction("FADD R4, R2, R3", [R(4)], [R(2), R(3)])
    for sm in (80, 90, 100, 120):
        table = LatencyTable.load(sm)
        assert table.min_distance(move, half, R(4), "WAW") <= (
            table.min_distance(move, single, R(4), "WAW")
        )


def test_a_branch_has_read_its_condition_when_the_next_instruction_issues() -> None:
    branch = instruction("BRA.DIV UR4, `(.L_x_3)", [], [UR(4)])
    move = instruction("UMOV UR4, 0xffffffff", [UR(4)], [])
    assert LatencyTable.load(100).min_distance(branch, move, UR(4), "WAR") == 1


def test_the_least_distance_and_the_occurrences_of_two_tables_are_combined() -> None:
    empty: dict[str, dict[str, list[int]]] = {}
    corpus = {
        "floors": {"RAW": {"fma>R|fma:data": [5, 50]}},
        "attested": {"AFTER": {"BAR|LDS": [6, 9]}},
        "suffices": {"RAW": {"FADD>R": [4, 20]}},
        "ceilings": {"fma>R": 24},
    }
    libraries = {
        "classes": {"RAW": {"fma>R|fma:data": [4, 7, 3]}},
        "forms": empty,
        "attested": {"AFTER": {"BAR|LDS": [2, 90, 9], "BAR|STS": [3, 5, 2]}},
        "suffices": {"RAW": {"FADD>R": [6, 30, 4]}},
    }
    tables = latency.combine(corpus, libraries)
    assert tables.floors["RAW"]["fma>R|fma:data"] == latency.Row(4, 57)
    assert tables.sufficient["RAW"]["FADD>R"] == latency.Row(6, 50)
    assert tables.attested["AFTER"]["BAR|LDS"].distance == 6  # measured on a GPU: never lowered
    assert tables.attested["AFTER"]["BAR|STS"].distance == 3


def test_drained_predicated_off_and_redefined_guards_are_not_counted() -> None:
    producer = instruction("FADD R2, R3, R4", [R(2)], [R(3), R(4)], at=0, stall=2)
    drain = instruction("FADD R9, R3, R4", [R(9)], [R(3), R(4)], at=1, stall=0, yields=True)
    consumer = instruction("FMUL R5, R2, R6", [R(5)], [R(2), R(6)], at=2)
    assert not count_distances(producer, drain, consumer)["RAW", "FADD>R|FMUL.1", 2]
    never = instruction("@!PT FMUL R5, R2, R6", [R(5)], [R(2), R(6)], at=1)
    assert not any(kind == "RAW" for kind, *_ in count_distances(producer, never))


@pytest.mark.parametrize("sm", [90, 100, 120])
def test_a_vote_may_be_read_as_early_as_compilers_let_it_on_each_architecture(sm: int) -> None:
    up1, p0 = registers.number("UP", 1), registers.number("P", 0)
    vote = instruction("VOTEU.ANY UP1, P0", [up1], [p0])
    reader = instruction("PLOP3.LUT P0, PT, PT, PT, UP1, 0x80, 0x8", [p0], [up1])
    assert LatencyTable.mined(sm).min_distance(vote, reader, up1, "RAW") == 1


def test_a_move_from_the_return_address_has_a_latency() -> None:
    move = instruction("RPCMOV.32 R2, Rpc.LO", [R(2)], [])
    back = instruction("RPCMOV.32 Rpc.LO, R2", [], [R(2)])
    assert move.is_barrier and LatencyTable.mined(100).min_distance(move, back, R(2), "RAW") == 14
