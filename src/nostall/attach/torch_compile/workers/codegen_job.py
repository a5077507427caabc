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
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import triton

from nostall.attach.torch_compile.measure.plan_tuning import Race, Racing
from nostall.attach.torch_compile.runtime.custom_op import resolve
from nostall.attach.torch_compile.workers.cpu_time import COMPILERS
from nostall.attach.torch_compile.workers.torch_state import folders, put_folders
from nostall.attach.torch_compile.workers.worker import belong, said
from nostall.fusion.codegen.runtime.kernel import clear_source_cache
from nostall.fusion.graph.graph import Graph

Places = Mapping[str, str | None]
"""Of :func:`folders`."""
AT_ONCE_S = 60.0
"""Seconds for one answer: who waits for longer asks again."""


@dataclass(frozen=True)
class Written:
    """What has been done: the plans that race, and what went wrong.  ``left`` kernels are still
    being compiled; ``died``: one of the processes did, amid something."""

    racing: tuple[Racing, ...] = ()
    failures: tuple[str, ...] = ()
    left: int = 0
    died: bool = False


@dataclass(frozen=True)
class Writing:
    """An errand: stitch regions, as ``race`` prepares them.  When the answer comes their kernels
    are being compiled for ``target`` (Triton's word for an architecture); those of other owners
    are not any more."""

    graphs: tuple[Graph, ...]
    race: Race
    target: Any
    owner: int = 0
    folders: Places = field(default_factory=folders)

    def written(self) -> bytes:
        """For :meth:`fulfil`."""
        return pickle.dumps(replace(self, race=replace(self.race, regions=[])))

    @staticmethod
    def fulfil(text: bytes) -> Written:
        asked: Writing = pickle.loads(text)
        return _WORKERS.written(asked)


@dataclass(frozen=True)
class Compiling:
    """An errand: wait for what is being compiled, :data:`AT_ONCE_S` at most."""

    def written(self) -> bytes:
        """For :meth:`fulfil`."""
        return b""

    @staticmethod
    def fulfil(text: bytes) -> Written:
        return _WORKERS.compiled()


class _Workers:
    """Processes of the process that fulfils errands; they share what it has imported."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None
        self._begun: list[Future[str]] = []
        self._owner = 0

    def written(self, asked: Writing) -> Written:
        """Explore regions side by side, and have their kernels compiled."""
        if asked.owner != self._owner:
            for one in self._begun:
                one.cancel()
            self._owner, self._begun = asked.owner, []
        for is_new in (self._pool is None, True):
            try:
                return self._written(asked, self._started())
            except BrokenProcessPool:
                self._pool, self._begun = None, []
                if is_new:  # or it may have been broken before
                    break
        return Written(died=True)

    def _written(self, asked: Writing, pool: ProcessPoolExecutor) -> Written:
        racing, failures, known = list[Racing](), list[str](), set[str]()
        race, places = asked.race, asked.folders
        for region in [pool.submit(_prepared, one, race, places) for one in asked.graphs]:
            kernels, plans, failure = region.result()
            if failure:  # one region is not worth the others
                failures.append(failure)
            racing += plans
            new = [kernel for kernel in dict.fromkeys(kernels) if kernel not in known]
            known.update(new)
            self._begun += [pool.submit(_compile, one, asked.target, places) for one in new]
        return Written(tuple(racing), tuple(failures))

    def compiled(self) -> Written:
        """What has been compiled since this was asked last."""
        done, left = wait(self._begun, AT_ONCE_S)
        self._begun = [one for one in self._begun if one in left]
        try:
            failures = dict.fromkeys(failure for one in done if (failure := one.result()))
        except BrokenProcessPool:
            self._pool, self._begun = None, []
            return Written(died=True)
        return Written((), tuple(failures), len(self._begun))

    def _started(self) -> ProcessPoolExecutor:
        if self._pool is None:
            context = multiprocessing.get_context("fork")
            self._pool = ProcessPoolExecutor(COMPILERS, context, belong, (os.getpid(),))
        return self._pool


_WORKERS = _Workers()


def _at(places: Places) -> None:
    """Keep everything there; what is in memory would not be written there again."""
    if put_folders(places):
        clear_source_cache()
        resolve.cache_clear()


def _prepared(graph: Graph, race: Race, places: Places) -> tuple[list[str], list[Racing], str]:
    kernels = list[str]()
    try:
        _at(places)
        kernels += race.prepare(graph)
    except Exception as error:  # as a text: one that cannot be pickled would look like a death
        return kernels, race.regions, said(error)
    return kernels, race.regions, ""


def _compile(kernel: str, target: Any, places: Places) -> str:
    try:
        _at(places)
        # Compilers need no more than the name of the architecture: nothing is on a GPU.
        triton.runtime.driver.set_active(Architecture(target))
        resolve(kernel).warm(torch.device("cuda"))
    except Exception as error:  # likewise
        return said(error)
    return ""


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
