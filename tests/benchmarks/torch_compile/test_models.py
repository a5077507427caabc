"""Tests of the whole-model benchmark: scheduling, resuming, failures, and its results page."""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks.__main__ import main as command
from benchmarks.harness.result_file import load, results

pytest.importorskip("triton")
pytest.importorskip("torch")

from benchmarks.torch_compile.guarantees import CHECKS, compare_processes
from benchmarks.torch_compile.model_setup import INTERLEAVED, Setup
from benchmarks.torch_compile.step_timing import Stopwatch, cpu_seconds, time_interleaved

from benchmarks.torch_compile import model_process
from benchmarks.torch_compile import models as benchmark
from benchmarks.torch_compile import page as results_page


def make_options(out: Path, **changes: Any) -> argparse.Namespace:
    values = {"models": "", "parts": "", "device": "cuda", "dtype": "bfloat16", "small": False}
    values |= {"pairs": 2, "zoo": "parts"}
    return argparse.Namespace(out=out, each=10.0, measured=1.0, **{**values, **changes})


def model_parts(queue: list[benchmark.Job]) -> list[tuple[str, str]]:
    return [(job.setup.model, job.setup.part) for job in queue]


def test_jobs_with_shared_caches_share_a_queue_and_modes_come_last(tmp_path: Path) -> None:
    queues = [
        model_parts(q)
        for q in benchmark.assign_jobs(benchmark.pending_jobs(make_options(tmp_path), 0.0), 4)
    ]
    jobs = [job for queue in queues for job in queue]
    assert len(jobs) == len(set(jobs)) == 7 * 5
    for queue in queues:
        for at, (model, part) in enumerate(queue):
            if part == "steady":
                assert queue[at - 1] == (model, "nostall")
        is_mode = [part in ("autotuned", "graphs") for _, part in queue]
        assert is_mode == sorted(is_mode)
    assert ("bert-train", "nostall") in {queue[0] for queue in queues}


def test_committed_checks_of_guarantees_have_no_failures() -> None:
    result = load(results("torch_compile") / "guarantees_h200.json")
    assert list(result["checks"]) == list(CHECKS)
    assert {
        name: check["wrong"] for name, check in result["checks"].items() if check["wrong"]
    } == {}


@pytest.mark.parametrize(
    ("second_kernel", "wrong"), [("0", []), ("1", ["another kernels on rank 1"])]
)
def test_ranks_and_repeated_runs_are_compared(second_kernel: str, wrong: list[str]) -> None:
    ranks = [{"digest": "a", "kernels": ["0"]}, {"digest": "a", "kernels": [second_kernel]}]
    assert compare_processes("ranks", ranks) == wrong
    runs = [{"digests": ["a"], "from store": at > 0} for at in range(3)]
    assert compare_processes("bits", runs) == []
    runs[2] |= {"digests": ["b"], "from store": False}
    expected = ["different bits in another run", "a later run has chosen again"]
    assert compare_processes("bits", runs) == expected


def test_complete_parts_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "dien-train.nostall.json").write_text(json.dumps({"complete": True}))
    (tmp_path / "dien-train.inductor.json").write_text(json.dumps({"starts": {}}))
    jobs = benchmark.pending_jobs(
        make_options(tmp_path, models="dien", parts="inductor,nostall"), 0.0
    )
    assert model_parts(jobs) == [("dien-train", "inductor")]


def test_an_unknown_part_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", "torch_compile.models", "--out", "out", "--parts", "steady,nothing"]
    assert command(words) == 2
    assert "--parts has nothing; allowed are inductor, nostall, first" in capsys.readouterr().err


def test_an_unknown_benchmark_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["run", "torch_compile.nothing", "--out", "out"]) == 2
    assert "unknown benchmark 'torch_compile.nothing'; allowed are" in capsys.readouterr().err


@pytest.mark.slow
def test_a_failed_or_slow_process_raises_process_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    setup = Setup("none", "steady", str(tmp_path / "x.json"), device="cpu", small=True)
    with pytest.raises(benchmark.ProcessFailed, match="KeyError: 'none'"):
        benchmark.run_process(setup, tmp_path, time.monotonic() + 60)
    long = replace(setup, model="crnn-infer")
    with pytest.raises(benchmark.ProcessFailed, match="more than 1 s"):
        benchmark.run_process(long, tmp_path, time.monotonic() + 1.2)
    with pytest.raises(benchmark.ProcessFailed, match="no time"):
        benchmark.run_process(setup, tmp_path, time.monotonic())


def paired_job(out: Path, until: float = 1e9) -> benchmark.Job:
    return benchmark.Job(Setup("dien-train", "first", str(out)), until, str(out.parent / "caches"))


class FakeProcesses:
    """Fake of ``run_process`` that records started methods and checks their caches."""

    def __init__(self, fails_at: int = 99) -> None:
        self.started: list[str] = []
        self.fails_at = fails_at

    def __call__(self, setup: Setup, caches: Path, until: float) -> None:
        if setup.part == "first":
            assert not caches.exists(), "cold starts have empty caches"
            caches.mkdir(parents=True)
        else:
            assert caches.name == benchmark.CACHE_SOURCE[setup.state], (
                "warm starts have the caches of their method"
            )
        self.started.append(setup.state if setup.recorded else f"({setup.state})")
        if len(self.started) == self.fails_at:
            raise benchmark.ProcessFailed("no luck")
        out = Path(setup.out)
        runs = json.loads(out.read_text())["runs"] if out.exists() else []
        if setup.recorded:
            runs.append({"method": setup.state, "first_s": 10.0 + len(runs)})
        out.write_text(json.dumps({"runs": runs}))


def test_paired_first_steps_alternate_and_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "dien-train.first.json"
    processes = FakeProcesses(fails_at=4)
    monkeypatch.setattr(benchmark, "run_process", processes)
    with pytest.raises(benchmark.ProcessFailed, match="no luck"):
        benchmark.run(paired_job(out))
    assert processes.started == ["(nostall)", "inductor", "nostall", "nostall"]
    processes = FakeProcesses()
    monkeypatch.setattr(benchmark, "run_process", processes)
    message = benchmark.run(paired_job(out))
    assert processes.started == ["(nostall)", "nostall", "inductor"]
    assert message == "inductor 10.0 s, nostall 11.0 s, nostall 12.0 s, inductor 13.0 s"


def test_first_steps_start_only_if_time_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = FakeProcesses()
    monkeypatch.setattr(benchmark, "run_process", processes)
    late = time.monotonic() + benchmark.PAIR_SECONDS["first"] - 1
    with pytest.raises(benchmark.ProcessFailed, match="no time"):
        benchmark.run(paired_job(tmp_path / "x.json", late))
    assert processes.started == []
    jobs = benchmark.pending_jobs(make_options(tmp_path, parts="first", models="bert"), 0.0)
    assert [len(queue) for queue in benchmark.assign_jobs(jobs, 2)] == [1, 1]


def test_warm_paired_starts_use_the_caches_of_both_methods(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = benchmark.pending_jobs(
        make_options(tmp_path, parts="inductor,nostall,again", models="dien"), 0.0
    )
    (queue, *others) = benchmark.assign_jobs(jobs, 2)
    assert [part for _, part in model_parts(queue)] == ["inductor", "nostall", "again"]
    assert others == [[]]
    processes = FakeProcesses()
    monkeypatch.setattr(benchmark, "run_process", processes)
    job = replace(queue[-1], deadline=time.monotonic() + 1e6, caches=str(tmp_path))
    with pytest.raises(benchmark.ProcessFailed, match="add nostall to --parts"):
        benchmark.run(job)
    for name in ("inductor", "nostall"):
        (tmp_path / name).mkdir()
    benchmark.run(job)
    assert processes.started == [
        "(always)",
        *("inductor", "nostall", "always"),
        *("nostall", "always", "inductor"),
    ]


def test_a_queue_begins_with_an_unrecorded_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = benchmark.pending_jobs(
        make_options(tmp_path, parts="inductor,steady", models="dien"), 1e9
    )
    (queue,) = benchmark.assign_jobs(jobs, 1)
    first, *others = benchmark.with_unrecorded_start(0, queue)
    assert benchmark.with_unrecorded_start(1, queue)[0].caches != first.caches, (
        "another GPU has caches of its own"
    )
    assert others == queue and not first.setup.recorded
    assert first.caches not in {job.caches for job in queue}
    assert Path(first.setup.out).parent != tmp_path
    assert first.expected_seconds == benchmark.PAIR_SECONDS["first"]
    processes = FakeProcesses()
    monkeypatch.setattr(benchmark, "run_process", processes)
    (tmp_path / "x").mkdir()
    setup = replace(first.setup, out=str(tmp_path / "x" / "read.json"))
    for _ in range(2):  # caches of an earlier run are removed
        message = benchmark.run(replace(first, setup=setup, caches=str(tmp_path / "y")))
        assert "not recorded" in message
    assert processes.started == ["(nostall)"] * 2
    steady = benchmark.pending_jobs(make_options(tmp_path, parts="steady", models="dien"), 1e9)
    assert benchmark.with_unrecorded_start(0, steady) == steady


def test_the_page_has_ratios_of_paired_first_steps() -> None:
    steps = [("nostall", 11.0), ("inductor", 10.0), ("inductor", 10.0), ("nostall", 9.0)]
    runs = [{"method": method, "first_s": seconds} for method, seconds in steps]
    assert results_page._paired({}, "first") == []
    ratios = results_page._paired({"first": {"runs": [*runs, runs[0]]}}, "first")
    assert results_page._spread(ratios) == ["0.99x", "0.90 to 1.10", "2"]
    metadata = {"date": "2026-01-02T03:04:05", "gpu": "G", "torch": "2", "dtype": "bfloat16"}
    page = results_page.models_page({"model": {"first": {**metadata, "runs": runs}}})
    no_pairs, no_times = "not measured |  | 0", "not measured | not measured"
    assert (
        f"| model | G |  | 0.99x | 0.90 to 1.10 | 2 | {no_pairs} | {no_pairs} | {no_times} |"
        in page
    )
    runs = [{**run, "first_thread_s": 4.0} for run in runs]
    page = results_page.models_page({"model": {"again": {**metadata, "runs": runs}}})
    warm = f"0.99x | 0.90 to 1.10 | 2 | {no_pairs} | 1.00x | not measured |"
    assert f"| model |  | G | {no_pairs} | {warm}" in page
    assert "Measured from 2026-01-02T03:04 to 2026-01-02T03:04 UTC on G." in page
    third_run = {"method": "always", "first_s": 12.0, "first_thread_s": 5.0}
    third_run |= {"first_collector_s": 0.5}
    page = results_page.models_page(
        {"model": {"again": {**metadata, "runs": [*runs[:2], third_run, runs[2]]}}}
    )
    warm = "1.10x | 1.10 to 1.10 | 1 | 1.20x | 1.20 to 1.20 | 1 | 1.00x, 1.25x | 0.50 s |"
    assert f"{no_pairs} | {warm}" in page


def test_a_paired_process_appends_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "x.json"
    times = {"first_s": 1.5, "first_cpu_s": 2.5}
    monkeypatch.setattr(
        model_process, "start_program", lambda model, method, setup: (None, None, dict(times))
    )
    for state, recorded in (("nostall", False), ("nostall", True), ("inductor", True)):
        setup = {"model": "dien-train", "part": "first", "out": str(out), "state": state}
        setup |= {"device": "none", "small": True, "pairs": 1, "recorded": recorded}
        monkeypatch.setattr(sys, "argv", ["", json.dumps(setup)])
        model_process.main()
        result = json.loads(out.read_text())
        assert result["complete"] == (state == "inductor")
    assert result["runs"] == [{"method": m, **times} for m in ("nostall", "inductor")]


def test_a_stopwatch_counts_full_garbage_collections() -> None:
    stopwatch = Stopwatch()
    gc.collect(0)
    assert stopwatch.elapsed("first")["first_collector_s"] == 0.0
    start = time.perf_counter()
    gc.collect()
    seconds = time.perf_counter() - start
    assert 0.0 < stopwatch.elapsed("first")["first_collector_s"] <= seconds
    gc.callbacks.remove(stopwatch._on_collection)


def test_cpu_seconds_include_running_and_ended_children() -> None:
    before = cpu_seconds()
    burn = "import time\nwhile time.process_time() < 0.4: pass\nprint()\ninput()"
    with subprocess.Popen([sys.executable, "-c", burn], stdin=-1, stdout=-1, text=True) as child:
        assert child.stdout is not None
        child.stdout.readline()
        running = cpu_seconds() - before
        child.communicate("\n")
    assert running >= 0.35
    assert cpu_seconds() - before >= 0.35


def test_interleaved_times_are_compared_with_the_base_and_its_null(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    setup = Setup("", "steady", "", device="cpu", measured_s=0.1)

    def step(seconds: float) -> None:
        now[0] += seconds

    runs = {"slow": lambda: step(2e-3), "quick": lambda: step(1e-3)}
    result = time_interleaved(runs, setup)
    assert result["base"] == "slow"
    assert result["compared"]["quick"]["verdict"] == "faster"
    assert len(result["null_s"]) == len(result["samples_s"]["quick"])
    assert time_interleaved(runs, setup, "quick")["compared"]["slow"]["verdict"] == "slower"


def test_the_summary_line_has_ratios_launches_and_reasons() -> None:
    compared = {"nostall": {"ratio": 1.25, "verdict": "faster"}}
    result = {
        "looped": {"compared": compared},
        "apart": {},
        "kernels": {"nostall": {"launches": 7}},
    }
    assert benchmark.summary_line(result).startswith(
        "looped nostall 1.250 faster; launches {'nostall': 7}"
    )
    graph = {"reason": "faster as a whole", "kernels": 3, "left": 1}
    cold = {"first_s": 2.0, "until_chosen_s": 5.0, "graphs": [graph]}
    expected = "cold 2.0 s, chosen after 5.0 s, faster as a whole, 3 in, 1 left"
    assert benchmark.summary_line({"starts": {"cold": cold}}) == expected


def test_the_committed_page_is_up_to_date() -> None:
    assert results_page.PAGE.read_text() == results_page.text(), (
        "run `python -m benchmarks page torch-compile`"
    )


def test_generated_kernels_are_counted_separately() -> None:
    rows = [
        ["triton_poi_fused_0", 2, 3e-6],
        ["nvjet_tst", 9, 9e-3],
        ["stitched_sum_block_1", 4, 5e-6],
    ]
    result = {"kernels": {"compile": {"by_name": rows[:2]}, "nostall": {"by_name": rows}}}
    cells = results_page._generated("model", result)
    assert cells == ["model", "2: 3 us", "6: 8 us", "4: 5 us", "not measured"]


def test_importing_model_process_does_not_import_nostall() -> None:
    code = "import sys, benchmarks.torch_compile.model_process; print([*sys.modules])"
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert "torch" in completed.stdout and "nostall" not in completed.stdout


def test_processes_of_a_part_change_the_order_and_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, turns = tmp_path / "x.json", list[int]()

    def run(setup: Setup, caches: Path, until: float) -> None:
        turns.append(setup.turn)
        if len(turns) == 3:
            raise benchmark.ProcessFailed("no luck")
        earlier = json.loads(out.read_text())["rounds"] if out.exists() else []
        round_result = {
            "looped": {"compared": {"x": {"ratio": 1.0, "verdict": "same"}}},
            "apart": {},
        }
        out.write_text(json.dumps({"rounds": [*earlier, round_result]}))

    monkeypatch.setattr(benchmark, "run_process", run)
    job = benchmark.Job(Setup("crnn-infer", "graphs", str(out)), 1e9, str(tmp_path))
    assert job.expected_seconds == 60 + 3 * 20
    with pytest.raises(benchmark.ProcessFailed):
        benchmark.run(job)
    assert benchmark.run(job).count("looped x 1.000 same") == 4
    assert turns == [0, 1, 2, 2, 3]
    out.unlink()
    benchmark.run(replace(job, deadline=time.monotonic() + 20))
    assert turns[5:] == [0], "a process that would end too late is not started"


def test_the_page_has_mean_and_range_over_processes() -> None:
    def make_round(speedup: float) -> dict[str, object]:
        base, ours, *other_methods = INTERLEAVED["graphs"]
        samples = {base: [2e-3, 4e-3], ours: [2e-3 / speedup, 4e-3 / speedup]}
        samples |= dict.fromkeys(other_methods, (4e-3, 8e-3))
        return {"looped": {"samples_s": samples}, "graphs": {ours: [{"state": "inductor"}]}}

    cells = results_page._rounds("m", {"rounds": [make_round(0.8), make_round(1.25)]})
    assert cells[:3] == ["m", "3.00", "1.000 (0.800 to 1.250)"]
    assert cells[3:5] == ["0.500 (0.500 to 0.500)"] * 2
    assert cells[5:] == ["2.000 (1.600 to 2.500)", "2", "inductor"]
