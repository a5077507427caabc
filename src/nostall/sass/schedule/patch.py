"""Cubins of many schedules of one function, without building a program for each."""

from __future__ import annotations

import numpy as np

from nostall.sass.binary import encoding
from nostall.sass.binary.encoding import WORD_BYTES
from nostall.sass.program.program import Function, Program
from nostall.sass.schedule.state import Schedule

_HIGH = 64
"""The control bits all lie in the upper half of a word."""


class Patcher:
    """``patch(state)`` equals ``space.impose(state).to_cubin()``: every word re-encoded from its
    payload and the state's control fields, every recorded offset moved along."""

    def __init__(self, program: Program, function: Function) -> None:
        self._rest = program.to_cubin()
        self._text = function.text
        by_index = sorted(function.instructions, key=lambda i: i.index)
        words = [(i.payload & (1 << _HIGH) - 1, i.payload >> _HIGH) for i in by_index]
        self._payload = np.array(words, dtype=np.uint64)
        self._records = [
            (record, *divmod(record.offset, WORD_BYTES))
            for record in function.text.records
            if not record.is_branch_target
        ]

    def patch(self, state: Schedule) -> bytes:
        """The cubin with this schedule of the function, the rest as it was."""
        words = self._payload[state.order]
        words[:, 1] |= _control(state)[state.order]
        out = bytearray(self._rest)
        out[self._text.file_offset : self._text.file_offset + words.nbytes] = words.astype(
            "<u8"
        ).tobytes()
        position = np.empty(len(state.order), dtype=np.int64)
        position[state.order] = np.arange(len(state.order))
        for record, index, inside in self._records:
            moved = int(position[index]) * WORD_BYTES + inside
            out[record.file_offset : record.file_offset + record.width] = moved.to_bytes(
                record.width, "little"
            )
        return bytes(out)


def _control(state: Schedule) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """The upper half of each instruction's control word, by original index."""
    word = np.zeros(len(state.order), dtype=np.uint64)
    for field, values in (
        (encoding.STALL, state.stall),
        (encoding.NO_YIELD, 1 - state.yields),
        (encoding.WRITE_SB, state.write_sb),
        (encoding.READ_SB, state.read_sb),
        (encoding.WAIT, state.wait),
        (encoding.REUSE, state.reuse),
    ):
        word |= values.astype(np.uint64) << np.uint64(field.low - _HIGH)
    return word
