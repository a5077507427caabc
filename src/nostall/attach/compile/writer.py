"""Kernels that a process without a GPU explores, writes and has Triton compile.

Threads of the program's own process would have to take Python's lock from it: a step that launches
a thousand kernels gives it away as often, and waits up to 5 ms for it each time.  Whoever needs a
kernel later finds its region in the store and its binary in Triton's cache.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
from collections.abc import Mapping
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import Any

import torch
import triton

from nostall.attach.compile.helper import follow
from nostall.attach.compile.operator import resolve
from nostall.attach.compile.processor import COMPILERS
from nostall.attach.compile.race import Race, Racing
from nostall.attach.compile.surroundings import folders, put_folders
from nostall.fusion.graph import Graph

Places = Mapping[str, str | None]
"""Of :func:`folders`."""


@dataclass(frozen=True)
class Writing:
    """An errand: stitch regions, as ``race`` prepares them.  Their kernels are being compiled for
    ``target`` (Triton's word for an architecture) when the answer comes: the plans that race."""

    graphs: tuple[Graph, ...]
    race: Race
    target: Any
    folders: Places = field(default_factory=folders)

    def written(self) -> bytes:
        """For :meth:`fulfil`."""
        return pickle.dumps(self)

    @staticmethod
    def fulfil(text: bytes) -> tuple[Racing, ...]:
        asked: Writing = pickle.loads(text)
        return tuple(_WORKERS.written(asked))


@dataclass(frozen=True)
class Compiling:
    """An errand: wait for all that is being compiled."""

    def written(self) -> bytes:
        """For :meth:`fulfil`."""
        return b""

    @staticmethod
    def fulfil(text: bytes) -> None:
        _WORKERS.wait()


class _Workers:
    """Processes of the process that fulfils errands; they share what it has imported."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None
        self._begun: list[Future[None]] = []

    def written(self, asked: Writing) -> list[Racing]:
        """Raises whatever fails in one of them, or :class:`BrokenProcessPool` where one died."""
        if self._pool is None:
            context = multiprocessing.get_context("fork")
            self._pool = ProcessPoolExecutor(COMPILERS, context, follow, (os.getpid(),))
        try:
            return self._written(self._pool, asked)
        except BrokenProcessPool:
            self._pool = None
            raise

    def _written(self, pool: ProcessPoolExecutor, asked: Writing) -> list[Racing]:
        racing, known = list[Racing](), set[str]()
        each = [pool.submit(_prepared, graph, asked.race, asked.folders) for graph in asked.graphs]
        for one in each:
            kernels, regions = one.result()
            racing += regions
            for kernel in kernels:
                if kernel not in known:
                    known.add(kernel)
                    self._begun.append(pool.submit(_compile, kernel, asked.target, asked.folders))
        return racing

    def wait(self) -> None:
        """Until nothing is being compiled.  What has failed is compiled by who needs it."""
        begun, self._begun = self._begun, []
        wait(begun)


_WORKERS = _Workers()


def _prepared(graph: Graph, race: Race, places: Places) -> tuple[list[str], list[Racing]]:
    put_folders(places)
    return list(race.prepare(graph)), race.regions


def _compile(kernel: str, target: Any, places: Places) -> None:
    put_folders(places)
    # Compilers need no more than the name of the architecture: there is no context on a GPU.
    triton.runtime.driver.set_active(Architecture(target))
    resolve(kernel).warm(torch.device("cuda"))


class Architecture:
    """As much of a driver as Triton asks before it compiles."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0

    @property
    def launcher_cls(self) -> Any:
        """What Triton has compiled for each signature, too, in some versions."""
        from triton.backends.nvidia.driver import CudaLauncher

        return CudaLauncher
