"""Results for traces as users bring them: odd fields cost one event, ranks, hosts, nodes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nostall.core import BadInput, BadTrace
from nostall.workload import load_hardware
from nostall.workload.characterization import characterize_traces, parse_what_if
from nostall.workload.traces.ranks import read_ranks
from tests.unit.workload.trace_events import Event, event, kernel, launch, trace, write

START = 1_700_000_000_000_000
GEMM, ADD, NCCL = "ampere_sgemm_128x64_nn", "vectorized_elementwise_kernel", "ncclDevKernel_AllRed"


def sound_events() -> list[Event]:
    return [
        launch(START, 1), kernel(GEMM, START + 10, 100, launch=1),
        launch(START + 20, 2), kernel(ADD, START + 120, 30, launch=2),
        launch(START + 30, 3), kernel(NCCL, START + 100, 100, launch=3, stream=20),
    ]  # fmt: skip


def result_of(*paths: Path, **options: Any) -> dict[str, Any]:
    return characterize_traces(read_ranks(paths), **options).as_json()


def figures(path: Path) -> tuple[dict[str, float], list[str]]:
    """(microseconds by part, remarks) of a trace with one GPU."""
    result = result_of(path)
    [rank] = result["ranks"]
    parts = {k: round(v * 1e6, 1) for k, v in rank["parts_seconds"].items() if v}
    return parts, result["remarks"]


SOUND = {"compute": 100, "memory": 30, "weights": 60}
ODD_EVENTS: dict[str, Callable[[], bytes]] = {
    "infinite bandwidth": lambda: (
        b'{"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD", "ts": '
        b'%d, "dur": 0, "args": {"device": 0, "stream": 7, "memory bandwidth (GB/s)": inf}}'
        % (START + 200)
    ),
    "windows path": lambda: (
        rb'{"ph": "X", "cat": "python_function", "name": '
        rb'"torch\cuda\__init__.py(219)", "ts": 1, "dur": 1, "args": {}}'
    ),
    "not UTF-8": lambda: (
        b'{"ph": "X", "cat": "python_function", "name": "a\xff\xfeb", "ts": 1, "dur": 1}'
    ),
    "no time": lambda: json.dumps(kernel("volta_sgemm_64x64_nt", 0, 0, launch=9)).encode(),
    "NaN duration": lambda: json.dumps(kernel(ADD, START, float("nan"))).encode(),
    "unterminated": lambda: b'{"ph": "X", "cat": "kernel", "name": "k',
}


@pytest.mark.parametrize("name", ODD_EVENTS)
@pytest.mark.parametrize("position", [0, 3, 6])
def test_an_odd_event_costs_itself_and_is_remarked(
    tmp_path: Path, name: str, position: int
) -> None:
    events = [json.dumps(e).encode() for e in sound_events()]
    events.insert(position, ODD_EVENTS[name]())
    path = tmp_path / "t.json"
    empty, full = b'"traceEvents": []', b'"traceEvents": [%b]' % b", ".join(events)
    path.write_bytes(json.dumps(trace()).encode().replace(empty, full))
    parts, remarks = figures(path)
    assert parts == SOUND
    assert remarks and all("t.json: " in remark for remark in remarks)


def test_overlapping_kernels_count_once_and_are_remarked(tmp_path: Path) -> None:
    events = [kernel(GEMM, 0, 100), kernel(ADD, 50, 100), kernel(ADD, 80, 100)]
    parts, remarks = figures(write(tmp_path / "t.json", trace(*events)))
    assert parts == {"compute": 100, "memory": 80}
    assert "2 kernels of GPU 0 overlap another kernel of the same stream" in remarks[0]
    [rank] = result_of(tmp_path / "t.json")["ranks"]
    chain = next(b for b in rank["fix_first"] if "chains" in b["problem"])
    assert chain["modelled_gain_at_most"] == pytest.approx(180 / (180 - 30))


@pytest.mark.parametrize(("category", "name"), [
    ("xpu_runtime", "urEnqueueKernelLaunch"),
    ("cuda_driver", "cuLaunchKernelEx"),
    ("cuda_runtime", "hipLaunchKernel"),
    ("hip_runtime", "hipExtModuleLaunchKernel"),
])  # fmt: skip
def test_launches_of_every_runtime_explain_idle_time(
    tmp_path: Path, category: str, name: str
) -> None:
    recorded = trace(
        event(category, name, 0, 5, correlation=1),
        kernel("gemm_kernel", 10, 100, launch=1),
        event(category, name, 200, 5, correlation=2, bytes="4096"),
        kernel("elementwise", 300, 30, launch=2),
    )
    parts, remarks = figures(write(tmp_path / "t.json", recorded))
    assert parts == {"compute": 100, "memory": 30, "idle_launch": 190}
    assert remarks == []


def test_a_trace_without_gpu_activities_has_the_time_of_its_host(tmp_path: Path) -> None:
    recorded = trace(
        event("user_annotation", "ProfilerStep#1", 100, 200),
        event("cpu_op", "enumerate(DataLoader)#_Next", 100, 40),
        event("cpu_op", "aten::linear", 150, 60),
        event("cpu_op", "aten::addmm", 160, 40),
        event("cuda_runtime", "cudaLaunchKernel", 170, 10, correlation=1),
        event("cuda_runtime", "cudaDeviceSynchronize", 220, 30),
        {**event("cpu_op", "aten::addmm", 260, 20), "tid": "worker 2"},
        event("cpu_op", "aten::before", 0, 10),
        rank=None,
    )
    result = result_of(write(tmp_path / "t.json", recorded))
    [host] = result["hosts"]
    assert result["ranks"] == []
    parts = {k: round(v * 1e6, 3) for k, v in host["parts_seconds"].items()}
    assert parts == {"data_loader": 40, "sync": 30, "launch": 10, "operators": 70, "other": 50}
    assert host["seconds"] == pytest.approx(200e-6)
    operators = {o["name"]: o for o in host["top_operators"]}
    assert set(operators) == {"aten::linear", "aten::addmm"}
    assert operators["aten::linear"]["self_seconds"] == pytest.approx(20e-6)
    assert operators["aten::addmm"]["calls"] == 2
    assert operators["aten::addmm"]["self_seconds"] == pytest.approx(60e-6)
    assert "only the time of the host is shown" in result["remarks"][0]


def test_a_trace_without_any_work_is_rejected(tmp_path: Path) -> None:
    recorded = trace(event("user_annotation", "ProfilerStep#1", 0, 9))
    with pytest.raises(BadTrace, match="an operator or a runtime call"):
        read_ranks([write(tmp_path / "t.json", recorded)])


def test_questions_about_a_host_are_rejected(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", trace(event("cpu_op", "aten::add", 0, 9)))
    with pytest.raises(BadInput, match=r"ProfilerActivity\.CUDA"):
        result_of(path, questions=[parse_what_if("memory=x2")])


def all_reduce(start: float, duration: float, group: str, ranks: str, **args: Any) -> Event:
    names = {"Process Group Name": group, "Process Group Ranks": ranks}
    return kernel(NCCL, start, duration, stream=20, **names, **args)


def write_ranks(tmp_path: Path, *ranks: list[Event]) -> list[Path]:
    return [
        write(tmp_path / f"rank{n}.json", trace(*events, rank=n, world=len(ranks)))
        for n, events in enumerate(ranks)
    ]


def test_ranks_wait_within_their_process_groups(tmp_path: Path) -> None:
    """Two groups of two ranks, and one group of all."""
    paths = write_ranks(
        tmp_path,
        [all_reduce(0, 30, "1", "[0, 1]"), all_reduce(1000, 50, "0", "[0, 1, 2, 3]")],
        [all_reduce(0, 10, "1", "[0, 1]"), all_reduce(1000, 60, "0", "[0, 1, 2, 3]")],
        [all_reduce(0, 20, "1", "[2, 3]"), all_reduce(1000, 70, "0", "[0, 1, 2, 3]")],
        [all_reduce(0, 90, "1", "[2, 3]"), all_reduce(1000, 80, "0", "[0, 1, 2, 3]")],
    )
    summary = result_of(*paths)["collectives"]
    assert summary["collectives"] == 3
    assert summary["transfer_seconds"] == pytest.approx(80e-6)
    waits = [rank["waiting_seconds"] for rank in summary["ranks"]]
    assert waits == pytest.approx([20e-6, 10e-6, 20e-6, 100e-6])


def test_traces_without_ranks_are_matched_by_their_collectives(tmp_path: Path) -> None:
    paths = [
        write(tmp_path / f"{name}.json", trace(kernel(NCCL, 0, duration), rank=None))
        for name, duration in (("a", 30), ("b", 10))
    ]
    ranks = result_of(*paths)["collectives"]["ranks"]
    assert [rank["waiting_seconds"] for rank in ranks] == pytest.approx([20e-6, 0])


def test_collectives_of_groups_with_one_trace_are_remarked(tmp_path: Path) -> None:
    paths = write_ranks(
        tmp_path,
        [all_reduce(0, 30, "0", "[0, 1]"), all_reduce(100, 9, "5", "[0, 9]")],
        [all_reduce(0, 10, "0", "[0, 1]")],
    )
    result = result_of(*paths)
    assert result["collectives"]["collectives"] == 1
    assert any("1 collective of process groups with only one trace" in r for r in result["remarks"])


@pytest.mark.parametrize("has_sequence", [False, True])
def test_a_lost_collective_costs_itself(tmp_path: Path, has_sequence: bool) -> None:
    def events(wait: float) -> list[Event]:
        return [
            all_reduce(
                100 * n, 10 + wait, "0", "[0, 1]", dtype="Float",
                **{"In msg nelems": 1000 + n, **({"Seq": n} if has_sequence else {})},
            )
            for n in range(20)
        ]  # fmt: skip

    complete, damaged = events(5), events(0)
    del damaged[7]
    result = result_of(*write_ranks(tmp_path, complete, damaged))
    assert result["collectives"]["collectives"] == 19
    waits = [rank["waiting_seconds"] for rank in result["collectives"]["ranks"]]
    assert waits == pytest.approx([19 * 5e-6, 0])
    assert any("1 collective of 20" in remark for remark in result["remarks"])


def test_slow_down_of_a_traced_step_over_several_nodes(tmp_path: Path) -> None:
    """100 MB over four nodes at 70 % of 200 GB/s: 150 MB in the ring."""
    recorded = trace(
        kernel(GEMM, 0, 9000),
        kernel(NCCL, 9000, 1000, dtype="Float", **{"In msg nelems": 25_000_000}),
    )
    path = write(tmp_path / "t.json", recorded)
    hardware = load_hardware("a100-dgx")
    question = parse_what_if("nodes=4")
    [answer] = result_of(path, hardware=hardware, questions=[question])["ranks"][0]["slowdown"]
    exchange = 150e6 / (0.7 * 200e9)
    assert answer["gradient_bytes"] == pytest.approx(100e6)
    assert answer["modelled_slowdown_at_most"] == pytest.approx(1 + exchange / 10e-3)
    last = 25 * 2**20 / 100e6
    assert answer["modelled_slowdown_at_least"] == pytest.approx(1 + last * exchange / 10e-3)
    with pytest.raises(BadInput, match="add --hardware"):
        result_of(path, questions=[question])


def test_bytes_that_are_not_recorded_are_asked_for(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", trace(kernel(GEMM, 0, 9000)))
    hardware = load_hardware("a100-dgx")
    with pytest.raises(BadInput, match="nodes=4,gradients=438MB"):
        result_of(path, hardware=hardware, questions=[parse_what_if("nodes=4")])
    question = parse_what_if("nodes=4,gradients=10MB")
    [answer] = result_of(path, hardware=hardware, questions=[question])["ranks"][0]["slowdown"]
    assert answer["modelled_slowdown_at_least"] == answer["modelled_slowdown_at_most"] > 1


def test_the_largest_factor_of_a_question_has_a_finite_answer(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", trace(kernel(ADD, 0, 10)))
    [rank] = result_of(path, questions=[parse_what_if("memory=x1000000000")])["ranks"]
    assert rank["what_if"][0]["modelled_speedup"] == pytest.approx(1e9)
