"""Fast construction of cubins for many schedules of one function, by patching bytes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nostall.sass.binary import encoding
from nostall.sass.binary.encoding import WORD_BYTES
from nostall.sass.program.program import Function, Program
from nostall.sass.schedule.state import Schedule

_HALF_BITS = 64
"""Bits of half an instruction word; the upper half holds all control bits."""


class Patcher:
    """Writes schedules of one function into its cubin.

    ``patch(state)`` equals ``space.impose(state).to_cubin()``, without building a program: each
    instruction word is encoded from its payload and its control fields, and each offset that the
    cubin records follows its instruction.
    """

    def __init__(self, program: Program, function: Function) -> None:
        self._cubin = program.to_cubin()
        self._text = function.text
        by_index = sorted(function.instructions, key=lambda i: i.index)
        words = [(i.payload & (1 << _HALF_BITS) - 1, i.payload >> _HALF_BITS) for i in by_index]
        self._payload = np.array(words, dtype=np.uint64)
        self._records = [
            (record, *divmod(record.offset, WORD_BYTES))
            for record in function.text.records
            if not record.is_branch_target
        ]

    def patch(self, state: Schedule) -> bytes:
        """The cubin with this schedule of the function; all other bytes are unchanged."""
        words = self._payload[state.order]
        words[:, 1] |= _control_bits(state)[state.order]
        cubin = bytearray(self._cubin)
        cubin[self._text.file_offset : self._text.file_offset + words.nbytes] = words.astype(
            "<u8"
        ).tobytes()
        position = np.empty(len(state.order), dtype=np.int64)
        position[state.order] = np.arange(len(state.order))
        for record, index, inside in self._records:
            offset = int(position[index]) * WORD_BYTES + inside
            cubin[record.file_offset : record.file_offset + record.width] = offset.to_bytes(
                record.width, "little"
            )
        return bytes(cubin)


def _control_bits(state: Schedule) -> NDArray[np.uint64]:
    """The control bits in the upper half of each instruction word, by original index."""
    bits = np.zeros(len(state.order), dtype=np.uint64)
    for field, values in (
        (encoding.STALL, state.stall),
        (encoding.NO_YIELD, 1 - state.yields),
        (encoding.WRITE_SB, state.write_sb),
        (encoding.READ_SB, state.read_sb),
        (encoding.WAIT, state.wait),
        (encoding.REUSE, state.reuse),
    ):
        bits |= values.astype(np.uint64) << np.uint64(field.low - _HALF_BITS)
    return bits
