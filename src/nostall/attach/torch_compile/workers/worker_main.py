"""What a process does that works for the program."""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import torch

from nostall.attach.torch_compile.workers.cpu_time import ended, tree
from nostall.attach.torch_compile.workers.worker import Answer, said

PATIENCE_S = 600.0
"""Until it is let onto a GPU, or onto none."""
IDLE_S = 60.0
"""Without an errand; the next one starts another process."""
NICE = 5
"""The program goes first."""


def _answered(text: bytes) -> Answer[Any]:
    try:
        fulfil, asked = pickle.loads(text)
        return Answer(done=fulfil(asked))
    except Exception as error:  # who asked says so, and compiles it
        return Answer(said(error))


def _spent() -> float:
    """Processor time of this process and of those that work for it."""
    return tree(os.getpid()) or time.process_time() + ended()


def _warmed() -> None:
    """Compile something small: what Inductor and Triton load for that takes seconds."""
    from torch._inductor import config

    from nostall.attach.torch_compile.workers.compile_job import Errand

    def small(x: torch.Tensor) -> torch.Tensor:
        return x.softmax(-1)

    device = torch.device("cuda", torch.cuda.current_device())
    given = ((8, 8), (8, 1), torch.float32, device, True)
    with config.patch(fx_graph_cache=False):
        Errand.fulfil(Errand(torch.fx.symbolic_trace(small), (given,), {}, None).written())


def follow(parent: int) -> None:
    """End with this process's parent, also amid an errand: who starts a program again needs the
    GPU."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


_program: list[Connection] = []
"""To the program, in a process that works for it."""


def belong(parent: int) -> None:
    """In a process that was forked by one of ours: end with it.  Who waits for its answers is told
    when it is gone, so nobody else holds its connection."""
    while _program:
        _program.pop().close()
    follow(parent)


def main() -> None:
    """Errands from the program, which uses this GPU or none, until it is gone or has no more."""
    follow(os.getppid())
    os.nice(NICE)
    with contextlib.suppress(Exception):  # the first errand says what is wrong
        importlib.import_module(sys.argv[2])
    told = 0.0
    with Connection(int(sys.argv[1])) as connection, contextlib.suppress(EOFError):
        _program.append(connection)
        if not connection.poll(PATIENCE_S):
            os._exit(0)  # the program compiles only, or has stopped
        _place(int(connection.recv_bytes()))
        while connection.poll(IDLE_S):
            answer = _answered(connection.recv_bytes())
            spent = _spent()
            # The process's own start belongs to the first one.
            answer.cpu_seconds, told = spent - told, spent
            connection.send_bytes(pickle.dumps(answer))
    os._exit(0)  # what those that work for it still do is for nobody


def _place(gpu: int) -> None:
    """From now on this GPU is used, or none if negative."""
    if gpu >= 0:
        with contextlib.suppress(Exception):  # the first errand says what is wrong
            torch.cuda.set_device(gpu)
            _warmed()
