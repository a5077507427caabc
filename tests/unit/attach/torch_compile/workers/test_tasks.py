"""Background tasks: order, failures, CPU time, interpreter exit, forks."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from nostall.attach.torch_compile.workers.tasks import BackgroundTasks, Task  # noqa: E402


def run(tasks: BackgroundTasks) -> None:
    tasks.start()
    end = time.monotonic() + 30
    while not tasks.is_ready and time.monotonic() < end:
        time.sleep(0.001)
    assert tasks.is_ready


def test_a_failing_source_or_task_is_logged_and_the_others_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ran = []

    def fail() -> None:
        raise RuntimeError("no luck")

    def failing_source() -> Iterator[Task]:
        yield fail
        yield lambda: ran.append("first source")
        raise RuntimeError("no idea")

    tasks = BackgroundTasks()
    with caplog.at_level(logging.WARNING, "nostall"):
        tasks.add(failing_source)
        tasks.add(lambda: [lambda: ran.append("second source")])
        run(tasks)
    assert sorted(ran) == ["first source", "second source"]
    messages = [r.message for r in caplog.records]
    counts = [sum(text in message for message in messages) for text in ("no luck", "no idea")]
    assert counts == [1, 1]


def test_all_sources_are_called_before_a_task_runs() -> None:
    """Final tasks start when all sources were called."""
    called, go, final = [], threading.Event(), threading.Event()
    tasks = BackgroundTasks()
    for name in ("first", "second"):
        tasks.add(lambda name=name: called.append(name) or [lambda: go.wait(30)])
    tasks.add_final(final.set)
    tasks.start()
    assert final.wait(30)
    assert called == ["first", "second"] and not tasks.is_ready
    go.set()
    run(tasks)


def test_cpu_time_of_all_tasks_is_counted() -> None:
    def task() -> None:
        end = time.thread_time() + 0.05
        while time.thread_time() < end:
            pass

    tasks = BackgroundTasks()
    tasks.add(lambda: [task] * 3)
    run(tasks)
    assert 3 * 0.05 <= tasks.cpu_seconds <= 1.5 * tasks.seconds


EXITS = """
import sys, threading, time
from nostall.attach.torch_compile.workers.tasks import BackgroundTasks
began = threading.Event()
def task():
    began.set()
    time.sleep(0.5)
    print("ended", flush=True)
tasks = BackgroundTasks()
tasks.add(lambda: [task] * 50)
tasks.start()
began.wait()
"""


def test_at_exit_the_running_task_ends_and_no_other_starts() -> None:
    """A thread that returns from C++ to a finalized interpreter aborts the process."""
    began = time.monotonic()
    ran = subprocess.run([sys.executable, "-c", EXITS], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("ended") == 1
    assert time.monotonic() - began < 50 * 0.5


FORKS = """
import os, sys, threading, time
from nostall.attach.torch_compile.workers.tasks import BackgroundTasks
tasks = BackgroundTasks()
began, go = threading.Event(), threading.Event()
tasks.add(lambda: [lambda: began.set() or (go.wait(60) and None)])
tasks.start()
began.wait()
tasks._lock.acquire()
if os.fork() == 0:
    tasks.start()
    other = BackgroundTasks()
    other.add(lambda: [lambda: None])
    other.start()
    while not other.is_ready:
        time.sleep(0.01)
    sys.exit()
start = time.monotonic()
tasks._lock.release()
_, status = os.wait()
print(status, time.monotonic() - start, flush=True)
go.set()
"""


@pytest.mark.slow
def test_a_forked_process_does_not_wait_for_threads_of_its_parent() -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORKS]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    status, seconds = ran.stdout.split()
    assert status == "0" and float(seconds) < 5


def test_background_threads_use_the_current_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new thread starts with the first GPU."""
    local = threading.local()

    @contextlib.contextmanager
    def use_device(device: int) -> Iterator[None]:
        local.device = device
        yield
        local.device = None

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "device", use_device)
    devices: dict[str, int | None] = {}

    def record(name: str) -> None:
        devices[name] = getattr(local, "device", None)

    def source() -> Iterator[Callable[[], None]]:
        record("source")
        yield lambda: record("task")

    tasks = BackgroundTasks()
    tasks.add(source)
    tasks.add_final(lambda: record("final task"))
    run(tasks)
    assert devices == {"source": 3, "task": 3, "final task": 3}
