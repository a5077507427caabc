"""Gluon for Triton's interpreter, which knows Triton only: layouts are left out, shared memory is
bytes of numpy.

What it shows is that every chunk is read where it was written and before something else is written
there: memory begins as NaN.  It runs one operator after the other for all threads, so it shows
nothing of barriers and layouts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

POISON = 0xFF
"""A byte of NaN in every float."""


class Language:
    """What stands for ``triton.experimental.gluon.language`` in kernels."""

    def __getattr__(self, name: str) -> Any:
        import triton.language as tl

        # The interpreter puts its own operators there while a kernel runs.
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

    def allocate_shared_memory(self, dtype: Any, shape: list[int], layout: object) -> Memory:
        whole = np.full(int(np.prod(shape)) * _bytes(dtype), POISON, np.uint8)
        return Memory(whole, dtype, tuple(shape))

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
    """Bytes of shared memory seen as a tensor."""

    whole: np.ndarray
    dtype: Any
    shape: tuple[int, ...]

    def reinterpret(self, dtype: Any, shape: list[int], layout: object) -> Memory:
        if int(np.prod(shape)) * _bytes(dtype) != self.whole.size:
            raise AssertionError(f"{self.whole.size} bytes are not {dtype} of {shape}")
        return Memory(self.whole, dtype, tuple(shape))

    def index(self, at: int) -> Memory:
        """One of the tensors along the first axis."""
        inner = self.shape[1:]
        size = int(np.prod(inner)) * _bytes(self.dtype)
        if not 0 <= at < self.shape[0]:
            raise AssertionError(f"chunk {at} of {self.shape[0]}")
        return Memory(self.whole[at * size : (at + 1) * size], self.dtype, inner)

    def load(self, layout: object) -> Any:
        import triton.language as tl
        from triton.runtime.interpreter import TensorHandle, _get_np_dtype

        data = self.whole.view(_get_np_dtype(self.dtype)).reshape(self.shape).copy()
        return tl.core.tensor(
            TensorHandle(data, self.dtype), tl.block_type(self.dtype, list(self.shape))
        )

    def store(self, value: Any) -> None:
        if tuple(value.shape) != self.shape or value.dtype != self.dtype:
            raise AssertionError(f"{value.dtype} {value.shape} into {self.dtype} {self.shape}")
        self.whole[:] = np.ascontiguousarray(value.handle.data).view(np.uint8).reshape(-1)


class Copies:
    """What stands for ``async_copy``: nothing arrives before it is waited for."""

    def __init__(self) -> None:
        self._on_the_way: list[tuple[Memory, Any]] = []

    def async_load(self, memory: Memory, pointer: Any, mask: Any = None) -> None:
        import triton.language as tl

        self._on_the_way.append((memory, tl.load(pointer, mask=mask)))

    def commit_group(self) -> None:
        return None

    def wait_group(self, left: int) -> None:
        for memory, value in self._on_the_way:
            memory.store(value)
        self._on_the_way.clear()


def _bytes(dtype: Any) -> int:
    return int(dtype.primitive_bitwidth) // 8


def prepare() -> None:
    """Let kernels that import Gluon get this one."""
    import triton
    from triton.experimental import gluon
    from triton.experimental.gluon.language.nvidia import ampere

    ampere.async_copy = Copies()
    gluon.jit = triton.jit
    gluon.language = Language()
