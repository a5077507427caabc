"""Gluon on Triton's interpreter, which supports only Triton: a numpy model of shared memory.

It checks that kernels read each chunk of shared memory from where they wrote it, before they write
something else there; shared memory starts as NaN. It cannot check barriers and layouts: it ignores
layouts, and runs each operation for all threads before the next.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

POISON = 0xFF
"""Initial byte of shared memory; floats of any width that consist of it are NaN."""


class Language:
    """Replacement of the module ``triton.experimental.gluon.language``."""

    def __getattr__(self, name: str) -> Any:
        import triton.language as tl

        # Looked up on each access: the interpreter patches the module while a kernel runs.
        return getattr(tl, name)

    @property
    def shared_memory_descriptor(self) -> type[Memory]:
        return Memory

    def barrier(self) -> None:
        return None

    def arange(self, start: int, end: int, layout: object) -> Any:
        return self.__getattr__("arange")(start, end)

    def zeros(self, shape: tuple[int, ...], dtype: Any, layout: object) -> Any:
        return self.__getattr__("zeros")(shape, dtype)

    def full(self, shape: tuple[int, ...], value: Any, dtype: Any, layout: object = None) -> Any:
        return self.__getattr__("full")(shape, value, dtype)

    def convert_layout(self, value: Any, layout: object) -> Any:
        return value

    def allocate_shared_memory(self, dtype: Any, shape: list[int], layout: object) -> Memory:
        data = np.full(int(np.prod(shape)) * _bytes(dtype), POISON, np.uint8)
        return Memory(data, dtype, tuple(shape))

    @staticmethod
    def BlockedLayout(*_: object) -> None:  # noqa: N802 - Gluon's name
        return None

    @staticmethod
    def SwizzledSharedLayout(*_: object) -> None:  # noqa: N802 - Gluon's name
        return None

    @staticmethod
    def SliceLayout(*_: object) -> None:  # noqa: N802 - Gluon's name
        return None


@dataclass(frozen=True)
class Memory:
    """A tensor in shared memory, Gluon's ``shared_memory_descriptor``."""

    data: np.ndarray
    """The tensor's bytes, shared with other descriptors of the same memory."""
    dtype: Any
    shape: tuple[int, ...]

    def reinterpret(self, dtype: Any, shape: list[int], layout: object) -> Memory:
        """The same bytes with another dtype and shape."""
        if int(np.prod(shape)) * _bytes(dtype) != self.data.size:
            raise AssertionError(f"{self.data.size} bytes are not {dtype} of {shape}")
        return Memory(self.data, dtype, tuple(shape))

    def index(self, at: int) -> Memory:
        """The tensor at an index of the first axis."""
        inner = self.shape[1:]
        size = int(np.prod(inner)) * _bytes(self.dtype)
        if not 0 <= at < self.shape[0]:
            raise AssertionError(f"chunk {at} of {self.shape[0]}")
        return Memory(self.data[at * size : (at + 1) * size], self.dtype, inner)

    def load(self, layout: object) -> Any:
        import triton.language as tl
        from triton.runtime.interpreter import TensorHandle, _get_np_dtype

        data = self.data.view(_get_np_dtype(self.dtype)).reshape(self.shape).copy()
        return tl.core.tensor(
            TensorHandle(data, self.dtype), tl.block_type(self.dtype, list(self.shape))
        )

    def store(self, value: Any) -> None:
        if tuple(value.shape) != self.shape or value.dtype != self.dtype:
            raise AssertionError(f"{value.dtype} {value.shape} into {self.dtype} {self.shape}")
        self.data[:] = np.ascontiguousarray(value.handle.data).view(np.uint8).reshape(-1)


class AsyncCopy:
    """Replacement of Gluon's ``async_copy``: data arrives only when a kernel waits for it."""

    def __init__(self) -> None:
        self._in_flight: list[tuple[Memory, Any]] = []

    def async_load(self, memory: Memory, pointer: Any, mask: Any = None) -> None:
        import triton.language as tl

        self._in_flight.append((memory, tl.load(pointer, mask=mask)))

    def commit_group(self) -> None:
        return None

    def wait_group(self, num_outstanding: int) -> None:
        """Complete all copies, also those that a GPU could still leave outstanding."""
        for memory, value in self._in_flight:
            memory.store(value)
        self._in_flight.clear()


def _bytes(dtype: Any) -> int:
    return int(dtype.primitive_bitwidth) // 8


def prepare() -> None:
    """Patch Gluon in this process, so that kernels that import it run on the interpreter."""
    import triton
    from triton.experimental import gluon
    from triton.experimental.gluon.language.nvidia import ampere

    ampere.async_copy = AsyncCopy()
    gluon.jit = triton.jit
    gluon.language = Language()
