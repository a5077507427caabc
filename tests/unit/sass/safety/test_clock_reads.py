"""Reads of a clock end after a fixed latency: no access relies on a wait for them."""

from __future__ import annotations

from tests.corpus.catalogue import NVCC

from nostall.sass import Program
from nostall.sass.program import Function
from nostall.sass.program.instruction import Instruction
from nostall.sass.safety.hazards.validator import HazardValidator
from nostall.sass.safety.symbolic.validator import SymbolicValidator

SPARE = 1 << 5
"""A scoreboard that the function does not set."""


def with_wait(instruction: Instruction) -> Instruction:
    control = instruction.control
    return instruction.with_control(control.with_(wait=control.wait | SPARE))


def test_a_wait_behind_a_clock_read_may_move_over_a_store() -> None:
    program = Program.from_cubin((NVCC / "barrier_wait.sm_120.cubin").read_bytes())
    (function,) = program.functions
    order = function.instructions
    assert not any(5 in (i.control.write_sb, i.control.read_sb) for i in order)
    (store,) = [at for at, i in enumerate(order) if i.base == "STG"]
    (block,) = [b for b in function.blocks if b.start <= store < b.end]
    clock = next(i for i in order if i.base == "CS2UR")
    assert clock.is_barrier
    assert clock.control.write_sb > 5
    assert clock.index < order[block.start].index

    def waiting(at: int) -> Function:
        return function.reordered([with_wait(i) if i is order[at] else i for i in order])

    original, candidate = waiting(store - 1), waiting(store + 1)
    assert not HazardValidator(program.sm).compare(original, candidate)
    assert not SymbolicValidator(program.sm).compare(original, candidate)
