"""Static properties of a compiled kernel: what a binary says of its speed without a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from nostall.core import LaunchSpec
from nostall.core.errors import BadLaunch
from nostall.sass import Function, Program
from nostall.sass.model.costs import Column, cost_table
from nostall.sass.model.occupancy import Resources, block_limits, kernel_resources, occupancy
from nostall.sass.model.parameters import SmParameters, sm_parameters
from nostall.sass.model.trace import natural_loops
from nostall.sass.program.instruction import Instruction
from nostall.sass.program.opcodes import UNREACHED, Effect, Pipe

_LOCAL = Effect.READ_LOCAL | Effect.WRITE_LOCAL
_LOADS = Effect.READ_GLOBAL | Effect.READ_SHARED
_MATRIX = (Pipe.MMA, Pipe.GMMA)
_PADDING = ("NOP", "PADDING", UNREACHED)
_WARPS_OF_A_BLOCK = 4
"""Warps of a block whose launch is unknown."""


@dataclass(frozen=True)
class Loops:
    """The instructions inside loops, each counted once."""

    instructions: int
    matrix: int
    """Instructions of the tensor cores."""
    accesses: int
    """Loads and stores of global and shared memory."""
    product_waits: int
    """Waits for asynchronous products; ptxas adds some if it serialises them."""
    issue_cycles: int
    """Sum of the stall counts: cycles in which a warp alone issues them, without waits."""
    load_distance: float
    """Instructions between a load and the first one that reads its result, in the mean."""

    @property
    def work(self) -> int:
        """Instructions that the source asks for: a loop that is unrolled twice has twice as many"""
        return self.matrix or self.accesses


@dataclass(frozen=True)
class Properties:
    """What a compiled kernel uses and contains."""

    registers: int
    """Registers of a thread."""
    warps_per_sm: int
    """Warps that fit on an SM; by registers alone if the launch is unknown."""
    limit: str
    """The resource that limits them."""
    local_accesses: int
    """Instructions that access local memory, such as those of spilled registers."""
    spill_bytes: int | None
    """Bytes of spill stores and loads; None if ptxas did not report them."""
    instructions: int
    """Without padding."""
    bank_conflicts: int
    """Arithmetic with three operands in one register bank, none of them from the reuse cache."""
    pipes: Mapping[str, int]
    """Instructions by class."""
    opcodes: Mapping[str, int]
    """Instructions by opcode without modifiers."""
    loops: Loops
    words: bytes = field(repr=False)
    """The machine code."""
    order: tuple[str, ...] = field(repr=False)
    """The opcodes in their order."""

    def to_json(self) -> dict[str, Any]:
        """The fields without the code."""
        fields = asdict(self)
        del fields["words"], fields["order"]
        return fields


def read_properties(
    cubin: bytes,
    kernel: str,
    launch: LaunchSpec | None = None,
    *,
    spill_bytes: int | None = None,
) -> Properties:
    """The properties of a kernel of a cubin.

    ``launch``: for the occupancy.  ``spill_bytes``: what ptxas reported of it.
    Raises the errors of :meth:`.Program.of_kernel`.
    """
    program = Program.of_kernel(cubin, kernel)
    function = program.kernel(kernel)
    parameters = sm_parameters(program.sm)
    code = [i for i in function.instructions if i.base not in _PADDING]
    warps, limit = _warps(program, function, launch, parameters)
    return Properties(
        registers=kernel_resources(program, function, LaunchSpec(), parameters).registers,
        warps_per_sm=warps,
        limit=limit,
        local_accesses=sum(bool(i.effects & _LOCAL) for i in code),
        spill_bytes=spill_bytes,
        instructions=len(code),
        bank_conflicts=_bank_conflicts(function, parameters),
        pipes=dict(Counter(str(i.pipe) for i in code).most_common()),
        opcodes=dict(Counter(i.base for i in code).most_common()),
        loops=_loops(function),
        words=cubin[function.text.file_offset :][: function.text.size],
        order=tuple(i.opcode for i in code),
    )


def _warps(
    program: Program, function: Function, launch: LaunchSpec | None, parameters: SmParameters
) -> tuple[int, str]:
    """(warps that fit on an SM, the resource that limits them)."""
    if launch is not None:
        resources = kernel_resources(program, function, launch, parameters)
        try:
            on_sm = occupancy(resources, launch, parameters)
        except BadLaunch:
            return 0, "no block fits"
        limits = block_limits(resources, parameters)
        return on_sm.blocks_per_sm * resources.warps, min(limits, key=lambda name: limits[name])
    registers = kernel_resources(program, function, LaunchSpec(), parameters).registers
    block = Resources(registers, 0, 0, 32 * _WARPS_OF_A_BLOCK)
    limits = block_limits(block, parameters)
    limit = min(("warps", "registers"), key=lambda name: limits[name])
    return limits[limit] * _WARPS_OF_A_BLOCK, limit


def _loops(function: Function) -> Loops:
    """The loops of a kernel together."""
    inside = sorted({block for loop in natural_loops(function.blocks) for block in loop.body})
    bodies = [
        function.instructions[function.blocks[b].start : function.blocks[b].end] for b in inside
    ]
    code = [i for body in bodies for i in body if i.base not in _PADDING]
    distances = [d for body in bodies for d in _load_distances(body)]
    return Loops(
        len(code),
        sum(i.pipe in _MATRIX for i in code),
        sum(i.accesses_memory and not i.effects & _LOCAL for i in code),
        sum(i.base == "WARPGROUP" and "DEPBAR" in i.modifiers for i in code),
        sum(i.control.stall for i in code),
        sum(distances) / len(distances) if distances else 0.0,
    )


def _load_distances(body: Sequence[Instruction]) -> list[int]:
    """For each load of a block, the instructions up to the first one that reads its result."""
    distances = []
    for at, load in enumerate(body):
        if load.effects & _LOADS and load.defs:
            written = set(load.defs)
            readers = (k for k in range(at + 1, len(body)) if not written.isdisjoint(body[k].uses))
            distances.append(next(readers, len(body)) - at - 1)
    return distances


def _bank_conflicts(function: Function, parameters: SmParameters) -> int:
    """See :attr:`Properties.bank_conflicts`; registers are in two banks, even and odd."""
    costs = cost_table(function.instructions, parameters)
    slots = (Column.A, Column.B, Column.C)
    conflicts = 0
    before: Instruction | None = None
    for instruction in function.instructions:
        row = [int(costs[instruction.index, slot]) for slot in slots]
        if min(row) >= 0 and len(set(row)) == 3 and len({r % 2 for r in row}) == 1:
            kept = [] if before is None else [int(costs[before.index, slot]) for slot in slots]
            reuse = before.control.reuse if before is not None else 0
            conflicts += not any(reuse >> n & 1 and k == row[n] for n, k in enumerate(kept))
        before = instruction
    return conflicts
