"""Kernel times from CUPTI: the GPU's own time stamps at the beginning and the end of each kernel.

Only the activity API is used, which needs no access to hardware counters.  The record's layout is
that of ``CUpti_ActivityKernel4`` and later (``cupti_activity.h``): kind at byte 0, start at 16, end
at 24, both in nanoseconds.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from nostall.core.errors import MissingPart
from nostall.core.launch import LaunchSpec
from nostall.gpu.driver import Arguments, Cuda, Loaded
from nostall.gpu.timing import Flush, turns

_CONCURRENT_KERNEL = 10
_START, _END = 16, 24
_BUFFER = 4 << 20
_ALIGNMENT = 8

_Requested = ctypes.CFUNCTYPE(
    None,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.POINTER(ctypes.c_size_t),
    ctypes.POINTER(ctypes.c_size_t),
)
_Completed = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t
)


class CuptiTimer:
    """Times each launch alone: neither gaps between launches nor the host are part of it.

    A sample is the median of ``times`` launches in a row; with ``flush`` of one, after the L2 cache
    was overwritten.  Raises :class:`MissingPart` where the library or the permission is missing.
    """

    def __init__(
        self,
        cuda: Cuda,
        spec: LaunchSpec,
        arguments: Arguments,
        times: int,
        flush: Flush | None = None,
        activity: Activity | None = None,
    ) -> None:
        self.cuda, self.spec, self.arguments = cuda, spec, arguments
        self.times = times if flush is None else 1
        self.flush = flush
        self.activity = activity or Activity(_library())

    def pairs(self, kernels: Sequence[Loaded], rounds: int) -> list[list[float]]:
        """As :meth:`nostall.gpu.timing.Timer.pairs`."""
        order = turns(len(kernels), rounds)
        for kernel in kernels:
            self.cuda.launch(kernel, self.spec, self.arguments)
        self.cuda.synchronize()
        self.activity.begin()
        for turn in order:
            for which in turn:
                if self.flush is not None:
                    self.flush()
                for _ in range(self.times):
                    self.cuda.launch(kernels[which], self.spec, self.arguments)
        self.cuda.synchronize()
        seconds = self.activity.end()
        expected = rounds * len(kernels) * self.times
        if len(seconds) != expected or not all(s > 0 for s in seconds):
            raise MissingPart(
                f"CUPTI recorded {len(seconds)} kernels, {expected} ran, or it could not take "
                "their times; measure with --timing graph or --timing events"
            )
        samples: list[list[float]] = [[] for _ in kernels]
        parts = np.reshape(seconds, (-1, self.times))
        for which, part in zip((w for turn in order for w in turn), parts, strict=True):
            samples[which].append(float(np.median(part)))
        return samples


class Activity:
    """CUPTI's records of the kernels that ran between :meth:`begin` and :meth:`end`."""

    def __init__(self, library: Any) -> None:
        self.library = library
        self._buffers: dict[int, Any] = {}
        self._spans: list[tuple[int, int]] = []
        # Held: CUPTI calls them for as long as this process lives.
        self._callbacks = (_Requested(self._requested), _Completed(self._completed))
        self._call("cuptiActivityRegisterCallbacks", *self._callbacks)

    def begin(self) -> None:
        self._spans.clear()
        self._call("cuptiActivityEnable", ctypes.c_int(_CONCURRENT_KERNEL))

    def end(self) -> list[float]:
        """Seconds of each kernel, in the order in which they ran; all of them have ended."""
        self._call("cuptiActivityFlushAll", ctypes.c_uint32(1))
        self._call("cuptiActivityDisable", ctypes.c_int(_CONCURRENT_KERNEL))
        return [(end - start) * 1e-9 for start, end in sorted(self._spans)]

    def _requested(self, buffer: Any, size: Any, records: Any) -> None:
        block = ctypes.create_string_buffer(_BUFFER + _ALIGNMENT)
        address = -(-ctypes.addressof(block) // _ALIGNMENT) * _ALIGNMENT
        self._buffers[address] = block
        buffer[0], size[0], records[0] = address, _BUFFER, 0

    def _completed(
        self, _context: object, _stream: int, buffer: int, _size: int, valid: int
    ) -> None:
        record = ctypes.c_void_p()
        while valid:
            status = self.library.cuptiActivityGetNextRecord(
                ctypes.c_void_p(buffer), ctypes.c_size_t(valid), ctypes.byref(record)
            )
            if status != 0 or record.value is None:
                break
            if ctypes.c_uint32.from_address(record.value).value == _CONCURRENT_KERNEL:
                start = ctypes.c_uint64.from_address(record.value + _START).value
                end = ctypes.c_uint64.from_address(record.value + _END).value
                self._spans.append((start, end))
        self._buffers.pop(buffer, None)

    def _call(self, name: str, *arguments: Any) -> None:
        status = int(getattr(self.library, name)(*arguments))
        if status != 0:
            text = ctypes.c_char_p()
            with suppress(AttributeError):
                self.library.cuptiGetResultString(ctypes.c_int(status), ctypes.byref(text))
            said = text.value.decode() if text.value else f"error {status}"
            raise MissingPart(
                f"CUPTI cannot be used here: {name} says {said}; it may need permission, or "
                "another profiler is attached; measure with --timing graph or --timing events"
            )


def _library() -> Any:
    """CUPTI of the toolkit or of the package ``nvidia-cuda-cupti``."""
    causes: list[str] = []
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        return ctypes.CDLL(load_nvidia_dynamic_lib("cupti").abs_path)
    except Exception as error:  # each version has its own classes for "not known", "not found"
        causes.append(" ".join(str(error).split())[:120] or type(error).__name__)
    for name in ("libcupti.so.13", "libcupti.so.12", "libcupti.so"):
        with suppress(OSError):
            return ctypes.CDLL(name)
    raise MissingPart(
        f"the library CUPTI is not here ({causes[0]}); pip install nvidia-cuda-cupti, or measure "
        "with --timing graph or --timing events"
    )
