"""A schedule of one function: an order and the control words of its instructions; immutable."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from nostall.core.errors import BadRun
from nostall.sass.binary.encoding import Control
from nostall.sass.program.program import Function
from nostall.sass.schedule.arrays import Int32Array, UInt8Array


@dataclass(frozen=True, eq=False)
class Schedule:
    """Order and control fields of the n instructions of a function.

    ``order`` holds the original index of the instruction at each position. The other arrays hold
    one control field each, by original index.
    """

    order: Int32Array
    stall: UInt8Array
    yields: UInt8Array
    write_sb: UInt8Array
    read_sb: UInt8Array
    wait: UInt8Array
    reuse: UInt8Array

    def __post_init__(self) -> None:
        for array in self.arrays():
            array.setflags(write=False)

    def arrays(self) -> tuple[Int32Array | UInt8Array, ...]:
        """The arrays in the order of the fields, written out because each move calls this."""
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
        """A hash of 16 bytes that identifies the schedule."""
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
    def from_function(cls, function: Function) -> Schedule:
        """The current schedule of a function."""
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
        """A copy of ``function`` with this schedule."""
        by_index = {i.index: i for i in function.instructions}
        return function.reordered(
            [by_index[i].with_control(self.control(i)) for i in self.order.tolist()]
        )

    def dump(self) -> str:
        """The schedule as one line of text: the arrays in hexadecimal."""
        return ":".join(array.tobytes().hex() for array in self.arrays())

    @classmethod
    def load(cls, text: str, size: int) -> Schedule:
        """Read the text of :meth:`dump` for a function of ``size`` instructions.

        Raises :class:`BadRun` if the text is damaged or belongs to another kernel.
        """
        try:
            parts = [bytes.fromhex(part) for part in text.split(":")]
            order = np.frombuffer(parts[0], dtype=np.int32).copy()
            fields = [np.frombuffer(part, dtype=np.uint8).copy() for part in parts[1:]]
        except ValueError as error:
            raise BadRun(f"the saved schedule cannot be read ({error}); start a new run") from error
        if len(order) != size or len(fields) != 6 or any(len(a) != size for a in fields):
            raise BadRun(
                f"the saved schedule has {len(order)} instructions, the kernel has {size}; the "
                "schedule belongs to another kernel; resume with the kernel of the run"
            )
        return cls(order, *fields)
