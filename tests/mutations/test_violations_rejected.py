"""The verifier rejects every seeded violation, and there are enough violations of each kind."""

from __future__ import annotations

import math
import os

import pytest

from nostall.core.errors import BadBinary
from nostall.sass import Program
from nostall.sass.safety.verify import validate, verify_program
from tests.corpus import catalogue
from tests.mutations.kernels import (
    LARGE_TRITON,
    NVCC,
    TRITON,
    cubin_paths,
    read_program,
    smallest_cubins,
)
from tests.mutations.mutants import (
    MUTATIONS,
    SPECIAL_KINDS,
    Mutant,
    PartResults,
    check_by_part,
    mutants,
    only,
)

COUNT = int(
    os.environ.get("NOSTALL_MUTANTS")
    or next(
        count for step, count in ((1, 20), (12, 8), (math.inf, 2)) if catalogue.slice_step() <= step
    )
)
"""Number of mutants of each kind that are checked."""

SPECIAL_COUNT = min(COUNT, 8 if catalogue.slice_step() == 1 else 4)
"""The same for kinds whose constructs are only in a few cubins."""

DISASSEMBLED = tuple(MUTATIONS)[:: 1 if catalogue.slice_step() <= 12 else 4]
"""Kinds of which the verifier rejects a cubin as a user gives it.  nvdisasm takes longest."""

ORIGINALS = 8 if catalogue.slice_step() <= 12 else 4
"""Number of cubins that the same checks accept."""

RARE = {
    "cover of sources removed": 6,
    "cover of results removed": 15,
    "access moved below its cover": 5,
    "barrier without its wait": 6,
    "partial wait counts too little": 2,
    "weakened entry": 8,
    "short distance from a matrix product": 2,
    "accumulator across WARPGROUP": 1,
    "warpgroup products reordered": 2,
    "load above the wait for a fence": 2,
    "product's register overwritten": 4,
    "accumulator read before its wait": 2,
    "short distance from R2UR": 3,
    "result over a back edge": 4,
    "short distance over a back edge": 3,
}
"""Kinds that have few places in these kernels -> number of mutants, at least."""

REFUSED_BY_ORDER = frozenset(
    {
        "read before write",
        "overwritten before read",
        "write behind the next write",
        "access across a barrier",
        "access across a fence",
        "access across an atomic",
        "copy across its commit",
        "access across a counted wait",
        "accumulator across WARPGROUP",
        "warpgroup products reordered",
        "instruction inside glue",
        "stores swapped",
        "load across a store",
        "moved across a branch",
        "shared reads swapped",
        "product's register overwritten",
        "accumulator read before its wait",
    }
)
"""Kinds that the check of the order refuses without the rest of the hazard half, which refuses all
other kinds without it."""

LEFT_BY_SYMBOLIC = frozenset(
    {
        "stale reuse",
        "illegal encoding",
        "scoreboard on fixed latency",
        "wait right after the setter",
        "short distance from uniform",
        "accumulator across WARPGROUP",
        "instruction inside glue",
        "warpgroup product misplaced",
        "copy group misplaced",
        "cluster barrier misplaced",
    }
)
"""Kinds of which the symbolic half accepts some or all mutants; it refuses those of all others."""


def _unclaimed(kind: str, results: list[PartResults]) -> dict[str, int]:
    """Half of the verifier -> mutants of a kind that it must refuse alone, and does not.

    Parser and structure check are not counted: what they refuse never reaches the halves.
    """
    judged = [result for result in results if result.judged]
    in_order = kind in REFUSED_BY_ORDER
    return {
        "hazards": sum(not (r.order if in_order else r.hazards) for r in judged),
        "symbolic": sum(not r.symbolic for r in judged if kind not in LEFT_BY_SYMBOLIC),
    }


def _verdict_rejects(mutant: Mutant) -> bool:
    """Whether the verifier rejects the mutant's cubin, and names the instructions of its findings.

    The cubin is parsed with nvdisasm, and the function that the mutation changes is judged.
    """
    try:
        candidate = Program.from_cubin(mutant.data)
    except BadBinary:
        return True
    changed = candidate.function(mutant.function.name)
    verdict = verify_program(only(mutant.program, mutant.function), only(candidate, changed))
    for finding in verdict.findings:
        at, rest = divmod(finding.offset, 16)
        if finding.function:  # else it is about the whole cubin
            found = candidate.function(finding.function).instructions[at]
            texts = [text.replace(".reuse", "") for text in (found.text, finding.instruction)]
            assert (texts[0], rest) == (texts[1], 0), finding
    return not verdict.safe


@pytest.mark.parametrize("kind", MUTATIONS)
def test_every_seeded_violation_is_rejected(kind: str) -> None:
    count = SPECIAL_COUNT if kind in SPECIAL_KINDS else COUNT
    made = list(mutants(kind, count, per_function=3))
    results = [(mutant, check_by_part(mutant, disassemble=False)) for mutant in made]
    accepted = [str(mutant) for mutant, result in results if not result.rejected]
    assert made, f"{kind}: no kernel of this slice has a place for it; see IN_EVERY_SLICE"
    assert not accepted
    assert _unclaimed(kind, [result for _, result in results]) == {"hazards": 0, "symbolic": 0}
    assert kind not in DISASSEMBLED or _verdict_rejects(made[0])
    if catalogue.slice_step() == 1 or kind in SPECIAL_KINDS:
        assert len(made) >= min(count, RARE.get(kind, count)), f"{kind}: {len(made)} mutants"


@pytest.mark.parametrize("kind", ["stale reuse", "dropped wait for R2UR", "shared reads swapped"])
def test_the_verdict_holds_the_findings_of_every_part(kind: str) -> None:
    """These kinds have findings of the hazards only, of both halves, and of the order."""
    mutant = next(mutants(kind, 1, per_function=1))
    parts = check_by_part(mutant, disassemble=True)
    expected = [*parts.hazards, *parts.order, *parts.symbolic]
    verdict = verify_program(mutant.program, Program.from_cubin(mutant.data))
    assert expected
    assert sorted(map(str, verdict.findings)) == sorted(map(str, expected))


def test_one_cubin_alone_is_checked_by_both_halves() -> None:
    mutant = next(mutants("dropped wait for R2UR", 1, per_function=1))
    assert validate(mutant.program.cubin.data).safe
    assert {finding.part for finding in validate(mutant.data).findings} == {"hazards", "symbolic"}


def test_a_stale_reuse_in_one_cubin_alone_is_found() -> None:
    mutant = next(mutants("stale reuse", 1, per_function=1))
    assert {finding.kind for finding in validate(mutant.data).findings} == {"stale-reuse"}


def test_claims_name_kinds() -> None:
    assert MUTATIONS.keys() >= REFUSED_BY_ORDER | LEFT_BY_SYMBOLIC


def test_the_same_checks_accept_the_original() -> None:
    for path in smallest_cubins(ORIGINALS):
        program = read_program(path)
        for function in program.functions:
            unchanged = Mutant("none", path.stem, program, function, program.cubin.data)
            assert not check_by_part(unchanged, disassemble=False).rejected
            assert not check_by_part(unchanged, disassemble=True).rejected


def test_the_kernels_cover_all_architectures() -> None:
    assert len(MUTATIONS) >= 18
    names = " ".join((*TRITON, *NVCC, *LARGE_TRITON))
    assert all(f"sm_{sm}" in names for sm in (75, 80, 86, 89, 90, "90a", 100, 120))
    if catalogue.slice_step() == 1:
        assert len(cubin_paths()) == len(TRITON) + len(NVCC) + len(LARGE_TRITON)
