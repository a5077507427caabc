"""Kernels that a worker explores, generates and compiles without a GPU."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from triton.backends.nvidia.compiler import get_ptxas  # noqa: E402

from nostall.attach.torch_compile.measure.plan_tuning import ProductTuning  # noqa: E402
from nostall.attach.torch_compile.runtime.custom_op import load_op  # noqa: E402
from nostall.attach.torch_compile.workers import codegen_job  # noqa: E402
from nostall.attach.torch_compile.workers import worker as worker_module  # noqa: E402
from nostall.attach.torch_compile.workers.codegen_job import (  # noqa: E402
    CodegenJob,
    CodegenResult,
    CompileStatusJob,
    TargetOnlyDriver,
)
from nostall.attach.torch_compile.workers.worker import Worker  # noqa: E402
from nostall.fusion.graph.graph import Graph  # noqa: E402
from nostall.fusion.hardware import H200  # noqa: E402
from tests.unit.attach.torch_compile.regions import (  # noqa: E402
    HOPPER,
    normalized_rows,
    opaque_region,
    tuning,
)

pytestmark = pytest.mark.slow

LARGE = 1 << 20
"""Rows of a kernel that takes long enough to be tuned."""


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Worker]:
    for name in ("NOSTALL_HOME", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    found = Worker("torch", on_gpu=False)
    yield found
    found.stop()


def generate(*graphs: Graph, owner: int = 0) -> CodegenJob:
    return CodegenJob(graphs, tuning(), HOPPER, owner)


def test_a_job_has_the_hardware_of_the_users_process_and_no_candidates_of_its_own() -> None:
    """The worker has no GPU that it could ask."""
    small = replace(H200, sms=46)
    for job_tuning in (ProductTuning(small, [object()]), tuning()):  # type: ignore[list-item]
        job = CodegenJob((), job_tuning, HOPPER, folders={})
        sent = pickle.loads(job.serialize())
        assert sent.tuning == replace(job_tuning, candidates=[])


def binaries(folder: Path) -> dict[Path, int]:
    """Binaries in a cache, and the times when they were written."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*.cubin")}


def test_the_users_process_finds_kernels_in_the_store_and_binaries_in_tritons_cache(
    worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = (normalized_rows(LARGE), normalized_rows(LARGE), normalized_rows(8))
    generated = worker.run(generate(*graphs))
    assert generated.value is not None and not generated.value.failures
    compiled = worker.run(CompileStatusJob())
    assert compiled.value == CodegenResult()
    # The worker itself only waits; the time is that of its processes.
    assert compiled.cpu_seconds > 0.1
    candidates = generated.value.plan_candidates
    assert [region.graph for region in candidates] == [graphs[0]] * 2

    # This process would have generated the same kernels.
    monkeypatch.setenv("NOSTALL_HOME", str(tmp_path / "another"))
    local = tuning()
    kernels = {kernel for graph in graphs for kernel in local.prepare(graph)}
    assert len(kernels) > 2
    regions = (*candidates, *local.candidates)
    plans = [
        [[candidate.plan for candidate in each] for each in region.kernels.values()]
        for region in regions
    ]
    assert plans[:2] == plans[2:]
    monkeypatch.setenv("NOSTALL_HOME", str(tmp_path / "NOSTALL_HOME"))
    monkeypatch.setattr(triton.runtime.driver, "_active", TargetOnlyDriver(HOPPER))
    before = binaries(tmp_path / "TRITON_CACHE_DIR")
    assert len(before) >= len(kernels)
    for kernel in kernels:
        load_op(kernel).compile(torch.device("cuda"))
    assert binaries(tmp_path / "TRITON_CACHE_DIR") == before


def test_cache_folders_may_change_between_jobs(
    worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []
    for name in ("first", "second"):
        for variable in ("NOSTALL_HOME", "TRITON_CACHE_DIR"):
            monkeypatch.setenv(variable, str(tmp_path / name / variable))
        worker.run(generate(normalized_rows(8)))
        worker.run(CompileStatusJob())
        files = [path.name for path in sorted((tmp_path / name).rglob("*.*"))]
        written.append([file for file in files if file.endswith((".cubin", ".py", ".json"))])
    assert written[0] == written[1]
    assert any(file.endswith(".cubin") for file in written[0])


def test_plan_candidates_that_the_caller_has_are_not_returned_again(worker: Worker) -> None:
    first = worker.run(generate(normalized_rows(LARGE))).value
    assert first is not None
    known = tuning()
    known.candidates += first.plan_candidates
    second = worker.run(CodegenJob((normalized_rows(2 * LARGE),), known, HOPPER)).value
    assert second is not None
    assert [region.graph for region in second.plan_candidates] == [normalized_rows(2 * LARGE)]


def test_processes_of_the_worker_exit_with_it(worker: Worker) -> None:
    worker.run(generate(*(normalized_rows(1 << exponent) for exponent in range(15, 21))))
    assert worker._process is not None
    lists = [*(Path("/proc") / str(worker._process.pid) / "task").glob("*/children")]
    processes = [Path("/proc") / pid for text in lists for pid in text.read_text().split()]
    assert processes
    worker.stop()
    end = time.monotonic() + 20
    while any(map(Path.exists, processes)) and time.monotonic() < end:
        time.sleep(0.1)
    assert not any(map(Path.exists, processes))


PRINT_VERSIONS = """
from triton.backends.nvidia.compiler import get_ptxas_version
before = get_ptxas_version(90)
{}
from nostall.attach.torch_compile.runtime import custom_op
print("12.0" in before, "12.0" in get_ptxas_version(90))
"""


@pytest.mark.parametrize("first_compilation", ["", "compile_tasks._set_triton_ptxas_path()"])
def test_a_cached_ptxas_version_is_replaced_by_that_of_inductors_ptxas(
    tmp_path: Path, first_compilation: str
) -> None:
    """The user may have compiled kernels before, also by Inductor."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_PTXAS_PATH"}
    text = INDUCTORS_PTXAS.format(str(older_ptxas(tmp_path)))
    text += PRINT_VERSIONS.format(first_compilation)
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", text],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert ran.stdout.split() == ["False", "True"]


def older_ptxas(folder: Path) -> Path:
    """A ptxas that reports an older version."""
    ptxas = folder / "ptxas"
    ptxas.write_text(OLDER_PTXAS.format(get_ptxas(HOPPER.arch).path))
    ptxas.chmod(0o755)
    return ptxas


INDUCTORS_PTXAS = """
import os
from torch._inductor.runtime import compile_tasks
compile_tasks._set_triton_ptxas_path = lambda: os.environ.update(
    TRITON_PTXAS_PATH={0!r}, TRITON_PTXAS_BLACKWELL_PATH={0!r}
)
"""
OLDER_PTXAS = """#!/bin/sh
if [ "$1" = --version ]; then echo "Cuda compilation tools, release 12.0, V12.0.1"; exit; fi
exec {0} "$@"
"""


def test_kernels_are_compiled_by_inductors_ptxas(
    worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's cache keys contain the version of ptxas."""
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    program = INDUCTORS_PTXAS.format(str(older_ptxas(tmp_path))) + worker_module.PROGRAM
    monkeypatch.setattr(worker_module, "PROGRAM", program)
    assert not worker.run(generate(normalized_rows(8))).failure
    worker.run(CompileStatusJob())
    (text,) = (path.read_text() for path in (tmp_path / "TRITON_CACHE_DIR").rglob("*.ptx"))
    assert "\n.version 8.0\n" in text


def test_a_region_without_kernels_does_not_stop_the_others(worker: Worker, tmp_path: Path) -> None:
    result = worker.run(generate(opaque_region(), normalized_rows(LARGE))).value
    assert result is not None and len(result.plan_candidates) == 1
    (failure,) = result.failures
    assert "opaque" in failure
    assert worker.run(CompileStatusJob()).value == CodegenResult()
    assert binaries(tmp_path / "TRITON_CACHE_DIR")


def test_an_error_of_a_compilation_is_reported(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/proc/nowhere")
    assert worker.run(generate(normalized_rows(LARGE))).value is not None
    result = worker.run(CompileStatusJob()).value
    assert result is not None and not result.process_died
    (failure,) = result.failures
    assert "nowhere" in failure


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> codegen_job._CompilePool:
    """A pool in this process."""
    monkeypatch.setenv("NOSTALL_HOME", str(tmp_path))
    return codegen_job._CompilePool()


@pytest.mark.parametrize("function", ["_compile", "_prepare"])
def test_a_process_that_dies_is_reported_and_replaced(
    pool: codegen_job._CompilePool, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    job = generate(normalized_rows(8))
    with monkeypatch.context() as patch:
        patch.setattr(codegen_job, function, die)
        results = [pool.generate(job), pool.wait_for_kernels()]
    assert any(result.process_died for result in results)
    monkeypatch.setattr(codegen_job, "_compile", succeed)
    assert pool.generate(job) == CodegenResult()
    assert pool.wait_for_kernels() == CodegenResult()


class UnpicklableError(Exception):
    """Its arguments are not those of its constructor, so pickle cannot restore it."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


@pytest.mark.parametrize("function", ["load_op", "_use_folders"])
def test_any_exception_in_a_process_is_reported_as_a_failure(
    pool: codegen_job._CompilePool, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    def fail(*_: Any) -> None:
        raise UnpicklableError("no", "luck")

    failed = CodegenResult(failures=("UnpicklableError: no luck",))
    monkeypatch.setattr(codegen_job, function, fail)
    result = pool.generate(generate(normalized_rows(8)))
    if function == "load_op":
        assert result == CodegenResult()
        assert pool.wait_for_kernels() == failed
    else:
        assert result == failed


def test_a_pool_whose_processes_died_while_idle_is_replaced(
    pool: codegen_job._CompilePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codegen_job, "_compile", succeed)
    job = generate(normalized_rows(8))
    pool.generate(job)
    pool.wait_for_kernels()
    assert pool._pool is not None
    for process in pool._pool._processes.values():
        process.kill()
        process.join()
    assert pool.generate(job) == CodegenResult()
    assert pool.wait_for_kernels() == CodegenResult()


def test_compilations_of_another_owner_are_cancelled(
    pool: codegen_job._CompilePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codegen_job, "MAX_COMPILERS", 1)
    monkeypatch.setattr(codegen_job, "_compile", succeed_after_2_s)
    graphs = tuple(normalized_rows(rows) for rows in range(8, 48))
    pool.generate(generate(*graphs, owner=1))
    assert len(pool._compilations) == len(graphs)
    began = time.monotonic()
    pool.generate(generate(normalized_rows(7), owner=2))
    assert pool.wait_for_kernels() == CodegenResult()
    assert time.monotonic() - began < 30


def test_one_wait_is_limited_in_time(
    pool: codegen_job._CompilePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codegen_job, "_compile", succeed_after_2_s)
    monkeypatch.setattr(codegen_job, "MAX_WAIT_S", 0.1)
    pool.generate(generate(normalized_rows(8)))
    assert pool.wait_for_kernels() == CodegenResult(remaining=1)
    monkeypatch.setattr(codegen_job, "MAX_WAIT_S", 30.0)
    assert pool.wait_for_kernels() == CodegenResult()


def die(*_: Any) -> None:
    os._exit(1)


def succeed(*_: Any) -> None: ...


def succeed_after_2_s(*_: Any) -> None:
    time.sleep(2.0)
