"""CPU time of compile processes: counted once, and shared between open accounts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

from nostall.attach.torch_compile.workers import cpu_time, tasks
from nostall.attach.torch_compile.workers import worker as worker_module
from nostall.attach.torch_compile.workers.cpu_time import (
    SharedCpuTime,
    count_cpu_time,
    finished_children_seconds,
    inductor_pool_seconds,
    process_tree_seconds,
)
from nostall.attach.torch_compile.workers.tasks import BackgroundTasks
from nostall.attach.torch_compile.workers.worker import Worker

BURN = """
import time
while time.process_time() < 0.3: pass
"""
MIN_SECONDS, MAX_SECONDS = 0.25, 2.0
"""Bounds for the CPU time of the program above."""


def burn() -> None:
    subprocess.run([sys.executable, "-S", "-c", BURN], check=True)


@pytest.fixture
def new_account(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children of earlier tests are not counted."""
    children = SharedCpuTime(finished_children_seconds)
    with children.account(lambda seconds: None):
        pass
    monkeypatch.setattr(cpu_time, "FINISHED_CHILDREN", children)
    monkeypatch.setattr(tasks, "FINISHED_CHILDREN", children)


@pytest.mark.usefixtures("new_account")
def test_a_finished_child_is_shared_by_open_accounts() -> None:
    outer: list[float] = []
    inner: list[float] = []
    with count_cpu_time(outer.append):
        with count_cpu_time(inner.append):
            burn()
        assert MIN_SECONDS / 2 < sum(inner) < MAX_SECONDS / 2
    assert sum(outer) == pytest.approx(sum(inner), abs=0.1), "each gets half of it"
    assert MIN_SECONDS < sum(outer) + sum(inner) < MAX_SECONDS
    with count_cpu_time(inner.append):
        pass
    assert sum(inner) < MAX_SECONDS / 2


def test_a_stopped_worker_is_not_counted_as_a_child_but_as_unreported_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    children = SharedCpuTime(finished_children_seconds)
    monkeypatch.setattr(cpu_time, "FINISHED_CHILDREN", children)
    monkeypatch.setattr(worker_module, "FINISHED_CHILDREN", children)
    monkeypatch.setattr(worker_module, "PROGRAM", f"{BURN}time.sleep(60)")
    worker, counted = Worker("torch", on_gpu=False), list[float]()
    worker.attach_gpu()
    assert worker._process is not None
    end = time.monotonic() + 20
    while process_tree_seconds(worker._process.pid) < MIN_SECONDS and time.monotonic() < end:
        time.sleep(0.01)
    with count_cpu_time(counted.append):
        worker.stop()
    assert sum(counted) < MIN_SECONDS / 2
    # No job result has reported the time, so it is reported here, once.
    assert worker.take_unreported_seconds() > MIN_SECONDS / 2
    assert worker.take_unreported_seconds() == 0.0


@pytest.mark.usefixtures("new_account")
def test_children_of_background_tasks_are_counted() -> None:
    background = BackgroundTasks()
    called = threading.Event()

    def source() -> list[tasks.Task]:
        called.set()
        return [burn]

    background.add(source)
    background.start()
    assert called.wait(20)
    for _ in range(400):
        if background.is_ready:
            break
        threading.Event().wait(0.05)
    assert background.is_ready
    assert MIN_SECONDS < background.cpu_seconds < MAX_SECONDS


def test_a_pool_process_is_counted_with_its_children(monkeypatch: pytest.MonkeyPatch) -> None:
    child = f"{BURN}print('burnt', flush=True); time.sleep(60)"
    command = [sys.executable, "-S", "-c", child]
    parent = f"import subprocess, time; subprocess.Popen({command!r}); time.sleep(60)"
    with subprocess.Popen(
        [sys.executable, "-c", parent], stdout=subprocess.PIPE, start_new_session=True
    ) as pool:
        try:
            assert pool.stdout is not None and pool.stdout.readline() == b"burnt\n"
            assert MIN_SECONDS < process_tree_seconds(pool.pid) < MAX_SECONDS
            pools = SimpleNamespace(_pool_set=[SimpleNamespace(process=pool), SimpleNamespace()])
            monkeypatch.setitem(sys.modules, "torch._inductor.async_compile", pools)
            assert MIN_SECONDS < inductor_pool_seconds() < MAX_SECONDS
        finally:
            os.killpg(pool.pid, signal.SIGKILL)
    assert process_tree_seconds(pool.pid) == 0.0


def test_without_system_support_no_time_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "resource", None)
    monkeypatch.delitem(sys.modules, "torch._inductor.async_compile", raising=False)
    assert finished_children_seconds() == inductor_pool_seconds() == 0.0


def test_a_falling_total_takes_nothing_from_accounts() -> None:
    """It falls when a process ends that it includes."""
    totals = iter([1.0, 3.0, 0.5, 1.5])
    shared, counted = SharedCpuTime(lambda: next(totals)), list[float]()
    for _ in range(2):
        with shared.account(counted.append):
            pass
    assert counted == [2.0, 1.0]
