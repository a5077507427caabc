"""Run experiments on the GPU: load a cubin, launch it, read hashes and cycles."""

from __future__ import annotations

import ctypes
from contextlib import suppress

import numpy as np

from benchmarks.sass.distances.consumers import Values
from benchmarks.sass.distances.kernel import KERNEL, SCRATCH_OFFSET, Experiment
from benchmarks.sass.distances.observe import Blind, Condition, Words
from benchmarks.sass.distances.values import KINDS, SLOT_BYTES, input_values
from benchmarks.sass.distances.windows import PASSES, THREADS
from nostall.core.launch import LaunchSpec
from nostall.gpu.driver import Cuda, DriverError, KernelArguments, LoadedKernel

GIB = 1 << 30
_MARGIN = 1 << 20


class GpuProber:
    """The CUDA context of this process, with the buffers of all experiments."""

    def __init__(self, seed: int, ordinal: int = 0) -> None:
        """``seed``: of the input values."""
        self.cuda = Cuda(ordinal)
        self._loaded: tuple[bytes, LoadedKernel] | None = None
        self._out = self.cuda.allocate(SCRATCH_OFFSET + THREADS * 16)
        self._inputs: dict[Values, int] = {}
        for kind, slots in self._slots().items():
            values = input_values(kind, seed, slots)
            self._inputs[kind] = self.cuda.allocate(values.nbytes)
            self._upload(self._inputs[kind], values)

    def _slots(self) -> dict[Values, int]:
        """The global address of the slots for each kind of values that this GPU has memory for."""
        near = _within_4_gib(self.cuda.allocate(_MARGIN))
        slots: dict[Values, int] = {kind: near for kind in KINDS if kind != "global_high"}
        with suppress(DriverError):
            slots["global_high"] = _within_4_gib(self.cuda.allocate(4 * GIB + _MARGIN))
        return slots

    def run(self, cubin: bytes, subject: Experiment, condition: Condition) -> tuple[Words, Words]:
        """See :class:`.search.Prober`.  Raises DriverError if the kernel faults."""
        cuda = self.cuda
        if subject.pair.values not in self._inputs:
            raise Blind("this GPU has no memory for addresses that are 4 GiB apart")
        loaded = self._load(cubin)
        records = len(subject.windows) * PASSES
        threads = condition.warps * 32
        block = THREADS if condition.stream else threads
        spec = LaunchSpec(grid=(1, 1, 1), block=(block, 1, 1), args=())
        values = (self._out, self._inputs[subject.pair.values], condition.stream, condition.warps)
        types = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32)
        cuda.fill(self._out, 0xFF, records * THREADS * 8)
        cuda.launch(loaded, spec, KernelArguments((values, types)))
        raw = cuda.download(self._out, records * THREADS * 8).view(np.uint32)
        table = raw.reshape(len(subject.windows), PASSES, THREADS, 2)[:, :, :threads]
        return table[..., 0], table[..., 1]

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
        flat = np.ascontiguousarray(values)
        self.cuda.call("cuMemcpyHtoDAsync", target, flat, flat.nbytes, self.cuda.stream)
        self.cuda.synchronize()


def _within_4_gib(start: int) -> int:
    """The first address from ``start`` whose slots do not cross a multiple of 4 GiB."""
    size = SLOT_BYTES * THREADS
    end = (start | 0xFFFFFFFF) + 1
    return start if start + size <= end else end
