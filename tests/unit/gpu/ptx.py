"""Runs the few kinds of PTX instructions that nostall's kernels consist of, all threads at once.

Written from the PTX manual, not from the kernels: it is what they are tested against.
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
Memory = Callable[[int, int], Any]
"""(address, size) -> a view of that much memory; raises where there is none."""


@dataclass(frozen=True)
class Entry:
    """One parsed kernel."""

    name: str
    parameters: tuple[tuple[str, str], ...]
    code: tuple[tuple[str, str, tuple[str, ...]], ...]
    labels: Mapping[str, int]


def parse(text: str) -> Entry:
    """The one kernel of ``text``; raises ValueError for what is not understood."""
    found = re.search(r"\.visible \.entry (\w+)\((.*?)\)\s*\{(.*)\}", text, re.S)
    if found is None:
        raise ValueError("no kernel")
    name, parameters, body = found.groups()
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
    """One launch: registers are arrays with an element per thread, held as 64 bits."""

    def __init__(self, entry: Entry, values: tuple[Any, ...], blocks: int, threads: int) -> None:
        self.entry, self.count = entry, blocks * threads
        kinds = [np.dtype(TYPES[kind]) for _, kind in entry.parameters]
        self.parameters = {
            name: np.array([value], kind)
            for (name, _), kind, value in zip(entry.parameters, kinds, values, strict=True)
        }
        lane = np.arange(self.count, dtype=np.uint64)
        self.registers: dict[str, Any] = {
            "%tid.x": lane % np.uint64(threads),
            "%ctaid.x": lane // np.uint64(threads),
            "%ntid.x": np.full(self.count, threads, np.uint64),
            "%nctaid.x": np.full(self.count, blocks, np.uint64),
        }

    def run(self, memory: Memory) -> None:
        """Always the threads that are furthest behind, until all have returned."""
        at = np.zeros(self.count, dtype=np.int64)
        end = len(self.entry.code)
        while (now := int(at.min())) < end:
            here = np.flatnonzero(at == now)
            guard, operation, operands = self.entry.code[now]
            at[here] = now + 1
            taken = here[self.registers[guard][here].astype(bool)] if guard else here
            name, *how = operation.split(".")
            if name == "ret":
                at[taken] = end
            elif name == "bra":
                at[taken] = self.entry.labels[operands[0]]
            elif len(taken):
                getattr(self, f"_{name}")(how, operands, taken, memory)

    def read(self, operand: str, kind: str, threads: Any) -> Any:
        """The operand's low bits as ``kind``, for these threads."""
        wide = np.dtype(TYPES[kind])
        if operand.startswith("%"):
            bits = self.registers[operand][threads]
        elif operand[:2] in ("0f", "0d"):
            bits = np.full(len(threads), int(operand[2:], 16), np.uint64)
        else:
            bits = np.full(len(threads), int(operand, 0), np.uint64)
        return bits.astype(f"u{wide.itemsize}").view(wide)

    def write(self, register: str, threads: Any, value: Any) -> None:
        kept = self.registers.setdefault(register, np.zeros(self.count, np.uint64))
        kept[threads] = value.view(f"u{value.dtype.itemsize}").astype(np.uint64)

    def _ld(self, how: list[str], operands: tuple[str, ...], threads: Any, memory: Memory) -> None:
        kind = np.dtype(TYPES[how[1]])
        inner = operands[1].strip("[]")
        if how[0] == "param":
            value = self.parameters[inner]
            assert value.dtype == kind, f"{inner} is read as {how[1]}"
            self.write(operands[0], threads, np.repeat(value, len(threads)))
            return
        addresses = self.read(inner, "u64", threads)
        found = [memory(int(a), kind.itemsize).view(kind)[0] for a in addresses]
        self.write(operands[0], threads, np.array(found, kind))

    def _st(self, how: list[str], operands: tuple[str, ...], threads: Any, memory: Memory) -> None:
        kind = np.dtype(TYPES[how[1]])
        values = self.read(operands[1], how[1], threads)
        for address, value in zip(
            self.read(operands[0].strip("[]"), "u64", threads), values, strict=True
        ):
            memory(int(address), kind.itemsize).view(kind)[0] = value

    def _red(self, how: list[str], operands: tuple[str, ...], threads: Any, memory: Memory) -> None:
        assert how == ["global", "add", "u64"]
        for address, value in zip(
            self.read(operands[0].strip("[]"), "u64", threads),
            self.read(operands[1], "u64", threads),
            strict=True,
        ):
            memory(int(address), 8).view("u8")[0] += value

    def _mov(self, how: list[str], operands: tuple[str, ...], threads: Any, _: Memory) -> None:
        self.write(operands[0], threads, self.read(operands[1], how[0], threads))

    def _cvt(self, how: list[str], operands: tuple[str, ...], threads: Any, _: Memory) -> None:
        to, come = [part for part in how if part != "rn"]
        value = self.read(operands[1], come, threads)
        with np.errstate(over="ignore", invalid="ignore"):
            self.write(operands[0], threads, value.astype(TYPES[to]))

    def _mul(self, how: list[str], operands: tuple[str, ...], threads: Any, _: Memory) -> None:
        mode, kind = how
        a, b = (self.read(operand, kind, threads) for operand in operands[1:])
        if mode == "wide":
            a, b = a.astype(np.uint64), b.astype(np.uint64)
        if mode == "hi":
            high = [(int(x) * int(y)) >> 64 for x, y in zip(a, b, strict=True)]
            self.write(operands[0], threads, np.array(high, np.uint64))
            return
        with np.errstate(over="ignore", invalid="ignore"):
            self.write(operands[0], threads, a * b)

    def _setp(self, how: list[str], operands: tuple[str, ...], threads: Any, _: Memory) -> None:
        a, b = (self.read(operand, how[1], threads) for operand in operands[1:])
        self.write(operands[0], threads, COMPARE[how[0]](a, b).astype(np.uint8))

    def _abs(self, how: list[str], operands: tuple[str, ...], threads: Any, _: Memory) -> None:
        self.write(operands[0], threads, np.abs(self.read(operands[1], how[0], threads)))

    def _two(self, function: Any, kind: str, operands: tuple[str, ...], threads: Any) -> None:
        a, b = (self.read(operand, kind, threads) for operand in operands[1:])
        with np.errstate(over="ignore", invalid="ignore"):
            self.write(operands[0], threads, function(a, b))

    def _add(self, how: list[str], operands: tuple[str, ...], threads: Any, _: Memory) -> None:
        self._two(np.add, how[-1], operands, threads)

    def _sub(self, how: list[str], operands: tuple[str, ...], threads: Any, _: Memory) -> None:
        self._two(np.subtract, how[-1], operands, threads)

    def _xor(self, how: list[str], operands: tuple[str, ...], threads: Any, _: Memory) -> None:
        self._two(np.bitwise_xor, how[0], operands, threads)

    def _and(self, how: list[str], operands: tuple[str, ...], threads: Any, _: Memory) -> None:
        self._two(np.bitwise_and, how[0], operands, threads)

    def _or(self, how: list[str], operands: tuple[str, ...], threads: Any, _: Memory) -> None:
        self._two(np.bitwise_or, how[0], operands, threads)

    def _min(self, how: list[str], operands: tuple[str, ...], threads: Any, _: Memory) -> None:
        self._two(np.minimum, how[0], operands, threads)

    def _shl(self, how: list[str], operands: tuple[str, ...], threads: Any, _: Memory) -> None:
        self._two(np.left_shift, how[0], operands, threads)

    def _shr(self, how: list[str], operands: tuple[str, ...], threads: Any, _: Memory) -> None:
        self._two(np.right_shift, how[0], operands, threads)
