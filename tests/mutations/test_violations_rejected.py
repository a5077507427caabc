"""The verifier rejects every seeded violation, and there are enough violations of each kind."""

from __future__ import annotations

import os

import pytest

from nostall.core.errors import BadBinary
from nostall.sass import Program
from nostall.sass.safety.verify import verify_program
from tests.corpus import catalogue
from tests.mutations.kernels import NVCC, TRITON, cubin_paths, read_program, smallest_cubins
from tests.mutations.mutants import (
    MUTATIONS,
    SPECIAL_KINDS,
    Mutant,
    check_by_part,
    mutants,
)

COUNT = int(os.environ.get("NOSTALL_MUTANTS", "20" if catalogue.slice_step() == 1 else "8"))
"""Number of mutants of each kind that are checked."""

SPECIAL_COUNT = min(COUNT, 8 if catalogue.slice_step() == 1 else 4)
"""The same for kinds whose constructs are only in a few cubins."""

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


def _verdict_rejects(mutant: Mutant) -> bool:
    """Whether the verifier rejects the mutant's cubin, parsed with nvdisasm."""
    try:
        return not verify_program(mutant.program, Program.from_cubin(mutant.data)).safe
    except BadBinary:
        return True


@pytest.mark.parametrize("kind", MUTATIONS)
def test_every_seeded_violation_is_rejected(kind: str) -> None:
    count = SPECIAL_COUNT if kind in SPECIAL_KINDS else COUNT
    made = list(mutants(kind, count, per_function=3))
    results = [(mutant, check_by_part(mutant, disassemble=False)) for mutant in made]
    accepted = [str(mutant) for mutant, result in results if not result.rejected]
    assert not accepted
    assert all(_verdict_rejects(mutant) for mutant in made[:1])
    if catalogue.slice_step() == 1 or kind in SPECIAL_KINDS:
        assert len(made) >= min(count, RARE.get(kind, count)), f"{kind}: {len(made)} mutants"


def test_the_same_checks_accept_the_original() -> None:
    for path in smallest_cubins(8):
        program = read_program(path)
        for function in program.functions:
            unchanged = Mutant("none", path.stem, program, function, program.cubin.data)
            assert not check_by_part(unchanged, disassemble=False).rejected
            assert not check_by_part(unchanged, disassemble=True).rejected


def test_the_kernels_cover_all_architectures() -> None:
    assert len(MUTATIONS) >= 18
    names = " ".join((*TRITON, *NVCC))
    assert all(f"sm_{sm}" in names for sm in (75, 80, 86, 89, 90, "90a", 100, 120))
    if catalogue.slice_step() == 1:
        assert len(cubin_paths()) == len(TRITON) + len(NVCC)
