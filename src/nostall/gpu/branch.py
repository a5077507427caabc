"""A branch of the CUDA graph that is being captured, for work that waits for nothing before it.

What a program captures on one stream runs one kernel after the other.  Work that reads no memory,
as the drawing of random numbers, has nothing to wait for: captured on a stream of its own it runs
beside the kernels before it, and only what reads its result waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from nostall.gpu.driver import DriverError

NON_BLOCKING = 1
"""Of ``cuStreamCreate``: the stream knows nothing of the legacy default one."""

Way = Literal["in order", "fork", "branch"]

_branches: dict[tuple[int, int], int] = {}
"""The stream beside each one that captured, by device: no program has it for anything else, as it
may one of PyTorch's pool."""


def beside(make: Callable[[], Tensor], driver: Any = None) -> Tensor:
    """What ``make`` returns: a new tensor on the current device, made without reading memory.

    While the current stream is captured the kernels of ``make`` are a branch of their own: they
    wait for what was captured before the first one only, and the current stream waits for them.
    Otherwise, and where the driver does not tell, all is in order.  ``driver`` is the module
    ``cuda.bindings.driver``, or a test's stand-in.
    """
    if not torch.cuda.is_current_stream_capturing():
        return make()
    main = torch.cuda.current_stream()
    driver = driver or _bindings()
    if driver is None:
        return make()
    try:
        handle = _branch_of(driver, main)
        way = way_of(capture_of(driver, main.cuda_stream), capture_of(driver, handle))
    except DriverError:
        return make()
    if way == "in order":
        return make()
    branch = torch.cuda.ExternalStream(handle, device=main.device)
    if way == "fork":
        branch.wait_stream(main)
    with torch.cuda.stream(branch):
        made = make()
    main.wait_stream(branch)
    # Its memory is not given to another call of the branch, which would not wait for the reader.
    made.record_stream(main)
    return made


def way_of(main: int | None, branch: int | None) -> Way:
    """What is to be done, by the numbers of the captures that two streams are part of; None for a
    stream that is not captured."""
    if main is None:
        return "in order"
    if branch is None:
        return "fork"
    return "branch" if branch == main else "in order"


def capture_of(driver: Any, stream: int) -> int | None:
    """The number of the capture that a stream is part of, None where it is not captured.  Raises
    :class:`DriverError` where the driver does not tell."""
    _, captured, number, *_ = _called(driver, "cuStreamGetCaptureInfo", stream)
    active = driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
    return int(number) if int(captured) == int(active) else None


def _branch_of(driver: Any, main: torch.cuda.Stream) -> int:
    key = (main.device.index, main.cuda_stream)
    if key not in _branches:
        _, made = _called(driver, "cuStreamCreate", NON_BLOCKING)
        _branches[key] = int(made)
    return _branches[key]


def _called(driver: Any, name: str, *arguments: Any) -> tuple[Any, ...]:
    """What a driver function returns, its status first."""
    found: tuple[Any, ...] = getattr(driver, name)(*arguments)
    if int(found[0]) != 0:
        raise DriverError(getattr(found[0], "name", str(found[0])), name)
    return found


def _bindings() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError:
        return None
    return driver
