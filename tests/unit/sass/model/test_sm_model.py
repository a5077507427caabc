"""The SM model as an objective, on hand-written and on compiled kernels."""

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
from nostall.tuning.sources.triton_source import compile_triton

GEMM = Path(__file__).parents[4] / "examples" / "gemm_leakyrelu.py"


def compile_model(name: str = "gemm_leakyrelu", arch: str = "sm_90", trips: int = 64):
    source = compile_triton(GEMM, name, arch=arch)
    compiled = Program.from_cubin(source.cubin)
    kernel = compiled.kernel(source.kernel)
    launch = source.launch.model_copy(update={"trips": {0: trips}})
    return compiled, kernel, SmModel(compiled, kernel, launch)


@pytest.fixture(scope="module")
def gemm():
    return compile_model()


def test_a_measurement_has_the_kind_and_the_provenance_of_the_model():
    sm_model, state = model([ins("NOP")] * 10, launch=LaunchSpec(flops=5.0))
    (measurement,) = sm_model.evaluate([state])
    assert (measurement.kind, measurement.unit, sm_model.flops) == ("modelled", "s", 5.0)
    assert measurement.value == pytest.approx(10 / sm_model.parameters.clock_hz)
    assert measurement.provenance["architecture"] == "sm_80"
    assert measurement.provenance["trips"] == "no loops"
    assert "modelled" in str(measurement)


def test_rounds_multiply_the_time():
    code = [ins("FFMA R0, R0, R1, R2", 4)] * 10
    one_round, state = model(code, launch=LaunchSpec(grid=(108, 1, 1)), warps=1)
    three_rounds, _ = model(code, launch=LaunchSpec(grid=(324, 1, 1)), warps=1)
    assert three_rounds.evaluate([state])[0].value == 3 * one_round.evaluate([state])[0].value


def test_a_schedule_of_another_kernel_fails_without_raising():
    sm_model, _ = model([ins("NOP")] * 3)
    foreign = Schedule.from_function(function([ins("NOP")] * 4))
    (measurement,) = sm_model.evaluate([foreign])
    assert measurement.failure is not None and "4 instructions, the kernel 3" in measurement.failure
    with pytest.raises(BadInput, match="give a schedule of this kernel"):
        sm_model.explain(foreign)


@pytest.mark.parametrize("option", ["warps", "assumed_trips", "kept_iterations"])
def test_options_must_be_positive(option):
    kernel = function([ins("EXIT")])
    with pytest.raises(BadInput, match=f"{option} is 0; it must be at least 1"):
        SmModel(program(kernel), kernel, LaunchSpec(), **{option: 0})


def test_the_model_meets_the_contract_of_an_objective(gemm):
    compiled, kernel, sm_model = gemm
    check_objective(sm_model, ScheduleSpace(compiled, kernel), steps=6)


def test_equal_states_cost_the_same_to_the_bit(gemm):
    _, kernel, sm_model = gemm
    _, _, second = compile_model()
    state = Schedule.from_function(kernel)
    values = {m.value for m in sm_model.evaluate([state] * 3) + second.evaluate([state])}
    assert len(values) == 1


def test_the_order_matters(gemm):
    compiled, kernel, sm_model = gemm
    space, rng = ScheduleSpace(compiled, kernel), np.random.default_rng(0)
    state, values = space.start(), set()
    for _ in range(60):
        move = space.propose(state, rng)
        if move is not None:
            state = space.apply(state, move)
            values.add(sm_model.evaluate([state])[0].value)
    assert len(values) > 5


def test_slower_control_words_cost_more(gemm):
    _, kernel, sm_model = gemm
    state = Schedule.from_function(kernel)
    slow = replace(state, stall=np.full_like(state.stall, 15), yields=np.ones_like(state.yields))
    before, after = (m.value for m in sm_model.evaluate([state, slow]))
    assert after > 1.3 * before


@pytest.mark.slow
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
    compiled = Program.from_cubin(source.cubin)
    kernel = compiled.kernel(source.kernel)
    sm_model = SmModel(compiled, kernel, source.launch)
    starts, weights = sm_model.trace.visits[:, 0], sm_model.trace.weights
    for loop in sm_model.loops:
        iterations = weights[starts == kernel.blocks[loop.header].start].sum()
        # The header of a loop that is tested at its top runs once more.
        assert iterations in (
            sm_model.trace.trips[loop.number],
            sm_model.trace.trips[loop.number] + 1,
        )


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120"])
def test_the_time_of_a_matrix_product_is_realistic(arch):
    _, kernel, sm_model = compile_model("gemm_leakyrelu@full", arch)
    (measurement,) = sm_model.evaluate([Schedule.from_function(kernel)])
    # 137 GFLOP: between 10 and 1000 TFLOP/s.
    assert 1.4e-4 < measurement.value < 1.4e-2
    assert measurement.provenance["path"] == "complete"


def test_the_explanation_covers_the_kernel(gemm):
    _, kernel, sm_model = gemm
    explanation = sm_model.explain(Schedule.from_function(kernel))
    assert explanation.cycles.shape == (len(kernel.instructions), len(Reason))
    assert explanation.cycles.min() >= 0
    assert explanation.trips == {0: 64} and not explanation.assumed_trips
    assert explanation.cycles.sum() == pytest.approx(
        explanation.wave_cycles * explanation.simulated_warps, rel=1e-9
    )
    assert explanation.total_cycles / sm_model.parameters.clock_hz == pytest.approx(
        explanation.seconds
    )
    loop = kernel.blocks[sm_model.loops[0].header]
    issued = explanation.cycles[loop.start : loop.end, Reason.ISSUED]
    assert issued == pytest.approx(np.full(len(loop), 64.0))
    assert len(sm_model.timeline(Schedule.from_function(kernel))) == sm_model.trace.length
