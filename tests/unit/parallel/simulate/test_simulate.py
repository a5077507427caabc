"""The simulator, compared with times computed by hand."""

from __future__ import annotations

import numpy as np
import pytest

from nostall.parallel.errors import BadPlan
from nostall.parallel.plan import POLICIES, Plan, Stage, Workload, check_plan
from nostall.parallel.profile.layers import Layer, chain
from nostall.parallel.simulate import memory, simulate, simulated_s
from tests.unit.parallel.cases import pipeline, profile, servers, straight


@pytest.mark.parametrize("policy", ["gpipe", "pa", "pb", "1f1b", "list", "interleaved"])
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (2, 3), (4, 4), (4, 9)])
def test_balanced_pipeline_has_the_textbook_bubble(
    policy: str, stages: int, micro_batches: int
) -> None:
    work = pipeline(stages, micro_batches)
    plan = straight(range(1, stages + 1), policy)  # type: ignore[arg-type]
    assert simulated_s(work, plan) == pytest.approx((micro_batches + stages - 1) * 3.0)


def test_zero_bubble_splits_the_backward_pass() -> None:
    """With F = I = W = 1, 1F1B has a bubble of (S - 1)(F + B), the best order (S - 1)(F + I - W).

    The greedy order reaches the best bubble with more micro-batches in flight than 1F1B, and a
    bubble in between with the same number.
    """
    work = pipeline(3, 9, parameters=1e-9)
    assert simulated_s(work, straight([1, 2, 3], "1f1b")) == pytest.approx(9 * 3 + 2 * 3)
    assert simulated_s(work, straight([1, 2, 3], "zero-bubble")) == pytest.approx(9 * 3 + 4)
    more_in_flight = straight([1, 2, 3], "zero-bubble", in_flight=(5, 4, 3))
    assert simulated_s(work, more_in_flight) == pytest.approx(9 * 3 + 2)


def test_interleaving_divides_the_bubble() -> None:
    work = Workload(profile(8), servers(1, 2), 4)
    chunks = tuple(Stage(2 * s, 2 * s + 2, (s % 2,)) for s in range(4))
    one_stage_per_gpu = straight([4, 8])
    assert simulated_s(work, one_stage_per_gpu) == pytest.approx((4 + 1) * 12)
    assert simulated_s(work, Plan(chunks, "interleaved")) == pytest.approx(4 * 12 + 6)


def test_transfers_delay_the_next_stage() -> None:
    work = Workload(profile(2, boundary=1e9), servers(2, 1, between=1), 1)
    # F 1, link 1, F 1, B 2, link 1, B 2.
    assert simulated_s(work, straight([1, 2])) == pytest.approx(8)


def test_half_duplex_links_carry_one_direction_at_a_time() -> None:
    """The link is the bottleneck: half duplex takes 4 s per micro-batch, full 2 s per direction."""
    half = Workload(
        profile(2, forward=0.1, backward=0.1, boundary=2e9),
        servers(2, 1, between=1, duplex="half"),
        8,
    )
    full = Workload(half.profile, servers(2, 1, between=1), 8)
    plan = straight([1, 2], "list", in_flight=(8, 8))
    assert simulated_s(half, plan) >= 8 * 4
    assert simulated_s(full, plan) == pytest.approx(0.1 + 8 * 2 + 0.2 + 2 + 0.1)


def test_boundaries_that_share_a_port_wait_for_it() -> None:
    """GPUs 0 and 1 are on one server, 2 and 3 on the other; three or one boundaries cross."""
    work = Workload(
        profile(4, forward=0.1, backward=0.1, boundary=1e9), servers(2, 2, between=1), 16
    )
    three_crossings = Plan(tuple(Stage(s, s + 1, (g,)) for s, g in enumerate((0, 2, 1, 3))), "pb")
    one_crossing = Plan(tuple(Stage(s, s + 1, (g,)) for s, g in enumerate((0, 1, 2, 3))), "pb")
    assert simulated_s(work, three_crossings) > 16 * 2.9
    assert simulated_s(work, one_crossing) < 16 * 2.2


def test_all_reduce_follows_the_last_backward_pass() -> None:
    work = Workload(profile(2, parameters=1e9), servers(1, 4, inside=1), 2, 2)
    plan = Plan((Stage(0, 1, (0, 1)), Stage(1, 2, (2, 3))), "pb")
    # A sample takes 6 s in all; a ring all-reduce of 1 GB over two GPUs at 1 GB/s takes 1 s.
    assert simulated_s(work, plan) == pytest.approx(6 + 1)


def test_data_parallelism_overlaps_the_all_reduce_with_the_backward_pass() -> None:
    """Layer 1's gradients are reduced while layer 0's backward pass runs."""
    work = Workload(profile(2, parameters=1e9), servers(1, 2, inside=1), 2)
    plan = Plan((Stage(0, 2, (0, 1)),), "1f1b")
    # Two samples on two GPUs take 6 s.  Layer 1's all-reduce (1 s) overlaps, layer 0's does not.
    assert simulated_s(work, plan) == pytest.approx(6 + 1)


def test_micro_batches_in_flight_do_not_depend_on_their_number() -> None:
    """DAPPLE, table 5: the memory of PA and PB does not grow with M, that of GPipe does."""
    for policy, in_flight in (("pa", (3, 2, 1)), ("pb", (5, 3, 1)), ("1f1b", (3, 2, 1))):
        for micro_batches in (8, 32):
            work = pipeline(3, micro_batches)
            timeline = simulate(work, straight([1, 2, 3], policy))  # type: ignore[arg-type]
            assert timeline.peak_in_flight == in_flight
    gpipe = simulate(pipeline(3, 32), straight([1, 2, 3], "gpipe"))
    assert gpipe.peak_in_flight == (32, 32, 32)


def test_memory_counts_state_and_micro_batches_in_flight() -> None:
    work = Workload(profile(3, parameters=10.0, stored=7.0, boundary=1.0), servers(1, 3), 8)
    plan = straight([1, 2, 3], "pa")
    needed = memory(work, plan, simulate(work, plan))
    assert needed.peak == (40 + 3 * 7, 40 + 2 * 7, 40 + 7)
    assert needed.fits is True
    recomputed = straight([1, 2, 3], "pa", recompute=True)
    # A stage keeps its input per micro-batch (the first none), and all activations of one
    # micro-batch while its backward pass runs.
    needed = memory(work, recomputed, simulate(work, recomputed))
    assert needed.peak == (40 + 7, 40 + 2 + 7, 40 + 1 + 7)


def test_a_worker_of_several_stages_has_the_state_of_all_of_them() -> None:
    layers = [Layer(f"l{i}", 1.0, 2.0, 10.0**i, 7.0) for i in range(6)]
    work = Workload(chain("c", layers, [1.0] * 5, 1), servers(1, 2), 4)
    plan = Plan(tuple(Stage(i, i + 1, (i % 2,)) for i in range(6)), "interleaved")
    needed = memory(work, plan, simulate(work, plan))
    assert needed.state == (4 * 10101, 4 * 101010)  # worker 0 has the layers 0, 2 and 4
    # Activations of 7 bytes: of at least one micro-batch in a stage, at most of all four in three.
    for state, peak in zip(needed.state, needed.peak, strict=True):
        assert (peak - state) / 7 in range(1, 13)


def test_unmeasured_memory_never_proves_that_a_plan_fits() -> None:
    work = Workload(profile(2, stored=None, boundary=1.0), servers(1, 2), 4)
    plan = straight([1, 2])
    assert memory(work, plan, simulate(work, plan)).fits is None
    too_big = Workload(profile(2, stored=None, parameters=2.0**34), servers(1, 2), 4)
    assert memory(too_big, plan, simulate(too_big, plan)).fits is False


def test_limits_on_micro_batches_in_flight_make_a_plan_slower() -> None:
    work = pipeline(3, 12)
    times = [simulated_s(work, straight([1, 2, 3], "pa", in_flight=(k, k, k))) for k in (1, 2, 3)]
    assert times[0] == pytest.approx(12 * 9)  # the stages do not overlap
    assert times[0] > times[1] > times[2]


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (straight([1, 3]), "begin at 0"),
        (straight([1, 1, 2]), "more stages than layers"),
        (Plan((Stage(0, 1, (0,)), Stage(1, 2, (0, 1)))), "share some"),
        (Plan((Stage(0, 1, (0,)), Stage(1, 2, (0,))), "pb"), "several stages per GPU"),
        (Plan((Stage(0, 2, (0, 7)),)), "the cluster has"),
        (Plan((Stage(0, 2, ()),)), "one or more"),
        (straight([1, 2], in_flight=(0, 1)), "in_flight"),
    ],
)
def test_plans_that_do_not_match_are_rejected(plan: Plan, message: str) -> None:
    with pytest.raises(BadPlan, match=message):
        check_plan(plan, 2, 2)


def test_interleaving_needs_stages_in_rotation_and_a_multiple_of_workers() -> None:
    work = Workload(profile(4), servers(1, 2), 3)
    rotated = tuple(Stage(s, s + 1, (s % 2,)) for s in range(4))
    with pytest.raises(BadPlan, match="multiple"):
        simulate(work, Plan(rotated, "interleaved"))
    folded = tuple(Stage(s, s + 1, (g,)) for s, g in enumerate((0, 1, 1, 0)))
    with pytest.raises(BadPlan, match="in rotation"):
        simulate(work, Plan(folded, "interleaved"))
    assert simulated_s(work, Plan(folded, "list")) < 36


def test_simulation_is_deterministic() -> None:
    work = Workload(profile(4, boundary=1e8), servers(2, 2, inside=3, between=1), 8)
    for policy in POLICIES:
        plan = straight([1, 2, 3, 4], policy)
        first, second = simulate(work, plan), simulate(work, plan)
        assert np.array_equal(first.operation_starts, second.operation_starts)
        assert first.iteration_s == second.iteration_s
