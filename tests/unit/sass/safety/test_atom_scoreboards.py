"""ATOM announces its predicate and its register by two scoreboards: each half checks both."""

import pytest
from tests.corpus.catalogue import NVCC

from nostall.sass import Program
from nostall.sass.program import Function, Instruction
from nostall.sass.safety import verify_program
from nostall.sass.safety.hazards.validator import HazardValidator
from nostall.sass.safety.symbolic.validator import SymbolicValidator

HALVES = {"hazards": HazardValidator, "symbolic": SymbolicValidator}


@pytest.fixture(params=["add_float", "add_in_loop", "several"])
def kernel(request: pytest.FixtureRequest) -> tuple[Program, Function]:
    program = Program.from_cubin((NVCC / "generic_atomics.sm_90.cubin").read_bytes())
    return program, program.kernel(request.param)


def _atoms(function: Function) -> list[int]:
    """The positions of ATOM with both scoreboards."""
    order = function.instructions
    return [
        at
        for at, i in enumerate(order)
        if i.base == "ATOM" and i.control.write_sb < 6 and i.control.read_sb < 6
    ]


def _waiter(function: Function, at: int, scoreboard: int) -> int:
    """The first instruction after position ``at`` that waits for a scoreboard."""
    order = function.instructions
    return next(k for k in range(at + 1, len(order)) if scoreboard in order[k].control.waits)


def _with_wait(function: Function, at: int, drop: int, add: int | None = None) -> Function:
    order: list[Instruction] = list(function.instructions)
    wait = order[at].control.wait & ~(1 << drop)
    wait |= 0 if add is None else 1 << add
    order[at] = order[at].with_control(order[at].control.with_(wait=wait))
    return function.reordered(order)


def _refusing(program: Program, before: Function, after: Function) -> set[str]:
    return {n for n, half in HALVES.items() if half(program.sm).compare(before, after)}


def test_compiler_output_is_accepted_by_each_half(kernel: tuple[Program, Function]) -> None:
    program, function = kernel
    assert _atoms(function)
    assert not _refusing(program, function, function)
    assert verify_program(program, program).safe


def test_the_predicate_needs_the_read_scoreboard(kernel: tuple[Program, Function]) -> None:
    program, function = kernel
    for at in _atoms(function):
        control = function.instructions[at].control
        waiter = _waiter(function, at, control.read_sb)
        dropped = _with_wait(function, waiter, control.read_sb)
        assert _refusing(program, function, dropped) == set(HALVES)
        swapped = _with_wait(function, waiter, control.read_sb, control.write_sb)
        assert _refusing(program, function, swapped) == set(HALVES)


def test_the_register_needs_the_write_scoreboard(kernel: tuple[Program, Function]) -> None:
    program, function = kernel
    for at in _atoms(function):
        control = function.instructions[at].control
        waiters = [
            k
            for k in range(at + 1, len(function.instructions))
            if control.write_sb in function.instructions[k].control.waits
        ]
        changed = function
        for waiter in waiters:
            changed = _with_wait(changed, waiter, control.write_sb)
        assert "hazards" in _refusing(program, function, changed)
