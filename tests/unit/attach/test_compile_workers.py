"""Kernels that Inductor's worker processes compile, and what happens where they cannot."""

from __future__ import annotations

import os
import pickle
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
from nostall.attach.compile.race import prepared  # noqa: E402
from nostall.attach.compile.records import Kept  # noqa: E402
from nostall.attach.compile.workers import (  # noqa: E402
    Workers,
    compiled_elsewhere,
    compiling_for,
    planned_elsewhere,
)
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
    (name,), seconds = compiled_elsewhere({}, kernel, 90)
    assert name == kernel and seconds > 0
    (made, *_) = cubins(tmp_path)
    assert made.read_bytes()[:4] == b"\x7fELF"


def test_a_worker_plans_what_the_program_would(kernel: str, tmp_path: Path) -> None:
    graph = next(iter(PATTERNS.values()))()
    region = pickle.loads(pickle.dumps(graph)), 3, "all"
    elsewhere = {"NOSTALL_HOME": str(tmp_path / "other")}
    names, _ = planned_elsewhere(elsewhere, *region)
    os.environ["NOSTALL_HOME"] = str(tmp_path / "home")
    assert names == prepared(*region)
    assert len(set(names)) >= 3
    assert set(names) >= {kernel}


def test_the_driver_is_what_it_was(kernel: str) -> None:
    before = triton.runtime.driver._active
    with pytest.raises(RuntimeError, match="no luck"), compiling_for(90):
        raise RuntimeError("no luck")
    assert triton.runtime.driver._active is before


REGIONS: Any = [("first", 8, "all"), ("second", 8, "all")]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Regions that were planned in this process."""
    found: list[str] = []

    def plan(graph: Any, most: int, extent: str) -> list[str]:
        assert (most, extent) == (8, "all")
        found.append(graph)
        return [f"{graph} 1", "both"]

    monkeypatch.setattr(workers, "prepared", plan)
    return found


def test_what_workers_do_is_counted_and_ready_here(
    warmed: Warmed, here: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []

    def submit(work: Any, environment: dict[str, str], what: str, *how: Any) -> Future[Any]:
        asked.append((work, what, *how))
        assert environment["NOSTALL_HOME"] == "/somewhere"
        found: Future[Any] = Future()
        if what in ("second", "both"):
            found.set_exception(OSError("a worker died"))
        else:
            names = ["first 1", "both"] if work is planned_elsewhere else [what]
            found.set_result((names, 1.5))
        return found

    monkeypatch.setattr(workers, "inductors_pool", lambda: submit)
    monkeypatch.setenv("NOSTALL_HOME", "/somewhere")
    pool = Workers(CUDA)
    pool.make(REGIONS)
    assert [one[1:] for one in asked] == [
        ("first", 8, "all"),
        ("second", 8, "all"),
        ("first 1", 90),
        ("both", 90),
        ("second 1", 90),
    ]
    assert here == ["second"]
    assert warmed.names == ["first 1", "both", "second 1"]
    assert pool.cpu_seconds == 4.5


@pytest.mark.parametrize("broken", [True, False])
def test_without_workers_the_thread_does_it(
    broken: bool, warmed: Warmed, here: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def submit(*job: Any) -> Future[Any]:
        raise RuntimeError("cannot schedule new futures after shutdown")

    monkeypatch.setattr(workers, "inductors_pool", lambda: submit if broken else None)
    pool = Workers(CUDA)
    pool.make(REGIONS)
    assert here == ["first", "second"]
    assert warmed.names == ["first 1", "both", "second 1"]
    assert pool.cpu_seconds == 0.0


def test_nobody_waits_for_workers_that_do_not_answer(
    warmed: Warmed, here: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "inductors_pool", lambda: lambda *job: Future())
    monkeypatch.setattr(workers, "LONGEST", 0.2)
    began = time.monotonic()
    Workers(CUDA).make(REGIONS * 10)
    assert time.monotonic() - began < 2.0
    assert len(warmed.names) == 3


def test_on_a_processor_kernels_are_planned_and_not_compiled(
    warmed: Warmed, here: list[str]
) -> None:
    Workers(torch.device("cpu")).make(REGIONS)
    assert here == ["first", "second"]
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
    graph = next(iter(PATTERNS.values()))()
    names, _ = submit(planned_elsewhere, passed, graph, 1, "all").result(90)
    assert kernel in names
    _, seconds = submit(compiled_elsewhere, passed, kernel, 90).result(90)
    assert seconds > 0 and cubins(tmp_path)


def test_a_pool_that_is_none_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.async_compile import AsyncCompile

    def broken(_: Any) -> bool:
        raise AttributeError("PyTorch has changed")

    monkeypatch.setattr(AsyncCompile, "use_process_pool", classmethod(broken))
    assert workers.inductors_pool() is None
