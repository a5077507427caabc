"""Kernels that another process explores, writes and has compiled without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from triton.backends.nvidia.compiler import get_ptxas  # noqa: E402

from nostall.attach.torch_compile.runtime.custom_op import resolve  # noqa: E402
from nostall.attach.torch_compile.workers import codegen_job  # noqa: E402
from nostall.attach.torch_compile.workers import worker as helping  # noqa: E402
from nostall.attach.torch_compile.workers.codegen_job import (  # noqa: E402
    Architecture,
    Compiling,
    Writing,
    Written,
)
from nostall.attach.torch_compile.workers.worker import Helper  # noqa: E402
from tests.unit.attach.torch_compile.regions import HOPPER, bordered, normed, race  # noqa: E402


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Helper]:
    for name in ("NOSTALL_HOME", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    found = Helper("torch", on_gpu=False)
    yield found
    found.end()


def binaries(place: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in place.rglob("*.cubin")}


def test_the_program_finds_kernels_in_the_store_and_their_binaries_in_tritons_cache(
    process: Helper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Large enough that its plans race.
    graphs = (normed(1 << 20), normed(1 << 20), normed(8))
    answer = process.do(Writing(graphs, race(), HOPPER))
    assert answer.done is not None and not answer.done.failures
    compiled = process.do(Compiling())
    assert compiled.done == Written()
    # The process itself only waits.
    assert compiled.cpu_seconds > 0.1
    racing = answer.done.racing
    assert [one.graph for one in racing] == [graphs[0]] * 2

    # What was found is what this process would have found.
    monkeypatch.setenv("NOSTALL_HOME", str(tmp_path / "another"))
    here = race()
    kernels = {kernel for graph in graphs for kernel in here.prepare(graph)}
    assert len(kernels) > 2
    plans = [[plans for _, plans in one.kernels.values()] for one in (*racing, *here.regions)]
    assert plans[:2] == plans[2:]
    monkeypatch.setenv("NOSTALL_HOME", str(tmp_path / "NOSTALL_HOME"))
    monkeypatch.setattr(triton.runtime.driver, "_active", Architecture(HOPPER))
    made = binaries(tmp_path / "TRITON_CACHE_DIR")
    assert len(made) >= len(kernels)
    for kernel in kernels:
        resolve(kernel).warm(torch.device("cuda"))
    assert binaries(tmp_path / "TRITON_CACHE_DIR") == made


def test_where_things_are_kept_may_change_between_two_errands(
    process: Helper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for name in ("one", "other"):
        for variable in ("NOSTALL_HOME", "TRITON_CACHE_DIR"):
            monkeypatch.setenv(variable, str(tmp_path / name / variable))
        process.do(Writing((normed(8),), race(), HOPPER))
        process.do(Compiling())
        files = [path.name for path in sorted((tmp_path / name).rglob("*.*"))]
        found.append([name for name in files if name.endswith((".cubin", ".py", ".json"))])
    assert found[0] == found[1]
    assert any(name.endswith(".cubin") for name in found[0])


def test_regions_that_race_already_are_not_told_again(process: Helper) -> None:
    asked = Writing((normed(1 << 20),), race(), HOPPER)
    first = process.do(asked).done
    assert first is not None
    known = race()
    known.regions += first.racing
    again = process.do(Writing((normed(1 << 21),), known, HOPPER)).done
    assert again is not None
    assert [one.graph for one in again.racing] == [normed(1 << 21)]


def test_workers_end_with_the_process(process: Helper) -> None:
    process.do(Writing(tuple(normed(1 << at) for at in range(15, 21)), race(), HOPPER))
    assert process._process is not None
    children = [*(Path("/proc") / str(process._process.pid) / "task").glob("*/children")]
    workers = [Path("/proc") / pid for text in children for pid in text.read_text().split()]
    assert workers
    process.end()
    end = time.monotonic() + 20
    while any(map(Path.exists, workers)) and time.monotonic() < end:
        time.sleep(0.1)
    assert not any(map(Path.exists, workers))


ASKED = """
from triton.backends.nvidia.compiler import get_ptxas_version
before = get_ptxas_version(90)
{}
from nostall.attach.torch_compile.runtime import custom_op as operator
print("12.0" in before, "12.0" in get_ptxas_version(90))
"""


@pytest.mark.parametrize("meanwhile", ["", "compile_tasks._set_triton_ptxas_path()"])
def test_who_has_asked_for_the_version_before_is_told_again(tmp_path: Path, meanwhile: str) -> None:
    """A program may have compiled kernels of its own, and by Inductor."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_PTXAS_PATH"}
    text = INDUCTORS.format(str(older(tmp_path))) + ASKED.format(meanwhile)
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", text],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert ran.stdout.split() == ["False", "True"]


def older(place: Path) -> Path:
    """A ptxas that says that it is of another version."""
    ptxas = place / "ptxas"
    ptxas.write_text(OLDER.format(get_ptxas(HOPPER.arch).path))
    ptxas.chmod(0o755)
    return ptxas


INDUCTORS = """
import os
from torch._inductor.runtime import compile_tasks
compile_tasks._set_triton_ptxas_path = lambda: os.environ.update(
    TRITON_PTXAS_PATH={0!r}, TRITON_PTXAS_BLACKWELL_PATH={0!r}
)
"""
OLDER = """#!/bin/sh
if [ "$1" = --version ]; then echo "Cuda compilation tools, release 12.0, V12.0.1"; exit; fi
exec {0} "$@"
"""


def test_kernels_are_compiled_by_the_ptxas_that_inductor_takes(
    process: Helper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names in Triton's cache tell its version: nobody finds what another one has made."""
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    program = INDUCTORS.format(str(older(tmp_path))) + helping.PROGRAM
    monkeypatch.setattr(helping, "PROGRAM", program)
    assert not process.do(Writing((normed(8),), race(), HOPPER)).failure
    process.do(Compiling())
    (text,) = (path.read_text() for path in (tmp_path / "TRITON_CACHE_DIR").rglob("*.ptx"))
    assert "\n.version 8.0\n" in text


def test_a_region_that_cannot_be_written_costs_no_other(process: Helper, tmp_path: Path) -> None:
    done = process.do(Writing((bordered(), normed(1 << 20)), race(), HOPPER)).done
    assert done is not None and len(done.racing) == 1
    (failure,) = done.failures
    assert "opaque" in failure
    assert process.do(Compiling()).done == Written()
    assert binaries(tmp_path / "TRITON_CACHE_DIR")


def test_what_cannot_be_compiled_is_said(process: Helper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/proc/nowhere")
    assert process.do(Writing((normed(1 << 20),), race(), HOPPER)).done is not None
    done = process.do(Compiling()).done
    assert done is not None and not done.died
    (failure,) = done.failures
    assert "nowhere" in failure


def test_a_worker_that_dies_is_not_waited_for_and_others_come(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NOSTALL_HOME", str(tmp_path))
    workers, asked = codegen_job._Workers(), Writing((normed(8),), race(), HOPPER)
    for name in ("_compile", "_prepared"):
        with monkeypatch.context() as patch:
            patch.setattr(codegen_job, name, dies)
            done = [workers.written(asked), workers.compiled()]
        assert any(one.died for one in done)
    monkeypatch.setattr(codegen_job, "_compile", lasts)
    assert workers.written(asked) == Written()
    assert workers.compiled() == Written()


class Strange(Exception):
    """It cannot be read from its pickle."""

    def __init__(self, one: str, other: str) -> None:
        super().__init__(f"{one} {other}")


def test_whatever_fails_in_a_worker_is_no_death(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails(*_: Any) -> None:
        raise Strange("no", "luck")

    monkeypatch.setenv("NOSTALL_HOME", str(tmp_path))
    monkeypatch.setattr(codegen_job, "resolve", fails)
    workers = codegen_job._Workers()
    assert workers.written(Writing((normed(8),), race(), HOPPER)) == Written()
    assert workers.compiled() == Written(failures=("Strange: no luck",))
    monkeypatch.setattr(codegen_job, "_at", fails)
    workers = codegen_job._Workers()
    done = workers.written(Writing((normed(8),), race(), HOPPER))
    assert done == Written(failures=("Strange: no luck",))


def test_a_worker_that_died_before_costs_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NOSTALL_HOME", str(tmp_path))
    monkeypatch.setattr(codegen_job, "_compile", lasts)
    workers, asked = codegen_job._Workers(), Writing((normed(8),), race(), HOPPER)
    workers.written(asked)
    workers.compiled()
    assert workers._pool is not None
    for one in workers._pool._processes.values():
        one.kill()
        one.join()
    assert workers.written(asked) == Written()
    assert workers.compiled() == Written()


def test_who_comes_next_does_not_wait_for_what_is_not_needed_any_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NOSTALL_HOME", str(tmp_path))
    monkeypatch.setattr(codegen_job, "COMPILERS", 1)
    monkeypatch.setattr(codegen_job, "_compile", lasts_longer)
    workers = codegen_job._Workers()
    every = tuple(normed(rows) for rows in range(8, 48))
    workers.written(Writing(every, race(), HOPPER, owner=1))
    assert len(workers._begun) == len(every)
    began = time.monotonic()
    workers.written(Writing((normed(7),), race(), HOPPER, owner=2))
    assert workers.compiled() == Written()
    assert time.monotonic() - began < 30


def test_who_waits_for_long_asks_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NOSTALL_HOME", str(tmp_path))
    monkeypatch.setattr(codegen_job, "_compile", lasts_longer)
    monkeypatch.setattr(codegen_job, "AT_ONCE_S", 0.1)
    workers = codegen_job._Workers()
    workers.written(Writing((normed(8),), race(), HOPPER))
    assert workers.compiled() == Written(left=1)
    monkeypatch.setattr(codegen_job, "AT_ONCE_S", 30.0)
    assert workers.compiled() == Written()


def dies(*_: Any) -> None:
    os._exit(1)


def lasts(*_: Any) -> None: ...


def lasts_longer(*_: Any) -> None:
    time.sleep(2.0)
