"""Run work on a parallel branch of the CUDA graph that is being captured.

Kernels captured on one stream form a chain in the graph.  Work that reads no memory, such as
drawing random numbers, depends on nothing.  Captured on a second stream it runs in parallel to the
kernels before it, and only the kernels that read its result wait for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from nostall.gpu.driver import DriverError

NON_BLOCKING = 1
"""``CU_STREAM_NON_BLOCKING``: the stream does not synchronize with the legacy default stream."""

Placement = Literal["in order", "fork", "branch"]
"""Where work is captured: on the main stream, on the branch stream after it waited for the main
stream, or on the branch stream, which is part of the capture already."""

_branches: dict[tuple[int, int], int] = {}
"""Handles of branch streams by (device, main stream).  They are created here, not taken from
PyTorch's pool, because the user's process may use pool streams for other work."""


def run_on_branch(make: Callable[[], Tensor], driver: Any = None) -> Tensor:
    """Call ``make`` on a branch stream if the current stream is being captured.

    ``make`` returns a new tensor on the current device and reads no memory.  In a capture, its
    kernels wait only for what was captured before the first call, and the current stream waits for
    them.  Without a capture, or if a driver call fails, ``make`` runs on the current stream.

    ``driver``: the module ``cuda.bindings.driver``, or a test's fake of it.
    """
    if not torch.cuda.is_current_stream_capturing():
        return make()
    main = torch.cuda.current_stream()
    driver = driver or _import_bindings()
    if driver is None:
        return make()
    try:
        handle = _branch_stream(driver, main)
        where = placement(capture_id(driver, main.cuda_stream), capture_id(driver, handle))
    except DriverError:
        return make()
    if where == "in order":
        return make()
    branch = torch.cuda.ExternalStream(handle, device=main.device)
    if where == "fork":
        branch.wait_stream(main)
    with torch.cuda.stream(branch):
        tensor = make()
    main.wait_stream(branch)
    # Otherwise the allocator could reuse the memory on the branch before the main stream reads it.
    tensor.record_stream(main)
    return tensor


def placement(main: int | None, branch: int | None) -> Placement:
    """Where to capture work, given the capture ids of both streams (None: not capturing)."""
    if main is None:
        return "in order"
    if branch is None:
        return "fork"
    return "branch" if branch == main else "in order"


def capture_id(driver: Any, stream: int) -> int | None:
    """The id of the capture that a stream is part of, or None if it is not capturing.

    Raises :class:`DriverError` if the driver call fails.
    """
    _, status, number, *_ = _call(driver, "cuStreamGetCaptureInfo", stream)
    active = driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
    return int(number) if int(status) == int(active) else None


def _branch_stream(driver: Any, main: torch.cuda.Stream) -> int:
    key = (main.device.index, main.cuda_stream)
    if key not in _branches:
        _, handle = _call(driver, "cuStreamCreate", NON_BLOCKING)
        _branches[key] = int(handle)
    return _branches[key]


def _call(driver: Any, name: str, *arguments: Any) -> tuple[Any, ...]:
    """Call a driver function; returns its results, the status first.

    Raises :class:`DriverError` if it fails.
    """
    results: tuple[Any, ...] = getattr(driver, name)(*arguments)
    if int(results[0]) != 0:
        raise DriverError(getattr(results[0], "name", str(results[0])), name)
    return results


def _import_bindings() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError:
        return None
    return driver
