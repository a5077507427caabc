"""Inputs and expected outputs of a kernel: made, kept and compared in device memory."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from nostall.core.errors import BadInput
from nostall.core.launch import Buffer, LaunchSpec
from nostall.core.tolerance import Tolerance
from nostall.gpu import device_code
from nostall.gpu.driver import Cuda, DriverError, Loaded

WIDTHS = {
    "f16": 2,
    "bf16": 2,
    "f32": 4,
    "f64": 8,
    "f8e4m3": 1,
    "f8e5m2": 1,
    **{f"{sign}{bits}": bits // 8 for sign in "iu" for bits in (8, 16, 32, 64)},
}
"""Bytes of one element."""
_POISON = (0xFF, 0x5A)
"""Bytes that outputs hold before a checked launch, in turns: an output that is not written cannot
equal the expected one for both."""
_KEY = 0x5851F42D4C957F2D
_MOST = (1 << 63) - 1


@dataclass(frozen=True)
class _Place:
    spec: Buffer
    count: int
    size: int
    padded: int
    pointer: int


class Buffers:
    """Device memory for one launch: working copies, ``sets`` random inputs, expected outputs.

    What a set holds follows from the seed and a *sample number* alone.  Raises :class:`BadInput`
    when there is not enough memory.
    """

    def __init__(
        self, cuda: Cuda, launch: LaunchSpec, sets: int, seed: int, tolerance: Tolerance | None
    ) -> None:
        self.cuda, self.seed, self.tolerance = cuda, seed, tolerance
        self._owned: list[int] = []
        args = [a for a in launch.args if isinstance(a, Buffer)]
        _has_room(cuda, args, sets)
        try:
            self.places = [self._place(spec) for spec in args]
            self._inputs = [
                {p.spec.name: self._allocate(p.padded) for p in self._given()} for _ in range(sets)
            ]
            self._expected = [
                {p.spec.name: self._allocate(p.padded) for p in self._results()}
                for _ in range(sets)
            ]
            self._words = self._allocate(16)
        except DriverError as error:
            raise BadInput(_no_room(args, sets, cuda.memory()[0], str(error))) from error
        self.pointers = {place.spec.name: place.pointer for place in self.places}
        self._number, self._counter = self._words, self._words + 8
        self._fill = {
            p.spec.dtype: cuda.own(device_code.fill(p.spec.dtype), "fill") for p in self._given()
        }
        self._near = {p.spec.dtype: self._judge(p.spec.dtype) for p in self._results()}
        self._advance = cuda.own(device_code.advance(), "advance")
        self._turn = 0

    def set_number(self, number: int) -> None:
        """The sample that :meth:`make` makes next."""
        self.cuda.upload_word(self._number, number)

    def advance(self) -> None:
        """On to the next sample; may be part of a graph."""
        values = (self._number,)
        self._launch(self._advance, 1, (values, (ctypes.c_void_p,)), threads=1)

    def make(self, into: int) -> None:
        """Fill input set ``into`` with the sample whose number is set; may be part of a graph."""
        for position, place in enumerate(self._given()):
            spec = place.spec
            key = (self.seed * device_code.GOLDEN + (position + 1) * _KEY) & _MOST
            values = (
                self._inputs[into][spec.name],
                place.count,
                self._number,
                key,
                spec.low,
                spec.high - spec.low,
                spec.bound or 0,
            )
            types = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint64)
            reals = (ctypes.c_float, ctypes.c_float, ctypes.c_uint64)
            self._launch(self._fill[spec.dtype], place.count, (values, (*types, *reals)))

    def restore(self, number: int) -> None:
        """Working copies as before a launch: inputs of set ``number``, poisoned outputs."""
        self._turn += 1
        for place in self.places:
            role = place.spec.role
            if role in ("in", "inout"):
                source = self._inputs[number][place.spec.name]
                self.cuda.copy(place.pointer, source, place.padded)
            else:
                byte = _POISON[self._turn % 2] if role == "out" else 0
                self.cuda.fill(place.pointer, byte, place.padded)

    def expect(self, number: int) -> None:
        """Keep the present outputs as what set ``number`` must give.

        Padding is part of the comparison, so it is set to zero first on both sides.
        """
        for place in self._results():
            self._clear_padding(place)
            self.cuda.copy(self._expected[number][place.spec.name], place.pointer, place.padded)

    def clear_count(self) -> None:
        self.cuda.fill(self._counter, 0, 8)

    def count_wrong(self, number: int) -> None:
        """Add the words (with a tolerance: floating-point elements) of all outputs that are not
        what set ``number`` must give to the count; may be part of a graph."""
        for place in self._results():
            self._clear_padding(place)
            near = self._near[place.spec.dtype]
            expected = self._expected[number][place.spec.name]
            bitwise = self.tolerance is None or place.spec.dtype not in device_code.FLOATING
            count = place.padded // 4 if bitwise else place.count
            limits = (0.0, 0.0) if bitwise else (self.tolerance.rtol, self.tolerance.atol)  # type: ignore[union-attr]
            values = (place.pointer, expected, count, self._counter, *limits)
            pointers = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p)
            self._launch(near, count, (values, (*pointers, ctypes.c_double, ctypes.c_double)))

    def counted(self) -> int:
        """The count; waits for the device."""
        return self.cuda.download_word(self._counter)

    def wrong(self, number: int) -> int:
        """How many words or elements of the present outputs are not those of set ``number``."""
        self.clear_count()
        self.count_wrong(number)
        return self.counted()

    def release(self) -> None:
        """Give the memory back; nothing can be launched on it any more."""
        self.cuda.synchronize()
        while self._owned:
            self.cuda.free(self._owned.pop())

    def _given(self) -> list[_Place]:
        return [p for p in self.places if p.spec.role in ("in", "inout")]

    def _results(self) -> list[_Place]:
        return [p for p in self.places if p.spec.role in ("out", "inout")]

    def _place(self, spec: Buffer) -> _Place:
        count, size, padded = _sizes(spec)
        return _Place(spec, count, size, padded, self._allocate(padded))

    def _allocate(self, size: int) -> int:
        pointer = self.cuda.allocate(size)
        self._owned.append(pointer)
        return pointer

    def _judge(self, dtype: str) -> Loaded:
        if self.tolerance is not None and dtype in device_code.FLOATING:
            return self.cuda.own(device_code.differing_beyond(dtype), "differing")
        return self.cuda.own(device_code.differing(), "differing")

    def _clear_padding(self, place: _Place) -> None:
        if place.padded > place.size:
            self.cuda.fill(place.pointer + place.size, 0, place.padded - place.size)

    def _launch(
        self,
        code: Loaded,
        count: int,
        packed: tuple[tuple[Any, ...], tuple[Any, ...]],
        threads: int = 256,
    ) -> None:
        """A grid that strides over ``count`` elements."""
        blocks = min(1024, -(-count // threads))
        self.cuda.call(
            "cuLaunchKernel",
            code.function,
            *(blocks, 1, 1),
            *(threads, 1, 1),
            0,
            self.cuda.stream,
            packed,
            0,
        )


def _sizes(spec: Buffer) -> tuple[int, int, int]:
    """Elements, bytes, and bytes up to a multiple of 16."""
    count = 1
    for n in spec.shape:
        count *= n
    size = count * WIDTHS[spec.dtype]
    return count, size, -(-size // 16) * 16


def needed(args: list[Buffer], sets: int) -> int:
    """Bytes of device memory: a working copy of each buffer, and ``sets`` times what goes in and
    what is expected."""
    total = 0
    for spec in args:
        copies = {"in": sets, "out": sets, "inout": 2 * sets, "scratch": 0}[spec.role]
        total += _sizes(spec)[2] * (1 + copies)
    return total


def _has_room(cuda: Cuda, args: list[Buffer], sets: int) -> None:
    free, _ = cuda.memory()
    if needed(args, sets) > free:
        raise BadInput(_no_room(args, sets, free, "too little memory"))


def _no_room(args: list[Buffer], sets: int, free: int, why: str) -> str:
    largest = max(args, key=lambda spec: _sizes(spec)[1])
    return (
        f"the buffers of this launch do not fit on the GPU ({why}): {needed(args, sets):,} bytes "
        f"are needed ({len(args)} buffers with {sets} sets of inputs and expected outputs; the "
        f"largest is {largest.name!r} with {_sizes(largest)[1]:,} bytes), {free:,} are free; make "
        "the shapes smaller, or end what else uses this GPU"
    )
