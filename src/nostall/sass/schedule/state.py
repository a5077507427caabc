"""One schedule of one function: an order and a control word per instruction; immutable."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nostall.core.errors import BadRun
from nostall.sass.binary.encoding import Control
from nostall.sass.program.program import Function

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class Schedule:
    """``order[p]`` is the original index at position p; the other arrays (uint8) are indexed by
    original index and hold the control fields of that instruction.  All have n elements."""

    order: NDArray[np.int32]
    stall: Bytes
    yields: Bytes
    write_sb: Bytes
    read_sb: Bytes
    wait: Bytes
    reuse: Bytes

    def __post_init__(self) -> None:
        for array in self.arrays():
            array.setflags(write=False)

    def arrays(self) -> tuple[NDArray[np.int32] | Bytes, ...]:
        """The arrays in the order of the fields (named: this runs at every move)."""
        return (
            self.order,
            self.stall,
            self.yields,
            self.write_sb,
            self.read_sb,
            self.wait,
            self.reuse,
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schedule) and self.key() == other.key()

    def __hash__(self) -> int:
        return hash(self.key())

    def key(self) -> bytes:
        """16 bytes that identify the schedule."""
        digest = hashlib.blake2b(digest_size=16)
        for array in self.arrays():
            digest.update(array.tobytes())
        return digest.digest()

    def control(self, index: int) -> Control:
        """The control word of the instruction with original index ``index``."""
        return Control(
            stall=int(self.stall[index]),
            yields=bool(self.yields[index]),
            write_sb=int(self.write_sb[index]),
            read_sb=int(self.read_sb[index]),
            wait=int(self.wait[index]),
            reuse=int(self.reuse[index]),
        )

    @classmethod
    def of(cls, function: Function) -> Schedule:
        """The schedule that a function has now."""
        n = len(function.instructions)
        order = np.array([i.index for i in function.instructions], dtype=np.int32)
        columns = np.zeros((6, n), dtype=np.uint8)
        for instruction in function.instructions:
            c = instruction.control
            columns[:, instruction.index] = (
                c.stall,
                c.yields,
                c.write_sb,
                c.read_sb,
                c.wait,
                c.reuse,
            )
        return cls(order, *(column.copy() for column in columns))

    def impose(self, function: Function) -> Function:
        """``function`` with this schedule."""
        by_index = {i.index: i for i in function.instructions}
        return function.reordered(
            [by_index[i].with_control(self.control(i)) for i in self.order.tolist()]
        )

    def dump(self) -> str:
        """One line of text: the arrays in hexadecimal."""
        return ":".join(array.tobytes().hex() for array in self.arrays())

    @classmethod
    def load(cls, text: str, size: int) -> Schedule:
        """The inverse of :meth:`dump` for a function of ``size`` instructions."""
        try:
            parts = [bytes.fromhex(part) for part in text.split(":")]
            order = np.frombuffer(parts[0], dtype=np.int32).copy()
            rest = [np.frombuffer(part, dtype=np.uint8).copy() for part in parts[1:]]
        except ValueError as error:
            raise BadRun(f"the saved schedule cannot be read ({error}); start anew") from error
        if len(order) != size or len(rest) != 6 or any(len(a) != size for a in rest):
            raise BadRun(
                f"the saved schedule has {len(order)} instructions, the kernel has {size}; it "
                "belongs to another kernel"
            )
        return cls(order, *rest)
