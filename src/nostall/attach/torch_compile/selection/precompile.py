"""Compile a graph in worker processes while the user's process keeps running.

Failures here only cost time: what no worker has compiled is compiled when it is needed.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch.fx import GraphModule
from triton import knobs
from triton.runtime import driver

from nostall.attach.torch_compile.measure.kernel_comparison import (
    KernelComparisons,
    fake_placeholders,
    graph_device,
)
from nostall.attach.torch_compile.measure.plan_tuning import (
    PlanCandidates,
    PlanTuning,
    ProductTuning,
)
from nostall.attach.torch_compile.measure.product_comparison import ProductComparisons
from nostall.attach.torch_compile.rewrite.compilers import GraphCompiler, InductorCompiler
from nostall.attach.torch_compile.rewrite.kernel_selection import KernelFilter, RewriteResult
from nostall.attach.torch_compile.selection.graph_state import GraphState
from nostall.attach.torch_compile.store.kernel_store import KernelStore
from nostall.attach.torch_compile.store.rank_sync import RankSync
from nostall.attach.torch_compile.store.records import KernelComparisonRecord
from nostall.attach.torch_compile.workers.codegen_job import (
    CodegenJob,
    CodegenResult,
    CompileStatusJob,
)
from nostall.attach.torch_compile.workers.compile_job import (
    CompileJob,
    ObserveJob,
    describe_inputs,
    read_graph,
)
from nostall.attach.torch_compile.workers.cpu_time import MAX_COMPILERS
from nostall.attach.torch_compile.workers.tasks import BackgroundTasks, is_exiting
from nostall.attach.torch_compile.workers.torch_state import TorchState
from nostall.attach.torch_compile.workers.worker import (
    CODEGEN_WORKER,
    FIRST_INDUCTOR_WORKER,
    INDUCTOR_WORKERS,
    JOB_TIMEOUT_S,
    Job,
    JobResult,
    Worker,
)
from nostall.attach.warning import warn_once
from nostall.fusion.graph.graph import Graph

T = TypeVar("T")

REGIONS_PER_WORKER = 3
"""Regions from which on one more Inductor worker is used: with fewer, it would hardly be ready in
time to compile baselines.  Chosen, not measured."""
TUNED_VERSION_S = 20.0
"""Longest wait for the version of a graph whose block sizes are measured, in seconds, if Inductor
compiled the graph in less."""
CPUS_PER_WORKER = 2
"""Compile processes that each Inductor worker needs; with fewer, workers would slow each other."""


class Precompiler:
    """Has the candidate of one graph, and everything before it, compiled by worker processes."""

    def __init__(self, tasks: BackgroundTasks, state: GraphState) -> None:
        self._tasks, self._state, self._report = tasks, state, state.report
        self._baseline_lock, self._report_lock = threading.Lock(), threading.Lock()
        self._baseline_jobs: Iterator[CompileJob] | None = None
        self._baselines_end = math.inf
        # What became of the last candidate's graphs; None until a worker has compiled them.
        self.rewrite_result: RewriteResult | None = None
        # Whether the caches have the version with measured block sizes, and if not, why.
        self.has_tuned_version = False
        self.tuned_failure = ""
        # Whether a process crashed or hung while it compiled kernels: this process might, too.
        self.worker_died = False

    def start_workers(self, device: torch.device, compared_regions: int) -> None:
        """Start workers during the first step, so that they import their modules early.

        ``compared_regions``: regions whose kernels will be compared with baselines.  Does nothing
        if there are few CPUs, because Inductor needs them for the first step.
        """
        if CPUS_PER_WORKER * len(INDUCTOR_WORKERS) > MAX_COMPILERS:
            return
        for worker in self._inductor_workers(compared_regions):
            worker.start()
        if compile_target(device) is not None:
            CODEGEN_WORKER.start()

    def attach_workers(self, compared_regions: int) -> None:
        """Allow workers to use the GPU, to compile the graph and the baselines of its regions."""
        if not self._state.is_decided:
            for worker in self._inductor_workers(compared_regions):
                worker.attach_gpu()

    def _inductor_workers(self, compared_regions: int) -> list[Worker]:
        count = min(compared_regions // REGIONS_PER_WORKER, MAX_COMPILERS // CPUS_PER_WORKER)
        return [*INDUCTOR_WORKERS[: max(1, count)]]

    def observation(
        self, module: GraphModule, inputs: Sequence[Any], patches: Mapping[str, Any]
    ) -> Callable[[], list[GraphModule]] | None:
        """A function that has a worker find Inductor's graphs of a graph.

        None if no worker can; the report then says why.
        """
        try:
            job = CompileJob(module, describe_inputs(inputs), dict(patches), None)
        except Exception as error:  # must not end the user's compilation
            self._report.local_only_reason = str(error)
            return None
        return partial(self._observe, ObserveJob(job))

    def _observe(self, job: ObserveJob) -> list[GraphModule]:
        if self._is_unneeded:
            return []
        FIRST_INDUCTOR_WORKER.attach_gpu()
        return self._graphs(self._run_job("graph_compilation", FIRST_INDUCTOR_WORKER, job))

    def _graphs(self, result: JobResult[tuple[bytes, ...]]) -> list[GraphModule]:
        if self._is_unneeded:  # the worker may have been stopped, which is no failure
            return []
        if result.value is None:
            self._report.local_only_reason = result.failure
        return [read_graph(data) for data in result.value or ()]

    def generate_kernels(
        self, graphs: Sequence[Graph], tuning: PlanTuning | ProductTuning, device: torch.device
    ) -> Sequence[PlanCandidates] | None:
        """Start the generation of regions' kernels and their compilation in a worker.

        Returns the kernels whose plans are to be measured; None if this process has to do the work.
        """
        if self._is_unneeded:
            return ()
        target = compile_target(device)
        if target is None:
            return None
        job = CodegenJob(tuple(graphs), tuning, target, id(self))
        return self._candidates(self._run_job("codegen", CODEGEN_WORKER, job))

    def wait_for_kernels(self) -> None:
        """Wait until all kernels are compiled, or none was compiled for :data:`JOB_TIMEOUT_S`."""
        fewest, end = math.inf, math.inf
        while not self._is_unneeded and CODEGEN_WORKER.is_running:
            result = self._run_job("kernel_compilation", CODEGEN_WORKER, CompileStatusJob())
            self._candidates(result)
            if result.value is None or not result.value.remaining:
                return
            if result.value.remaining < fewest:
                fewest, end = result.value.remaining, time.perf_counter() + JOB_TIMEOUT_S
            elif time.perf_counter() > end:
                warn_once(f"background preparation failed: {fewest} kernels are not compiled")
                CODEGEN_WORKER.stop()
                self.worker_died = True

    def _candidates(self, result: JobResult[CodegenResult]) -> Sequence[PlanCandidates] | None:
        """The plan candidates of a result; logs its failures.  None if the job failed."""
        value = result.value
        if self._is_unneeded:
            return ()
        for failure in (result.failure,) if value is None else value.failures:
            warn_once(f"background preparation failed: {failure}")
        if value is None:
            return None
        self.worker_died = self.worker_died or value.process_died
        return value.plan_candidates

    @property
    def _is_unneeded(self) -> bool:
        """Whether the version of the graph is selected, or the interpreter exits."""
        return self._state.is_decided or is_exiting()

    def compile_baselines(
        self,
        comparisons: KernelComparisons,
        compiler: GraphCompiler,
        worker: Worker,
        products: ProductComparisons | None = None,
    ) -> None:
        """Compile baselines in a worker, in parallel with the workers of other threads.

        Ends after the first failure, or after about the time that the comparisons may take.
        """
        if not (RankSync.current().is_leader and comparisons.graphs):
            return
        if not isinstance(compiler, InductorCompiler):
            return
        while worker is FIRST_INDUCTOR_WORKER or worker.is_attached:
            job = self._next_baseline_job(comparisons, compiler, products)
            if job is None or self._compile(job, worker).failure:
                return
            with self._baseline_lock:
                if time.perf_counter() > self._baselines_end:
                    return
                # The limit counts from the first result, because a worker needs time to start.
                end = time.perf_counter() + self._report.seconds["baseline"]
                self._baselines_end = min(self._baselines_end, end)

    def _next_baseline_job(
        self,
        comparisons: KernelComparisons,
        compiler: InductorCompiler,
        products: ProductComparisons | None,
    ) -> CompileJob | None:
        """The next job that no worker has taken yet."""
        with self._baseline_lock:
            if self._baseline_jobs is None:
                self._baseline_jobs = baseline_jobs(comparisons, compiler, products)
            return next(self._baseline_jobs, None)

    def compile_candidate(
        self,
        module: GraphModule,
        inputs: Sequence[Any],
        patches: Mapping[str, Any],
        kernel_filter: KernelFilter,
    ) -> bool:
        """Start to compile the candidate in a worker; the background tasks are ready when it is.

        Returns False if no worker can compile it; the report then says why.
        """
        self.rewrite_result = None
        try:
            job = CompileJob(module, describe_inputs(inputs), dict(patches), kernel_filter)
        except Exception as error:  # the user's process compiles it instead
            self._report.local_only_reason = str(error)
            return False

        def work() -> None:
            result = self._compile(job, FIRST_INDUCTOR_WORKER)
            self.rewrite_result = result.value
            if not self._state.is_decided:
                self._report.local_only_reason = result.failure

        self._tasks.add_final(work)
        self._tasks.start()
        return True

    def compile_tuned_version(
        self,
        module: GraphModule,
        inputs: Sequence[Any],
        patches: Mapping[str, Any],
        kernel_filter: KernelFilter,
    ) -> None:
        """Add a task that compiles Inductor's version with its block sizes to be measured.

        The task ends after :data:`TUNED_VERSION_S`, or as long as the baseline took, in any case.
        """
        try:
            job = CompileJob(module, describe_inputs(inputs), dict(patches), kernel_filter)
        except Exception as error:  # optional
            self.tuned_failure = str(error)
            return
        done, second = threading.Event(), INDUCTOR_WORKERS[1]

        def compile_job() -> None:
            # The first worker waits for kernels at this time; a start takes longer than that.
            worker = second if second.is_running else FIRST_INDUCTOR_WORKER
            result = self._compile(job, worker)
            self.tuned_failure, self.has_tuned_version = result.failure, not result.failure
            done.set()

        def work() -> None:
            limit = max(TUNED_VERSION_S, self._report.seconds.get("baseline", 0.0))
            threading.Thread(target=compile_job, name="nostall-blocks", daemon=True).start()
            if not done.wait(limit):
                self.tuned_failure = f"they were not compiled in {limit:.0f} s"

        self._tasks.add_early(work)

    def _compile(self, job: CompileJob, worker: Worker) -> JobResult[RewriteResult]:
        if self._state.is_decided:
            return JobResult("the version of the graph is selected")
        return self._run_job("graph_compilation", worker, job)

    def _run_job(self, activity: str, worker: Worker, job: Job[T]) -> JobResult[T]:
        """Run a job, and report its wall time and its CPU time."""
        began = time.perf_counter()
        result = worker.run(job)
        taken = time.perf_counter() - began
        self._tasks.add_cpu_seconds(result.cpu_seconds)
        with self._report_lock:
            self._report.add_seconds(activity, taken)
        return result


def baseline_jobs(
    comparisons: KernelComparisons,
    compiler: InductorCompiler,
    products: ProductComparisons | None = None,
) -> Iterator[CompileJob]:
    """Jobs that compile the baselines without a stored comparison; the largest ones come first,
    and those of matrix products last."""
    store, patches = KernelStore(), dict(compiler.patches)
    modules = [(key, each.module) for key, each in comparisons.baselines(store).items()]
    modules += [] if products is None else products.baselines.items()
    for key, module in modules:
        if store.load(KernelComparisonRecord, key) is None:
            fakes, device = fake_placeholders(module), graph_device(module)
            inputs = [(tuple(x.shape), x.stride(), x.dtype, device, False) for x in fakes]
            state = replace(TorchState.capture(), grad=False)
            yield CompileJob(module, tuple(inputs), patches, None, state)


def compile_target(device: torch.device) -> Any:
    """Triton's target for a device, if a worker can compile for it into Triton's cache; or None."""
    if device.type != "cuda" or knobs.compilation.always_compile:
        return None
    try:
        return driver.active.get_current_target()
    except Exception:  # any error of the driver occurs again, and is reported, at the compilation
        return None
