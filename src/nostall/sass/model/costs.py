"""What one instruction costs, as one row of integers for the compiled engine.

The row depends on the instruction and the architecture only, never on its control word, so it is
computed once and looked up by original index.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import IntEnum
from math import ceil

import numpy as np
from numpy.typing import NDArray

from nostall.sass.model.parameters import SmParameters
from nostall.sass.program.instruction import Instruction
from nostall.sass.program.opcodes import Effect, Pipe

WARP = 32


class Column(IntEnum):
    """Columns of the cost table; cycles unless said otherwise.

    ``PIPE`` is busy for ``OCCUPANCY`` after issue.  Queued instructions then take ``SERVICE``
    cycles of ``SERVER``; the write scoreboard is released ``LATENCY`` and the read scoreboard
    ``READ`` after that service begins (after issue without a server, and for the sources of a
    global access).  ``KIND`` is a
    :class:`Kind`, ``ARGUMENT`` its argument; ``GATED`` instructions wait for a deferred barrier.
    ``A``, ``B``, ``C`` are the general registers in the operand slots (-1: none).
    """

    PIPE = 0
    OCCUPANCY = 1
    SERVER = 2
    SERVICE = 3
    LATENCY = 4
    READ = 5
    KIND = 6
    ARGUMENT = 7
    GATED = 8
    A = 9
    B = 10
    C = 11


class Server(IntEnum):
    """Queues behind the pipes; their rates are a sub-core's share of its SM."""

    NONE = 0
    SHARED = 1
    GLOBAL = 2
    GMMA = 3


class Kind(IntEnum):
    """How an instruction synchronises."""

    PLAIN = 0
    DEPBAR = 1
    """Waits until scoreboard ``ARGUMENT & 7`` counts at most ``ARGUMENT >> 3 & 63``, and until
    those in the mask ``ARGUMENT >> 9`` are 0."""
    BARRIER = 2
    """``ARGUMENT`` is 1 when only memory instructions wait (DEFER_BLOCKING)."""
    COPY = 3
    """An asynchronous copy; done when the next COMMIT is."""
    COMMIT = 4
    GROUP = 5
    """Counts in the warp-group scoreboard (GSB)."""


GSB = 6
"""Number of the warp-group scoreboard in the engine's arrays."""

_PIPES = {pipe: number for number, pipe in enumerate(Pipe)}
_SHAPES = {
    "884": (8, 8, 4),
    "8816": (8, 8, 16),
    "8832": (8, 8, 32),
    "88128": (8, 8, 128),
    "1684": (16, 8, 4),
    "1688": (16, 8, 8),
    "16816": (16, 8, 16),
    "16832": (16, 8, 32),
    "16864": (16, 8, 64),
    "168128": (16, 8, 128),
    "168256": (16, 8, 256),
}
_PRODUCT = re.compile(r"^(\d+)x(\d+)x(\d+)$")
_EIGHT_BIT = frozenset(("E4M3", "E5M2", "S8", "U8"))
_WIDE = {"64": 8, "128": 16, "256": 32, "U8": 1, "S8": 1, "U16": 2, "S16": 2}
_SHARED = Effect.READ_SHARED | Effect.WRITE_SHARED
_SLOTS = ((Column.A, 24), (Column.B, 32), (Column.C, 64))
_BANKED = frozenset((Pipe.INT, Pipe.FMA, Pipe.HALF, Pipe.DOUBLE))


def cost_table(
    instructions: Sequence[Instruction],
    table: SmParameters,
    *,
    active_sub_cores: int = 4,
    active_sms: int | None = None,
) -> NDArray[np.int32]:
    """[n, len(Column)], by original index.

    ``active_sub_cores`` share the SM's memory pipeline, ``active_sms`` (all, when None) the DRAM.
    """
    rows = np.zeros((len(instructions), len(Column)), dtype=np.int32)
    rows[:, Column.A : Column.C + 1] = -1
    coster = _Coster(table, active_sub_cores, table.sms if active_sms is None else active_sms)
    for instruction in instructions:
        coster.fill(instruction, rows[instruction.index])
    return rows


def mma_shape(instruction: Instruction) -> tuple[int, int, int] | None:
    """(m, n, k) from the modifiers of a matrix instruction."""
    for modifier in instruction.opcode.split(".")[1:]:
        if modifier in _SHAPES:
            return _SHAPES[modifier]
        found = _PRODUCT.match(modifier)
        if found:
            return int(found[1]), int(found[2]), int(found[3])
    return None


class _Coster:
    """Fills rows for one architecture and one sharing of its SM."""

    def __init__(self, table: SmParameters, sub_cores: int, sms: int) -> None:
        self.table = table
        self.sub_cores = sub_cores
        self.global_rate = table.global_bytes_per_cycle(sms) / sub_cores
        self.issue = {
            Pipe.INT: table.issue_int,
            Pipe.FMA: table.issue_fma,
            Pipe.HALF: table.issue_half,
            Pipe.DOUBLE: table.issue_double,
            Pipe.UNIFORM: table.issue_uniform,
            Pipe.XU: table.issue_xu,
            Pipe.LSU: table.issue_lsu,
            Pipe.CONST: table.issue_const,
            Pipe.SPECIAL: table.issue_special,
            Pipe.TENSOR: table.issue_tensor,
        }
        self.latency = {
            Pipe.DOUBLE: table.latency_double,
            Pipe.MMA: table.latency_dmma,
            Pipe.UNIFORM: table.latency_uniform,
            Pipe.XU: table.latency_xu,
            Pipe.CONST: table.latency_const,
            Pipe.SPECIAL: table.latency_special,
            Pipe.TENSOR: table.latency_tensor,
        }

    def fill(self, instruction: Instruction, row: NDArray[np.int32]) -> None:
        pipe = instruction.pipe
        row[Column.PIPE] = _PIPES[pipe]
        row[Column.OCCUPANCY] = self._occupancy(instruction)
        row[Column.LATENCY] = self.latency.get(pipe, 1)
        row[Column.READ] = self.table.read_delay
        row[Column.GATED] = pipe in (Pipe.LSU, Pipe.TENSOR, Pipe.GMMA) or instruction.base in (
            "BAR",
            "EXIT",
        )
        if pipe in _BANKED:
            for column, low in _SLOTS:
                register = instruction.payload >> low & 0xFF
                if register != 255 and register in instruction.uses:
                    row[column] = register
        if instruction.never_executes:
            row[Column.OCCUPANCY] = 1
            row[Column.READ] = 1
        elif pipe is Pipe.LSU:
            self._load_store(instruction, row)
        elif pipe is Pipe.GMMA:
            self._group_mma(instruction, row)
        self._synchronise(instruction, row)

    def _occupancy(self, instruction: Instruction) -> int:
        """Cycles between two issues to the pipe."""
        pipe, base = instruction.pipe, instruction.base
        if base == "IMAD":
            wide = instruction.modifiers & {"WIDE", "HI"}
            return self.table.issue_imad * (2 if wide else 1)
        if pipe is Pipe.MMA:
            return self._mma_cycles(instruction)
        if base in ("FFMA2", "FADD2", "FMUL2"):
            return 2 * self.table.issue_fma
        return self.issue.get(pipe, 1)

    def _mma_cycles(self, instruction: Instruction) -> int:
        """Multiply-adds of the shape over those per cycle of a sub-core, by element type."""
        m, n, k = mma_shape(instruction) or (16, 8, 16)
        base, modifiers = instruction.base, instruction.modifiers
        if base == "DMMA":
            return max(2, ceil(m * n * k / self.table.dmma_rate))
        rate = self.table.mma_rate
        if base in ("IMMA", "QMMA"):
            rate *= 2
        elif base == "OMMA":
            rate *= 4
        elif base == "BMMA":
            rate *= 8
        elif "TF32" in modifiers:
            rate *= 0.5
        if base != "IMMA" and "F32" in modifiers:
            rate *= self.table.f32_accumulate
        if "SP" in modifiers:
            rate *= 2
        return max(2, ceil(m * n * k / rate))

    def _group_mma(self, instruction: Instruction, row: NDArray[np.int32]) -> None:
        """A quarter of the warp group's product, done behind the warp's back."""
        m, n, k = mma_shape(instruction) or (64, 64, 16)
        rate = self.table.gmma_rate
        if instruction.base != "HGMMA" or instruction.modifiers & _EIGHT_BIT:
            rate *= 2
        elif "TF32" in instruction.modifiers:
            rate *= 0.5
        row[Column.SERVER] = Server.GMMA
        row[Column.SERVICE] = max(1, ceil(m / 4 * n * k / rate))
        row[Column.LATENCY] = row[Column.SERVICE] + self.table.latency_gmma
        if any("gsb" in operand for operand in instruction.operands):
            row[Column.KIND] = Kind.GROUP

    def _load_store(self, instruction: Instruction, row: NDArray[np.int32]) -> None:
        table, base, does = self.table, instruction.base, instruction.effects
        width = next((_WIDE[m] for m in instruction.modifiers if m in _WIDE), 4)
        bytes_ = WARP * width
        if base in ("SHFL", "MATCH", "REDUX", "MOVM", "QSPC", "PIXLD", "ISBERD"):
            self._shared(row, 128, table.latency_shuffle)
        elif base in ("LDSM", "STSM"):
            last = instruction.opcode.rpartition(".")[2]
            matrices = int(last) if last in ("2", "4") else 1
            self._shared(row, 128 * matrices, self._shared_latency(matrices))
        elif base in ("ATOMS", "REDS", "STAS"):
            self._shared(row, 2 * bytes_, table.latency_atomic)
        elif does & _SHARED and base != "LDGSTS":
            self._shared(row, bytes_, self._shared_latency(max(1, width // 4)))
        elif does & (Effect.READ_LOCAL | Effect.WRITE_LOCAL):
            self._shared(row, bytes_, table.latency_l1)
        else:
            row[Column.SERVER] = Server.GLOBAL
            row[Column.SERVICE] = max(1, round(bytes_ / self.global_rate))
            extra = table.latency_atomic if instruction.opcode_class.effects & Effect.FENCE else 0
            row[Column.LATENCY] = table.latency_global + extra

    def _shared_latency(self, words: int) -> int:
        """Latency of an access of ``words`` 32-bit words (or matrices) per lane."""
        return self.table.latency_shared + self.table.latency_shared_wide * (
            max(1, words).bit_length() - 1
        )

    def _shared(self, row: NDArray[np.int32], bytes_: int, latency: int) -> None:
        per_sm = max(1, ceil(bytes_ / self.table.shared_bytes_per_cycle))
        row[Column.SERVER] = Server.SHARED
        row[Column.SERVICE] = per_sm * self.sub_cores
        row[Column.LATENCY] = latency

    def _synchronise(self, instruction: Instruction, row: NDArray[np.int32]) -> None:
        base, modifiers = instruction.base, instruction.modifiers
        if base == "DEPBAR" or (base == "WARPGROUP" and "DEPBAR" in modifiers):
            row[Column.KIND] = Kind.DEPBAR
            row[Column.ARGUMENT] = _depbar_argument(instruction)
        elif base == "BAR" and "ARV" not in modifiers:
            row[Column.KIND] = Kind.BARRIER
            row[Column.ARGUMENT] = "DEFER_BLOCKING" in modifiers
        elif base == "LDGSTS":
            row[Column.KIND] = Kind.COPY
        elif base in ("LDGDEPBAR", "ARRIVES"):
            row[Column.KIND] = Kind.COMMIT


def _depbar_argument(instruction: Instruction) -> int:
    """Board, count and mask as :attr:`Kind.DEPBAR` packs them."""
    board, count, mask = 7, 0, 0
    for operand in instruction.operands:
        if operand.startswith("SB"):
            board = int(operand[2:])
        elif operand.startswith("gsb"):
            board = GSB
        elif operand.startswith("{"):
            for number in re.findall(r"\d+", operand):
                mask |= 1 << int(number)
        else:
            count = int(operand, 0)
    return board | count << 3 | mask << 9
