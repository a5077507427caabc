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
_using: list[Opening] = []
"""What somebody uses, opens or waits for."""
_unwanted: list[Opening] = []
"""What is being closed."""


@contextmanager
def opened(opening: Opening) -> Iterator[Device]:
    """This process's device for ``opening``; it stays open until another one is asked for.

    One user at a time: a worker with several threads has one GPU all the same.
    """
    _using.append(opening)
    try:
        with _busy:
            if not _open or _open[0][0] != opening:
                _close()
                _open.append((opening, opening.make(opening.kernel, opening.plan, _ordinal())))
            yield _open[0][1]
    finally:
        _using.remove(opening)


def close(opening: Opening) -> None:
    """Let go of this process's device for ``opening``, so that others may have the GPU.

    Workers may be shared: what somebody else has open is left alone.
    """
    if opening not in (*_using, *(mine for mine, _ in _open)):
        return
    _unwanted.append(opening)
    try:
        with _busy:
            if _open and _open[0][0] == opening:
                _close()
    finally:
        _unwanted.remove(opening)


def wanted(opening: Opening) -> bool:
    """False once :func:`close` waits for the device: whoever has it is to come to an end."""
    return opening not in _unwanted


def _close() -> None:
    while _open:
        _, device = _open.pop()
        if isinstance(device, LocalGpu):
            device.close()


class FarmDevice:
    """A :class:`~nostall.gpu.device.Device` on one worker of a farm; when that worker is lost, on
    another one.  ``about`` is the GPU that gave the last answer."""

    def __init__(self, farm: Works, opening: Opening) -> None:
        self.farm, self.opening = farm, opening
        self._about: Mapping[str, str] | None = None

    @property
    def about(self) -> Mapping[str, str]:
        if self._about is None:
            self._about = self.farm.call(_about, self.opening)
        return self._about

    def evaluate(self, cubin: bytes) -> Outcome:
        return self._ask("evaluate", cubin)

    def compare(self, cubin: bytes, rounds: int, checks: int) -> Outcome:
        return self._ask("compare", cubin, rounds, checks)

    def _ask(self, verb: str, *arguments: Any) -> Outcome:
        outcome, self._about = self.farm.call(_answer, self.opening, verb, *arguments)
        return outcome


def _answer(opening: Opening, verb: str, *arguments: Any) -> tuple[Outcome, Mapping[str, str]]:
    with opened(opening) as device:
        outcome: Outcome = getattr(device, verb)(*arguments)
        return outcome, dict(device.about)


def _about(opening: Opening) -> Mapping[str, str]:
    with opened(opening) as device:
        return dict(device.about)


def _ordinal() -> int:
    text = os.environ.get(GPU, "0")
    if not text.isdecimal():
        raise BadInput(f"{GPU} is {text!r}; give the number of a GPU, such as 0")
    return int(text)
