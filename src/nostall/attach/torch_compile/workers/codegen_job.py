"""Jobs of the code generation worker: explore regions, generate kernels, compile them by Triton.

The worker does not use a GPU.  Threads of the user's process would need Python's lock for this
work: a step that launches a thousand kernels releases the lock a thousand times, and waits up to
5 ms for it each time.  Later processes find the regions in the store and the binaries in Triton's
cache.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
from collections.abc import Mapping
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import triton

from nostall.attach.torch_compile.measure.plan_tuning import (
    PlanCandidates,
    PlanTuning,
    ProductTuning,
)
from nostall.attach.torch_compile.runtime.custom_op import load_op
from nostall.attach.torch_compile.workers.cpu_time import MAX_COMPILERS
from nostall.attach.torch_compile.workers.torch_state import cache_folders, set_cache_folders
from nostall.attach.torch_compile.workers.worker_main import exit_with_parent_worker
from nostall.core.errors import one_line
from nostall.fusion.codegen.runtime.kernel import clear_source_cache
from nostall.fusion.graph.graph import Graph

Folders = Mapping[str, str | None]
"""As :func:`cache_folders` returns them."""
MAX_WAIT_S = 60.0
"""Longest wait of one :class:`CompileStatusJob`, in seconds; the caller then runs another one."""


@dataclass(frozen=True)
class CodegenResult:
    """Results of the worker since the last job."""

    # Kernels whose plans are to be measured.
    plan_candidates: tuple[PlanCandidates, ...] = ()
    # Errors of single regions or kernels.
    failures: tuple[str, ...] = ()
    # Kernels that are still being compiled.
    remaining: int = 0
    # Whether one of the worker's processes died while it worked.
    process_died: bool = False


@dataclass(frozen=True)
class CodegenJob:
    """Generate kernels for regions, and start to compile them."""

    graphs: tuple[Graph, ...]
    # Names the kernels of each graph.
    tuning: PlanTuning | ProductTuning
    # Triton's description of the architecture to compile for.
    target: Any
    # Identifies the Dynamo graph; compilations for other owners are cancelled.
    owner: int = 0
    folders: Folders = field(default_factory=cache_folders)

    def serialize(self) -> bytes:
        # Candidates that the user's process has already are not sent.
        return pickle.dumps(replace(self, tuning=replace(self.tuning, candidates=[])))

    @staticmethod
    def run(data: bytes) -> CodegenResult:
        job: CodegenJob = pickle.loads(data)
        return _POOL.generate(job)


@dataclass(frozen=True)
class CompileStatusJob:
    """Wait for the compilations that were started, :data:`MAX_WAIT_S` at most."""

    def serialize(self) -> bytes:
        return b""

    @staticmethod
    def run(data: bytes) -> CodegenResult:
        return _POOL.wait_for_kernels()


class _CompilePool:
    """Processes that the worker forks, so that they share the modules it has imported."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None
        self._compilations: list[Future[str]] = []
        self._owner = 0

    def generate(self, job: CodegenJob) -> CodegenResult:
        """Generate the kernels of regions in parallel, and start to compile each new kernel."""
        if job.owner != self._owner:
            for compilation in self._compilations:
                compilation.cancel()
            self._owner, self._compilations = job.owner, []
        # A pool that existed may have been broken before, so a new one gets a second try.
        for is_new in (self._pool is None, True):
            try:
                return self._generate(job, self._executor())
            except BrokenProcessPool:
                self._pool, self._compilations = None, []
                if is_new:
                    break
        return CodegenResult(process_died=True)

    def _generate(self, job: CodegenJob, pool: ProcessPoolExecutor) -> CodegenResult:
        candidates, failures, known = list[PlanCandidates](), list[str](), set[str]()
        tuning, folders = job.tuning, job.folders
        futures = [pool.submit(_prepare, graph, tuning, folders) for graph in job.graphs]
        for future in futures:
            kernels, region_candidates, failure = future.result()
            if failure:  # the other regions are still generated
                failures.append(failure)
            candidates += region_candidates
            new = [kernel for kernel in dict.fromkeys(kernels) if kernel not in known]
            known.update(new)
            self._compilations += [
                pool.submit(_compile, kernel, job.target, folders) for kernel in new
            ]
        return CodegenResult(tuple(candidates), tuple(failures))

    def wait_for_kernels(self) -> CodegenResult:
        """Wait for the compilations; returns the failures since the last call."""
        done, remaining = wait(self._compilations, MAX_WAIT_S)
        self._compilations = [future for future in self._compilations if future in remaining]
        try:
            failures = dict.fromkeys(failure for future in done if (failure := future.result()))
        except BrokenProcessPool:
            self._pool, self._compilations = None, []
            return CodegenResult(process_died=True)
        return CodegenResult((), tuple(failures), len(self._compilations))

    def _executor(self) -> ProcessPoolExecutor:
        if self._pool is None:
            context = multiprocessing.get_context("fork")
            self._pool = ProcessPoolExecutor(
                MAX_COMPILERS, context, exit_with_parent_worker, (os.getpid(),)
            )
        return self._pool


_POOL = _CompilePool()


def _use_folders(folders: Folders) -> None:
    """Set the cache folders; after a change drop what is in memory, so that it is written again."""
    if set_cache_folders(folders):
        clear_source_cache()
        load_op.cache_clear()


def _prepare(
    graph: Graph, tuning: PlanTuning | ProductTuning, folders: Folders
) -> tuple[list[str], list[PlanCandidates], str]:
    """Generate a region's kernels; returns their names, plan candidates and the error, if any."""
    kernels = list[str]()
    try:
        _use_folders(folders)
        kernels += tuning.prepare(graph)
    except Exception as error:  # as text: one that cannot be unpickled would break the pool
        return kernels, tuning.candidates, one_line(error)
    return kernels, tuning.candidates, ""


def _compile(kernel: str, target: Any, folders: Folders) -> str:
    """Compile a kernel; returns the error, if any."""
    try:
        _use_folders(folders)
        # Compilers only need the target, so no GPU is used.
        triton.runtime.driver.set_active(TargetOnlyDriver(target))
        load_op(kernel).compile(torch.device("cuda"))
    except Exception as error:  # as text, as in :func:`_prepare`
        return one_line(error)
    return ""


class TargetOnlyDriver:
    """The part of a Triton driver that compilation needs; it has no GPU."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0

    @property
    def launcher_cls(self) -> Any:
        """Triton's launcher, for which some versions compile C code for each signature."""
        from triton.backends.nvidia.driver import CudaLauncher

        return CudaLauncher
