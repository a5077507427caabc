"""Machine code of dependent launches: where the wait may stand, and how far down it moves."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from nostall.ptx.assemble.command import plain_command
from nostall.ptx.assemble.ptxas import run_ptxas
from nostall.ptx.assemble.versions import find_assemblers
from nostall.sass import Function, Program, validate
from nostall.sass.safety.dependent_launch import check_wait, find_waits, wait_problem
from nostall.sass.schedule.dependent_wait import sink_wait

WAIT, TRIGGER = "griddepcontrol.wait;", "griddepcontrol.launch_dependents;"


@cache
def assemble(body: str, folder: Path) -> bytes:
    """A kernel for sm_90 whose body computes an address in %rd3 and may use the values below."""
    text = f"""
.version 7.8
.target sm_90
.address_size 64
.const .align 4 .b32 table[4] = {{1, 2, 3, 4}};
.visible .entry k(.param .u64 a, .param .u32 n)
{{
 .reg .pred %p<4>;
 .reg .b32 %r<16>;
 .reg .b64 %rd<8>;
 ld.param.u64 %rd1, [a];
 ld.param.u32 %r1, [n];
 mov.u32 %r2, %tid.x;
 mov.u32 %r3, %ctaid.x;
 mad.lo.s32 %r4, %r3, %r1, %r2;
 mul.wide.s32 %rd2, %r4, 4;
 add.s64 %rd3, %rd1, %rd2;
 setp.lt.s32 %p1, %r4, %r1;
{body}
 ret;
}}
"""
    assemblers = find_assemblers()
    if not assemblers:
        pytest.skip("needs ptxas")
    run = run_ptxas(assemblers[0], text, plain_command(text).arguments(), folder)
    assert run.status == "assembled", run.detail
    return run.cubin


def kernel(cubin: bytes) -> Function:
    return Program.of_kernel(cubin, "k").kernel("k")


ACCESS = " ld.global.u32 %r5, [%rd3];\n add.s32 %r5, %r5, 1;\n st.global.u32 [%rd3], %r5;"


def test_the_wait_sinks_to_the_first_access(tmp_path: Path) -> None:
    original = assemble(f" {WAIT}\n{ACCESS}", tmp_path)
    sunk = sink_wait(original, "k")
    before, after = kernel(original), kernel(sunk)
    (start,), (end,) = find_waits(before), find_waits(after)
    assert start < end
    assert after.instructions[end + 1].accesses_memory
    assert sorted(i.payload for i in before.instructions) == sorted(
        i.payload for i in after.instructions
    )
    assert check_wait(sunk, "k") == ""
    assert not validate(sunk).findings
    assert sink_wait(sunk, "k") == sunk


def test_the_neighbours_of_a_sunk_wait_keep_their_distance(tmp_path: Path) -> None:
    original = assemble(f" {WAIT}\n{ACCESS}", tmp_path)
    before, after = kernel(original), kernel(sink_wait(original, "k"))
    (start,) = find_waits(before)
    above, wait, below = (before.instructions[start + n].control for n in (-1, 0, 1))
    assert after.instructions[start - 1].control.stall == above.stall + wait.stall
    assert after.instructions[start].control.wait == below.wait | wait.wait


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (ACCESS, "has no ACQBULK"),
        (f"{ACCESS}\n {WAIT}", "precedes its ACQBULK"),
        (f" @%p1 bra L;\n {WAIT}\n{ACCESS}\nL:", "after a branch"),
        (f" @%p1 {WAIT}\n{ACCESS}", "after a branch|has a guard"),
        (f" bar.sync 0;\n {WAIT}\n{ACCESS}", "precedes its ACQBULK"),
        (f" prefetch.global.L2 [%rd3];\n {WAIT}\n{ACCESS}", "precedes its ACQBULK"),
        (f" red.global.add.u32 [%rd3], 1;\n {WAIT}\n{ACCESS}", "precedes its ACQBULK"),
        (
            f" cvta.const.u64 %rd4, table;\n ld.u32 %r6, [%rd4];\n {WAIT}\n"
            " st.global.u32 [%rd3], %r6;",
            "precedes its ACQBULK",
        ),
    ],
)
def test_machine_code_that_may_access_memory_early_is_refused(
    body: str, problem: str, tmp_path: Path
) -> None:
    cubin = assemble(body, tmp_path)
    assert re.search(problem, check_wait(cubin, "k"))


@pytest.mark.parametrize("place", ["first", "before", "after"])
def test_a_trigger_is_no_access(place: str, tmp_path: Path) -> None:
    parts = {
        "first": f" {TRIGGER}\n {WAIT}\n{ACCESS}",
        "before": f" add.s32 %r1, %r1, 1;\n {TRIGGER}\n {WAIT}\n{ACCESS}",
        "after": f" {WAIT}\n {TRIGGER}\n{ACCESS}",
    }
    sunk = sink_wait(assemble(parts[place], tmp_path), "k")
    assert check_wait(sunk, "k") == ""
    assert not validate(sunk).findings


def test_an_access_moved_above_the_wait_is_found(tmp_path: Path) -> None:
    function = kernel(sink_wait(assemble(f" {WAIT}\n{ACCESS}", tmp_path), "k"))
    (wait,) = find_waits(function)
    order = list(function.instructions)
    order[wait], order[wait + 1] = order[wait + 1], order[wait]
    assert "precedes its ACQBULK" in wait_problem(function.reordered(order))
    for operand in ("c[0x3][0x10]", "cx[UR4][0x8]"):
        constant = replace(order[0], text=f"MOV R1, {operand}", operands=("R1", operand))
        from_table = replace(function, instructions=(constant, *function.instructions[1:]))
        assert "precedes its ACQBULK" in wait_problem(from_table)
