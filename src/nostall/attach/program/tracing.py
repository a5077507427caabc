"""A profile of a few steps of the program, taken where it has no profiler of its own."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Sequence
from typing import Any

PRODUCTS = (
    "aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::baddbmm", "aten::baddbmm_",
)  # fmt: skip
ALIGNED = 8
"""Dimensions of products in 16-bit types that are no multiple of this are padded by Inductor; those
of 32-bit types of half of it."""

NEVER_PADDED = 3.0
"""Multiply-adds an element of operands and result up to which Inductor pads no product, unless its
inner dimension is the largest: half of FLOP a byte of the GPUs with the fewest
(torch._inductor.fx_passes.pad_mm.is_mm_compute_bound)."""


class Trace:
    """A running profile; its file has the steps that :meth:`step` ends."""

    def __init__(self, path: str, activities: Sequence[str] = ("CPU", "CUDA")) -> None:
        self.path = path
        profiler = sys.modules["torch"].profiler
        self._profile = profiler.profile(
            activities=[getattr(profiler.ProfilerActivity, name) for name in activities],
            record_shapes=True,
        )
        self.steps = 0
        self.is_usual = True
        """Whether all of its steps did the usual work."""
        self._profile.start()
        self._begin()

    def _begin(self) -> None:
        # The mark of a step, which `profile.step()` sets only with a schedule.
        self._mark: Any = sys.modules["torch"].profiler.record_function(
            f"ProfilerStep#{self.steps}"
        )
        self._mark.__enter__()

    def step(self, *, last: bool = False) -> None:
        """A step of the program has ended."""
        self._end()
        self.steps += 1
        if not last:
            self._begin()

    def _end(self) -> None:
        if self._mark is not None:
            self._mark.__exit__(None, None, None)
            self._mark = None

    def stop(self) -> None:
        """End the profile without a file."""
        self._end()
        self._profile.stop()

    def write(self) -> list[int]:
        """End the profile and write its file.

        Returns the ids of the products that a compiler pads or fuses, as the file has them.
        """
        self._profile.stop()
        self._profile.export_chrome_trace(self.path)
        events = self._profile.profiler.kineto_results.events()
        return [e.correlation_id() for e in events if e.name() in PRODUCTS and _is_padded(e)]

    def finish(self) -> dict[str, Any]:
        """What the watch says of the trace: its file and :meth:`write`, or why there is none."""
        try:
            if not self.is_usual:  # an evaluation, which is more work than a step has
                self.stop()
                return {"trace_obstacle": "a traced step did other work than the usual ones"}
            return {"trace_file": self.path, "padded": self.write()}
        except Exception as error:  # any error of a profiler: the watch needs none
            with contextlib.suppress(Exception):
                self.stop()
            return {"trace_obstacle": f"the profiler fails: {type(error).__name__}: {error}"}


def _is_padded(event: Any) -> bool:
    """Whether a compiler pads or fuses a product."""
    is_float32 = set(event.dtypes()) & {"float", "double"}
    multiple = ALIGNED // 2 if is_float32 else ALIGNED
    operands = [shape for shape in event.shapes() if len(shape) > 1][-2:]
    if len(operands) < 2:
        return False
    (rows, inner), columns = operands[0][-2:], operands[1][-1]
    if inner == 1:  # Inductor computes it with pointwise work
        return True
    touched = rows * inner + inner * columns + rows * columns
    is_inner_largest = inner > rows and inner > columns
    if not is_inner_largest and rows * inner * columns <= NEVER_PADDED * touched:
        return False
    return any(size % multiple for size in (rows, inner, columns))


def open_trace(path: str) -> Trace | str:
    """A running profile, or why none can be taken."""
    try:
        return trace_obstacle() or Trace(path)
    except Exception as error:  # any error of a profiler: the watch needs none
        return f"the profiler fails: {type(error).__name__}: {error}"


def trace_obstacle() -> str:
    """Why no profile can be taken; empty if one can.

    A second profiler would leave the program's own empty.
    """
    torch = sys.modules["torch"]
    if torch._C._autograd._profiler_enabled():
        return "a profiler of the program runs"
    own = getattr(sys.modules.get("torch.profiler"), "profile", None)
    if own is None:
        return "this PyTorch has no profiler"
    if any(issubclass(type(o), own) for o in gc.get_objects()):
        return "the program has a profiler of its own"
    return ""
