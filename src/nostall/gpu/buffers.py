"""Inputs and expected outputs of a kernel, kept in device memory and compared there."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nostall.core.launch import Buffer, LaunchSpec
from nostall.gpu.driver import Cuda

_TYPES: dict[str, Any] = {
    "f16": np.float16,
    "f32": np.float32,
    "f64": np.float64,
    "i8": np.int8,
    "i16": np.int16,
    "i32": np.int32,
    "i64": np.int64,
    "u8": np.uint8,
    "u32": np.uint32,
    "u64": np.uint64,
}
_POISON = (0xFF, 0x5A)
"""Bytes that outputs hold before a checked launch, in turns: an output that is not written cannot
equal the expected one for both."""

_DIFFERING = b"""
.version 7.0
.target sm_75
.address_size 64
.visible .entry differing(.param .u64 a, .param .u64 b, .param .u64 n, .param .u64 count)
{
 .reg .pred %p<3>;
 .reg .b32 %r<8>;
 .reg .b64 %d<12>;
 ld.param.u64 %d0, [a];
 ld.param.u64 %d1, [b];
 ld.param.u64 %d2, [n];
 ld.param.u64 %d3, [count];
 mov.u32 %r0, %ctaid.x;
 mov.u32 %r1, %ntid.x;
 mov.u32 %r2, %tid.x;
 mad.wide.u32 %d4, %r0, %r1, 0;
 cvt.u64.u32 %d5, %r2;
 add.u64 %d4, %d4, %d5;
 mov.u32 %r3, %nctaid.x;
 mul.wide.u32 %d6, %r3, %r1;
LOOP:
 setp.ge.u64 %p0, %d4, %d2;
 @%p0 bra DONE;
 shl.b64 %d7, %d4, 2;
 add.u64 %d8, %d0, %d7;
 add.u64 %d9, %d1, %d7;
 ld.global.u32 %r4, [%d8];
 ld.global.u32 %r5, [%d9];
 setp.ne.u32 %p1, %r4, %r5;
 @%p1 red.global.add.u32 [%d3], 1;
 add.u64 %d4, %d4, %d6;
 bra LOOP;
DONE:
 ret;
}
\0"""
"""PTX that counts the 32-bit words in which two buffers differ."""


@dataclass(frozen=True)
class _Place:
    spec: Buffer
    size: int
    padded: int
    pointer: int


class Buffers:
    """Device memory for one launch: working copies, ``count`` random inputs, expected outputs."""

    def __init__(self, cuda: Cuda, launch: LaunchSpec, count: int, seed: int) -> None:
        self.cuda = cuda
        self.places = [_place(cuda, a) for a in launch.args if isinstance(a, Buffer)]
        self.pointers = {place.spec.name: place.pointer for place in self.places}
        self._inputs: list[dict[str, int]] = []
        self._expected: dict[int, dict[str, int]] = {}
        self._counter = cuda.allocate(16)
        self._compare = cuda.load(_DIFFERING, "differing")
        self._turn = 0
        for number in range(count):
            self._inputs.append({p.spec.name: cuda.allocate(p.padded) for p in self._given()})
            self.refresh(number, np.random.default_rng([seed, number]))

    def refresh(self, number: int, rng: np.random.Generator) -> None:
        """Fill input set ``number`` with new random values; its expected outputs are gone."""
        for place in self._given():
            self.cuda.upload(self._inputs[number][place.spec.name], _random(place.spec, rng))
        self._expected.pop(number, None)

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
        kept: dict[str, int] = self._expected.setdefault(number, {})
        for place in self._results():
            if place.spec.name not in kept:
                kept[place.spec.name] = self.cuda.allocate(place.padded)
            self._clear_padding(place)
            self.cuda.copy(kept[place.spec.name], place.pointer, place.padded)
        self.cuda.synchronize()

    def wrong_words(self, number: int) -> int:
        """How many 32-bit words of all outputs differ from the expected ones."""
        self.cuda.fill(self._counter, 0, 4)
        for place in self._results():
            self._clear_padding(place)
            self._count(place, self._expected[number][place.spec.name])
        return int(self.cuda.download(self._counter, 4).view(np.uint32)[0])

    def _given(self) -> list[_Place]:
        return [p for p in self.places if p.spec.role in ("in", "inout")]

    def _results(self) -> list[_Place]:
        return [p for p in self.places if p.spec.role in ("out", "inout")]

    def _clear_padding(self, place: _Place) -> None:
        if place.padded > place.size:
            self.cuda.fill(place.pointer + place.size, 0, place.padded - place.size)

    def _count(self, place: _Place, expected: int) -> None:
        words = place.padded // 4
        blocks = min(1024, -(-words // 256))
        values = (place.pointer, expected, words, self._counter)
        self.cuda.call(
            "cuLaunchKernel",
            self._compare.function,
            *(blocks, 1, 1),
            *(256, 1, 1),
            0,
            self.cuda.stream,
            (values, (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p)),
            0,
        )


def _place(cuda: Cuda, spec: Buffer) -> _Place:
    width = 2 if spec.dtype == "bf16" else np.dtype(_TYPES[spec.dtype]).itemsize
    size = int(np.prod(spec.shape)) * width
    padded = -(-size // 16) * 16
    return _Place(spec, size, padded, cuda.allocate(padded))


def _random(spec: Buffer, rng: np.random.Generator) -> NDArray[Any]:
    """Uniform values as the launch specification says."""
    count = int(np.prod(spec.shape))
    if spec.bound is not None:
        return rng.integers(0, spec.bound, count).astype(_TYPES[spec.dtype])
    values = rng.random(count, dtype=np.float32) * (spec.high - spec.low) + spec.low
    if spec.dtype == "bf16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(_TYPES[spec.dtype])
