"""CUDA graphs of steps: a GPU starts the kernels and collectives of a step without the processor.

The processor needs tens of microseconds for an operator and more for a collective, which is longer
than many of them run.  A graph is captured once and launched as a whole.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from nostall.parallel.errors import CaptureFailed

WARM_UPS = 2
"""Runs before the capture: they create communicators, constants and workspaces of libraries."""
T = TypeVar("T")


class CudaGraph(Generic[T]):
    """The kernels of an action; calling it runs them again on the same memory.

    ``result`` is what the action returned.  Its tensors have new values after each call, and belong
    to the memory pool of the graph: a later graph of the same pool may overwrite them.
    """

    def __init__(self, graph: Any, result: T) -> None:
        self._graph = graph
        self.result: T | None = result

    def __call__(self) -> T | None:
        self._graph.replay()
        return self.result

    def release(self) -> None:
        """Give the memory of the result back to the pool; the graph stays usable."""
        self.result = None

    def close(self) -> None:
        """Destroy the graph: NCCL does not end a communicator that a graph uses."""
        self.release()
        torch.cuda.synchronize()
        self._graph.reset()

    @classmethod
    def capture(
        cls,
        action: Callable[[], T],
        pool: Any = None,
        *,
        warm_ups: int = WARM_UPS,
        stream: Any = None,
    ) -> CudaGraph[T]:
        """The graph of an action on the current CUDA device, which first runs ``warm_ups`` times.

        ``stream`` is that of the capture; None for one of PyTorch's own.
        A collective call if there is a process group.  The action must not wait for the GPU.
        Raises :class:`CaptureFailed` on all ranks if one of them cannot capture it; the cause is
        the error of this rank, if it has one.
        """
        for _ in range(warm_ups):
            action()
        torch.cuda.synchronize()
        graph, result, error = torch.cuda.CUDAGraph(), None, None
        try:
            # Watchdog threads of NCCL use CUDA meanwhile, which the mode "global" forbids.
            with torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
                result = action()
        except RuntimeError as raised:
            error = raised
            torch.cuda.synchronize()
        if not all_ranks(error is None):
            own = "another rank failed" if error is None else str(error).split("\n")[0]
            raise CaptureFailed(
                f"the action cannot be a CUDA graph ({own}); launch it operator by operator"
            ) from error
        return cls(graph, result)  # type: ignore[arg-type]


def all_ranks(own: bool) -> bool:
    """Whether a statement is true on all ranks."""
    if not dist.is_initialized():
        return own
    flag = torch.tensor(float(own), device="cuda")
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag)


def wait_in(action: Callable[[], object]) -> str:
    """Run an action; where it waits for the GPU, as PyTorch's warning says; empty if nowhere.

    A wait shows control or shapes that depend on values on the GPU.
    """
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            action()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    found = [own for own in caught if "synchronizing CUDA operation" in str(own.message)]
    return f"{Path(found[0].filename).name}, line {found[0].lineno}" if found else ""
