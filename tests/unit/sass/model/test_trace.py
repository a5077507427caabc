"""Natural loops, traced paths, trip counts and the extrapolation of loops."""

from __future__ import annotations

import pytest
from tests.unit.sass.model.model_kernels import ONE_BLOCK, function, ins, model

from nostall.core.errors import BadLaunch
from nostall.core.launch import LaunchSpec
from nostall.sass.model.trace import iteration_weight, natural_loops, trace_path, trip_counts

WORK = ins("FFMA R0, R0, R1, R2", 4)
EXIT = ins("EXIT", 5)


def branch(label: str, guard: str = "@P0 ") -> object:
    return ins(f"{guard}BRA `({label})", 5)


def bottom_tested():
    return [WORK, WORK, WORK, branch("L"), WORK, EXIT], {"L": 1}


def top_tested():
    return [WORK, branch("OUT"), WORK, WORK, branch("TOP", ""), WORK, EXIT], {"TOP": 1, "OUT": 5}


def nested():
    code = [WORK, WORK, WORK, branch("IN"), WORK, branch("OUT"), EXIT]
    return code, {"OUT": 1, "IN": 2}


def path(code, labels, trips=None, kept_iterations=100, assumed_trips=8):
    kernel = function(code, labels)
    loops = natural_loops(kernel.blocks)
    counts, assumed_loops = trip_counts(loops, trips or {}, assumed_trips)
    trace = trace_path(kernel, loops, counts, assumed_loops, kept_iterations)
    positions = [p for start, end in trace.visits.tolist() for p in range(start, end)]
    return positions, trace


@pytest.mark.parametrize("make", [bottom_tested, top_tested])
@pytest.mark.parametrize("trips", [1, 2, 5])
def test_a_loop_runs_as_often_as_the_launch_says(make, trips):
    positions, trace = path(*make(), trips={0: trips})
    assert positions.count(2) == trips
    assert positions[-1] == len(make()[0]) - 1
    assert trace.assumed_loops == frozenset()


def test_a_top_tested_loop_can_have_no_iterations():
    positions, _ = path(*top_tested(), trips={0: 0})
    assert positions.count(2) == 0


def test_loops_are_numbered_by_position_and_trip_counts_multiply():
    positions, trace = path(*nested(), trips={0: 3, 1: 4})
    assert positions.count(1) == 3
    assert positions.count(2) == 12
    positions, trace = path(*nested(), trips={1: 4}, assumed_trips=2)
    assert (positions.count(1), positions.count(2)) == (2, 8)
    assert trace.assumed_loops == {0}


def test_a_loop_with_an_exit_in_the_middle():
    code = [WORK, WORK, branch("SKIP"), WORK, branch("OUT"), WORK, branch("TOP", ""), EXIT]
    positions, _ = path(code, {"TOP": 1, "SKIP": 4, "OUT": 7}, trips={0: 4})
    assert (positions.count(1), positions.count(5)) == (4, 3)
    assert positions[-1] == 7


def test_an_endless_loop_ends():
    positions, trace = path([WORK, branch("L", "")], {"L": 0}, trips={0: 3})
    assert 3 <= positions.count(0) <= 5
    assert trace.complete


def test_unknown_loops_and_negative_counts_are_rejected():
    with pytest.raises(BadLaunch, match=r"loops \[1\].*has 1 loops"):
        path(*bottom_tested(), trips={1: 4})
    with pytest.raises(BadLaunch, match="negative counts"):
        path(*bottom_tested(), trips={0: -1})


def test_branches_fall_through_unless_that_ends_the_kernel():
    skips = [WORK, branch("LATE"), WORK, WORK, WORK, WORK, WORK, EXIT, WORK, EXIT]
    assert path(skips, {"LATE": 8})[0] == list(range(8))
    leaves = [WORK, branch("MAIN"), EXIT, WORK, WORK, WORK, WORK, WORK, EXIT]
    assert path(leaves, {"MAIN": 3})[0] == [0, 1, *range(3, 9)]


def test_a_kernel_does_not_skip_its_main_loop():
    load = ins("LDS R4, [R8]", 2)
    code = [branch("RUN"), WORK, branch("END", ""), load, branch("RUN"), WORK, EXIT]
    assert path(code, {"RUN": 3, "END": 5}, trips={0: 2})[0] == [0, 3, 4, 3, 4, 5, 6]
    idle_loop = [*code[:3], WORK, *code[4:]]
    assert path(idle_loop, {"RUN": 3, "END": 5}, trips={0: 2})[0] == [0, 1, 2, 5, 6]


def test_a_guarded_call_can_leave_a_loop():
    leave = ins("@P0 CALL.REL.NOINC `(OUT)", 5)
    code = [WORK, WORK, leave, branch("TOP", ""), WORK, WORK, EXIT]
    positions, _ = path(code, {"TOP": 1, "OUT": 4}, trips={0: 5})
    assert positions.count(3) in (4, 5)
    assert positions[-3:] == [4, 5, 6]


def test_a_loop_that_the_path_passes_by_is_reported():
    code = [WORK, branch("SLOW"), *[WORK] * 5, EXIT, WORK, branch("SLOW"), EXIT]
    assert path(code, {"SLOW": 8})[1].short_loops == frozenset({0})
    assert path(*bottom_tested())[1].short_loops == frozenset()


def test_recursion_is_entered_once():
    code = [
        ins("CALL.REL.NOINC `(F)", 5),
        EXIT,
        WORK,
        ins("CALL.REL.NOINC `(F)", 5),
        ins("RET.REL.NODEC R20 `(kernel)", 5),
    ]
    assert path(code, {"F": 2})[0] == [0, 2, 3, 4, 1]


def test_a_guarded_exit_goes_on():
    assert path([WORK, ins("@P0 EXIT", 5), WORK, EXIT], {})[0] == [0, 1, 2, 3]


def test_calls_return_to_their_callers():
    code = [
        ins("CALL.REL.NOINC `(F)", 5),
        WORK,
        ins("CALL.REL.NOINC `(F)", 5),
        EXIT,
        WORK,
        ins("RET.REL.NODEC R20 `(kernel)", 5),
    ]
    assert path(code, {"F": 4})[0] == [0, 4, 5, 1, 2, 4, 5, 3]


@pytest.mark.parametrize("kept_iterations", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("trips", [1, 3, 8, 100])
def test_weights_stand_for_all_iterations(kept_iterations, trips):
    iterations = min(kept_iterations, trips)
    total = sum(iteration_weight(i, trips, kept_iterations) for i in range(1, iterations + 1))
    assert total == pytest.approx(trips)


def loop_with_memory():
    code = [
        ins("LDS R4, [R8]", 2, write=0),
        WORK,
        ins("FADD R1, R4, R4", 4, wait=1),
        ins("LDS R5, [R8+0x4]", 2, write=1),
        ins("LDG.E R6, [R10]", 2, write=2),
        WORK,
        ins("FADD R1, R5, R5", 4, wait=2),
        ins("FADD R1, R6, R6", 4, wait=4),
        branch("L"),
        WORK,
        EXIT,
    ]
    return code, {"L": 1}


def loop_with_barrier():
    code, labels = loop_with_memory()
    return [*code[:3], ins("BAR.SYNC 0x0", 2), *code[3:]], labels


LOOPS = [bottom_tested, top_tested, nested, loop_with_memory, loop_with_barrier]


def extrapolated_and_full(make, warps, kept_iterations, launch=ONE_BLOCK):
    code, labels = make()
    common = {"labels": labels, "warps": warps, "launch": launch, "assumed_trips": 40}
    full, state = model(code, kept_iterations=1000, **common)
    short, _ = model(code, kept_iterations=kept_iterations, **common)
    assert short.trace.length < full.trace.length / 3
    return short.cycles(state), full.cycles(state)


@pytest.mark.parametrize("kept_iterations", [4, 6, 8])
@pytest.mark.parametrize("warps", [1, 2])
@pytest.mark.parametrize("make", LOOPS)
def test_extrapolation_agrees_with_full_simulation(make, warps, kept_iterations):
    short, full = extrapolated_and_full(make, warps, kept_iterations)
    assert short == pytest.approx(full, rel=0.01)


@pytest.mark.parametrize("warps", [3, 4, 8])
def test_extrapolation_of_warps_that_a_barrier_synchronises(warps):
    launch = LaunchSpec(block=(128 * warps, 1, 1))
    short, full = extrapolated_and_full(loop_with_barrier, warps, 6, launch)
    assert short == pytest.approx(full, rel=0.01)


@pytest.mark.parametrize("warps", [3, 4])
@pytest.mark.parametrize("make", LOOPS)
def test_extrapolation_of_warps_that_compete_is_rough(make, warps):
    # Greedy issue lets some warps run ahead, over all iterations more than over a few.
    short, full = extrapolated_and_full(make, warps, 6)
    assert short == pytest.approx(full, rel=0.25)


def test_cost_is_proportional_to_the_iterations():
    code, labels = bottom_tested()
    times = []
    for trips in (10, 20, 1000):
        sm_model, state = model(code, labels=labels, launch=LaunchSpec(trips={0: trips}))
        times.append(sm_model.cycles(state))
    assert (times[2] - times[1]) / 980 == pytest.approx((times[1] - times[0]) / 10)
    assert (times[1] - times[0]) / 10 == 4 + 4 + 5
