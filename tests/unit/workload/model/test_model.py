"""The framework's closed forms, its bounds, and what must hold for every job."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from nostall.core import BadHardware, BadInput, BadJob
from nostall.workload import Architecture, Hardware, Population, Resource, project, step
from nostall.workload.hardware import flat
from nostall.workload.model import PARTS, place, sensitivities, sweep, traffic
from tests.unit.workload.job_records import RATES, ROUND, job, jobs

LOSSLESS = dataclasses.replace(ROUND, efficiency=flat(1.0))
GBIT = 0.125e9


def test_a_gigabyte_over_parameter_servers_takes_042_seconds() -> None:
    moved = step(job(weight_traffic=1e9), LOSSLESS)
    assert moved.weights == pytest.approx(1 / 3.125 + 1 / 10)
    assert moved.media[Resource.ETHERNET] / moved.weights == pytest.approx(0.762, abs=5e-4)


def test_allreduce_in_one_server_moves_the_same_bytes_21_times_as_fast() -> None:
    before = step(job(weight_traffic=1e9), ROUND).weights
    after = step(job(Architecture.ALLREDUCE_LOCAL, weight_traffic=1e9), ROUND).weights
    assert after == pytest.approx(1 / (0.7 * 50))
    assert before / after == pytest.approx(21)


@pytest.mark.parametrize(("weights", "speedup"), [(0.62, 1.55), (0.72, 1.70)])
def test_25_to_100_gigabit(weights: float, speedup: float) -> None:
    """Speed-up 1 / (1 - 0.75 e), e being Ethernet's share of the step."""
    traffic_seconds = step(job(weight_traffic=1e9), ROUND).weights
    rest = traffic_seconds * (1 - weights) / weights
    one = job(
        weight_traffic=1e9, flops=rest * 0.7 * ROUND.flops["fp32"], memory_bytes=0, input_bytes=0
    )
    here = step(one, ROUND)
    assert here.share("weights") == pytest.approx(weights)
    ethernet = here.media[Resource.ETHERNET] / here.total
    found = sweep([one], ROUND, Resource.ETHERNET, [25 * GBIT, 100 * GBIT]).speedups
    assert found[0][0] == pytest.approx(1)
    assert found[1][0] == pytest.approx(1 / (1 - 0.75 * ethernet))
    assert found[1][0] == pytest.approx(speedup, abs=0.01)


def test_the_parts_are_amounts_over_seventy_percent_of_the_peaks() -> None:
    found = step(job(weight_traffic=3e9), ROUND)
    assert found.data == pytest.approx(40e6 / (0.7 * 10e9))
    assert found.compute == pytest.approx(1e12 / (0.7 * 10e12))
    assert found.memory == pytest.approx(50e9 / (0.7 * 1e12))
    assert found.weights == pytest.approx(3e9 / (0.7 * 3.125e9) + 3e9 / (0.7 * 10e9))
    assert found.total == pytest.approx(sum(found.part(p) for p in PARTS))


@pytest.mark.parametrize(
    ("architecture", "replicas", "moved"),
    [
        (Architecture.SINGLE, 1, {}),
        (Architecture.MULTI_GPU, 4, {Resource.PCIE: 2 * 420e6}),
        (Architecture.MULTI_GPU, 1, {Resource.PCIE: 0}),
        (Architecture.PS_WORKER, 4, {Resource.ETHERNET: 840e6, Resource.PCIE: 840e6}),
        (Architecture.PS_WORKER, 1, {Resource.ETHERNET: 840e6, Resource.PCIE: 840e6}),
        (Architecture.ALLREDUCE_LOCAL, 8, {Resource.NVLINK: 1.75 * 400e6 + 7 * 20e6}),
        (Architecture.ALLREDUCE_LOCAL, 1, {Resource.NVLINK: 0}),
        (Architecture.PEARL, 4, {Resource.NVLINK: 1.5 * 400e6 + 1.5 * 20e6}),
        (
            Architecture.ALLREDUCE_CLUSTER,
            32,
            {
                Resource.ETHERNET: 1.5 * 400e6 + 3 * 8 * 20e6,
                Resource.NVLINK: 1.75 * 400e6 + 31 * 20e6,
            },
        ),
        (
            Architecture.ALLREDUCE_CLUSTER,
            8,
            {Resource.ETHERNET: 0, Resource.NVLINK: 1.75 * 400e6 + 7 * 20e6},
        ),
    ],
)
def test_closed_forms_of_the_traffic(
    architecture: Architecture, replicas: int, moved: dict[Resource, float]
) -> None:
    assert traffic(job(architecture, replicas=replicas), 8) == pytest.approx(moved)


def test_replicas_of_one_server_share_its_pcie_for_their_input() -> None:
    alone = step(job(), ROUND).data
    assert step(job(Architecture.ALLREDUCE_LOCAL), ROUND).data == pytest.approx(8 * alone)
    links = dataclasses.replace(ROUND, pcie_links=3)
    assert step(job(Architecture.ALLREDUCE_LOCAL), links).data == pytest.approx(3 * alone)
    two = dataclasses.replace(job(Architecture.ALLREDUCE_CLUSTER), replicas=16)
    assert step(two, ROUND).data == pytest.approx(8 * alone)


def test_porting_to_one_server_caps_the_replicas_and_counts_them() -> None:
    found = project(job(replicas=16, weight_traffic=1e9), Architecture.ALLREDUCE_LOCAL, ROUND)
    assert found.after.replicas == 8
    assert found.throughput == pytest.approx(found.per_replica / 2)
    assert found.step_after.media == pytest.approx({Resource.NVLINK: 1e9 / 35e9})
    cluster = project(job(replicas=16), Architecture.ALLREDUCE_CLUSTER, ROUND)
    assert cluster.after.replicas == 16
    assert cluster.throughput == cluster.per_replica


def test_weights_that_do_not_fit_are_an_obstacle_which_partitioning_removes() -> None:
    large = job(embedding_bytes=100e9)
    local = project(large, Architecture.ALLREDUCE_LOCAL, ROUND)
    assert "100 GB" in local.obstacle and "16 GB" in local.obstacle
    assert project(large, Architecture.PEARL, ROUND).obstacle == ""


def test_what_cannot_be_asked_is_refused() -> None:
    with pytest.raises(BadJob, match="1w1g"):
        project(job(), Architecture.SINGLE, ROUND)
    without = dataclasses.replace(ROUND, nvlink=0.0)
    with pytest.raises(BadHardware, match="no nvlink"):
        project(job(), Architecture.ALLREDUCE_LOCAL, without)
    with pytest.raises(BadHardware, match=r"'fp8'.*fp32"):
        step(job(precision="fp8"), ROUND)
    with pytest.raises(BadJob, match="no jobs"):
        Population((), ROUND)


@given(jobs(), st.sampled_from(RATES), st.floats(1.0001, 1e3))
def test_faster_hardware_never_slows_a_step(one, resource, factor) -> None:
    before, after = step(one, ROUND), step(one, ROUND.scaled(resource, factor))
    assert after.total <= before.total * (1 + 1e-12)
    assert after.overlapped <= before.overlapped * (1 + 1e-12)


@given(jobs(), st.sampled_from(list(Resource)), st.floats(1.0001, 1e3))
def test_amdahl_bounds_every_gain_and_gives_it_exactly(one, resource, factor) -> None:
    found = next(s for s in sensitivities(one, ROUND) if s.resource is resource)
    gain = step(one, ROUND).total / step(one, ROUND.scaled(resource, factor)).total
    assert gain == pytest.approx(found.speedup(factor), rel=1e-6)
    assert gain <= found.limit * (1 + 1e-9)
    assert gain <= factor * (1 + 1e-9)


@given(jobs())
def test_overlap_is_at_most_threefold(one) -> None:
    found = step(one, ROUND)
    assert found.total / 3 <= found.overlapped * (1 + 1e-12)
    assert found.overlapped <= found.total * (1 + 1e-12)
    assert math.isclose(sum(found.share(p) for p in PARTS), 1)


@given(jobs())
def test_flat_efficiency_spends_all_time_on_some_resource(one) -> None:
    found = sensitivities(one, ROUND)
    assert sum(s.removable for s in found) == pytest.approx(1, abs=1e-6)
    assert [s.removable for s in found] == sorted((s.removable for s in found), reverse=True)


@given(jobs(Architecture.PS_WORKER))
def test_as_published_porting_speeds_weight_traffic_up_21_times(one) -> None:
    assume(one.weight_traffic and one.weight_traffic > 1)
    found = project(one, Architecture.ALLREDUCE_LOCAL, ROUND)
    if found.after.replicas > 1:
        ratio = found.step_before.weights / found.step_after.weights
        assert ratio == pytest.approx(21)
    # At most: everything was weight traffic.
    assert found.per_replica <= 21.000001 or found.after.replicas == 1


@given(st.lists(jobs(), min_size=1, max_size=12))
def test_shares_of_a_population_sum_to_one(many) -> None:
    population = Population(tuple(many), ROUND)
    for by in ("job", "gpu"):
        assert sum(population.shares(by).values()) == pytest.approx(1)
        series = population.cdf(lambda s: s.share("weights"), by)
        assert series.cumulative[-1] == pytest.approx(1)
        assert series.at_most(1.0000001) == pytest.approx(1)
        assert series.at_most(-1) == 0
        assert all(a <= b for a, b in zip(series.values, series.values[1:], strict=False))


def test_gpu_time_weights_by_hours_only_when_every_job_gives_them() -> None:
    short = job(Architecture.SINGLE, gpu_hours=1.0)
    long = job(gpu_hours=3.0)
    weighted = Population((short, long), ROUND)
    assert weighted.weights("gpu") == [1.0, 3.0]
    mean = (step(short, ROUND).share("weights") + 3 * step(long, ROUND).share("weights")) / 4
    assert weighted.share("weights", "gpu") == pytest.approx(mean)
    mixed = Population((job(Architecture.SINGLE), long), ROUND)
    assert mixed.weights("gpu")[1] == pytest.approx(8 * step(long, ROUND).total)


def test_quantiles_are_the_smallest_value_with_enough_weight() -> None:
    series = Population(
        tuple(job(Architecture.SINGLE, flops=n * 7e12, memory_bytes=0) for n in (1, 2, 3, 4)), ROUND
    ).cdf(lambda s: s.compute)
    assert [series.quantile(q) for q in (0, 0.25, 0.26, 0.5, 1)] == pytest.approx([1, 1, 2, 2, 4])


def test_roofline() -> None:
    low = place(1e9, 1e9, 2e-3, ROUND)
    assert (low.intensity, low.bound) == (1.0, "memory")
    assert low.roof_seconds == pytest.approx(1e-3)
    assert low.reached == pytest.approx(0.5)
    high = place(1e12, 1e9, 0.2, ROUND)
    assert (high.bound, high.roof_seconds) == ("compute", pytest.approx(0.1))
    with pytest.raises(BadInput, match="bytes"):
        place(1.0, 0.0, 1.0, ROUND)


def hardware_with(**changes: object) -> Hardware:
    return dataclasses.replace(ROUND, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [
        {"memory": 0.0},
        {"pcie_links": 0},
        {"pcie": -1.0},
        {"ethernet": math.nan},
        {"flops": {}},
        {"flops": {"fp32": 0}},
    ],
)
def test_impossible_hardware_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(BadHardware):
        hardware_with(**changes)
