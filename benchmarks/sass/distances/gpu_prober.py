"""Run experiments on the GPU: load a cubin, launch it, read hashes and cycles."""

from __future__ import annotations

import ctypes
from contextlib import suppress

import numpy as np

from benchmarks.sass.distances.microkernels.consumers import Values
from benchmarks.sass.distances.microkernels.kernel import KERNEL, SCRATCH_OFFSET
from benchmarks.sass.distances.microkernels.values import KINDS, SLOT_BYTES, input_values
from benchmarks.sass.distances.microkernels.windows import PASSES, THREADS
from benchmarks.sass.distances.observe import Blind, Condition, Records, Words
from benchmarks.sass.distances.search import Subject
from nostall.core.launch import LaunchSpec
from nostall.gpu.driver import Cuda, DriverError, KernelArguments, LoadedKernel

GIB = 1 << 30
_LARGEST_LOW = 0x7F000000
"""End of the lower address words that every producer passes on: positive and no NaN as a float."""
_FAR_BYTES = 6 * GIB + (32 << 20)
"""Bytes in which two such addresses, 4 GiB apart, always exist."""
_NEAR_BYTES = 1 << 20
_RECORD_BYTES = 16


class GpuProber:
    """The CUDA context of this process, with the buffers of all experiments."""

    def __init__(self, seed: int, cuda: Cuda | None = None) -> None:
        """``seed``: of the input values."""
        self.cuda = cuda or Cuda()
        self._loaded: tuple[bytes, LoadedKernel] | None = None
        self._out = self.cuda.allocate(SCRATCH_OFFSET + THREADS * 16)
        self._inputs: dict[Values, int] = {}
        for kind, slots in self._slots().items():
            values = input_values(kind, seed, slots)
            self._inputs[kind] = self.cuda.allocate(values.nbytes)
            self._upload(self._inputs[kind], values)

    def _slots(self) -> dict[Values, int]:
        """The global address of the slots for each kind of values that this GPU has memory for."""
        with suppress(DriverError):
            far = harmless_slots(self.cuda.allocate(_FAR_BYTES))
            return dict.fromkeys(KINDS, far)
        near = self.cuda.allocate(_NEAR_BYTES)
        kinds = [kind for kind in KINDS if not kind.startswith("global")]
        if harmless_slots(near) == near:
            kinds.append("global")
        return dict.fromkeys(kinds, near)

    def run(self, cubin: bytes, subject: Subject, condition: Condition) -> Records:
        """See :class:`.search.Prober`.  Raises DriverError if the kernel faults."""
        cuda = self.cuda
        if subject.values not in self._inputs:
            raise Blind("this GPU has no memory for two addresses that are 4 GiB apart")
        loaded = self._load(cubin)
        records = subject.count * PASSES
        size = records * THREADS * _RECORD_BYTES
        threads = condition.warps * 32
        block = THREADS if condition.stream else threads
        spec = LaunchSpec(grid=(1, 1, 1), block=(block, 1, 1), args=())
        values = (self._out, self._inputs[subject.values], condition.stream, condition.warps)
        types = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32)
        cuda.fill(self._out, 0xFF, size)
        cuda.launch(loaded, spec, KernelArguments((values, types)))
        raw = cuda.download(self._out, size).view(np.uint32)
        table = raw.reshape(subject.count, PASSES, THREADS, -1)[:, :, :threads]
        return Records(table[..., 0], table[..., 1], table[..., 2:])

    def _load(self, cubin: bytes) -> LoadedKernel:
        if self._loaded is not None and self._loaded[0] == cubin:
            return self._loaded[1]
        if self._loaded is not None:
            self.cuda.unload(self._loaded[1])
            self._loaded = None
        loaded = self.cuda.load(cubin, KERNEL)
        self._loaded = (cubin, loaded)
        return loaded

    def _upload(self, target: int, values: Words) -> None:
        flat = values.ravel()
        self.cuda.call("cuMemcpyHtoDAsync", target, flat, flat.nbytes, self.cuda.stream)
        self.cuda.synchronize()


def harmless_slots(start: int) -> int:
    """The first address from ``start`` on whose slots have lower words that are harmless.

    The lower words stay below ``_LARGEST_LOW``, so no slot crosses a multiple of 4 GiB.
    """
    low = start & 0xFFFFFFFF
    return start if low + SLOT_BYTES * THREADS <= _LARGEST_LOW else start - low + 4 * GIB
