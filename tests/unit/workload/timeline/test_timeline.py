"""Timelines made by hand: each moment is counted once, and every idle gap has its cause."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nostall.core import BadTrace
from nostall.workload.jobs.record import Resource
from nostall.workload.timeline.advice import advise
from nostall.workload.timeline.analysis import PARTS, Timeline, analyse
from nostall.workload.timeline.intervals import Intervals
from nostall.workload.timeline.kernels import kernel_times
from nostall.workload.timeline.strip import strip
from nostall.workload.traces.kinds import Kind, kind_of_name
from nostall.workload.traces.kineto import read_kineto
from tests.unit.workload.job_records import ROUND
from tests.unit.workload.trace_events import Event, event, kernel, launch, trace, write

GEMM, ADD, NCCL = "ampere_sgemm_128x64_nn", "vectorized_elementwise_kernel", "ncclDevKernel_AllRed"


def timeline(tmp_path: Path, *events: Event) -> Timeline:
    [found] = analyse(read_kineto(write(tmp_path / "t.json", trace(*events))))
    return found


def microseconds(found: Timeline) -> dict[str, float]:
    return {k: round(v * 1e6, 3) for k, v in found.parts.items() if v > 1e-12}


spans = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=12)


def covered(pairs: list[tuple[int, int]]) -> set[int]:
    return {t for start, length in pairs for t in range(start, start + length)}


def intervals(pairs: list[tuple[int, int]]) -> Intervals:
    start = np.array([s for s, _ in pairs], dtype=float)
    return Intervals.union(start, start + np.array([n for _, n in pairs], dtype=float))


@given(spans, spans, st.integers(0, 40), st.integers(1, 40))
def test_interval_algebra_is_that_of_sets(a, b, low, width) -> None:
    first, second = intervals(a), intervals(b)
    assert first.length == len(covered(a))
    assert (first | second).length == len(covered(a) | covered(b))
    assert first.overlap(second) == len(covered(a) & covered(b))
    window = set(range(low, low + width))
    assert first.clip(low, low + width).length == len(covered(a) & window)
    assert first.gaps(low, low + width).length == len(window - covered(a))
    assert all(first.start[1:] > first.end[:-1])


def test_each_moment_is_counted_once_and_exposed_communication_is_what_nothing_hides(
    tmp_path: Path,
) -> None:
    found = timeline(
        tmp_path,
        kernel(GEMM, 0, 10),
        kernel(ADD, 5, 10, stream=8),
        kernel(NCCL, 12, 10, stream=9),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 20, 6, stream=10),
        event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 25, 3, stream=10),
    )
    assert microseconds(found) == {
        "compute": 10, "memory": 5, "weights": 7, "data": 4, "copies": 2,
    }  # fmt: skip
    assert found.span == pytest.approx(28e-6)
    assert found.communication == pytest.approx(10e-6)
    assert found.overlap == pytest.approx(0.3)


def test_idle_time_by_cause(tmp_path: Path) -> None:
    found = timeline(
        tmp_path,
        launch(0, 1), kernel(ADD, 10, 10, launch=1),
        launch(5, 2), kernel(ADD, 23, 7, launch=2),      # launched long before: other
        launch(36, 3), kernel(ADD, 40, 10, launch=3),    # launched late: launch
        event("cuda_runtime", "cudaStreamSynchronize", 45, 10),
        launch(56, 4), kernel(ADD, 60, 10, launch=4),    # the host had waited: sync
        event("user_annotation", "enumerate(DataLoader)#_Next", 65, 10),
        launch(76, 5), kernel(ADD, 80, 10, launch=5),    # the host had loaded: input
        kernel(ADD, 95, 5, launch=6),                    # launch not recorded: other
    )  # fmt: skip
    assert microseconds(found) == {
        "memory": 52, "idle_other": 8, "idle_launch": 10, "idle_sync": 10, "idle_input": 10,
    }  # fmt: skip
    assert found.late_gaps == 1
    assert found.backlog_gap == pytest.approx(3e-6)


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 30), st.sampled_from(Kind), st.integers(0, 3)), min_size=1, max_size=25))  # fmt: skip # noqa: E501
def test_the_parts_sum_to_the_span(tmp_path_factory, rows) -> None:
    names = {Kind.COMPUTE: GEMM, Kind.MEMORY: ADD, Kind.COMMUNICATION: NCCL}
    made = [
        kernel(names[k], s, n, stream=q)
        if k in names
        else event("gpu_memcpy", f"Memcpy {'HtoD' if k is Kind.INPUT else 'DtoH'}", s, n, stream=q)
        for s, n, k, q in rows
    ]
    path = write(tmp_path_factory.mktemp("t") / "t.json", trace(*made))
    if not any(n for _, n, _, _ in rows):
        with pytest.raises(BadTrace, match="duration 0"):
            analyse(read_kineto(path))
        return
    [found] = analyse(read_kineto(path))
    assert set(found.parts) == set(PARTS)
    assert sum(found.parts.values()) == pytest.approx(found.span)
    assert all(v >= -1e-15 for v in found.parts.values())
    assert 0 <= found.overlap <= 1 + 1e-9
    for advice in advise(found):
        assert advice.gain > 1
        assert advice.recoverable <= found.span


def test_devices_are_analysed_apart(tmp_path: Path) -> None:
    made = trace(kernel(GEMM, 0, 10, device=0), kernel(ADD, 0, 20, device=1))
    found = analyse(read_kineto(write(tmp_path / "t.json", made)))
    assert [t.device for t in found] == [0, 1]
    assert [t.span for t in found] == pytest.approx([10e-6, 20e-6])


def test_recorded_steps_leave_out_what_came_before(tmp_path: Path) -> None:
    found = timeline(
        tmp_path,
        kernel(ADD, 0, 50),
        event("user_annotation", "ProfilerStep#1", 100, 40),
        event("user_annotation", "ProfilerStep#2", 140, 40),
        kernel(GEMM, 110, 10),
        kernel(GEMM, 180, 20),  # runs on after the host's step has ended
    )
    assert found.steps == 2
    assert found.span == pytest.approx(100e-6)
    assert found.parts["memory"] == 0


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ampere_sgemm_128x64_nn", Kind.COMPUTE),
        ("void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_64x64_tn>()", Kind.COMPUTE),
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NTN", Kind.COMPUTE),
        ("void cudnn::detail::dgrad_engine<float, 512, 6, 5, 3, 3, 3>()", Kind.COMPUTE),
        ("flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128>>", Kind.COMPUTE),
        ("Cijk_Ailk_Bljk_SB_MT64x64x16_SN", Kind.COMPUTE),
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", Kind.COMMUNICATION),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", Kind.COMMUNICATION),
        ("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>()", Kind.COMMUNICATION),
        ("void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add>", Kind.MEMORY),
        ("void fbgemm_gpu::permute_2D_data_kernel<false, int>()", Kind.MEMORY),
        ("void cudnn::bn_bw_1C11_kernel_new<float, float, float2, 128>()", Kind.MEMORY),
        ("void splitKreduce_kernel<float>(cublasSplitKParams<float>)", Kind.MEMORY),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp>()", Kind.MEMORY),
        ("void cudnn::ops::nchwToNhwcKernel<float>()", Kind.MEMORY),
    ],
)  # fmt: skip
def test_kinds_by_name(name: str, kind: Kind) -> None:
    assert kind_of_name(name) is kind


def test_advice_names_the_level_and_bounds_the_gain(tmp_path: Path) -> None:
    found = timeline(
        tmp_path,
        launch(0, 1), kernel(GEMM, 0, 50, launch=1),
        launch(1, 2), kernel(NCCL, 50, 30, launch=2),
        launch(81, 3), kernel(ADD, 85, 4, launch=3),
        launch(82, 4), kernel(ADD, 90, 10, launch=4),
    )  # fmt: skip
    advice = {a.problem: a for a in advise(found)}
    exposed = advice["communication that no computation hides"]
    assert exposed.level.startswith("nostall.parallel")
    assert exposed.gain == pytest.approx(100 / 70)
    late = advice["the GPU waits for launches"]
    assert late.recoverable == pytest.approx((5 - 1) * 1e-6)  # less the gap of one in time
    fused = advice["chains of memory-bound kernels"]
    assert (fused.level.split(":")[0], fused.recoverable) == ("nostall.fusion", pytest.approx(4e-6))


def test_communication_can_hide_only_behind_computation(tmp_path: Path) -> None:
    found = timeline(tmp_path, kernel(GEMM, 0, 10), kernel(NCCL, 10, 90))
    [only] = advise(found)
    assert only.seconds == pytest.approx(90e-6)
    assert only.gain == pytest.approx(100 / 90)


def test_products_with_recorded_shapes_are_placed_under_the_roofline(tmp_path: Path) -> None:
    shapes = {"Input Dims": [[1000, 1000], [1000, 1000]], "Input type": ["float", "float"]}
    found = timeline(
        tmp_path,
        event("cpu_op", "aten::mm", 0, 1, **shapes, **{"External id": 5}),
        kernel(GEMM, 0, 400, **{"External id": 5}),
        kernel(ADD, 400, 100),
    )
    product, add = kernel_times(found, ROUND)
    assert product.placement is not None
    assert product.placement.bound == "compute"
    assert product.placement.reached == pytest.approx(2e9 / 10e12 / 400e-6)
    assert (add.placement, add.placed) == (None, 0)
    [below] = advise(found, [product, add])
    assert below.level.startswith("nostall.sass")
    assert below.gain == pytest.approx(500 / 300)
    assert kernel_times(found)[0].placement is None


def test_a_pass_over_memory_has_its_own_roof_and_is_no_product(tmp_path: Path) -> None:
    shapes = {"Input Dims": [[1000, 1000], [1000, 1000]], "Input type": ["float", "float"]}
    found = timeline(
        tmp_path,
        event("cpu_op", "aten::add", 0, 1, **shapes, **{"External id": 5}),
        kernel(ADD, 0, 40, **{"External id": 5}),
    )
    [add] = kernel_times(found, ROUND)
    assert add.placement is not None and add.placement.bound == "memory"
    assert add.placement.roof_seconds == pytest.approx(12e6 / ROUND.rate(Resource.MEMORY))
    assert not [a for a in advise(found, [add]) if "products" in a.problem]


def test_slices_add_up_to_the_parts(tmp_path: Path) -> None:
    found = timeline(
        tmp_path,
        kernel(GEMM, 0, 33),
        kernel(ADD, 20, 30, stream=8),
        kernel(NCCL, 45, 20, stream=9),
        kernel(ADD, 80, 17),
    )
    shares = strip(found, 7)
    assert shares.shape == (5, 7)
    seconds = shares.sum(axis=1) * found.span / 7
    names = ("compute", "memory", "weights", "data", "copies")
    assert seconds == pytest.approx([found.parts[name] for name in names])
    assert (shares.sum(axis=0) <= 1 + 1e-9).all()
