"""Kernels that another process explores, writes and has compiled without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.backends.nvidia.compiler import get_ptxas  # noqa: E402

from nostall.attach.compile import ahead, writer  # noqa: E402
from nostall.attach.compile import helper as helping  # noqa: E402
from nostall.attach.compile.helper import Helper  # noqa: E402
from nostall.attach.compile.operator import resolve  # noqa: E402
from nostall.attach.compile.race import Race  # noqa: E402
from nostall.attach.compile.writer import Architecture, Compiling, Writing  # noqa: E402
from nostall.fusion.build import Builder  # noqa: E402
from nostall.fusion.graph import Graph  # noqa: E402

HOPPER = GPUTarget("cuda", 90, 32)


def normed(rows: int) -> Graph:
    """Rows, each divided by its sum."""
    build = Builder()
    x = build.input((rows, 768))
    return build.graph(build("div", x, build("sum", x, dims=(1,), keepdim=True)))


def race() -> Race:
    return Race(2, 1.0, "reductions")


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Helper]:
    for name in ("NOSTALL_HOME", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    found = Helper(on_gpu=False)
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
    assert not answer.failure and answer.done is not None
    assert process.do(Compiling()).failure == ""
    racing = answer.done
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
    assert answer.cpu_seconds > 0


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
    ptxas = tmp_path / "ptxas"
    ptxas.write_text(OLDER.format(get_ptxas(HOPPER.arch).path))
    ptxas.chmod(0o755)
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    monkeypatch.setattr(helping, "PROGRAM", INDUCTORS.format(str(ptxas)) + helping.PROGRAM)
    assert not process.do(Writing((normed(8),), race(), HOPPER)).failure
    process.do(Compiling())
    (text,) = (path.read_text() for path in (tmp_path / "TRITON_CACHE_DIR").rglob("*.ptx"))
    assert "\n.version 8.0\n" in text


def test_a_region_that_cannot_be_written_is_a_failure_of_its_errand(process: Helper) -> None:
    build = Builder()
    x = build.input((8, 768))
    opaque = build.opaque("a border", x, shape=(8,), dtype="float32")
    graph = build.graph(opaque)
    answer = process.do(Writing((graph,), race(), HOPPER))
    assert answer.done is None and "opaque" in answer.failure
    assert process.running, "the next one may be written"


def test_a_worker_that_dies_is_not_waited_for_and_others_come(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NOSTALL_HOME", str(tmp_path))
    workers, asked, began = (
        writer._Workers(),
        Writing((normed(8),), race(), HOPPER),
        time.monotonic(),
    )
    with monkeypatch.context() as patch:
        patch.setattr(writer, "_compile", dies)
        assert workers.written(asked) == []
        workers.wait()
        with pytest.raises(BrokenProcessPool):
            workers.written(asked)
    monkeypatch.setattr(writer, "_compile", lasts)
    assert workers.written(asked) == []
    workers.wait()
    assert time.monotonic() - began < 30


def dies(*_: Any) -> None:
    os._exit(1)


def lasts(*_: Any) -> None: ...


ENDS = """
import sys, threading, time
from nostall.attach.compile import switch, helper
from nostall.attach.compile.ahead import Ahead
from nostall.attach.compile.background import Preparation
from nostall.attach.compile.report import GraphReport
helper.PROGRAM = "import time; time.sleep(60)"
preparation = Preparation()
ahead = Ahead(preparation, GraphReport())
preparation.add(lambda: [ahead.wait])
preparation.start()
while not helper.WRITER.running:
    time.sleep(0.01)
print(time.monotonic(), flush=True)
"""


def test_a_program_that_ends_does_not_wait_for_what_other_processes_compile() -> None:
    command = [sys.executable, "-W", "ignore", "-c", ENDS]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    assert time.monotonic() - float(ran.stdout) < 8


def test_where_binaries_are_not_kept_or_not_needed_no_other_process_compiles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(triton.runtime.driver, "_active", Architecture(HOPPER))
    assert ahead.target_of(torch.device("cuda")) == HOPPER
    assert ahead.target_of(torch.device("cpu")) is None
    monkeypatch.setattr(triton.knobs.compilation, "always_compile", True)
    assert ahead.target_of(torch.device("cuda")) is None
