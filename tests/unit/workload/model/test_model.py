"""The analytical model: closed forms, bounds, and properties that hold for every job."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from nostall.core import BadHardware, BadInput, BadJob
from nostall.workload import (
    Architecture,
    Hardware,
    Population,
    Resource,
    model_step,
    project_job,
)
from nostall.workload.hardware.description import flat_efficiency
from nostall.workload.model.breakdown import STEP_PARTS, traffic_by_medium
from nostall.workload.model.population import removable_shares, sweep_rate
from nostall.workload.timeline.kernels import roofline_point
from tests.unit.workload.job_records import (
    LINK_AND_MEMORY_RATES,
    TEST_HARDWARE,
    jobs,
    make_job,
)

FULL_EFFICIENCY = dataclasses.replace(TEST_HARDWARE, efficiency=flat_efficiency(1.0))


def test_a_gigabyte_over_parameter_servers_takes_042_seconds() -> None:
    step = model_step(make_job(weight_traffic=1e9), FULL_EFFICIENCY)
    assert step.weights == pytest.approx(1 / 3.125 + 1 / 10)
    assert step.media[Resource.ETHERNET] / step.weights == pytest.approx(0.762, abs=5e-4)


def test_allreduce_in_one_server_moves_the_same_bytes_21_times_as_fast() -> None:
    before = model_step(make_job(weight_traffic=1e9), TEST_HARDWARE).weights
    after = model_step(
        make_job(Architecture.ALLREDUCE_LOCAL, weight_traffic=1e9), TEST_HARDWARE
    ).weights
    assert after == pytest.approx(1 / (0.7 * 50))
    assert before / after == pytest.approx(21)


@pytest.mark.parametrize(("weights", "speedup"), [(0.62, 1.55), (0.72, 1.70)])
def test_speedup_of_25_to_100_gigabit_ethernet(weights: float, speedup: float) -> None:
    """The speed-up is 1 / (1 - 0.75 e) with e = share of Ethernet in the step."""
    traffic_seconds = model_step(make_job(weight_traffic=1e9), TEST_HARDWARE).weights
    rest = traffic_seconds * (1 - weights) / weights
    flops = rest * 0.7 * TEST_HARDWARE.flops["fp32"]
    ps_job = make_job(weight_traffic=1e9, flops=flops, memory_bytes=0, input_bytes=0)
    step = model_step(ps_job, TEST_HARDWARE)
    assert step.share("weights") == pytest.approx(weights)
    ethernet = step.media[Resource.ETHERNET] / step.total
    sweep = sweep_rate([ps_job], TEST_HARDWARE, Resource.ETHERNET, [1, 4])
    assert sweep.speedups[0][0] == pytest.approx(1)
    assert sweep.speedups[1][0] == pytest.approx(1 / (1 - 0.75 * ethernet))
    assert sweep.speedups[1][0] == pytest.approx(speedup, abs=0.01)


def test_the_parts_are_amounts_over_seventy_percent_of_the_peaks() -> None:
    step = model_step(make_job(weight_traffic=3e9), TEST_HARDWARE)
    assert step.data == pytest.approx(40e6 / (0.7 * 10e9))
    assert step.compute == pytest.approx(1e12 / (0.7 * 10e12))
    assert step.memory == pytest.approx(50e9 / (0.7 * 1e12))
    assert step.weights == pytest.approx(3e9 / (0.7 * 3.125e9) + 3e9 / (0.7 * 10e9))
    assert step.total == pytest.approx(sum(step.part(p) for p in STEP_PARTS))


@pytest.mark.parametrize(
    ("architecture", "replicas", "expected"),
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
def test_closed_forms_of_the_weight_traffic(
    architecture: Architecture, replicas: int, expected: dict[Resource, float]
) -> None:
    traffic = traffic_by_medium(make_job(architecture, replicas=replicas), 8)
    assert traffic == pytest.approx(expected)


def test_replicas_of_one_server_share_its_pcie_for_their_input() -> None:
    single_seconds = model_step(make_job(), TEST_HARDWARE).data
    assert model_step(make_job(Architecture.ALLREDUCE_LOCAL), TEST_HARDWARE).data == pytest.approx(
        8 * single_seconds
    )
    three_links = dataclasses.replace(TEST_HARDWARE, pcie_links=3)
    assert model_step(make_job(Architecture.ALLREDUCE_LOCAL), three_links).data == pytest.approx(
        3 * single_seconds
    )
    two_servers = dataclasses.replace(make_job(Architecture.ALLREDUCE_CLUSTER), replicas=16)
    assert model_step(two_servers, TEST_HARDWARE).data == pytest.approx(8 * single_seconds)


def test_porting_to_one_server_caps_the_replicas_and_the_throughput() -> None:
    ps_job = make_job(replicas=16, weight_traffic=1e9)
    local = project_job(ps_job, Architecture.ALLREDUCE_LOCAL, TEST_HARDWARE)
    assert local.after.replicas == 8
    assert local.throughput_speedup == pytest.approx(local.replica_speedup / 2)
    assert local.step_after.media == pytest.approx({Resource.NVLINK: 1e9 / 35e9})
    cluster = project_job(make_job(replicas=16), Architecture.ALLREDUCE_CLUSTER, TEST_HARDWARE)
    assert cluster.after.replicas == 16
    assert cluster.throughput_speedup == cluster.replica_speedup


def test_weights_that_do_not_fit_are_an_obstacle_that_partitioning_removes() -> None:
    large = make_job(embedding_bytes=100e9)
    local = project_job(large, Architecture.ALLREDUCE_LOCAL, TEST_HARDWARE)
    assert "100 GB" in local.obstacle and "16 GB" in local.obstacle
    assert project_job(large, Architecture.PEARL, TEST_HARDWARE).obstacle == ""


def test_impossible_questions_are_rejected() -> None:
    with pytest.raises(BadJob, match="1w1g"):
        project_job(make_job(), Architecture.SINGLE, TEST_HARDWARE)
    no_nvlink = dataclasses.replace(TEST_HARDWARE, nvlink=0.0)
    with pytest.raises(BadHardware, match="no nvlink"):
        project_job(make_job(), Architecture.ALLREDUCE_LOCAL, no_nvlink)
    with pytest.raises(BadHardware, match=r"'fp8'.*fp32"):
        model_step(make_job(precision="fp8"), TEST_HARDWARE)
    with pytest.raises(BadJob, match="no jobs"):
        Population((), TEST_HARDWARE)


@given(jobs(), st.sampled_from(LINK_AND_MEMORY_RATES), st.floats(1.0001, 1e3))
def test_faster_hardware_never_slows_a_step(drawn_job, resource, factor) -> None:
    before = model_step(drawn_job, TEST_HARDWARE)
    after = model_step(drawn_job, TEST_HARDWARE.scaled(resource, factor))
    assert after.total <= before.total * (1 + 1e-12)
    assert after.overlapped <= before.overlapped * (1 + 1e-12)


@given(jobs(), st.sampled_from(list(Resource)), st.floats(1.0001, 1e3))
def test_amdahls_law_gives_every_speedup_exactly(drawn_job, resource, factor) -> None:
    share = removable_shares(drawn_job, TEST_HARDWARE)[resource]
    faster = model_step(drawn_job, TEST_HARDWARE.scaled(resource, factor))
    speedup = model_step(drawn_job, TEST_HARDWARE).total / faster.total
    assert speedup == pytest.approx(1 / (1 - share * (1 - 1 / factor)), rel=1e-6)
    assert speedup * (1 - share) <= 1 + 1e-9
    assert speedup <= factor * (1 + 1e-9)


@given(jobs())
def test_perfect_overlap_gains_at_most_a_factor_of_three(drawn_job) -> None:
    modelled = model_step(drawn_job, TEST_HARDWARE)
    assert modelled.total / 3 <= modelled.overlapped * (1 + 1e-12)
    assert modelled.overlapped <= modelled.total * (1 + 1e-12)
    assert math.isclose(sum(modelled.share(p) for p in STEP_PARTS), 1)


@given(jobs())
def test_removable_shares_sum_to_one_at_flat_efficiency(drawn_job) -> None:
    shares = list(removable_shares(drawn_job, TEST_HARDWARE).values())
    assert sum(shares) == pytest.approx(1, abs=1e-6)
    assert shares == sorted(shares, reverse=True)


@given(jobs(Architecture.PS_WORKER))
def test_porting_speeds_published_weight_traffic_up_21_times(drawn_job) -> None:
    assume(drawn_job.weight_traffic and drawn_job.weight_traffic > 1)
    projection = project_job(drawn_job, Architecture.ALLREDUCE_LOCAL, TEST_HARDWARE)
    if projection.after.replicas > 1:
        ratio = projection.step_before.weights / projection.step_after.weights
        assert ratio == pytest.approx(21)
    # A step of weight traffic alone reaches this bound.
    assert projection.replica_speedup <= 21.000001 or projection.after.replicas == 1


@given(st.lists(jobs(), min_size=1, max_size=12))
def test_shares_of_a_population_sum_to_one(drawn_jobs) -> None:
    population = Population(tuple(drawn_jobs), TEST_HARDWARE)
    for by in ("job", "gpu"):
        assert sum(population.mean_shares(by).values()) == pytest.approx(1)
        shares = population.distribution(lambda s: s.share("weights"), by)
        assert shares.cumulative[-1] == pytest.approx(1)
        assert all(a <= b for a, b in zip(shares.values, shares.values[1:], strict=False))


def test_gpu_time_is_gpu_hours_only_if_every_job_has_them() -> None:
    single = make_job(Architecture.SINGLE, gpu_hours=1.0)
    ps_job = make_job(gpu_hours=3.0)
    weighted = Population((single, ps_job), TEST_HARDWARE)
    assert weighted.weights("gpu") == [1.0, 3.0]
    shares = [model_step(j, TEST_HARDWARE).share("weights") for j in (single, ps_job)]
    mean = (shares[0] + 3 * shares[1]) / 4
    assert weighted.mean_share("weights", "gpu") == pytest.approx(mean)
    mixed = Population((make_job(Architecture.SINGLE), ps_job), TEST_HARDWARE)
    assert mixed.weights("gpu")[1] == pytest.approx(8 * model_step(ps_job, TEST_HARDWARE).total)


def test_quantiles_are_the_smallest_value_with_enough_weight() -> None:
    single_jobs = (
        make_job(Architecture.SINGLE, flops=n * 7e12, memory_bytes=0) for n in (1, 2, 3, 4)
    )
    seconds = Population(tuple(single_jobs), TEST_HARDWARE).distribution(lambda s: s.compute)
    assert [seconds.quantile(q) for q in (0, 0.25, 0.26, 0.5, 1)] == pytest.approx([1, 1, 2, 2, 4])


def test_roofline() -> None:
    memory_bound = roofline_point(1e9, 1e9, 2e-3, TEST_HARDWARE)
    assert (memory_bound.intensity, memory_bound.bound) == (1.0, "memory")
    assert memory_bound.roof_seconds == pytest.approx(1e-3)
    assert memory_bound.attained_share == pytest.approx(0.5)
    compute_bound = roofline_point(1e12, 1e9, 0.2, TEST_HARDWARE)
    assert (compute_bound.bound, compute_bound.roof_seconds) == ("compute", pytest.approx(0.1))
    with pytest.raises(BadInput, match="bytes"):
        roofline_point(1.0, 0.0, 1.0, TEST_HARDWARE)


def hardware_with(**changes: object) -> Hardware:
    return dataclasses.replace(TEST_HARDWARE, **changes)  # type: ignore[arg-type]


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
def test_impossible_hardware_is_rejected(changes: dict[str, object]) -> None:
    with pytest.raises(BadHardware):
        hardware_with(**changes)
