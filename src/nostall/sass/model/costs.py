"""Cost table of a kernel: for each instruction a row of integers for the compiled issue engine.

A row depends on the instruction and the architecture, not on the control word. So the table is
computed once per kernel and indexed by original index.
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
"""Threads per warp."""


class Column(IntEnum):
    """Columns of the cost table; times are in cycles."""

    PIPE = 0
    """Number of the pipe."""
    OCCUPANCY = 1
    """Cycles after issue during which the pipe is busy."""
    SERVER = 2
    """The :class:`Server` behind the pipe."""
    SERVICE = 3
    """Cycles of work for the server."""
    LATENCY = 4
    """From the start of the service (without a server: from issue) to the release of the write
    scoreboard."""
    READ = 5
    """The same to the release of the read scoreboard; of a global access always from issue."""
    KIND = 6
    """The :class:`SyncKind`."""
    ARGUMENT = 7
    """The argument of the synchronisation."""
    GATED = 8
    """1 if the instruction waits for a deferred barrier, else 0."""
    A = 9
    """General register in operand slot a; -1: none."""
    B = 10
    """General register in operand slot b; -1: none."""
    C = 11
    """General register in operand slot c; -1: none."""


class Server(IntEnum):
    """Units that serve a queue behind a pipe; a sub-core gets its share of the SM's rate."""

    NONE = 0
    SHARED = 1
    GLOBAL = 2
    GMMA = 3


class SyncKind(IntEnum):
    """Kind of synchronisation of an instruction with others."""

    PLAIN = 0
    DEPBAR = 1
    """Waits until scoreboard ``ARGUMENT & 7`` is at most ``ARGUMENT >> 3 & 63``, and until the
    scoreboards in the bit mask ``ARGUMENT >> 9`` are 0."""
    BARRIER = 2
    """Block barrier; ``ARGUMENT`` is 1 if only memory instructions wait (DEFER_BLOCKING)."""
    COPY = 3
    """Asynchronous copy, part of the group that the next COMMIT closes."""
    COMMIT = 4
    """Closes a group of asynchronous copies; completes when they do."""
    GROUP = 5
    """Counts in the warp-group scoreboard (GSB)."""


GSB = 6
"""Number of the warp-group scoreboard in the arrays of the issue engine."""

_PIPE_NUMBERS = {pipe: number for number, pipe in enumerate(Pipe)}
_MMA_SHAPES = {
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
_GMMA_SHAPE = re.compile(r"^(\d+)x(\d+)x(\d+)$")
_EIGHT_BIT = frozenset(("E4M3", "E5M2", "S8", "U8"))
_ACCESS_BYTES = {"64": 8, "128": 16, "256": 32, "U8": 1, "S8": 1, "U16": 2, "S16": 2}
_SHARED = Effect.READ_SHARED | Effect.WRITE_SHARED
_SLOT_BITS = ((Column.A, 24), (Column.B, 32), (Column.C, 64))
_BANKED_PIPES = frozenset((Pipe.INT, Pipe.FMA, Pipe.HALF, Pipe.DOUBLE))


def cost_table(
    instructions: Sequence[Instruction],
    parameters: SmParameters,
    *,
    active_sub_cores: int = 4,
    active_sms: int | None = None,
) -> NDArray[np.int32]:
    """Cost rows of n instructions by original index, [n, len(Column)].

    ``active_sub_cores`` share the memory pipeline of an SM, ``active_sms`` (None: all) the DRAM.
    """
    rows = np.zeros((len(instructions), len(Column)), dtype=np.int32)
    rows[:, Column.A : Column.C + 1] = -1
    if active_sms is None:
        active_sms = parameters.sms
    builder = _RowBuilder(parameters, active_sub_cores, active_sms)
    for instruction in instructions:
        builder.fill(instruction, rows[instruction.index])
    return rows


def mma_shape(instruction: Instruction) -> tuple[int, int, int] | None:
    """(m, n, k) of a matrix instruction by its modifiers; None without a shape."""
    for modifier in instruction.opcode.split(".")[1:]:
        if modifier in _MMA_SHAPES:
            return _MMA_SHAPES[modifier]
        match = _GMMA_SHAPE.match(modifier)
        if match:
            return int(match[1]), int(match[2]), int(match[3])
    return None


class _RowBuilder:
    """Fills cost rows for one architecture and a number of active sub-cores and SMs."""

    def __init__(self, parameters: SmParameters, sub_cores: int, sms: int) -> None:
        self.parameters = parameters
        self.sub_cores = sub_cores
        self.global_rate = parameters.global_bytes_per_cycle(sms) / sub_cores
        self.issue_cycles = {
            Pipe.INT: parameters.issue_int,
            Pipe.FMA: parameters.issue_fma,
            Pipe.HALF: parameters.issue_half,
            Pipe.DOUBLE: parameters.issue_double,
            Pipe.UNIFORM: parameters.issue_uniform,
            Pipe.XU: parameters.issue_xu,
            Pipe.LSU: parameters.issue_lsu,
            Pipe.CONST: parameters.issue_const,
            Pipe.SPECIAL: parameters.issue_special,
            Pipe.TENSOR: parameters.issue_tensor,
        }
        self.latencies = {
            Pipe.DOUBLE: parameters.latency_double,
            Pipe.MMA: parameters.latency_dmma,
            Pipe.UNIFORM: parameters.latency_uniform,
            Pipe.XU: parameters.latency_xu,
            Pipe.CONST: parameters.latency_const,
            Pipe.SPECIAL: parameters.latency_special,
            Pipe.TENSOR: parameters.latency_tensor,
        }

    def fill(self, instruction: Instruction, row: NDArray[np.int32]) -> None:
        pipe = instruction.pipe
        row[Column.PIPE] = _PIPE_NUMBERS[pipe]
        row[Column.OCCUPANCY] = self._occupancy(instruction)
        row[Column.LATENCY] = self.latencies.get(pipe, 1)
        row[Column.READ] = self.parameters.read_delay
        row[Column.GATED] = pipe in (Pipe.LSU, Pipe.TENSOR, Pipe.GMMA) or instruction.base in (
            "BAR",
            "EXIT",
        )
        if pipe in _BANKED_PIPES:
            for column, low in _SLOT_BITS:
                register = instruction.payload >> low & 0xFF
                if register != 255 and register in instruction.uses:
                    row[column] = register
        if instruction.never_executes:
            row[Column.OCCUPANCY] = 1
            row[Column.READ] = 1
        elif pipe is Pipe.LSU:
            self._fill_load_store(instruction, row)
        elif pipe is Pipe.GMMA:
            self._fill_group_mma(instruction, row)
        self._fill_sync(instruction, row)

    def _occupancy(self, instruction: Instruction) -> int:
        """Cycles until the pipe takes the next instruction."""
        pipe, base = instruction.pipe, instruction.base
        if base == "IMAD":
            wide = instruction.modifiers & {"WIDE", "HI"}
            return self.parameters.issue_imad * (2 if wide else 1)
        if pipe is Pipe.MMA:
            return self._mma_cycles(instruction)
        if base in ("FFMA2", "FADD2", "FMUL2"):
            return 2 * self.parameters.issue_fma
        return self.issue_cycles.get(pipe, 1)

    def _mma_cycles(self, instruction: Instruction) -> int:
        """Cycles of mma.sync: multiply-adds of the shape / those per cycle, by element type."""
        m, n, k = mma_shape(instruction) or (16, 8, 16)
        base, modifiers = instruction.base, instruction.modifiers
        if base == "DMMA":
            return max(2, ceil(m * n * k / self.parameters.dmma_rate))
        rate = self.parameters.mma_rate
        if base in ("IMMA", "QMMA"):
            rate *= 2
        elif base == "OMMA":
            rate *= 4
        elif base == "BMMA":
            rate *= 8
        elif "TF32" in modifiers:
            rate *= 0.5
        if base != "IMMA" and "F32" in modifiers:
            rate *= self.parameters.f32_accumulate
        if "SP" in modifiers:
            rate *= 2
        return max(2, ceil(m * n * k / rate))

    def _fill_group_mma(self, instruction: Instruction, row: NDArray[np.int32]) -> None:
        """Fill in wgmma: each of the four warps has a quarter of the product, asynchronously."""
        m, n, k = mma_shape(instruction) or (64, 64, 16)
        rate = self.parameters.gmma_rate
        if instruction.base != "HGMMA" or instruction.modifiers & _EIGHT_BIT:
            rate *= 2
        elif "TF32" in instruction.modifiers:
            rate *= 0.5
        row[Column.SERVER] = Server.GMMA
        row[Column.SERVICE] = max(1, ceil(m / 4 * n * k / rate))
        row[Column.LATENCY] = row[Column.SERVICE] + self.parameters.latency_gmma
        if any("gsb" in operand for operand in instruction.operands):
            row[Column.KIND] = SyncKind.GROUP

    def _fill_load_store(self, instruction: Instruction, row: NDArray[np.int32]) -> None:
        parameters, base, effects = self.parameters, instruction.base, instruction.effects
        width = next((_ACCESS_BYTES[m] for m in instruction.modifiers if m in _ACCESS_BYTES), 4)
        bytes_ = WARP * width
        if base in ("SHFL", "MATCH", "REDUX", "MOVM", "QSPC", "PIXLD", "ISBERD"):
            self._fill_shared(row, 128, parameters.latency_shuffle)
        elif base in ("LDSM", "STSM"):
            last = instruction.opcode.rpartition(".")[2]
            matrices = int(last) if last in ("2", "4") else 1
            self._fill_shared(row, 128 * matrices, self._shared_latency(matrices))
        elif base in ("ATOMS", "REDS", "STAS"):
            self._fill_shared(row, 2 * bytes_, parameters.latency_atomic)
        elif effects & _SHARED and base != "LDGSTS":
            self._fill_shared(row, bytes_, self._shared_latency(max(1, width // 4)))
        elif effects & (Effect.READ_LOCAL | Effect.WRITE_LOCAL):
            self._fill_shared(row, bytes_, parameters.latency_l1)
        else:
            row[Column.SERVER] = Server.GLOBAL
            row[Column.SERVICE] = max(1, round(bytes_ / self.global_rate))
            extra = parameters.latency_atomic if effects & Effect.FENCE else 0
            row[Column.LATENCY] = parameters.latency_global + extra

    def _shared_latency(self, words: int) -> int:
        """Latency of a shared access of ``words`` 32-bit words (or matrices) per lane."""
        return self.parameters.latency_shared + self.parameters.latency_shared_wide * (
            max(1, words).bit_length() - 1
        )

    def _fill_shared(self, row: NDArray[np.int32], bytes_: int, latency: int) -> None:
        per_sm = max(1, ceil(bytes_ / self.parameters.shared_bytes_per_cycle))
        row[Column.SERVER] = Server.SHARED
        row[Column.SERVICE] = per_sm * self.sub_cores
        row[Column.LATENCY] = latency

    def _fill_sync(self, instruction: Instruction, row: NDArray[np.int32]) -> None:
        base, modifiers = instruction.base, instruction.modifiers
        if base == "DEPBAR" or (base == "WARPGROUP" and "DEPBAR" in modifiers):
            row[Column.KIND] = SyncKind.DEPBAR
            row[Column.ARGUMENT] = _depbar_argument(instruction)
        elif base == "BAR" and "ARV" not in modifiers:
            row[Column.KIND] = SyncKind.BARRIER
            row[Column.ARGUMENT] = "DEFER_BLOCKING" in modifiers
        elif base == "LDGSTS":
            row[Column.KIND] = SyncKind.COPY
        elif base in ("LDGDEPBAR", "ARRIVES"):
            row[Column.KIND] = SyncKind.COMMIT


def _depbar_argument(instruction: Instruction) -> int:
    """Scoreboard, count and mask, in the packed form of :attr:`SyncKind.DEPBAR`."""
    scoreboard, count, mask = 7, 0, 0
    for operand in instruction.operands:
        if operand.startswith("SB"):
            scoreboard = int(operand[2:])
        elif operand.startswith("gsb"):
            scoreboard = GSB
        elif operand.startswith("{"):
            for number in re.findall(r"\d+", operand):
                mask |= 1 << int(number)
        else:
            count = int(operand, 0)
    return scoreboard | count << 3 | mask << 9
