"""A device that is somewhere in a farm, and what a worker does to have it open."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from nostall.core.errors import BadInput, MissingPart
from nostall.farm.farm import GPU, Works
from nostall.gpu import Device, Kernel, LocalGpu, Outcome, Plan

Make = Callable[[Kernel, Plan, int], Device]


def local_gpu(kernel: Kernel, plan: Plan, ordinal: int) -> Device:
    """The real thing."""
    if multiprocessing.current_process().daemon:
        raise MissingPart(
            "this Dask worker is a daemon process and cannot start the process that holds the GPU; "
            "start workers with DASK_DISTRIBUTED__WORKER__DAEMON=False, or with --no-nanny"
        )
    return LocalGpu(kernel, plan, ordinal)


@dataclass(frozen=True)
class Opening:
    """How a worker opens its device; travels to it, so ``make`` is a module's own function."""

    kernel: Kernel
    plan: Plan
    make: Make = local_gpu


_busy = threading.Lock()
_open: list[tuple[Opening, Device]] = []
"""What this process has open; one at most."""


@contextmanager
def opened(opening: Opening) -> Iterator[Device]:
    """This process's device for ``opening``; it stays open until another one is asked for.

    One user at a time: a worker with several threads has one GPU all the same.
    """
    with _busy:
        if not _open or _open[0][0] != opening:
            _close()
            _open.append((opening, opening.make(opening.kernel, opening.plan, _ordinal())))
        yield _open[0][1]


def close() -> None:
    """Let go of this process's device, so that others may have the GPU."""
    with _busy:
        _close()


def _close() -> None:
    while _open:
        _, device = _open.pop()
        if isinstance(device, LocalGpu):
            device.close()


class FarmDevice:
    """A :class:`~nostall.gpu.device.Device` on one worker of a farm; when that worker is lost, on
    another one."""

    def __init__(self, farm: Works, opening: Opening) -> None:
        self.farm, self.opening = farm, opening
        self._about: Mapping[str, str] | None = None

    @property
    def about(self) -> Mapping[str, str]:
        if self._about is None:
            self._about = self.farm.call(_about, self.opening)
        return self._about

    def evaluate(self, cubin: bytes) -> Outcome:
        return self.farm.call(_ask, self.opening, "evaluate", cubin)

    def compare(self, cubin: bytes, rounds: int, checks: int) -> Outcome:
        return self.farm.call(_ask, self.opening, "compare", cubin, rounds, checks)


def _ask(opening: Opening, verb: str, *arguments: Any) -> Outcome:
    with opened(opening) as device:
        answer: Outcome = getattr(device, verb)(*arguments)
        return answer


def _about(opening: Opening) -> Mapping[str, str]:
    with opened(opening) as device:
        return dict(device.about)


def _ordinal() -> int:
    text = os.environ.get(GPU, "0")
    if not text.isdecimal():
        raise BadInput(f"{GPU} is {text!r}; give the number of a GPU, such as 0")
    return int(text)
