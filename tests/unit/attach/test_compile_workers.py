"""Kernels that Inductor's worker processes compile, and what happens where they cannot."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from tests.unit.fusion.patterns import PATTERNS  # noqa: E402

from nostall.attach.compile import workers  # noqa: E402
from nostall.attach.compile.records import Kept  # noqa: E402
from nostall.attach.compile.workers import Workers, compiled, compiling_for  # noqa: E402
from nostall.fusion.codegen.choice import first_choice  # noqa: E402
from nostall.fusion.codegen.emit import emit  # noqa: E402
from nostall.fusion.codegen.region import scheduled  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")

CUDA = torch.device("cuda", 0)


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """One in a store of its own, and an empty cache."""
    monkeypatch.setenv("NOSTALL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    graph = next(iter(PATTERNS.values()))()
    of = scheduled(graph, graph.operators)
    return Kept().put(emit(of, first_choice(of)))


def cubins(folder: Path) -> list[Path]:
    return sorted((folder / "triton").rglob("*.cubin"))


class Warmed:
    """Kernels by name, and which of them were compiled in this process."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, name: str) -> Any:
        class Runner:
            def warm(runner, device: Any) -> None:  # noqa: N805
                assert device == CUDA
                self.names.append(name)

        return Runner()


@pytest.fixture
def warmed(monkeypatch: pytest.MonkeyPatch) -> Warmed:
    found = Warmed()
    monkeypatch.setattr(workers, "resolve", found)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return found


def test_a_worker_compiles_without_a_gpu(kernel: str, tmp_path: Path) -> None:
    assert compiled(kernel, 90, {}) > 0
    (made, *_) = cubins(tmp_path)
    assert made.read_bytes()[:4] == b"\x7fELF"


def test_the_driver_is_what_it_was(kernel: str) -> None:
    before = triton.runtime.driver._active
    with pytest.raises(RuntimeError, match="no luck"), compiling_for(90):
        raise RuntimeError("no luck")
    assert triton.runtime.driver._active is before


def test_what_workers_do_is_counted_and_ready_here(
    warmed: Warmed, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []

    def submit(*job: Any) -> Future[float]:
        asked.append(job)
        found: Future[float] = Future()
        if job[1] == "bad":
            found.set_exception(OSError("a worker died"))
        else:
            found.set_result(1.5)
        return found

    monkeypatch.setattr(workers, "inductors_pool", lambda: submit)
    monkeypatch.setenv("NOSTALL_HOME", "/somewhere")
    pool = Workers(CUDA)
    for name in ("one", "bad", "one", "two"):
        pool.add(name)
    assert [job[1:3] for job in asked] == [("one", 90), ("bad", 90), ("two", 90)]
    assert asked[0][3]["NOSTALL_HOME"] == "/somewhere"
    assert warmed.names == []
    pool.finish()
    assert warmed.names == ["one", "bad", "two"]
    assert pool.cpu_seconds == 3.0
    pool.finish()
    assert len(warmed.names) == 3


@pytest.mark.parametrize("broken", [True, False])
def test_without_workers_the_thread_compiles(
    broken: bool, warmed: Warmed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def submit(*job: Any) -> Future[float]:
        raise RuntimeError("cannot schedule new futures after shutdown")

    monkeypatch.setattr(workers, "inductors_pool", lambda: submit if broken else None)
    pool = Workers(CUDA)
    pool.add("one")
    pool.finish()
    assert warmed.names == ["one"]
    assert pool.cpu_seconds == 0.0


def test_nobody_waits_for_workers_that_do_not_answer(
    warmed: Warmed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "inductors_pool", lambda: lambda *job: Future())
    monkeypatch.setattr(workers, "LONGEST", 0.2)
    pool = Workers(CUDA)
    for number in range(20):
        pool.add(f"kernel {number}")
    began = time.monotonic()
    pool.finish()
    assert time.monotonic() - began < 2.0
    assert len(warmed.names) == 20


def test_on_a_processor_nothing_is_compiled(warmed: Warmed) -> None:
    pool = Workers(torch.device("cpu"))
    pool.add("one")
    pool.finish()
    assert warmed.names == []


@pytest.fixture
def inductors(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """PyTorch's own pool, with two processes."""
    from torch._inductor import async_compile, config

    # A process finds what the one that started it finds.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    async_compile.AsyncCompile.process_pool.cache_clear()
    with config.patch(compile_threads=2):
        yield async_compile.AsyncCompile
        async_compile.shutdown_compile_workers()


def test_inductors_processes_take_such_work(inductors: Any, kernel: str, tmp_path: Path) -> None:
    until = time.monotonic() + 90
    while (submit := workers.inductors_pool()) is None and time.monotonic() < until:
        time.sleep(0.1)
    assert submit is not None
    passed = {name: os.environ[name] for name in ("NOSTALL_HOME", "TRITON_CACHE_DIR")}
    assert submit(compiled, kernel, 90, passed).result(90) > 0
    assert cubins(tmp_path)


def test_a_pool_that_is_none_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.async_compile import AsyncCompile

    def broken(_: Any) -> bool:
        raise AttributeError("PyTorch has changed")

    monkeypatch.setattr(AsyncCompile, "use_process_pool", classmethod(broken))
    assert workers.inductors_pool() is None
