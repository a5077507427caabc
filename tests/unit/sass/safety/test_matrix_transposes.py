"""Results of MOVM return in the order of shared loads, on which compiler output relies."""

from __future__ import annotations

import pytest
from tests.corpus.catalogue import NVCC

from nostall.sass import Program
from nostall.sass.program import Function
from nostall.sass.safety.hazards.validator import HazardValidator
from nostall.sass.safety.symbolic.validator import SymbolicValidator

CASES = [(75, "tile_and_load"), *((sm, "two_tiles") for sm in (75, 80, 90, 120))]
"""Functions in which a MOVM, or a load before it, has no scoreboard of its own."""


def function_of(sm: int, name: str) -> Function:
    program = Program.from_cubin((NVCC / f"transposed.sm_{sm}.cubin").read_bytes())
    return program.function(name)


@pytest.mark.parametrize(("sm", "name"), CASES)
def test_a_wait_for_the_last_of_the_queue_is_enough(sm: int, name: str) -> None:
    function = function_of(sm, name)
    queue = [i for i in function.instructions if i.base in ("MOVM", "LDS")]
    assert [i.control.write_sb < 6 for i in queue] == [False, True]
    assert queue[-1].base == "MOVM"
    assert not HazardValidator(sm).compare(function, function)
    assert not SymbolicValidator(sm).compare(function, function)


@pytest.mark.parametrize(("sm", "name"), CASES)
def test_the_order_of_the_queue_must_stay(sm: int, name: str) -> None:
    function = function_of(sm, name)
    order = list(function.instructions)
    first, last = [at for at, i in enumerate(order) if i.base in ("MOVM", "LDS")]
    order[first], order[last] = order[last], order[first]
    candidate = function.reordered(order)
    assert HazardValidator(sm).compare(function, candidate)
    assert SymbolicValidator(sm).compare(function, candidate)
