"""Worker processes: start, jobs, failures, exit, forks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from nostall.attach.torch_compile.workers import worker as worker_module  # noqa: E402
from nostall.attach.torch_compile.workers import worker_main  # noqa: E402
from nostall.attach.torch_compile.workers.compile_job import (  # noqa: E402
    CompileJob,
    describe_inputs,
)
from nostall.attach.torch_compile.workers.torch_state import TorchState  # noqa: E402
from nostall.attach.torch_compile.workers.worker import (  # noqa: E402
    FIRST_INDUCTOR_WORKER,
    Worker,
)

RECEIVES_GPU = """
import sys
from nostall.core.process import Channel
channel = Channel.from_descriptor(int(sys.argv[-1]))
channel.receive()  # the index of the GPU
"""


@pytest.fixture
def worker() -> Iterator[Worker]:
    found = Worker("torch")
    yield found
    found.stop()


def compile_job(size: int = 0) -> CompileJob:
    """A job of at least ``size`` bytes."""
    graph = torch.fx.symbolic_trace(nn.ReLU())
    graph.ballast = bytes(size)
    return CompileJob(graph, describe_inputs([torch.ones(3)]), {}, None)


def test_a_graph_that_cannot_be_pickled_is_a_failure_without_an_exception(worker: Worker) -> None:
    graph = torch.fx.symbolic_trace(nn.ReLU())
    graph.lock = threading.Lock()
    result = worker.run(CompileJob(graph, (), {}, None))
    assert result.failure.startswith("NotOffloadable: ")
    assert not worker.is_running


SLEEPS = "import time; time.sleep(60)"
LARGER_THAN_A_PIPE = 4 << 20


@pytest.mark.parametrize(
    ("program", "message", "size"),
    [
        ("raise SystemExit(3)", "ProcessEnded: ", 0),
        (RECEIVES_GPU + "channel.receive()", "ProcessEnded", 0),
        (
            RECEIVES_GPU + "channel.receive(); channel._socket.sendall(b'?' * 8)",
            "ProcessEnded: the process sent data that is not a message",
            0,
        ),
        (RECEIVES_GPU + SLEEPS, "TimeoutError: no answer within", 0),
        (RECEIVES_GPU + SLEEPS, "TimeoutError: the process took no message", LARGER_THAN_A_PIPE),
    ],
)
def test_a_failing_process_is_a_failure_without_an_exception(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, program: str, message: str, size: int
) -> None:
    monkeypatch.setattr(worker_module, "PROGRAM", program)
    monkeypatch.setattr(worker_module, "JOB_TIMEOUT_S", 0.5 if SLEEPS in program else 60.0)
    assert message in worker.run(compile_job(size)).failure
    assert not worker.is_running


def test_a_dead_worker_does_not_end_the_process_by_sigpipe(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "PROGRAM", "raise SystemExit(3)")
    child = os.fork()
    if not child:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        failed = worker.run(compile_job(LARGER_THAN_A_PIPE)).failure
        os._exit(0 if failed else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_a_process_that_cannot_be_started_is_a_failure_without_an_exception(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", "/no/such/python")
    worker.attach_gpu()
    assert "FileNotFoundError" in worker.run(compile_job()).failure
    assert not worker.is_running


PRELOADED = """
import os, pathlib
pathlib.Path(os.environ["PRELOADED"]).write_text(str(os.getpid()))
"""


def test_a_started_process_preloads_its_module_and_waits_for_its_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "preloaded.py").write_text(PRELOADED)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PRELOADED", str(file := tmp_path / "process"))
    # It has to wait for the GPU longer than it would for a job.
    program = f"import {worker_main.__name__} as m; m.IDLE_TIMEOUT_S = 1.0; "
    program += "m._use_gpu = m._run_job = print; m.main()"
    monkeypatch.setattr(worker_module, "PROGRAM", program)
    worker, gpus = Worker("preloaded"), list[int]()
    monkeypatch.setattr(worker_module, "_check_gpu_memory", lambda gpu, workers: gpus.append(gpu))
    worker.start()
    end = time.monotonic() + 60
    while not (file.exists() and file.read_text()) and time.monotonic() < end:
        time.sleep(0.01)
    process = worker._process
    assert process is not None and file.read_text() == str(process.pid)
    time.sleep(1.5)
    worker.start()
    assert worker.is_running and not worker.is_attached
    assert gpus == [], "no GPU is used yet, and the process still runs"
    worker.attach_gpu()
    assert worker.is_attached and worker._process is process and gpus == [-1]
    assert process._handle.wait(60) == 0, "it exits because there is no job"


def test_a_process_that_gets_no_gpu_exits(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    program = f"import {worker_main.__name__} as m; m.ATTACH_TIMEOUT_S = 0.1; m.main()"
    monkeypatch.setattr(worker_module, "PROGRAM", program)
    worker.start()
    assert worker._process is not None
    assert worker._process.reap(60) == 0


def test_start_does_not_wait_for_a_running_job(worker: Worker) -> None:
    with worker._lock:
        worker.start()
    assert not worker.is_running


def test_a_closed_worker_fails_its_job_and_starts_no_other_process(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "PROGRAM", RECEIVES_GPU + SLEEPS)
    worker.attach_gpu()
    assert worker.is_running
    threading.Timer(0.2, worker.close).start()
    began = time.monotonic()
    assert "ProcessEnded: " in worker.run(compile_job()).failure
    assert time.monotonic() - began < 30
    worker.attach_gpu()
    assert not worker.is_running


def test_a_forked_process_does_not_use_or_stop_the_worker_of_its_parent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_module, "PROGRAM", RECEIVES_GPU + SLEEPS)
    FIRST_INDUCTOR_WORKER.attach_gpu()
    process = FIRST_INDUCTOR_WORKER._process
    assert process is not None
    child = os.fork()
    if not child:
        is_reset = process._channel.fileno() < 0 and not FIRST_INDUCTOR_WORKER.is_running
        FIRST_INDUCTOR_WORKER.close()
        os._exit(0 if is_reset else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert FIRST_INDUCTOR_WORKER.is_running
    FIRST_INDUCTOR_WORKER.stop()


def test_a_process_without_jobs_exits(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    program = f"import {worker_main.__name__} as m; m.IDLE_TIMEOUT_S = 0.1; m.main()"
    monkeypatch.setattr(worker_module, "PROGRAM", program)
    worker.attach_gpu()
    assert worker._process is not None
    assert worker._process.reap(60) == 0


KILLED = """
import os, signal
from nostall.attach.torch_compile.workers import worker
worker.PROGRAM = (
    "import os, sys, time, nostall.attach.torch_compile.workers.worker_main as main;"
    "main.exit_with_parent(os.getppid());"
    "main.Channel.from_descriptor(int(sys.argv[-1])).send('ready'); time.sleep(60)"
)
worker.FIRST_INDUCTOR_WORKER.attach_gpu()
print(worker.FIRST_INDUCTOR_WORKER._process.pid, flush=True)
worker.FIRST_INDUCTOR_WORKER._process.receive()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_worker_exits_if_the_users_process_is_killed() -> None:
    command = [sys.executable, "-W", "ignore", "-c", KILLED]
    ran = subprocess.run(command, check=False, capture_output=True, text=True)
    assert ran.returncode == -signal.SIGKILL, ran.stderr[-500:]
    process, end = Path("/proc") / ran.stdout.strip(), time.monotonic() + 20
    while process.exists() and time.monotonic() < end:
        time.sleep(0.1)
    assert not process.exists()


def test_a_gpu_without_free_memory_is_not_used(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = TorchState.capture()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    worker.attach_gpu()
    assert not worker.is_running
    failure = worker.run(replace(compile_job(), state=state)).failure
    assert failure == "NotOffloadable: 1024 MB of the GPU are free; at least 2048 are needed"
    # Another worker may be attached that uses no memory yet.
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 << 30, 80 << 30))
    second = Worker("torch", max_workers=2)
    failure = second.run(replace(compile_job(), state=state)).failure
    assert failure == "NotOffloadable: 3072 MB of the GPU are free; at least 4096 are needed"
