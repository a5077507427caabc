"""How many blocks and warps are on an SM at once, and what limits them."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from nostall.core.errors import BadLaunch
from nostall.core.launch import LaunchSpec
from nostall.sass.binary.attributes import parse_attributes
from nostall.sass.model.parameters import SUB_CORES, SmParameters
from nostall.sass.program.program import Function, Program

WARP = 32
_REGCOUNT = 0x2F
_REGISTER_UNIT = 256
_GENERAL = 255


@dataclass(frozen=True, slots=True)
class Resources:
    """What one block of a kernel takes: registers per thread, bytes of shared memory (static,
    dynamic and reserved together), named barriers, threads."""

    registers: int
    shared: int
    barriers: int
    threads: int

    @property
    def warps(self) -> int:
        """Warps per block."""
        return -(-self.threads // WARP)


@dataclass(frozen=True, slots=True)
class Occupancy:
    """``blocks_per_sm`` fit at once; ``limit`` names the resource that admits no more.

    ``resident_blocks`` are there in this launch (``limit`` is "grid" when it is the smaller), and
    ``warps_per_scheduler`` are theirs on one scheduler of the busiest SM.  ``rounds`` is how often
    an SM is filled anew until all blocks have run; the last round counts by its share of blocks.
    """

    resources: Resources
    blocks_per_sm: int
    resident_blocks: int
    warps_per_scheduler: int
    rounds: float
    active_sms: int
    limit: str

    @property
    def active_sub_cores(self) -> int:
        """Sub-cores of an SM that have a warp."""
        return min(SUB_CORES, self.resident_blocks * self.resources.warps)


def resources(
    program: Program, function: Function, launch: LaunchSpec, table: SmParameters
) -> Resources:
    """Read the kernel's use from its cubin and its launch."""
    return Resources(
        registers=register_count(program, function),
        shared=_shared_bytes(program, function, launch, table),
        barriers=_barriers(function),
        threads=launch.threads,
    )


def register_count(program: Program, function: Function) -> int:
    """Registers per thread: what the cubin records, else the highest one named plus one."""
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
    named = [r for i in function.instructions for r in (*i.defs, *i.uses) if r < _GENERAL]
    return max(named, default=0) + 1


def _shared_bytes(
    program: Program, function: Function, launch: LaunchSpec, table: SmParameters
) -> int:
    """Static, dynamic and reserved; from sm_90 on the static section holds the reserved part."""
    name = f".nv.shared.{function.name}"
    static = sum(s.size for s in program.cubin.elf.sections if s.name == name)
    if table.sm >= 90:
        return max(static, table.reserved_shared) + launch.shared
    return static + table.reserved_shared + launch.shared


def _barriers(function: Function) -> int:
    """Named barriers: the highest immediate of a BAR plus one."""
    highest = -1
    for instruction in function.instructions:
        if instruction.base == "BAR" and instruction.operands:
            try:
                highest = max(highest, int(instruction.operands[0], 0))
            except ValueError:
                highest = max(highest, 0)
    return highest + 1


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def limits(need: Resources, table: SmParameters) -> dict[str, int]:
    """Blocks per SM that each resource admits; of equal ones the first is named as the limit."""
    per_warp = _up(max(need.registers, 1) * WARP, _REGISTER_UNIT)
    by_registers = table.registers // SUB_CORES // per_warp * SUB_CORES // need.warps
    shared = _up(need.shared, table.shared_unit)
    return {
        "blocks": table.max_blocks,
        "warps": table.max_warps // need.warps,
        "registers": by_registers,
        "shared memory": table.shared_bytes // shared if shared else table.max_blocks,
        "barriers": table.barriers // need.barriers if need.barriers else table.max_blocks,
    }


def occupancy(need: Resources, launch: LaunchSpec, table: SmParameters) -> Occupancy:
    """Occupancy of a launch; raises :class:`BadLaunch` when not even one block fits."""
    admitted = limits(need, table)
    limit = min(admitted, key=lambda name: admitted[name])
    fit = admitted[limit]
    if fit < 1:
        raise BadLaunch(
            f"no block fits on an SM of sm_{table.sm}: {limit} do not suffice for {need}; allowed "
            f"are {table.registers} registers, {table.shared_bytes} bytes of shared memory and "
            f"{table.max_warps} warps; make the block or its shared memory smaller"
        )
    wanted = -(-launch.blocks // table.sms)
    resident = min(fit, wanted)
    return Occupancy(
        resources=need,
        blocks_per_sm=fit,
        resident_blocks=resident,
        warps_per_scheduler=-(-resident * need.warps // SUB_CORES),
        rounds=wanted / resident,
        active_sms=min(launch.blocks, table.sms),
        limit="grid" if wanted < fit else limit,
    )
