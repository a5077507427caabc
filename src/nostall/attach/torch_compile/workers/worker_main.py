"""Main program of a worker process: receive jobs from the user's process and send their results."""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import sys
import threading
import time
from typing import Any

import torch

from nostall.attach.torch_compile.workers.cpu_time import (
    finished_children_seconds,
    process_tree_seconds,
)
from nostall.attach.torch_compile.workers.worker import JobResult
from nostall.core.errors import one_line
from nostall.core.process import Channel, ProcessEnded

ATTACH_TIMEOUT_S = 600.0
"""Longest wait for the GPU's index after the start, in seconds; then the process exits."""
IDLE_TIMEOUT_S = 60.0
"""Longest wait for a job, in seconds; then the process exits.  A later job starts another one."""
NICE = 5
"""Niceness of the process, so that the user's process has priority."""

_user_process: list[Channel] = []
"""The channel to the user's process, if this is a worker process."""


def main() -> None:
    """Run jobs until the user's process closes the channel, or for a time sends none.

    Arguments of the process: the module to preload, and the channel's file descriptor.  The first
    message is the index of the GPU, negative for none; all others are pickled jobs.
    """
    exit_with_parent(os.getppid())
    os.nice(NICE)
    # A module that cannot be imported makes the first job fail, which reports the error.
    with contextlib.suppress(Exception):
        importlib.import_module(sys.argv[1])
    reported = 0.0
    channel = Channel.from_descriptor(int(sys.argv[-1]))
    _user_process.append(channel)
    with contextlib.suppress(ProcessEnded):
        if not channel.poll(ATTACH_TIMEOUT_S):
            os._exit(0)  # the user's process only compiled, or is suspended
        _use_gpu(channel.receive())
        while channel.poll(IDLE_TIMEOUT_S):
            result = _run_job(channel.receive())
            spent = _cpu_seconds()
            # The first job's result includes the start of the process.
            result.cpu_seconds, reported = spent - reported, spent
            channel.send(result)
    os._exit(0)  # without waiting for the compile processes, whose results are not needed


def _use_gpu(gpu: int) -> None:
    """Make a GPU the current one and warm up compilation on it; negative: use none."""
    if gpu >= 0:
        # A GPU that cannot be used makes the first job fail, which reports the error.
        with contextlib.suppress(Exception):
            torch.cuda.set_device(gpu)
            _warm_up()


def _warm_up() -> None:
    """Compile a small graph: what Inductor and Triton load for that takes seconds."""
    from torch._inductor import config

    from nostall.attach.torch_compile.workers.compile_job import CompileJob

    def softmax(x: torch.Tensor) -> torch.Tensor:
        return x.softmax(-1)

    device = torch.device("cuda", torch.cuda.current_device())
    layout = ((8, 8), (8, 1), torch.float32, device, True)
    job = CompileJob(torch.fx.symbolic_trace(softmax), (layout,), {}, None)
    with config.patch(fx_graph_cache=False):
        CompileJob.run(job.serialize())


def _run_job(data: bytes) -> JobResult[Any]:
    try:
        run, job = pickle.loads(data)
        return JobResult(value=run(job))
    except Exception as error:  # reported to the user's process, which does the work itself
        return JobResult(one_line(error))


def _cpu_seconds() -> float:
    """CPU seconds of this process and of its children."""
    return process_tree_seconds(os.getpid()) or time.process_time() + finished_children_seconds()


def exit_with_parent(parent: int) -> None:
    """Exit when the parent process (by id) ends, also during a job, to free the GPU."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def exit_with_parent_worker(worker: int) -> None:
    """In a process that a worker (by id) forked: exit when the worker ends.

    Closes the channel to the user's process, which otherwise would not notice that the worker
    is gone.
    """
    while _user_process:
        _user_process.pop().close()
    exit_with_parent(worker)
