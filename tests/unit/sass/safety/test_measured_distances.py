"""Measured distances raise what they refute, and lower limits only on request."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.sass.safety.test_latency import instruction

from nostall.core.errors import UnsupportedArchitecture
from nostall.core.space import NO_TAGS
from nostall.sass import Program
from nostall.sass.program import registers
from nostall.sass.safety import pairing, verify_program
from nostall.sass.safety.latency import LatencyTable
from nostall.sass.safety.measured_distances import Bounds, MeasuredDistances, find
from nostall.sass.schedule import ScheduleSpace
from nostall.sass.schedule.moves import SetStall

R, P = (lambda i: registers.number("R", i)), (lambda i: registers.number("P", i))
TABLE = MeasuredDistances(
    "G",
    2,
    minima={"RAW": {"A>R": {"B.1": 4, "B.2": 6}}},
    joint={"RAW": {"A>R0": {"D.1": 8}}},
    refuted={"RAW": {"A>R": {"B.3": 5}, "A>R0": {"D.1": 3}}},
)
CLUSTERS = Path(__file__).parents[3] / "corpus" / "nvcc" / "clusters.sm_90.cubin"


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["A>R|B.1"], Bounds(4, 6)),
        (["A>R|B.1", "A>R|B.2"], Bounds(6, 8)),
        (["A>R|B.3"], Bounds(5, None)),
        (["A>R|B.1", "A>R|B.3"], Bounds(5, None)),
        (["A>R|B.1", "A>R|C.1"], Bounds(4, None)),
        (["A>R0|D.1"], Bounds(3, 10)),
        (["X>R|B.1"], Bounds(0, None)),
    ],
)
def test_a_pair_has_a_limit_only_if_each_of_its_operands_has(
    names: list[str], expected: Bounds
) -> None:
    assert TABLE.bounds(names, "RAW") == expected
    assert TABLE.bounds(names, "WAR") == Bounds(0, None)


@given(st.integers(1, 40), st.integers(0, 20), st.none() | st.integers(0, 10))
def test_distances_at_which_results_were_wrong_are_never_allowed(
    mined: int, wrong_below: int, margin: int | None
) -> None:
    bounds = Bounds(wrong_below, None if margin is None else wrong_below + margin)
    default, lowered = (bounds.apply(mined, lower=lower) for lower in (False, True))
    assert default == max(mined, wrong_below)
    assert wrong_below <= lowered <= default
    assert lowered < default or margin is None or default <= max(wrong_below + margin, wrong_below)


def test_every_minimum_of_the_table_is_at_least_one_and_none_is_refuted() -> None:
    table = find(90)
    assert table is not None and "H200" in table.gpu and table.margin == 2
    for kind, producers in table.minima.items():
        for producer, consumers in producers.items():
            for consumer, cycles in consumers.items():
                assert 2 <= cycles <= 40
                assert consumer not in table.refuted.get(kind, {}).get(producer, {})


def test_a_predicate_of_imad_reaches_a_guard_after_13_cycles() -> None:
    wide = instruction("IMAD.WIDE.U32 RZ, P0, R6, R7, R8", [P(0)], [R(6), R(7), R(8)])
    guarded = instruction("@P0 MOV R1, R2", [R(1)], [R(2), P(0)])
    guarded = replace(guarded, guard_registers=(P(0),))
    pair = (wide, guarded, P(0), "RAW")
    table = LatencyTable.load(90)
    assert LatencyTable.mined(90).min_distance(*pair) < 13 == table.min_distance(*pair)
    assert table.safe_distance(*pair) >= 13
    assert table.evidence(*pair, 13) == "measured on NVIDIA H200: wrong below 13 cycles"


def test_a_pair_that_compilers_never_leave_close_may_come_closer_on_request() -> None:
    add = instruction("IADD3 R4, R5, R6, RZ", [R(4)], [R(5), R(6)])
    shuffle = instruction("SHFL.IDX PT, R7, R4, R8, 0x1f", [R(7)], [R(4), R(8)])
    assert pairing.exact_names(add, shuffle, R(4), "RAW") == ["IADD3>R|SHFL.IDX.2"]
    pair = (add, shuffle, R(4), "RAW")
    default = LatencyTable.load(90)
    measured = LatencyTable.load(90, measured_latencies=True)
    assert measured.safe_distance(*pair) == 6 < default.safe_distance(*pair)
    assert measured.min_distance(*pair) <= default.min_distance(*pair)


def test_other_architectures_are_refused_on_request_only() -> None:
    with pytest.raises(UnsupportedArchitecture, match=r"sm_80; they exist for sm_90; leave out"):
        LatencyTable.load(80, measured_latencies=True)
    assert LatencyTable.load(80).sm == 80


def test_the_verifier_accepts_a_measured_distance_on_request_only() -> None:
    program = Program.from_cubin(CLUSTERS.read_bytes())
    function = program.kernel("cluster_sum")
    default = ScheduleSpace(program, function)
    measured = ScheduleSpace(program, function, measured_latencies=True)
    start = default.start()
    moves = [
        SetStall(index, cycles, NO_TAGS)
        for index in range(len(function.instructions))
        for cycles in range(1, int(start.stall[index]))
    ]
    closer = [move for move in moves if measured.apply_if_legal(start, move) is not None]
    closer = [move for move in closer if default.apply_if_legal(start, move) is None]
    assert closer
    changed = measured.impose(measured.apply(start, closer[0]))
    candidate = Program.from_cubin(changed.to_cubin())
    refused = verify_program(program, candidate)
    reasons = [f.reason for f in refused.findings if f.kind == "short-latency"]
    assert reasons and "in compiler output)" in reasons[0]
    assert verify_program(program, candidate, measured_latencies=True).safe
