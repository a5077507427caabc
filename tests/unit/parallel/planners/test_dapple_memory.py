"""DAPPLE's limit on memory: parameters with their state, and the activations of a micro-batch."""

from __future__ import annotations

from itertools import combinations

import pytest

from nostall.parallel.cluster import Cluster, parse_cluster
from nostall.parallel.plan import Plan, Stage, Workload
from nostall.parallel.planners import Effort, make_plan
from nostall.parallel.planners.memory_fit import fit_to_memory
from nostall.parallel.profile.layers import Layer, chain
from nostall.parallel.simulate import memory, simulate, simulated_s
from tests.unit.parallel.cases import FREE, profile, straight

MICRO_BATCHES = 32


def _cluster(
    *memory_gib: float, gpus: tuple[int, ...] | None = None, network: float = FREE
) -> Cluster:
    """Servers with these GiB per GPU, one GPU each unless ``gpus`` are given; GB/s between them."""
    counts = gpus or (1,) * len(memory_gib)
    link = f"{{ bandwidth_gbytes = {FREE} }}"
    text = "".join(
        f"[[servers]]\ngpus = {count}\nmemory_gib = {size}\nlink = {link}\n"
        for count, size in zip(counts, memory_gib, strict=True)
    )
    return parse_cluster(f'name = "mixed"\n{text}[network]\nbandwidth_gbytes = {network}\n')


def _plan(work: Workload) -> Plan:
    effort = Effort(seconds=600, evaluations=300, recompute=False)
    plan = make_plan(work, "dapple", effort)
    assert memory(work, plan, simulate(work, plan)).fits
    return plan


def _best_straight_s(work: Workload) -> float:
    """The least simulated seconds of plans with one stage on each GPU, in their order."""
    layers, gpus = len(work.profile), len(work.cluster)
    cuts = (straight([*inner, layers], "pb") for inner in combinations(range(1, layers), gpus - 1))
    fitting = filter(None, (fit_to_memory(work, plan) for plan in cuts))
    return min(simulated_s(work, plan) for plan in fitting)


@pytest.mark.parametrize(
    ("layers", "memory_gib"), [(100, (1, 64)), (100, (64, 1)), (24, (1, 64, 64))]
)
def test_a_small_gpu_gets_the_layers_whose_activations_it_holds(
    layers: int, memory_gib: tuple[float, ...]
) -> None:
    """The small GPU holds one micro-batch of 8 layers, or more of fewer; balanced cuts do not fit.

    Cuts that do not fit must neither hide those that do nor use up the simulated plans.
    """
    work = Workload(profile(layers, stored=2**30 / 8.5), _cluster(*memory_gib), MICRO_BATCHES)
    assert simulated_s(work, _plan(work)) <= _best_straight_s(work) * (1 + 1e-9)


def test_a_faster_beginning_that_does_not_fit_hides_no_slower_one() -> None:
    """GPU 0 holds the activations of two layers, and the cuts behind layers 2 to 5 are free.

    A search that ignores activations keeps these cuts only: the faster ones for each end of the
    second stage.  Replicas of the other layers do not fit, because of their state.
    """
    layers = [Layer(f"l{i}", 1, 2, 3e9 if i > 5 else 0, 2**30 / 2.5) for i in range(12)]
    boundaries = [0.5e9 if i < 2 else 0.0 for i in range(11)]
    cluster = _cluster(1, 64, 64, network=1)
    work = Workload(chain("cheap cuts", layers, boundaries, 1), cluster, MICRO_BATCHES)
    # The closed form does not count the limit on micro-batches in flight, which costs 25 %.
    assert simulated_s(work, _plan(work)) <= _best_straight_s(work) * 1.3


def test_a_small_gpu_gets_the_layers_whose_state_it_holds() -> None:
    """Four bytes of state for each byte of parameters: 8 layers."""
    work = Workload(profile(100, stored=0, parameters=2**28 / 8.5), _cluster(1, 64), MICRO_BATCHES)
    assert _plan(work).stages[0] == Stage(0, 8, (0,))


def test_a_plan_whose_last_stage_does_not_fit_excludes_no_other() -> None:
    """GPU 4 holds the activations of 3 of 30 layers; balanced plans give it 6 or more.

    The best plan with one GPU or one server per stage is worse than four replicas and GPU 4.
    """
    cluster = _cluster(64, 64, 1, gpus=(2, 2, 1))
    work = Workload(profile(30, stored=2**30 / 3.5 / 4), cluster, 4 * MICRO_BATCHES, 4)
    best = Plan((Stage(0, 27, (0, 1, 2, 3)), Stage(27, 30, (4,))), "pb")
    assert memory(work, best, simulate(work, best)).fits
    assert simulated_s(work, _plan(work)) <= simulated_s(work, best) * (1 + 1e-9)
