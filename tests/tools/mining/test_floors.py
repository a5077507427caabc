"""Mining of latency tables: the rows of hand-made counts, and tables of committed cubins."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from nostall.sass import Program
from nostall.sass.program import registers
from nostall.sass.program.instruction import Instruction
from nostall.sass.safety import latency
from tests.corpus.catalogue import NVCC
from tests.unit.sass.safety.test_latency import UR, R, count_distances, instruction
from tools.mining import floors as mining

FILES = ("arithmetic.sm_80.cubin", "arithmetic.sm_90.cubin", "algorithms.sm_86.cubin")
PREDICATE, P1 = registers.number("P", 0), registers.number("P", 1)


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, object]]:
    """Family -> table of the cubins ``FILES`` and of a file that is none, mined by the command."""
    folder = tmp_path_factory.mktemp("mined")
    (folder / "text.cubin").write_text("no cubin")
    files = [*(str(NVCC / name) for name in FILES), str(folder / "text.cubin")]
    command = [sys.executable, "-m", mining.__name__, "--out", str(folder), "--source", "tests"]
    texts = []
    for _ in range(2):  # the second run reads the cache
        run = [*command, "--cache", str(folder / "cache"), *files]
        subprocess.run(run, check=True, capture_output=True)
        texts.append({p.stem: p.read_text() for p in folder.glob("sm_*.json")})
    assert texts[0] == texts[1]
    return {int(name.removeprefix("sm_")): json.loads(text) for name, text in texts[0].items()}


def test_each_family_has_a_table_that_can_be_read(tables: dict[int, dict[str, object]]) -> None:
    assert sorted(tables) == [80, 86, 90]
    for table in tables.values():
        assert (table["cubins"], table["source"]) == (1, "tests")
        combined = latency.combine(table)
        assert combined.attested["RAW"] and combined.floors["RAW"] and combined.ceilings
    (program,) = [Program.from_cubin((NVCC / name).read_bytes()) for name in FILES if "90" in name]
    count = sum(len(function.instructions) for function in program.functions)
    assert tables[90]["instructions"] == count


def test_neighbours_have_the_smallest_stall_between_them(
    tables: dict[int, dict[str, object]],
) -> None:
    """The rows ISSUE, counted again from the listing."""
    stalls: dict[str, Counter[int]] = {}
    for function in Program.from_cubin((NVCC / "arithmetic.sm_90.cubin").read_bytes()).functions:
        for block in function.blocks:
            for first, second in pairwise(function.instructions[block.start : block.end]):
                name = f"{first.pipe}|{second.pipe}"
                stalls.setdefault(name, Counter())[first.control.stall] += 1
    expected = {name: [min(found), found.total()] for name, found in stalls.items()}
    assert tables[90]["floors"]["ISSUE"] == expected  # type: ignore[index]


def test_shipped_distances_are_not_above_those_of_committed_cubins(
    tables: dict[int, dict[str, object]],
) -> None:
    """What a compiler kept here often enough is not less than the shipped tables ask for."""
    for family, table in tables.items():
        shipped = latency.load(family)
        assert shipped is not None
        for kind in ("RAW", "WAW", "WAR"):
            mined = latency.combine(table).attested.get(kind, {})
            rows = shipped.attested.get(kind, {})
            known = mined.keys() & rows.keys()
            above = {n: (rows[n], mined[n]) for n in known if rows[n].distance > mined[n].distance}
            assert not above, (family, kind)
            assert not mined or len(known) > len(mined) / 2


def test_a_distance_counts_from_three_sightings_at_or_below_it() -> None:
    sightings = Counter(
        {
            ("RAW", "FADD>R|FMUL.1", "fma>R|fma:data", 4): 2,
            ("RAW", "FADD>R|FMUL.1", "fma>R|fma:data", 5): 1,
            ("RAW", "FADD>R|FMUL.1", "fma>R|fma:data", 9): 57,
            ("RAW", "MOV>R|FMUL.1", "int>R|fma:data", 4): 10,
            ("RAW", "MOV>R|FADD.1", "int>R|fma:data", 6): 10,
            ("RAW", "SEL>R|FMUL.1", "int>R|fma:data", 4): 2,
            # One exact pair with two classes: its guard is in another register file.
            ("RAW", "MOV>R|FMUL.1", "other>R|fma:data", 3): 3,
        }
    )
    exact, sufficient = mining.attested_rows(sightings)
    assert exact == {
        "RAW": {"FADD>R|FMUL.1": [5, 60], "MOV>R|FMUL.1": [3, 13], "MOV>R|FADD.1": [6, 10]}
    }
    assert sufficient == {"RAW": {"fma>R|fma:data": [5, 60], "FADD>R": [5, 60], "MOV>R": [6, 20]}}


def test_floors_are_the_smallest_distances() -> None:
    distances = Counter({("RAW", "a", 7): 1, ("RAW", "a", 4): 2, ("WAR", "a", 2): 5})
    assert mining.floor_rows(distances) == {"RAW": {"a": [4, 3]}, "WAR": {"a": [2, 5]}}


def test_ceilings_are_the_largest_distances_of_common_reads() -> None:
    floors = {
        "RAW": {"fma>R|fma:data": [4, 100], "fma>R|guard": [13, 99]},
        "WAW": {"x>R": [9, 999]},
    }
    exact = {
        "RAW": {"FADD>R|FMUL.1": [5, 100], "FADD>R1|STG.1": [6, 100], "IMAD>P@0|X.1": [8, 500]}
    }
    assert mining.ceilings(floors, exact) == {"fma>P": 8, "fma>R": 6}
    assert mining.ceilings({}, {}) == {}


def test_families_of_a_generation_share_all_but_matrix_and_double_units() -> None:
    own = {
        family: mining.Observations(
            Counter({("RAW", "fma>R|fma:data", family): 1, ("RAW", "mma>R|mma:data", family): 1}),
            Counter(
                {
                    ("RAW", "FADD>R|FMUL.1", "fma>R|fma:data", family): 1,
                    ("RAW", "DADD>R|FMUL.1", "double>R|fma:data", family): 1,
                    ("RAW", "HMMA.16816>R|FMUL.1", "mma>R|fma:data", family): 1,
                    ("RAW", "NEWOP>R|FMUL.1", "new>R|fma:data", family): 1,
                }
            ),
        )
        for family in (80, 86, 90)
    }
    mining._share_within_generation(own)
    for family, observations in own.items():
        shared = {80, 86} if family != 90 else {90}
        seen = {(name.partition("|")[0], d) for _, name, d in observations.floors}
        assert seen == {("fma>R", d) for d in shared} | {("mma>R", family)}
        pairs = {(name.partition(">")[0], d) for _, name, _, d in observations.sightings}
        assert pairs == {(op, d) for op in ("FADD", "NEWOP") for d in shared} | {
            (op, family) for op in ("DADD", "HMMA.16816")
        }
    alone = {80: mining.Observations(Counter({("RAW", "fma>R|fma:data", 4): 1}))}
    mining._share_within_generation(alone)
    assert alone[80].floors == Counter({("RAW", "fma>R|fma:data", 4): 1})


def guarded(text: str, defs: list[int], uses: list[int], **fields: int) -> Instruction:
    """An instruction with the guard P0 or !P0."""
    made = instruction(text, defs, [PREDICATE, *uses], **fields)
    return replace(made, guard_registers=(PREDICATE,))


@pytest.mark.parametrize(
    ("guard", "between", "count"),
    [
        ("@P0", instruction("MOV R9, R8", [R(9)], [R(8)], at=1), 1),
        ("@!P0", instruction("MOV R9, R8", [R(9)], [R(8)], at=1), 0),
        ("@P0", instruction("ISETP.NE.AND P0, PT, R8, RZ, PT", [PREDICATE], [R(8)], at=1), 0),
        ("@P0", guarded("@P0 PLOP3.LUT P0, PT, P0, PT, PT, 0x8, 0x0", [PREDICATE], [], at=1), 0),
    ],
)
def test_pairs_under_one_guard_count_while_the_guard_does_not_change(
    guard: str, between: Instruction, count: int
) -> None:
    test = instruction("ISETP.NE.AND P0, PT, R8, RZ, PT", [PREDICATE], [R(8)], stall=13)
    first = guarded("@P0 FADD R2, R3, R4", [R(2)], [R(3), R(4)], at=1, stall=5)
    second = guarded(f"{guard} FMUL R5, R2, R6", [R(5)], [R(2), R(6)], at=3)
    found = count_distances(test, first, between, second)
    assert sum(n for (_, name, _), n in found.items() if name == "FADD>R|FMUL.1") == count


def test_an_instruction_that_changes_its_own_guard_ends_the_pairs_of_that_guard() -> None:
    first = guarded("@P0 ISETP.NE.AND P0, PT, R8, RZ, PT", [PREDICATE], [R(8)], stall=13)
    second = guarded("@P0 ISETP.NE.AND P1, PT, R8, RZ, P0", [P1], [R(8)], at=1)
    assert not [key for key in count_distances(first, second) if key[0] == "RAW"]


@pytest.mark.parametrize(
    ("stall", "others", "count"),
    [(15, 1, 1), (15, 2, 0), (13, 2, 0), (12, 2, 1)],
)
def test_distances_count_up_to_the_horizon(stall: int, others: int, count: int) -> None:
    """24 cycles: 15 and 12 + 12 do, 15 + 15 and 13 + 13 do not."""
    order = [
        instruction("FADD R2, R3, R4", [R(2)], [R(3), R(4)], stall=stall),
        *(
            instruction("MOV R9, R8", [R(9)], [R(8)], at=number, stall=stall)
            for number in range(1, others)
        ),
        instruction("FMUL R5, R2, R6", [R(5)], [R(2), R(6)], at=9),
    ]
    assert len([key for key in count_distances(*order) if key[0] == "RAW"]) == count


@pytest.mark.parametrize("wait", [0, 1])
def test_distances_to_a_barrier_end_at_a_wait(wait: int) -> None:
    before = instruction("FADD R2, R3, R4", [R(2)], [R(3), R(4)], at=0, stall=4)
    barrier = instruction("BAR.SYNC.DEFER_BLOCKING 0x0", [], [], at=1, stall=6, wait=wait)
    after = instruction("FMUL R5, R2, R6", [R(5)], [R(2), R(6)], at=2)
    found = count_distances(before, barrier, after)
    assert (("BEFORE", "BAR|FADD", 4) in found) == (wait == 0)
    assert ("AFTER", "BAR|FMUL", 6) in found
    late = instruction("FMUL R5, R2, R6", [R(5)], [R(2), R(6)], at=2, wait=1)
    assert not any(kind == "AFTER" for kind, *_ in count_distances(before, barrier, late))


def test_uniform_registers_have_their_own_file() -> None:
    producer = instruction("UMOV UR4, UR6", [UR(4)], [UR(6)], stall=3)
    consumer = instruction("UIADD3 UR5, UR4, UR6, URZ", [UR(5)], [UR(4), UR(6)], at=1)
    assert count_distances(producer, consumer)["RAW", "UMOV>UR|UIADD3.1", 3] == 1
