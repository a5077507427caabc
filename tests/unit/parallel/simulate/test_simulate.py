"""The simulator against times that were worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from nostall.parallel.errors import BadPlan
from nostall.parallel.plan import POLICIES, Plan, Stage, Workload, check_plan
from nostall.parallel.simulate import memory, simulate, simulated_s
from tests.unit.parallel.cases import pipeline, profile, servers, straight


@pytest.mark.parametrize("policy", ["gpipe", "pa", "pb", "1f1b", "list", "interleaved"])
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (2, 3), (4, 4), (4, 9)])
def test_a_balanced_pipeline_has_the_textbook_bubble(
    policy: str, stages: int, micro_batches: int
) -> None:
    work = pipeline(stages, micro_batches)
    plan = straight(range(1, stages + 1), policy)  # type: ignore[arg-type]
    assert simulated_s(work, plan) == pytest.approx((micro_batches + stages - 1) * 3.0)


def test_zero_bubble_splits_the_backward_pass() -> None:
    """F = I = W = 1: 1F1B waits (S - 1)(F + B), the best split order (S - 1)(F + I - W).

    The greedy order gets there with more memory than 1F1B, and part of the way with as much.
    """
    work = pipeline(3, 9, parameters=1e-9)
    assert simulated_s(work, straight([1, 2, 3], "1f1b")) == pytest.approx(9 * 3 + 2 * 3)
    assert simulated_s(work, straight([1, 2, 3], "zero-bubble")) == pytest.approx(9 * 3 + 4)
    more = straight([1, 2, 3], "zero-bubble", in_flight=(5, 4, 3))
    assert simulated_s(work, more) == pytest.approx(9 * 3 + 2)


def test_interleaving_divides_the_bubble() -> None:
    work = Workload(profile(8), servers(1, 2), 4)
    four = tuple(Stage(2 * s, 2 * s + 2, (s % 2,)) for s in range(4))
    two = straight([4, 8])
    assert simulated_s(work, two) == pytest.approx((4 + 1) * 12)
    assert simulated_s(work, Plan(four, "interleaved")) == pytest.approx(4 * 12 + 6)


def test_transfers_delay_and_links_queue() -> None:
    work = Workload(profile(2, boundary=1e9), servers(2, 1, between=1), 1)
    # F 1, link 1, F 1, B 2, link 1, B 2.
    assert simulated_s(work, straight([1, 2])) == pytest.approx(8)


def test_half_duplex_links_take_turns() -> None:
    """The link is the bottleneck: 4 s a micro-batch in turns, 2 s each way otherwise."""
    half = Workload(
        profile(2, forward=0.1, backward=0.1, boundary=2e9),
        servers(2, 1, between=1, duplex="half"),
        8,
    )
    full = Workload(half.profile, servers(2, 1, between=1), 8)
    plan = straight([1, 2], "list", in_flight=(8, 8))
    assert simulated_s(half, plan) >= 8 * 4
    assert simulated_s(full, plan) == pytest.approx(0.1 + 8 * 2 + 0.2 + 2 + 0.1)


def test_boundaries_that_share_a_port_queue_there() -> None:
    """GPUs 0 2 are on one server, 1 3 on the other: three boundaries cross."""
    work = Workload(
        profile(4, forward=0.1, backward=0.1, boundary=1e9), servers(2, 2, between=1), 16
    )
    crossing = Plan(tuple(Stage(s, s + 1, (g,)) for s, g in enumerate((0, 2, 1, 3))), "pb")
    once = Plan(tuple(Stage(s, s + 1, (g,)) for s, g in enumerate((0, 1, 2, 3))), "pb")
    assert simulated_s(work, crossing) > 16 * 2.9
    assert simulated_s(work, once) < 16 * 2.2


def test_all_reduce_follows_the_last_backward_pass() -> None:
    work = Workload(profile(2, parameters=1e9), servers(1, 4, inside=1), 1)
    plan = Plan((Stage(0, 1, (0, 1)), Stage(1, 2, (2, 3))), "pb")
    # Slices of half a second and a second; ring over two: 1 s for 1 GB at 1 GB/s.
    assert simulated_s(work, plan) == pytest.approx(3 + 1)


def test_data_parallelism_hides_what_it_can_of_the_all_reduce() -> None:
    """Layer 1's gradients go out while layer 0's backward pass runs."""
    work = Workload(profile(2, parameters=1e9), servers(1, 2, inside=1), 2)
    plan = Plan((Stage(0, 2, (0, 1)),), "1f1b")
    # Two samples on two GPUs take 6 s; layer 1 sends during 2 s of backward, layer 0 after it.
    assert simulated_s(work, plan) == pytest.approx(6 + 1)


def test_held_micro_batches_do_not_grow_with_their_number() -> None:
    """DAPPLE's point (table 5): PA and PB are flat in M, GPipe is not."""
    for policy, held in (("pa", (3, 2, 1)), ("pb", (5, 3, 1)), ("1f1b", (3, 2, 1))):
        for micro_batches in (8, 32):
            work = pipeline(3, micro_batches)
            found = simulate(work, straight([1, 2, 3], policy))  # type: ignore[arg-type]
            assert found.held == held
    assert simulate(pipeline(3, 32), straight([1, 2, 3], "gpipe")).held == (32, 32, 32)


def test_memory_counts_state_and_what_is_in_flight() -> None:
    work = Workload(profile(3, parameters=10.0, stored=7.0, boundary=1.0), servers(1, 3), 8)
    plan = straight([1, 2, 3], "pa")
    found = memory(work, plan, simulate(work, plan))
    assert found.peak == (40 + 3 * 7, 40 + 2 * 7, 40 + 7)
    assert found.fits is True
    again = straight([1, 2, 3], "pa", recompute=True)
    # The first stage's input is read anew; one stage's all while its backward pass runs.
    assert memory(work, again, simulate(work, again)).peak == (40 + 7, 40 + 2 + 7, 40 + 1 + 7)


def test_unmeasured_memory_never_proves_that_a_plan_fits() -> None:
    work = Workload(profile(2, stored=None, boundary=1.0), servers(1, 2), 4)
    plan = straight([1, 2])
    assert memory(work, plan, simulate(work, plan)).fits is None
    big = Workload(profile(2, stored=None, parameters=2.0**34), servers(1, 2), 4)
    assert memory(big, plan, simulate(big, plan)).fits is False


def test_limits_on_what_is_held_slow_a_plan_down() -> None:
    work = pipeline(3, 12)
    times = [simulated_s(work, straight([1, 2, 3], "pa", in_flight=(k, k, k))) for k in (1, 2, 3)]
    assert times[0] == pytest.approx(12 * 9)  # nothing overlaps
    assert times[0] > times[1] > times[2]


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (straight([1, 3]), "begin at 0"),
        (straight([1, 1, 2]), "more stages than layers"),
        (Plan((Stage(0, 1, (0,)), Stage(1, 2, (0, 1)))), "share some"),
        (Plan((Stage(0, 1, (0,)), Stage(1, 2, (0,))), "pb"), "several"),
        (Plan((Stage(0, 2, (0, 7)),)), "the cluster has"),
        (Plan((Stage(0, 2, ()),)), "one or more"),
        (straight([1, 2], in_flight=(0, 1)), "in_flight"),
    ],
)
def test_plans_that_do_not_fit_are_refused(plan: Plan, said: str) -> None:
    with pytest.raises(BadPlan, match=said):
        check_plan(plan, 2, 2)


def test_interleaving_needs_dealt_stages_and_whole_rounds() -> None:
    work = Workload(profile(4), servers(1, 2), 3)
    dealt = tuple(Stage(s, s + 1, (s % 2,)) for s in range(4))
    with pytest.raises(BadPlan, match="multiple"):
        simulate(work, Plan(dealt, "interleaved"))
    folded = tuple(Stage(s, s + 1, (g,)) for s, g in enumerate((0, 1, 1, 0)))
    with pytest.raises(BadPlan, match="dealt out in turn"):
        simulate(work, Plan(folded, "interleaved"))
    assert simulated_s(work, Plan(folded, "list")) < 36


def test_the_same_plan_takes_the_same_time() -> None:
    work = Workload(profile(4, boundary=1e8), servers(2, 2, inside=3, between=1), 8)
    for policy in POLICIES:
        plan = straight([1, 2, 3, 4], policy)
        one, two = simulate(work, plan), simulate(work, plan)
        assert np.array_equal(one.starts, two.starts) and one.iteration_s == two.iteration_s
