"""Kernel times from CUPTI: the GPU's own time stamps at the start and the end of each kernel.

Uses only the activity API, which needs no access to hardware counters.  The record layout is that
of ``CUpti_ActivityKernel4`` and later (``cupti_activity.h``): kind at byte 0, start at byte 16, end
at byte 24, both times in nanoseconds.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from nostall.core.errors import MissingPart
from nostall.core.launch import LaunchSpec
from nostall.gpu.driver import Cuda, KernelArguments, LoadedKernel
from nostall.gpu.timing import L2Flush, round_orders

_CONCURRENT_KERNEL = 10
"""``CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL``."""
_START_OFFSET, _END_OFFSET = 16, 24
_BUFFER_BYTES = 4 << 20
_ALIGNMENT = 8

_RequestCallback = ctypes.CFUNCTYPE(
    None,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.POINTER(ctypes.c_size_t),
    ctypes.POINTER(ctypes.c_size_t),
)
_CompleteCallback = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t
)


class CuptiTimer:
    """Times each launch alone, without gaps between launches and without the host."""

    def __init__(
        self,
        cuda: Cuda,
        spec: LaunchSpec,
        arguments: KernelArguments,
        launches: int,
        flush: L2Flush | None = None,
        activity: Activity | None = None,
    ) -> None:
        """A sample is the median of ``launches`` launches; with ``flush``, one cold launch.

        Raises :class:`MissingPart` if the CUPTI library or the permission to use it is missing.
        """
        self.cuda, self.spec, self.arguments = cuda, spec, arguments
        self.launches = launches if flush is None else 1
        self.flush = flush
        self.activity = activity or Activity(_load_library())

    def time_interleaved(self, kernels: Sequence[LoadedKernel], rounds: int) -> list[list[float]]:
        """As :meth:`nostall.gpu.timing.Timer.time_interleaved`."""
        orders = round_orders(len(kernels), rounds)
        for kernel in kernels:
            self.cuda.launch(kernel, self.spec, self.arguments)
        self.cuda.synchronize()
        self.activity.begin()
        for order in orders:
            for index in order:
                if self.flush is not None:
                    self.flush()
                for _ in range(self.launches):
                    self.cuda.launch(kernels[index], self.spec, self.arguments)
        self.cuda.synchronize()
        seconds = self.activity.end()
        expected = rounds * len(kernels) * self.launches
        if len(seconds) != expected or not all(s > 0 for s in seconds):
            raise MissingPart(
                f"CUPTI recorded {len(seconds)} kernels, {expected} ran, or it could not take "
                "their times; measure with --timing graph or --timing events"
            )
        samples: list[list[float]] = [[] for _ in kernels]
        rows = np.reshape(seconds, (-1, self.launches))
        for index, row in zip((i for order in orders for i in order), rows, strict=True):
            samples[index].append(float(np.median(row)))
        return samples


class Activity:
    """Collects CUPTI's records of the kernels that run between :meth:`begin` and :meth:`end`."""

    def __init__(self, library: Any) -> None:
        self.library = library
        self._buffers: dict[int, Any] = {}
        self._spans: list[tuple[int, int]] = []
        # Kept alive because CUPTI calls them until the process ends.
        self._callbacks = (
            _RequestCallback(self._provide_buffer),
            _CompleteCallback(self._read_records),
        )
        self._call("cuptiActivityRegisterCallbacks", *self._callbacks)

    def begin(self) -> None:
        """Start to record."""
        self._spans.clear()
        self._call("cuptiActivityEnable", ctypes.c_int(_CONCURRENT_KERNEL))

    def end(self) -> list[float]:
        """Stop to record; seconds of each kernel, in order of their starts.

        All kernels must have ended.
        """
        self._call("cuptiActivityFlushAll", ctypes.c_uint32(1))
        self._call("cuptiActivityDisable", ctypes.c_int(_CONCURRENT_KERNEL))
        return [(end - start) * 1e-9 for start, end in sorted(self._spans)]

    def _provide_buffer(self, buffer: Any, size: Any, records: Any) -> None:
        """CUPTI's callback for a new buffer."""
        block = ctypes.create_string_buffer(_BUFFER_BYTES + _ALIGNMENT)
        address = -(-ctypes.addressof(block) // _ALIGNMENT) * _ALIGNMENT
        self._buffers[address] = block
        buffer[0], size[0], records[0] = address, _BUFFER_BYTES, 0

    def _read_records(
        self, _context: object, _stream: int, buffer: int, _size: int, valid: int
    ) -> None:
        """CUPTI's callback for a buffer with ``valid`` bytes of records."""
        record = ctypes.c_void_p()
        while valid:
            status = self.library.cuptiActivityGetNextRecord(
                ctypes.c_void_p(buffer), ctypes.c_size_t(valid), ctypes.byref(record)
            )
            if status != 0 or record.value is None:
                break
            if ctypes.c_uint32.from_address(record.value).value == _CONCURRENT_KERNEL:
                start = ctypes.c_uint64.from_address(record.value + _START_OFFSET).value
                end = ctypes.c_uint64.from_address(record.value + _END_OFFSET).value
                self._spans.append((start, end))
        self._buffers.pop(buffer, None)

    def _call(self, name: str, *arguments: Any) -> None:
        status = int(getattr(self.library, name)(*arguments))
        if status != 0:
            text = ctypes.c_char_p()
            with suppress(AttributeError):
                self.library.cuptiGetResultString(ctypes.c_int(status), ctypes.byref(text))
            reason = text.value.decode() if text.value else f"error {status}"
            raise MissingPart(
                f"CUPTI cannot be used: {name} returned {reason}; it may need permission, or "
                "another profiler is attached; measure with --timing graph or --timing events"
            )


def _load_library() -> Any:
    """Load CUPTI, from the CUDA toolkit or from the package ``nvidia-cuda-cupti``."""
    causes: list[str] = []
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        return ctypes.CDLL(load_nvidia_dynamic_lib("cupti").abs_path)
    except Exception as error:  # of a class that depends on the version of cuda.pathfinder
        causes.append(" ".join(str(error).split())[:120] or type(error).__name__)
    for name in ("libcupti.so.13", "libcupti.so.12", "libcupti.so"):
        with suppress(OSError):
            return ctypes.CDLL(name)
    raise MissingPart(
        f"the CUPTI library is not found ({causes[0]}); pip install nvidia-cuda-cupti, or measure "
        "with --timing graph or --timing events"
    )
