"""Jobs for worker processes: what a graph sends to them, and what happens without them."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

triton = pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from nostall.attach.torch_compile.report import GraphReport  # noqa: E402
from nostall.attach.torch_compile.rewrite.compilers import InductorCompiler  # noqa: E402
from nostall.attach.torch_compile.rewrite.kernel_selection import (  # noqa: E402
    KernelFilter,
    RewriteResult,
)
from nostall.attach.torch_compile.selection import precompile  # noqa: E402
from nostall.attach.torch_compile.selection.graph_state import GraphState  # noqa: E402
from nostall.attach.torch_compile.selection.precompile import Precompiler  # noqa: E402
from nostall.attach.torch_compile.workers.codegen_job import (  # noqa: E402
    CodegenResult,
    TargetOnlyDriver,
)
from nostall.attach.torch_compile.workers.tasks import BackgroundTasks  # noqa: E402
from nostall.attach.torch_compile.workers.worker import (  # noqa: E402
    FIRST_INDUCTOR_WORKER,
    JobResult,
)
from tests.unit.attach.torch_compile.regions import HOPPER, no_candidates, normalized_rows, tuning  # noqa: E402

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


class FakeWorker:
    """A worker that returns given results and records the types of its jobs."""

    is_running = True

    def __init__(self, *results: JobResult[Any]) -> None:
        self.results, self.jobs = list(results), list[str]()

    def run(self, job: Any) -> JobResult[Any]:
        self.jobs.append(type(job).__name__)
        return self.results.pop(0)


def with_codegen_worker(
    monkeypatch: pytest.MonkeyPatch, worker: FakeWorker, reason: str = ""
) -> Precompiler:
    """A precompiler with this worker; ``reason``: that of a selection, if there is one."""
    monkeypatch.setattr(precompile, "CODEGEN_WORKER", worker)
    monkeypatch.setattr(precompile, "compile_target", lambda device: HOPPER)
    return Precompiler(BackgroundTasks(), graph_state(reason))


def graph_state(reason: str = "") -> GraphState:
    """The state of a graph; ``reason``: why a version was selected, if one was."""
    state = GraphState(GraphReport())
    if reason:
        state.decide("inductor", reason)
    return state


def test_jobs_are_sent_until_all_kernels_are_compiled_and_failures_are_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    candidates = no_candidates(normalized_rows(8))
    worker = FakeWorker(
        JobResult(value=CodegenResult((candidates,), ("BadFusion: no luck",)), cpu_seconds=2.0),
        JobResult(value=CodegenResult(remaining=3), cpu_seconds=1.0),
        JobResult(value=CodegenResult(failures=("OSError: no room",))),
    )
    precompiler = with_codegen_worker(monkeypatch, worker)
    with caplog.at_level(logging.WARNING, "nostall"):
        assert precompiler.generate_kernels((), tuning(), CUDA) == (candidates,)
        precompiler.wait_for_kernels()
    assert worker.jobs == ["CodegenJob", "CompileStatusJob", "CompileStatusJob"]
    assert [text in caplog.text for text in ("no luck", "no room")] == [True, True]
    assert precompiler._tasks.cpu_seconds == 3.0
    assert not precompiler.worker_died


def test_if_the_worker_fails_the_users_process_generates_the_kernels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    precompiler = with_codegen_worker(monkeypatch, FakeWorker(JobResult("EOFError: gone")))
    with caplog.at_level(logging.WARNING, "nostall"):
        assert precompiler.generate_kernels((), tuning(), CUDA) is None
    assert "EOFError: gone" in caplog.text


def test_a_graph_with_a_selection_sends_no_codegen_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = FakeWorker()
    precompiler = with_codegen_worker(monkeypatch, worker, reason="slower as a whole")
    assert precompiler.generate_kernels((), tuning(), CUDA) == ()
    precompiler.wait_for_kernels()
    assert worker.jobs == []


def test_a_failure_after_the_selection_is_not_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Workers are stopped after the selection."""
    precompiler = with_codegen_worker(monkeypatch, worker := FakeWorker())

    def run(job: Any) -> JobResult[Any]:
        precompiler._state.decide("inductor", "slower as a whole")
        return JobResult("EOFError: gone")

    monkeypatch.setattr(worker, "run", run)
    with caplog.at_level(logging.WARNING, "nostall"):
        assert precompiler.generate_kernels((), tuning(), CUDA) == ()
    assert not caplog.text


def test_if_no_kernel_is_compiled_for_too_long_the_worker_is_stopped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(precompile, "JOB_TIMEOUT_S", 0.0)
    results = [JobResult(value=CodegenResult(remaining=remaining)) for remaining in (3, 2, 2)]
    precompiler = with_codegen_worker(monkeypatch, worker := FakeWorker(*results))

    def stop() -> None:
        worker.is_running = False

    monkeypatch.setattr(worker, "stop", stop, raising=False)
    with caplog.at_level(logging.WARNING, "nostall"):
        precompiler.wait_for_kernels()
    assert precompiler.worker_died and "2 kernels are not compiled" in caplog.text
    assert not worker.is_running and not worker.results


@pytest.mark.parametrize("job", ["generate", "wait"])
def test_a_process_that_died_in_either_job_is_remembered(
    monkeypatch: pytest.MonkeyPatch, job: str
) -> None:
    generated = JobResult(value=CodegenResult(process_died=job == "generate"))
    waited = JobResult(value=CodegenResult(process_died=True))
    precompiler = with_codegen_worker(monkeypatch, FakeWorker(generated, waited))
    precompiler.generate_kernels((), tuning(), CUDA)
    assert precompiler.worker_died == (job == "generate")
    precompiler.wait_for_kernels()
    assert precompiler.worker_died


class NumberedJobs:
    """Replaces a graph's kernel comparisons: their baseline jobs are numbers."""

    graphs = ("forward",)

    def __init__(self, count: int) -> None:
        self.count, self.asked = count, 0

    def jobs(self) -> Iterator[int]:
        self.asked += 1
        yield from range(self.count)


def with_numbered_jobs(monkeypatch: pytest.MonkeyPatch) -> Precompiler:
    """A precompiler that takes its baseline jobs from :class:`NumberedJobs`."""
    precompiler = with_codegen_worker(monkeypatch, FakeWorker())
    monkeypatch.setattr(precompile, "baseline_jobs", lambda comparisons, *_: comparisons.jobs())
    # The time of Inductor's own compilation limits that of the baselines.
    precompiler._report.seconds["baseline"] = 60.0
    return precompiler


def test_two_workers_share_the_baseline_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    precompiler, numbered = with_numbered_jobs(monkeypatch), NumberedJobs(9)
    taken: dict[str, list[int]] = {"first": [], "second": []}
    others_done = threading.Event()

    def worker(name: str) -> Any:
        def run(job: int) -> JobResult[Any]:
            taken[name].append(job)
            # The first worker's first job ends after all other jobs.
            if name == "first":
                others_done.wait(30)
            elif job == 8:
                others_done.set()
            return JobResult(cpu_seconds=1.0)

        return SimpleNamespace(run=run, is_attached=True)

    first, second = worker("first"), worker("second")
    monkeypatch.setattr(precompile, "FIRST_INDUCTOR_WORKER", first)
    threads = [
        threading.Thread(
            target=precompiler.compile_baselines, args=(numbered, InductorCompiler({}), worker)
        )
        for worker in (first, second)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(taken["first"] + taken["second"]) == [*range(9)]
    assert len(taken["first"]) == 1 and numbered.asked == 1
    assert precompiler._tasks.cpu_seconds == 9.0


def test_a_result_is_reported_while_another_thread_makes_baseline_jobs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread that waited for the other one would delay the interpreter's exit."""
    precompiler, go = with_numbered_jobs(monkeypatch), threading.Event()

    class SlowJobs(NumberedJobs):
        def jobs(self) -> Iterator[int]:
            go.wait(30)
            yield 0

    worker = FakeWorker(JobResult("no luck"))
    monkeypatch.setattr(precompile, "FIRST_INDUCTOR_WORKER", worker)
    thread = threading.Thread(
        target=precompiler.compile_baselines, args=(SlowJobs(1), InductorCompiler({}), worker)
    )
    thread.start()
    precompiler._run_job("kernel_compilation", FakeWorker(JobResult()), "a job")  # type: ignore[arg-type]
    assert thread.is_alive() and precompiler._report.seconds["kernel_compilation"] < 5
    go.set()
    thread.join(60)


def test_only_attached_workers_take_baseline_jobs_and_stop_after_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    precompiler, numbered = with_numbered_jobs(monkeypatch), NumberedJobs(3)
    detached: Any = SimpleNamespace(is_attached=False)
    compile_baselines = partial(precompiler.compile_baselines, numbered, InductorCompiler({}))
    compile_baselines(detached)
    assert numbered.asked == 0
    worker: Any = FakeWorker(*[JobResult("no luck")] * 3)
    monkeypatch.setattr(precompile, "FIRST_INDUCTOR_WORKER", worker)
    compile_baselines(worker)
    assert len(worker.jobs) == 1, "the user's process compiles the other baselines"


def recorded_workers(monkeypatch: pytest.MonkeyPatch, compilers: int) -> list[str]:
    """Replaces all workers; returns the list of their starts and attachments.

    ``compilers``: compile processes that may run at once.
    """
    events: list[str] = []

    def worker(name: str) -> Any:
        start, attach = (partial(events.append, f"{name} {what}") for what in ("start", "attach"))
        return SimpleNamespace(start=start, attach_gpu=attach)

    workers = tuple(map(worker, ("first", "second", "third")))
    monkeypatch.setattr(precompile, "INDUCTOR_WORKERS", workers)
    monkeypatch.setattr(precompile, "MAX_COMPILERS", compilers)
    monkeypatch.setattr(precompile, "CODEGEN_WORKER", worker("codegen"))
    monkeypatch.setattr(
        precompile, "compile_target", lambda device: HOPPER if device == CUDA else None
    )
    return events


@pytest.mark.parametrize(
    ("regions", "compilers", "attached"),
    [(0, 8, 1), (5, 8, 1), (6, 8, 2), (9, 8, 3), (99, 8, 3), (99, 5, 2), (99, 3, 1)],
)
def test_more_workers_are_attached_for_many_regions_if_there_are_cpus(
    monkeypatch: pytest.MonkeyPatch, regions: int, compilers: int, attached: int
) -> None:
    events = recorded_workers(monkeypatch, compilers)
    Precompiler(BackgroundTasks(), graph_state()).attach_workers(regions)
    assert events == ["first attach", "second attach", "third attach"][:attached]
    events.clear()
    decided = graph_state("slower as a whole")
    Precompiler(BackgroundTasks(), decided).attach_workers(regions)
    assert events == []


@pytest.mark.parametrize(
    ("device", "regions", "compilers", "started"),
    [
        (CUDA, 7, 6, ["first start", "second start", "codegen start"]),
        (CPU, 0, 6, ["first start"]),
        (CUDA, 99, 5, []),
    ],
)
def test_workers_start_during_the_first_step_only_if_there_are_enough_cpus(
    monkeypatch: pytest.MonkeyPatch,
    device: torch.device,
    regions: int,
    compilers: int,
    started: list[str],
) -> None:
    events = recorded_workers(monkeypatch, compilers)
    Precompiler(BackgroundTasks(), graph_state()).start_workers(device, regions)
    assert events == started


@pytest.mark.parametrize("reason", ["slower as a whole", ""])
def test_only_a_graph_without_a_selection_sends_its_candidate(
    monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    events: list[str] = []
    monkeypatch.setattr(FIRST_INDUCTOR_WORKER, "attach_gpu", lambda: events.append("attach"))
    monkeypatch.setattr(
        FIRST_INDUCTOR_WORKER, "run", lambda job: events.append("run") or JobResult("no luck")
    )
    tasks, state = BackgroundTasks(), graph_state(reason)
    precompiler = Precompiler(tasks, state)
    precompiler.attach_workers(1)
    graph = torch.fx.symbolic_trace(nn.ReLU())
    assert precompiler.compile_candidate(graph, [torch.ones(3)], {}, KernelFilter())
    end = time.monotonic() + 30
    while not tasks.is_ready and time.monotonic() < end:
        time.sleep(0.01)
    assert tasks.is_ready
    assert events == ([] if reason else ["attach", "run"])
    assert state.report.local_only_reason == ("" if reason else "no luck")


def test_what_a_worker_made_of_an_earlier_candidate_is_not_used_for_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    results = iter([JobResult(value=RewriteResult(["kernel"])), JobResult("no luck")])
    monkeypatch.setattr(FIRST_INDUCTOR_WORKER, "run", lambda job: next(results))
    tasks = BackgroundTasks()
    precompiler = Precompiler(tasks, graph_state(""))
    found = []
    for _ in range(2):
        graph = torch.fx.symbolic_trace(nn.ReLU())
        assert precompiler.compile_candidate(graph, [torch.ones(3)], {}, KernelFilter())
        end = time.monotonic() + 30
        while not tasks.is_ready and time.monotonic() < end:
            time.sleep(0.01)
        found.append(precompiler.rewrite_result)
    assert found == [RewriteResult(["kernel"]), None]


EXITS = """
import sys, time
from nostall.attach.torch_compile.selection import dispatcher
from nostall.attach.torch_compile.workers import tasks as tasks_module
from nostall.attach.torch_compile.workers import worker
from nostall.attach.torch_compile.selection.precompile import Precompiler
from nostall.attach.torch_compile.report import GraphReport
from nostall.attach.torch_compile.selection.graph_state import GraphState
worker.PROGRAM = "import time; time.sleep(60)"
tasks = tasks_module.BackgroundTasks()
precompiler = Precompiler(tasks, GraphState(GraphReport()))
worker.CODEGEN_WORKER.attach_gpu()
tasks.add(lambda: [precompiler.wait_for_kernels])
tasks.start()
while not tasks_module._task_lock.locked():
    time.sleep(0.01)
print(time.monotonic(), flush=True)
"""


@pytest.mark.slow
def test_the_interpreters_exit_does_not_wait_for_jobs_of_workers() -> None:
    command = [sys.executable, "-W", "ignore", "-c", EXITS]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    assert time.monotonic() - float(ran.stdout) < 8


def test_there_is_no_target_for_workers_without_gpu_cache_or_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(triton.runtime.driver, "_active", TargetOnlyDriver(HOPPER))
    assert precompile.compile_target(CUDA) == HOPPER
    assert precompile.compile_target(CPU) is None
    monkeypatch.setattr(triton.knobs.compilation, "always_compile", True)
    assert precompile.compile_target(CUDA) is None
    monkeypatch.setattr(triton.knobs.compilation, "always_compile", False)
    monkeypatch.setattr(triton.runtime.driver, "_active", object())
    assert precompile.compile_target(CUDA) is None, "the driver has no target"
