"""The model as an objective, on hand-made and on compiled kernels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.unit.sass.model.model_kernels import function, ins, model, program

from nostall.core.errors import BadInput
from nostall.core.launch import LaunchSpec
from nostall.sass.model import Reason, SmModel
from nostall.sass.program.program import Program
from nostall.sass.schedule.space import ScheduleSpace
from nostall.sass.schedule.state import Schedule
from nostall.testing import check_objective
from nostall.tuning.source import compile_triton

GEMM = Path(__file__).parents[4] / "examples" / "gemm_leakyrelu.py"


def compiled(name: str = "gemm_leakyrelu", arch: str = "sm_90", trips: int = 64):
    source = compile_triton(GEMM, name, arch=arch)
    whole = Program.from_cubin(source.cubin)
    kernel = whole.kernel(source.kernel)
    launch = source.launch.model_copy(update={"trips": {0: trips}})
    return whole, kernel, SmModel(whole, kernel, launch)


@pytest.fixture(scope="module")
def gemm():
    return compiled()


def test_a_measurement_says_that_it_is_modelled_and_of_what():
    made, state = model([ins("NOP")] * 10, launch=LaunchSpec(flops=5.0))
    (got,) = made.evaluate([state])
    assert (got.kind, got.unit, made.flops) == ("modelled", "s", 5.0)
    assert got.value == pytest.approx(10 / made.table.clock_hz)
    assert got.provenance["architecture"] == "sm_80"
    assert got.provenance["trips"] == "no loops"
    assert "modelled" in str(got)


def test_rounds_multiply_the_time():
    code = [ins("FFMA R0, R0, R1, R2", 4)] * 10
    one, state = model(code, launch=LaunchSpec(grid=(108, 1, 1)), warps=1)
    three, _ = model(code, launch=LaunchSpec(grid=(324, 1, 1)), warps=1)
    assert three.evaluate([state])[0].value == 3 * one.evaluate([state])[0].value


def test_a_schedule_of_another_kernel_fails_without_raising():
    made, _ = model([ins("NOP")] * 3)
    other = Schedule.of(function([ins("NOP")] * 4))
    (got,) = made.evaluate([other])
    assert got.failure is not None and "4 instructions, the kernel 3" in got.failure
    with pytest.raises(BadInput, match="give a schedule of this kernel"):
        made.explain(other)


@pytest.mark.parametrize("option", ["warps", "assumed_trips", "keep"])
def test_options_must_be_positive(option):
    kernel = function([ins("EXIT")])
    with pytest.raises(BadInput, match=f"{option} is 0; it must be at least 1"):
        SmModel(program(kernel), kernel, LaunchSpec(), **{option: 0})


def test_it_keeps_the_contract_of_an_objective(gemm):
    whole, kernel, made = gemm
    check_objective(made, ScheduleSpace(whole, kernel), steps=6)


def test_equal_states_cost_the_same_to_the_bit(gemm):
    _, kernel, made = gemm
    _, _, again = compiled()
    state = Schedule.of(kernel)
    values = {m.value for m in made.evaluate([state] * 3) + again.evaluate([state])}
    assert len(values) == 1


def test_the_order_matters(gemm):
    whole, kernel, made = gemm
    space, rng = ScheduleSpace(whole, kernel), np.random.default_rng(0)
    state, values = space.start(), set()
    for _ in range(60):
        move = space.propose(state, rng)
        if move is not None:
            state = space.apply(state, move)
            values.add(made.evaluate([state])[0].value)
    assert len(values) > 5


def test_slower_control_words_cost_more(gemm):
    _, kernel, made = gemm
    state = Schedule.of(kernel)
    slow = replace(state, stall=np.full_like(state.stall, 15), yields=np.ones_like(state.yields))
    before, after = (m.value for m in made.evaluate([state, slow]))
    assert after > 1.3 * before


@pytest.mark.parametrize(
    ("file", "arch"),
    [
        (file, arch)
        for file in ("fused_attention", "flash_attention", "fused_feedforward")
        for arch in ("sm_75", "sm_80", "sm_90", "sm_120")
        if (file, arch) != ("flash_attention", "sm_75")  # half a minute to compile
    ],
)
def test_loops_are_executed_as_often_as_the_provenance_says(file, arch):
    source = compile_triton(GEMM.with_name(f"{file}.py"), file, arch=arch)
    whole = Program.from_cubin(source.cubin)
    kernel = whole.kernel(source.kernel)
    made = SmModel(whole, kernel, source.launch)
    starts, weights = made.trace.visits[:, 0], made.trace.weights
    for loop in made.loops:
        entered = weights[starts == kernel.blocks[loop.header].start].sum()
        # A loop that is tested at its top looks once more.
        assert entered in (made.trace.trips[loop.number], made.trace.trips[loop.number] + 1)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120"])
def test_a_matrix_product_takes_a_believable_time(arch):
    _, kernel, made = compiled("gemm_leakyrelu@full", arch)
    (got,) = made.evaluate([Schedule.of(kernel)])
    # 137 GFLOP: between 10 and 1000 TFLOP/s.
    assert 1.4e-4 < got.value < 1.4e-2
    assert got.provenance["path"] == "complete"


def test_the_explanation_covers_the_kernel(gemm):
    _, kernel, made = gemm
    told = made.explain(Schedule.of(kernel))
    assert told.cycles.shape == (len(kernel.instructions), len(Reason))
    assert told.cycles.min() >= 0
    assert told.trips == {0: 64} and not told.assumed_trips
    assert told.cycles.sum() == pytest.approx(told.wave_cycles * told.simulated_warps, rel=1e-9)
    assert told.total_cycles / made.table.clock_hz == pytest.approx(told.seconds)
    loop = kernel.blocks[made.loops[0].header]
    issued = told.cycles[loop.start : loop.end, Reason.ISSUED]
    assert issued == pytest.approx(np.full(len(loop), 64.0))
    assert len(made.timeline(Schedule.of(kernel))) == made.trace.length
