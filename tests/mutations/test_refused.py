"""Every seeded violation is refused, and the library of them does not wither."""

from __future__ import annotations

import os

import pytest

from nostall.core.errors import BadBinary
from nostall.sass import Program
from nostall.sass.safety.verify import verify_program
from tests.corpus import catalogue
from tests.mutations.judging import KINDS, Mutant, mutants, opinions
from tests.mutations.kernels import NVCC, TRITON, paths, read, smallest

COUNT = int(os.environ.get("NOSTALL_MUTANTS", "20"))
"""Mutants of each kind; more are found when more are asked for."""
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
}
"""Kinds with few places in these kernels: at least so many."""


def _verdict_refuses(mutant: Mutant) -> bool:
    """The whole way: bytes, disassembly, all parts of the verifier."""
    try:
        return not verify_program(mutant.program, Program.from_cubin(mutant.data)).safe
    except BadBinary:
        return True


@pytest.mark.parametrize("kind", KINDS)
def test_every_seeded_violation_is_refused(kind: str) -> None:
    made = list(mutants(kind, COUNT, each=3))
    accepted = [str(mutant) for mutant in made if not opinions(mutant, full=False).refused]
    assert not accepted
    assert all(_verdict_refuses(mutant) for mutant in made[:1])
    if catalogue.every() == 1:
        assert len(made) >= min(COUNT, RARE.get(kind, COUNT)), f"{kind}: {len(made)} mutants"


def test_the_original_is_accepted_on_the_same_way() -> None:
    for path in smallest(8):
        program = read(path)
        for function in program.functions:
            same = Mutant("none", path.stem, program, function, program.cubin.data)
            assert not opinions(same, full=False).refused
            assert not opinions(same, full=True).refused


def test_the_kernels_are_of_every_architecture() -> None:
    assert len(KINDS) >= 18
    names = " ".join((*TRITON, *NVCC))
    assert all(f"sm_{sm}" in names for sm in (75, 80, 86, 89, 90, "90a", 100, 120))
    if catalogue.every() == 1:
        assert len(paths()) == len(TRITON) + len(NVCC)
