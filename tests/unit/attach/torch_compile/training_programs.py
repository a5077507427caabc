"""Training with workers, comparisons of kernels and tuned plans, in Triton's interpreter."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from typing import Any

from nostall.attach.torch_compile.measure import plan_tuning
from nostall.attach.torch_compile.selection import precompile
from nostall.attach.torch_compile.store.kernel_store import KernelStore
from nostall.attach.torch_compile.workers.codegen_job import CodegenResult
from nostall.attach.torch_compile.workers.worker import (
    CODEGEN_WORKER,
    FIRST_INDUCTOR_WORKER,
    INDUCTOR_WORKERS,
    JobResult,
)
from tests.unit.attach.torch_compile.small_models import (
    SecondIsFastest,
    SlowAtCalls,
    train,
)

COMPARE_KERNELS = {"nostall.tuned_plans": 0, "nostall.seconds": 60.0}


def with_workers() -> dict[str, Any]:
    """Training with workers, without them, and with one that dies, each twice with its own caches.

    Also returns the jobs and failures of the workers, and whether a worker still runs at the end.
    """
    options = {**COMPARE_KERNELS, "nostall.fallback": "inductor", "pattern_matcher": False}
    folders = [os.environ["NOSTALL_HOME"], os.environ["TORCHINDUCTOR_CACHE_DIR"]]
    result: dict[str, Any] = {}
    run_codegen = CODEGEN_WORKER.run
    target, limits = (
        precompile.compile_target,
        (
            precompile.REGIONS_PER_WORKER,
            precompile.MAX_COMPILERS,
        ),
    )
    precompile.compile_target = lambda device: "nothing is compiled in an interpreter"
    precompile.REGIONS_PER_WORKER, precompile.MAX_COMPILERS = 1, 8
    jobs: list[str] = []
    failures = {"first": list[str](), "others": list[str]()}
    run_first, *run_others = (worker.run for worker in INDUCTOR_WORKERS)

    def run_recorded(name: str, run: Callable[[Any], Any], job: Any) -> Any:
        answer = run(job)
        failures[name].append(answer.failure)
        return answer

    def run_codegen_recorded(job: Any) -> Any:
        answer = run_codegen(job)
        jobs.append(f"{type(job).__name__}: {answer.failure}")
        return answer

    def fail(job: Any) -> Any:
        return JobResult("no luck")

    def die(job: Any) -> Any:
        return JobResult(value=CodegenResult(process_died=True))

    CODEGEN_WORKER.run = die  # type: ignore[method-assign]
    for worker, run in zip(INDUCTOR_WORKERS[1:], run_others, strict=True):
        worker.run = partial(run_recorded, "others", run)  # type: ignore[method-assign]
    result["died"] = train("wide", SlowAtCalls(), options)
    for name, first, codegen in (
        ("workers", partial(run_recorded, "first", run_first), run_codegen_recorded),
        ("alone", fail, fail),
    ):
        FIRST_INDUCTOR_WORKER.run = first  # type: ignore[method-assign]
        CODEGEN_WORKER.run = codegen  # type: ignore[method-assign]
        os.environ["NOSTALL_HOME"], os.environ["TORCHINDUCTOR_CACHE_DIR"] = (
            f"{folder}-{name}" for folder in folders
        )
        for run_name in (name, f"{name}, again"):
            result[run_name] = train("wide", SlowAtCalls(), options)
        if name == "workers":
            # As after a run that ended before the selection: only PyTorch has the code.
            os.environ["NOSTALL_HOME"] = f"{folders[0]}-{name}-new"
            result["new store"] = train("wide", SlowAtCalls(), options)
        precompile.REGIONS_PER_WORKER, precompile.MAX_COMPILERS = limits[0], 1
    CODEGEN_WORKER.run = run_codegen  # type: ignore[method-assign]
    for worker, run in zip(INDUCTOR_WORKERS, (run_first, *run_others), strict=True):
        worker.run = run  # type: ignore[method-assign]
    precompile.compile_target = target
    precompile.REGIONS_PER_WORKER, precompile.MAX_COMPILERS = limits
    os.environ["NOSTALL_HOME"], os.environ["TORCHINDUCTOR_CACHE_DIR"] = folders
    running = any(worker.is_running for worker in (*INDUCTOR_WORKERS, CODEGEN_WORKER))
    return {**result, "running": running, "jobs": jobs, "failures": failures}


def with_kernel_comparisons() -> dict[str, Any]:
    """Training where all kernels are faster than Inductor's, all but one, none, or all are slower.

    Each case has its own store and runs twice.
    """
    result = {}
    home = os.environ["NOSTALL_HOME"]
    clocks = {
        "all": SlowAtCalls(),
        "some": SlowAtCalls(2),
        "equal": SlowAtCalls(*range(99)),
        "none": SlowAtCalls(*range(99), slow_s=2.0),
    }
    for name, clock in clocks.items():
        os.environ["NOSTALL_HOME"] = f"{home}-{name}"
        for run in ("first", "again"):
            result[f"{name}, {run}"] = train("wide", clock, COMPARE_KERNELS)
    os.environ["NOSTALL_HOME"] = home
    return result


def with_tuning() -> dict[str, Any]:
    """Training with tuned plans, once more with the stored selection, and with short kernels."""
    clock = SecondIsFastest()
    # The tensors of these tests are small.
    shortest, plan_tuning.MIN_TUNED_S = plan_tuning.MIN_TUNED_S, 0.0
    result: dict[str, Any] = {run: train("norms", clock, {}) for run in ("first", "again")}
    plan_tuning.MIN_TUNED_S = shortest
    tunings = [*(KernelStore().folder / "races").glob("*.json")]
    records = [json.loads(path.read_text()) for path in tunings]
    result["fastest plans"] = [record["plans"][record["winner"]] for record in records]
    result["winners"] = [record["winner"] for record in records]
    home = os.environ["NOSTALL_HOME"]
    os.environ["NOSTALL_HOME"] = f"{home}-short"
    result["short"] = train("norms", SecondIsFastest(), {})
    result["short tunings"] = len([*(KernelStore().folder / "races").glob("*.json")])
    os.environ["NOSTALL_HOME"] = home
    return result
