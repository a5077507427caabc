"""Whole models on several GPUs: who runs what, what is left out, what a fault costs."""

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

from benchmarks.torch_compile.guarantees import CHECKS, between
from benchmarks.torch_compile.model_process import INTERLEAVED, Setup
from benchmarks.torch_compile.step_timing import Stopwatch, time_interleaved, cpu_seconds

from benchmarks.torch_compile import model_process as process
from benchmarks.torch_compile import models as benchmark
from benchmarks.torch_compile import page as backend_page


def options(out: Path, **given: Any) -> argparse.Namespace:
    base = {"models": "", "parts": "", "device": "cuda", "dtype": "bfloat16", "small": False}
    base |= {"pairs": 2}
    return argparse.Namespace(out=out, each=10.0, measured=1.0, **{**base, **given})


def parts(queue: list[benchmark.Job]) -> list[tuple[str, str]]:
    return [(job.setup.model, job.setup.part) for job in queue]


def test_what_shares_compiled_graphs_shares_a_queue_and_modes_come_last(tmp_path: Path) -> None:
    queues = [parts(q) for q in benchmark.assign_jobs(benchmark.pending_jobs(options(tmp_path), 0.0), 4)]
    every = [job for queue in queues for job in queue]
    assert len(every) == len(set(every)) == 7 * 5
    for queue in queues:
        for at, (model, part) in enumerate(queue):
            if part == "steady":
                assert queue[at - 1] == (model, "nostall")
        late = [part in ("autotuned", "graphs") for _, part in queue]
        assert late == sorted(late)
    assert ("bert-train", "nostall") in {queue[0] for queue in queues}


def test_what_was_promised_was_kept() -> None:
    kept = load(results("torch_compile") / "guarantees_h200.json")
    assert list(kept["checks"]) == list(CHECKS)
    assert {name: one["wrong"] for name, one in kept["checks"].items() if one["wrong"]} == {}


@pytest.mark.parametrize(("place", "wrong"), [("0", []), ("1", ["another kernels on rank 1"])])
def test_ranks_and_runs_are_held_to_each_other(place: str, wrong: list[str]) -> None:
    ranks = [{"digest": "a", "kernels": ["0"]}, {"digest": "a", "kernels": [place]}]
    assert between("ranks", ranks) == wrong
    runs = [{"digests": ["a"], "from store": at > 0} for at in range(3)]
    assert between("bits", runs) == []
    runs[2] |= {"digests": ["b"], "from store": False}
    told = ["other bits in another run", "a later run has chosen again"]
    assert between("bits", runs) == told


def test_what_is_complete_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "dien-train.nostall.json").write_text(json.dumps({"complete": True}))
    (tmp_path / "dien-train.inductor.json").write_text(json.dumps({"starts": {}}))
    jobs = benchmark.pending_jobs(options(tmp_path, models="dien", parts="inductor,nostall"), 0.0)
    assert parts(jobs) == [("dien-train", "inductor")]


def test_an_unknown_part_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", "torch_compile.models", "--out", "out", "--parts", "steady,nothing"]
    assert command(words) == 2
    assert "--parts has nothing; allowed are inductor, nostall, first" in capsys.readouterr().err


def test_an_unknown_benchmark_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["run", "torch_compile.nothing", "--out", "out"]) == 2
    assert "unknown benchmark 'torch_compile.nothing'; allowed are" in capsys.readouterr().err


def test_a_process_that_fails_or_takes_too_long_costs_its_part(
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


def paired(out: Path, until: float = 1e9) -> benchmark.Job:
    return benchmark.Job(Setup("dien-train", "first", str(out)), until, str(out.parent / "caches"))


class Processes:
    """In place of a benchmark's processes: who was started, with which caches."""

    def __init__(self, fails_at: int = 99) -> None:
        self.started: list[str] = []
        self.fails_at = fails_at

    def __call__(self, setup: Setup, caches: Path, until: float) -> None:
        if setup.part == "first":
            assert not caches.exists(), "everybody starts with empty caches"
            caches.mkdir(parents=True)
        else:
            assert caches.name == benchmark.CACHE_SOURCE[setup.state], "what it has left is there"
        self.started.append(setup.state if setup.recorded else f"({setup.state})")
        if len(self.started) == self.fails_at:
            raise benchmark.ProcessFailed("no luck")
        out = Path(setup.out)
        runs = json.loads(out.read_text())["runs"] if out.exists() else []
        if setup.recorded:
            runs.append({"method": setup.state, "first_s": 10.0 + len(runs)})
        out.write_text(json.dumps({"runs": runs}))


def test_first_steps_are_taken_in_turns_and_an_interrupted_part_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "dien-train.first.json"
    processes = Processes(fails_at=4)
    monkeypatch.setattr(benchmark, "run_process", processes)
    with pytest.raises(benchmark.ProcessFailed, match="no luck"):
        benchmark.run(paired(out))
    assert processes.started == ["(nostall)", "inductor", "nostall", "nostall"]
    processes = Processes()
    monkeypatch.setattr(benchmark, "run_process", processes)
    told = benchmark.run(paired(out))
    assert processes.started == ["(nostall)", "nostall", "inductor"]
    assert told == "inductor 10.0 s, nostall 11.0 s, nostall 12.0 s, inductor 13.0 s"


def test_no_first_step_begins_that_would_end_too_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = Processes()
    monkeypatch.setattr(benchmark, "run_process", processes)
    late = time.monotonic() + benchmark.PAIR_SECONDS["first"] - 1
    with pytest.raises(benchmark.ProcessFailed, match="no time"):
        benchmark.run(paired(tmp_path / "x.json", late))
    assert processes.started == []
    jobs = benchmark.pending_jobs(options(tmp_path, parts="first", models="bert"), 0.0)
    assert [len(queue) for queue in benchmark.assign_jobs(jobs, 2)] == [1, 1]


def test_warm_starts_are_taken_in_turns_from_what_both_have_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = benchmark.pending_jobs(options(tmp_path, parts="inductor,nostall,again", models="dien"), 0.0)
    (queue, *others) = benchmark.assign_jobs(jobs, 2)
    assert [part for _, part in parts(queue)] == ["inductor", "nostall", "again"]
    assert others == [[]]
    processes = Processes()
    monkeypatch.setattr(benchmark, "run_process", processes)
    job = replace(queue[-1], until=time.monotonic() + 1e6, caches=str(tmp_path))
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


def test_a_start_that_is_not_recorded_reads_files_before_the_first_one_that_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = benchmark.pending_jobs(options(tmp_path, parts="inductor,steady", models="dien"), 1e9)
    (queue,) = benchmark.assign_jobs(jobs, 1)
    first, *others = benchmark.with_unrecorded_start(0, queue)
    assert benchmark.with_unrecorded_start(1, queue)[0].caches != first.caches, "another GPU has caches of its own"
    assert others == queue and not first.setup.recorded
    assert first.caches not in {job.caches for job in queue}
    assert Path(first.setup.out).parent != tmp_path
    assert first.expected == benchmark.PAIR_SECONDS["first"]
    processes = Processes()
    monkeypatch.setattr(benchmark, "run_process", processes)
    (tmp_path / "x").mkdir()
    setup = replace(first.setup, out=str(tmp_path / "x" / "read.json"))
    for _ in range(2):  # what another run has left is no help
        told = benchmark.run(replace(first, setup=setup, caches=str(tmp_path / "y")))
        assert "not recorded" in told
    assert processes.started == ["(nostall)"] * 2
    steady = benchmark.pending_jobs(options(tmp_path, parts="steady", models="dien"), 1e9)
    assert benchmark.with_unrecorded_start(0, steady) == steady


def test_a_page_says_how_far_pairs_of_first_steps_are_apart() -> None:
    every = [("nostall", 11.0), ("inductor", 10.0), ("inductor", 10.0), ("nostall", 9.0)]
    runs = [{"method": method, "first_s": seconds} for method, seconds in every]
    assert backend_page._paired({}, "first") == []
    ratios = backend_page._paired({"first": {"runs": [*runs, runs[0]]}}, "first")
    assert backend_page._spread(ratios) == ["0.99x", "0.90 to 1.10", "2"]
    begun = {"date": "2026-01-02T03:04:05", "gpu": "G", "torch": "2", "dtype": "bfloat16"}
    page = backend_page.models_page({"model": {"first": {**begun, "runs": runs}}})
    never, nothing = "not measured |  | 0", "not measured | not measured"
    assert f"| model | G |  | 0.99x | 0.90 to 1.10 | 2 | {never} | {never} | {nothing} |" in page
    runs = [{**one, "first_thread_s": 4.0} for one in runs]
    page = backend_page.models_page({"model": {"again": {**begun, "runs": runs}}})
    warm = f"0.99x | 0.90 to 1.10 | 2 | {never} | 1.00x | not measured |"
    assert f"| model |  | G | {never} | {warm}" in page
    assert "Measured from 2026-01-02T03:04 to 2026-01-02T03:04 UTC on G." in page
    third = {"method": "always", "first_s": 12.0, "first_thread_s": 5.0}
    third |= {"first_collector_s": 0.5}
    page = backend_page.models_page(
        {"model": {"again": {**begun, "runs": [*runs[:2], third, runs[2]]}}}
    )
    warm = "1.10x | 1.10 to 1.10 | 1 | 1.20x | 1.20 to 1.20 | 1 | 1.00x, 1.25x | 0.50 s |"
    assert f"{never} | {warm}" in page


def test_a_process_of_a_pair_adds_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "x.json"
    said = {"first_s": 1.5, "first_cpu_s": 2.5}
    monkeypatch.setattr(process, "start_program", lambda model, method, setup: (None, None, dict(said)))
    for state, recorded in (("nostall", False), ("nostall", True), ("inductor", True)):
        setup = {"model": "dien-train", "part": "first", "out": str(out), "state": state}
        setup |= {"device": "none", "small": True, "pairs": 1, "recorded": recorded}
        monkeypatch.setattr(sys, "argv", ["", json.dumps(setup)])
        process.main()
        found = json.loads(out.read_text())
        assert found["complete"] == (state == "inductor")
    assert found["runs"] == [{"method": m, **said} for m in ("nostall", "inductor")]


def test_a_watch_tells_what_the_collector_took_of_everything_there_is() -> None:
    watch = Stopwatch()
    gc.collect(0)
    assert watch.said("first")["first_collector_s"] == 0.0
    began = time.perf_counter()
    gc.collect()
    taken = time.perf_counter() - began
    assert 0.0 < watch.said("first")["first_collector_s"] <= taken
    gc.callbacks.remove(watch._heard)


def test_processor_time_of_children_counts_while_they_run_and_after() -> None:
    before = cpu_seconds()
    burn = "import time\nwhile time.process_time() < 0.4: pass\nprint()\ninput()"
    with subprocess.Popen([sys.executable, "-c", burn], stdin=-1, stdout=-1, text=True) as child:
        assert child.stdout is not None
        child.stdout.readline()
        running = cpu_seconds() - before
        child.communicate("\n")
    assert running >= 0.35
    assert cpu_seconds() - before >= 0.35


def test_times_in_turns_are_compared_with_the_first_and_its_null() -> None:
    about = Setup("", "steady", "", device="cpu", measured_s=0.1)
    runs = {"slow": lambda: time.sleep(2e-3), "quick": lambda: time.sleep(1e-3)}
    found = time_interleaved(runs, about)
    assert found["base"] == "slow"
    assert found["compared"]["quick"]["verdict"] == "faster"
    assert len(found["null_s"]) == len(found["samples_s"]["quick"])
    assert time_interleaved(runs, about, "quick")["compared"]["slow"]["verdict"] == "slower"


def test_a_line_says_what_matters() -> None:
    compared = {"nostall": {"ratio": 1.25, "verdict": "faster"}}
    found = {"looped": {"compared": compared}, "apart": {}, "kernels": {"nostall": {"launches": 7}}}
    assert benchmark.summary_line(found).startswith("looped nostall 1.250 faster; launches {'nostall': 7}")
    graph = {"reason": "faster as a whole", "kernels": 3, "left": 1}
    cold = {"first_s": 2.0, "until_chosen_s": 5.0, "graphs": [graph]}
    told = "cold 2.0 s, chosen after 5.0 s, faster as a whole, 3 in, 1 left"
    assert benchmark.summary_line({"starts": {"cold": cold}}) == told


def test_the_committed_page_says_what_the_committed_results_say() -> None:
    assert backend_page.PAGE.read_text() == backend_page.text(), (
        "run `python -m benchmarks page torch-compile`"
    )


def test_kernels_that_compilers_write_are_counted_apart() -> None:
    rows = [
        ["triton_poi_fused_0", 2, 3e-6],
        ["nvjet_tst", 9, 9e-3],
        ["stitched_sum_block_1", 4, 5e-6],
    ]
    result = {"kernels": {"compile": {"by_name": rows[:2]}, "nostall": {"by_name": rows}}}
    cells = backend_page._generated("model", result)
    assert cells == ["model", "2: 3 us", "6: 8 us", "4: 5 us", "not measured"]


def test_a_program_by_inductor_does_not_pay_for_our_imports_before_nor_ours_less() -> None:
    said = "import sys, benchmarks.torch_compile.model_process; print([*sys.modules])"
    done = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, check=True)
    assert "torch" in done.stdout and "nostall" not in done.stdout


def test_a_part_in_rounds_makes_models_in_other_orders_and_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, turns = tmp_path / "x.json", list[int]()

    def run(setup: Setup, caches: Path, until: float) -> None:
        turns.append(setup.turn)
        if len(turns) == 3:
            raise benchmark.ProcessFailed("no luck")
        before = json.loads(out.read_text())["rounds"] if out.exists() else []
        one = {"looped": {"compared": {"x": {"ratio": 1.0, "verdict": "same"}}}, "apart": {}}
        out.write_text(json.dumps({"rounds": [*before, one]}))

    monkeypatch.setattr(benchmark, "run_process", run)
    job = benchmark.Job(Setup("crnn-infer", "graphs", str(out)), 1e9, str(tmp_path))
    assert job.expected == 60 + 3 * 20
    with pytest.raises(benchmark.ProcessFailed):
        benchmark.run(job)
    assert benchmark.run(job).count("looped x 1.000 same") == 4
    assert turns == [0, 1, 2, 2, 3]
    out.unlink()
    benchmark.run(replace(job, until=time.monotonic() + 20))
    assert turns[5:] == [0], "a round that would end too late is not begun"


def test_rounds_are_told_by_their_mean_and_range() -> None:
    def one(quicker: float) -> dict[str, object]:
        base, ours, *others = INTERLEAVED["graphs"]
        samples = {base: [2e-3, 4e-3], ours: [2e-3 / quicker, 4e-3 / quicker]}
        samples |= dict.fromkeys(others, (4e-3, 8e-3))
        return {"looped": {"samples_s": samples}, "graphs": {ours: [{"state": "inductor"}]}}

    cells = backend_page._rounds("m", {"rounds": [one(0.8), one(1.25)]})
    assert cells[:3] == ["m", "3.00", "1.000 (0.800 to 1.250)"]
    assert cells[3:5] == ["0.500 (0.500 to 0.500)"] * 2
    assert cells[5:] == ["2.000 (1.600 to 2.500)", "2", "inductor"]
