"""Occupancy: how many blocks and warps are on an SM at once, and which resource limits them."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from nostall.core.errors import BadLaunch
from nostall.core.launch import LaunchSpec
from nostall.sass.binary.attributes import parse_attributes
from nostall.sass.model.parameters import SUB_CORES, SmParameters
from nostall.sass.program.program import Function, Program

WARP = 32
"""Threads per warp."""
_REGCOUNT = 0x2F
"""Code of the attribute EIATTR_REGCOUNT."""
_REGISTER_UNIT = 256
"""Registers per warp are allocated in units of this many."""
_GENERAL_REGISTERS = 255


@dataclass(frozen=True, slots=True)
class Resources:
    """Resources that one block of a kernel takes."""

    registers: int
    """Registers per thread."""
    shared: int
    """Bytes of shared memory: static, dynamic and reserved together."""
    barriers: int
    """Named barriers."""
    threads: int

    @property
    def warps(self) -> int:
        """Warps per block."""
        return -(-self.threads // WARP)


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Occupancy of an SM during one launch."""

    resources: Resources
    blocks_per_sm: int
    """Blocks that fit on an SM at once."""
    resident_blocks: int
    """Blocks on the busiest SM at once; fewer than ``blocks_per_sm`` if the grid is small."""
    warps_per_scheduler: int
    """Warps of the resident blocks on one scheduler of the busiest SM."""
    rounds: float
    """Rounds of resident blocks on an SM until all have run; the last one counts by its share."""
    active_sms: int
    """SMs that have a block."""
    limit: str
    """The resource that admits no more blocks; "grid" if the launch has too few."""

    @property
    def active_sub_cores(self) -> int:
        """Sub-cores of an SM that have a warp."""
        return min(SUB_CORES, self.resident_blocks * self.resources.warps)


def kernel_resources(
    program: Program, function: Function, launch: LaunchSpec, parameters: SmParameters
) -> Resources:
    """Read what a kernel uses from its cubin and its launch."""
    return Resources(
        registers=register_count(program, function),
        shared=_shared_bytes(program, function, launch, parameters),
        barriers=_barrier_count(function),
        threads=launch.threads,
    )


def register_count(program: Program, function: Function) -> int:
    """Registers per thread: the count that the cubin records, else the highest named one plus 1."""
    elf = program.cubin.elf
    names = [symbol.name for symbol in elf.symbols()]
    for section in elf.sections:
        if section.name != ".nv.info":
            continue
        for entry in parse_attributes(elf, section):
            if entry.code == _REGCOUNT and len(entry.payload) == 8:
                symbol, count = struct.unpack("<II", entry.payload)
                if symbol < len(names) and names[symbol] == function.name:
                    return int(count)
    registers = [
        r for i in function.instructions for r in (*i.defs, *i.uses) if r < _GENERAL_REGISTERS
    ]
    return max(registers, default=0) + 1


def _shared_bytes(
    program: Program, function: Function, launch: LaunchSpec, parameters: SmParameters
) -> int:
    """Static, dynamic and reserved bytes; from sm_90 on the section includes the reserved ones."""
    name = f".nv.shared.{function.name}"
    static = sum(s.size for s in program.cubin.elf.sections if s.name == name)
    if parameters.sm >= 90:
        return max(static, parameters.reserved_shared) + launch.shared
    return static + parameters.reserved_shared + launch.shared


def _barrier_count(function: Function) -> int:
    """Named barriers: the highest immediate operand of a BAR plus 1."""
    highest = -1
    for instruction in function.instructions:
        if instruction.base == "BAR" and instruction.operands:
            try:
                highest = max(highest, int(instruction.operands[0], 0))
            except ValueError:
                highest = max(highest, 0)
    return highest + 1


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def block_limits(resources: Resources, parameters: SmParameters) -> dict[str, int]:
    """Blocks per SM that each resource (registers, shared memory, ...) allows.

    The smallest one limits the occupancy; if several are equal, the first of them is reported.
    """
    per_warp = _round_up(max(resources.registers, 1) * WARP, _REGISTER_UNIT)
    warps = parameters.registers // SUB_CORES // per_warp * SUB_CORES
    shared = _round_up(resources.shared, parameters.shared_unit)
    barriers = resources.barriers
    return {
        "blocks": parameters.max_blocks,
        "warps": parameters.max_warps // resources.warps,
        "registers": warps // resources.warps,
        "shared memory": parameters.shared_bytes // shared if shared else parameters.max_blocks,
        "barriers": parameters.barriers // barriers if barriers else parameters.max_blocks,
    }


def occupancy(resources: Resources, launch: LaunchSpec, parameters: SmParameters) -> Occupancy:
    """Occupancy of a launch; raises :class:`BadLaunch` if not even one block fits."""
    limits = block_limits(resources, parameters)
    limit = min(limits, key=lambda name: limits[name])
    blocks_per_sm = limits[limit]
    if blocks_per_sm < 1:
        raise BadLaunch(
            f"no block fits on an SM of sm_{parameters.sm}: the block needs {resources}, too much "
            f"of {limit}; an SM has {parameters.registers} registers, {parameters.shared_bytes} "
            f"bytes of shared memory and {parameters.max_warps} warps; make the block or its "
            "shared memory smaller"
        )
    blocks_of_busiest_sm = -(-launch.blocks // parameters.sms)
    resident = min(blocks_per_sm, blocks_of_busiest_sm)
    return Occupancy(
        resources=resources,
        blocks_per_sm=blocks_per_sm,
        resident_blocks=resident,
        warps_per_scheduler=-(-resident * resources.warps // SUB_CORES),
        rounds=blocks_of_busiest_sm / resident,
        active_sms=min(launch.blocks, parameters.sms),
        limit="grid" if blocks_of_busiest_sm < blocks_per_sm else limit,
    )
