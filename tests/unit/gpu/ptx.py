"""Interpreter of the PTX instructions that nostall's helper kernels use, for all threads at once.

Written from the PTX manual, not from the kernels, because the kernels are tested against it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

TYPES: dict[str, Any] = {
    **{f"{k}{8 * w}": f"u{w}" for k in "ub" for w in (1, 2, 4, 8)},
    "f16": "f2",
    "f32": "f4",
    "f64": "f8",
}
COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "eq": np.equal,
    "ge": np.greater_equal,
    "gt": np.greater,
    "le": np.less_equal,
}
Operands = tuple[str, ...]
Memory = Callable[[int, int], Any]
"""(address, size) -> a view of the memory; raises if there is none at this address."""


@dataclass(frozen=True)
class Entry:
    """One parsed kernel."""

    name: str
    parameters: tuple[tuple[str, str], ...]
    code: tuple[tuple[str, str, tuple[str, ...]], ...]
    labels: Mapping[str, int]


def parse(text: str) -> Entry:
    """Parse the kernel in ``text``; raises ValueError if a line is not understood."""
    entry = re.search(r"\.visible \.entry (\w+)\((.*?)\)\s*\{(.*)\}", text, re.S)
    if entry is None:
        raise ValueError("no kernel")
    name, parameters, body = entry.groups()
    code: list[tuple[str, str, tuple[str, ...]]] = []
    labels: dict[str, int] = {}
    for line in filter(None, (raw.strip() for raw in body.splitlines())):
        if line.endswith(":"):
            labels[line[:-1]] = len(code)
        elif not line.startswith(".reg"):
            parts = re.fullmatch(r"(?:@(%p\d+) )?([\w.]+)\s*(.*);", line)
            if parts is None:
                raise ValueError(line)
            guard, operation, operands = parts.groups()
            code.append((guard or "", operation, tuple(filter(None, operands.split(", ")))))
    kinds = tuple((n, t) for t, n in re.findall(r"\.param \.(\w+) (\w+)", parameters))
    return Entry(name, kinds, tuple(code), labels)


class Machine:
    """One launch.  Registers are arrays of 64-bit values, one for each thread."""

    def __init__(self, entry: Entry, values: tuple[Any, ...], blocks: int, threads: int) -> None:
        self.entry, self.count = entry, blocks * threads
        kinds = [np.dtype(TYPES[kind]) for _, kind in entry.parameters]
        self.parameters = {
            name: np.array([value], kind)
            for (name, _), kind, value in zip(entry.parameters, kinds, values, strict=True)
        }
        self.nanoseconds = 0
        lane = np.arange(self.count, dtype=np.uint64)
        self.registers: dict[str, Any] = {
            "%tid.x": lane % np.uint64(threads),
            "%ctaid.x": lane // np.uint64(threads),
            "%ntid.x": np.full(self.count, threads, np.uint64),
            "%nctaid.x": np.full(self.count, blocks, np.uint64),
        }

    def run(self, memory: Memory) -> None:
        """Run until all threads have returned; each step advances the threads furthest behind."""
        counters = np.zeros(self.count, dtype=np.int64)
        end = len(self.entry.code)
        while (now := int(counters.min())) < end:
            threads = np.flatnonzero(counters == now)
            guard, operation, operands = self.entry.code[now]
            counters[threads] = now + 1
            active = threads[self.registers[guard][threads].astype(bool)] if guard else threads
            name, *modifiers = operation.split(".")
            if name == "ret":
                counters[active] = end
            elif name == "bra":
                counters[active] = self.entry.labels[operands[0]]
            elif len(active):
                getattr(self, f"_{name}")(modifiers, operands, active, memory)

    def read(self, operand: str, kind: str, threads: Any) -> Any:
        """The low bits of an operand as type ``kind``, for the given threads."""
        dtype = np.dtype(TYPES[kind])
        if operand == "%globaltimer":
            self.nanoseconds += 1000
            bits = np.full(len(threads), self.nanoseconds, np.uint64)
        elif operand.startswith("%"):
            bits = self.registers[operand][threads]
        elif operand[:2] in ("0f", "0d"):
            bits = np.full(len(threads), int(operand[2:], 16), np.uint64)
        else:
            bits = np.full(len(threads), int(operand, 0), np.uint64)
        return bits.astype(f"u{dtype.itemsize}").view(dtype)

    def write(self, register: str, threads: Any, value: Any) -> None:
        values = self.registers.setdefault(register, np.zeros(self.count, np.uint64))
        values[threads] = value.view(f"u{value.dtype.itemsize}").astype(np.uint64)

    def _ld(self, modifiers: list[str], operands: Operands, threads: Any, memory: Memory) -> None:
        kind = np.dtype(TYPES[modifiers[1]])
        inner = operands[1].strip("[]")
        if modifiers[0] == "param":
            value = self.parameters[inner]
            assert value.dtype == kind, f"{inner} is read as {modifiers[1]}"
            self.write(operands[0], threads, np.repeat(value, len(threads)))
            return
        addresses = self.read(inner, "u64", threads)
        values = [memory(int(a), kind.itemsize).view(kind)[0] for a in addresses]
        self.write(operands[0], threads, np.array(values, kind))

    def _st(self, modifiers: list[str], operands: Operands, threads: Any, memory: Memory) -> None:
        kind = np.dtype(TYPES[modifiers[1]])
        values = self.read(operands[1], modifiers[1], threads)
        for address, value in zip(
            self.read(operands[0].strip("[]"), "u64", threads), values, strict=True
        ):
            memory(int(address), kind.itemsize).view(kind)[0] = value

    def _red(self, modifiers: list[str], operands: Operands, threads: Any, memory: Memory) -> None:
        assert modifiers == ["global", "add", "u64"]
        for address, value in zip(
            self.read(operands[0].strip("[]"), "u64", threads),
            self.read(operands[1], "u64", threads),
            strict=True,
        ):
            memory(int(address), 8).view("u8")[0] += value

    def _griddepcontrol(self, *_: Any) -> None:
        """The order of launches is the fake driver's."""

    def _mov(self, modifiers: list[str], operands: Operands, threads: Any, _: Memory) -> None:
        self.write(operands[0], threads, self.read(operands[1], modifiers[0], threads))

    def _cvt(self, modifiers: list[str], operands: Operands, threads: Any, _: Memory) -> None:
        target, source = [part for part in modifiers if part != "rn"]
        value = self.read(operands[1], source, threads)
        with np.errstate(over="ignore", invalid="ignore"):
            self.write(operands[0], threads, value.astype(TYPES[target]))

    def _mul(self, modifiers: list[str], operands: Operands, threads: Any, _: Memory) -> None:
        mode, kind = modifiers
        a, b = (self.read(operand, kind, threads) for operand in operands[1:])
        if mode == "wide":
            a, b = a.astype(np.uint64), b.astype(np.uint64)
        if mode == "hi":
            high = [(int(x) * int(y)) >> 64 for x, y in zip(a, b, strict=True)]
            self.write(operands[0], threads, np.array(high, np.uint64))
            return
        with np.errstate(over="ignore", invalid="ignore"):
            self.write(operands[0], threads, a * b)

    def _setp(self, modifiers: list[str], operands: Operands, threads: Any, _: Memory) -> None:
        a, b = (self.read(operand, modifiers[1], threads) for operand in operands[1:])
        self.write(operands[0], threads, COMPARE[modifiers[0]](a, b).astype(np.uint8))

    def _abs(self, modifiers: list[str], operands: Operands, threads: Any, _: Memory) -> None:
        self.write(operands[0], threads, np.abs(self.read(operands[1], modifiers[0], threads)))

    def _binary(self, function: Any, kind: str, operands: Operands, threads: Any) -> None:
        a, b = (self.read(operand, kind, threads) for operand in operands[1:])
        with np.errstate(over="ignore", invalid="ignore"):
            self.write(operands[0], threads, function(a, b))

    def _add(self, modifiers: list[str], operands: Operands, threads: Any, _: Memory) -> None:
        self._binary(np.add, modifiers[-1], operands, threads)

    def _sub(self, modifiers: list[str], operands: Operands, threads: Any, _: Memory) -> None:
        self._binary(np.subtract, modifiers[-1], operands, threads)

    def _xor(self, modifiers: list[str], operands: Operands, threads: Any, _: Memory) -> None:
        self._binary(np.bitwise_xor, modifiers[0], operands, threads)

    def _and(self, modifiers: list[str], operands: Operands, threads: Any, _: Memory) -> None:
        self._binary(np.bitwise_and, modifiers[0], operands, threads)

    def _or(self, modifiers: list[str], operands: Operands, threads: Any, _: Memory) -> None:
        self._binary(np.bitwise_or, modifiers[0], operands, threads)

    def _min(self, modifiers: list[str], operands: Operands, threads: Any, _: Memory) -> None:
        self._binary(np.minimum, modifiers[0], operands, threads)

    def _shl(self, modifiers: list[str], operands: Operands, threads: Any, _: Memory) -> None:
        self._binary(np.left_shift, modifiers[0], operands, threads)

    def _shr(self, modifiers: list[str], operands: Operands, threads: Any, _: Memory) -> None:
        self._binary(np.right_shift, modifiers[0], operands, threads)
