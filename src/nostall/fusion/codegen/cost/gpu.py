"""How long programs take that share streaming multiprocessors and memory, *modelled*.

FusionStitching's latency-evaluator (arXiv:2009.10924) has L = N_wave * L_warp, waves of programs
that registers, warps and shared memory let be resident at once.  That is one limit here (Little's
law for a program's latency); the others are instructions that all warps issue, bytes from memory
and from L2, and how fast programs can begin.  The slowest decides, less sharply where two are
near to each other, and what the first and the last programs do has nothing beside it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from nostall.fusion.codegen.cost.occupancy import blocks_per_sm
from nostall.fusion.codegen.tiling.kernel_plan import REGISTERS_SM, REGISTERS_THREAD, WARP
from nostall.fusion.hardware import H200 as GPU

REGISTERS_MAY_BE = (0.85, 1.0, 1.2)
"""The compiler's registers / the modelled ones: half of all kernels are within 15 %, and a few more
or less decide how many programs are resident."""
_SPILL_BYTES = 8
"""A register that does not fit goes to memory and back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """One kernel's.  Of each of its ``programs``: ``instructions`` of a warp, ``registers`` of a
    thread, bytes of ``shared`` memory, bytes ``moved`` from and to memory, read ``again`` by the
    program itself, and coming along unasked for (``beside``: those that other programs need).
    ``partial``: of the latter those in sectors that are written in parts, ``single``: of ``moved``
    those in sectors without the other one of their pair.
    ``turns``: how often the tile is worked on, one part of the rows or columns after the other;
    ``steps``: loads that wait for others, ``hidden``: those that do so while the program works on
    what came before, ``phases``: parts that a reduction ends."""

    programs: int
    warps: int
    instructions: float
    registers: float
    moved: float
    turns: float = 1.0
    steps: float = 1.0
    hidden: float = 0.0
    phases: float = 0.0
    barriers: float = 0.0
    shared: int = 0
    again: float = 0.0
    beside: float = 0.0
    partial: float = 0.0
    single: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One GPU; bytes, seconds, and cycles of an SM.

    ``launch_s``: a kernel's begin and end, after another one; ``issued``: instructions of warps in
    a cycle (four schedulers could issue one each); ``alone``: cycles from one instruction of a warp
    to its next.  ``program_s``: from the begin of one program to that of the next, anywhere on the
    GPU, and ``warp_s`` of one warp; ``load_s``: from a load to its value where others load too;
    ``phase_s``: what a reduction and what loads after it cost a program; ``link_bytes``: what an SM
    gets in a cycle; ``spills``: registers that go to memory for each one that is missing, where
    twice as many as there are would be needed; ``reload_s``: how long a warp waits for one of
    those; ``sharpness``: how sharply the slowest of several limits decides where many programs are
    on an SM, ``company``: how many, of one warp, make it half as sharp (of w warps sqrt(w) fewer);
    ``pair``: bytes that memory loses for each one that comes in a sector without the other one of
    its pair.
    """

    sms: int
    clock_hz: float
    copy_bytes_per_s: float
    launch_s: float
    issued: float
    link_bytes: float
    program_s: float
    warp_s: float
    load_s: float
    phase_s: float
    barrier_s: float
    alone: float
    spills: float
    reload_s: float
    sharpness: float
    company: float
    pair: float
    l1_bytes: float
    l2_bytes: float
    l2_bytes_per_s: float


H200 = Machine(
    sms=GPU.sms,
    clock_hz=GPU.clock_hz,
    copy_bytes_per_s=GPU.copy_bytes_per_second,
    link_bytes=64.0,  # public micro-benchmarks of an H100
    # Of 256 KB what is left for a kernel's own data is taken as three quarters.
    l1_bytes=192e3,
    l2_bytes=GPU.l2_bytes,
    # Fitted to the times of 1,251 plans on an H200, by `python -m benchmarks run fusion.cost_model_fit`,
    # before kernels were launched early.  Since then measured: program_s, by `python -m
    # benchmarks.fusion.chains.program_start_rate`; chosen among 0, 1, 2 and 4: company, by
    # benchmarks/fusion/results/cost_model.json.gz.
    launch_s=0.61e-6,
    issued=3.35,
    load_s=0.693e-6,
    program_s=1.21e-9,
    warp_s=0.095e-9,
    phase_s=0.37e-6,
    barrier_s=39e-9,
    alone=1.65,
    spills=1.19,
    reload_s=0.021e-6,
    sharpness=4.7,
    company=2,
    pair=0.32,
    l2_bytes_per_s=5.1e12,
)


def resident(demand: Demand, machine: Machine = H200) -> int:
    """Programs that are on an SM at once."""
    registers = int(min(demand.registers, most_registers(demand)))
    fit = blocks_per_sm(demand.warps, registers, demand.shared)
    return max(1, min(fit, -(-demand.programs // machine.sms)))


def seconds(demand: Demand, machine: Machine = H200) -> float:
    """One kernel, launch included: the mean over what registers may turn out to be."""
    found = (
        _seconds(replace(demand, registers=demand.registers * share), machine)
        for share in REGISTERS_MAY_BE
    )
    return machine.launch_s + sum(found) / len(REGISTERS_MAY_BE)


def _seconds(demand: Demand, machine: Machine) -> float:
    together = resident(demand, machine)
    # What a program reads again comes from L1 as far as the programs of an SM fit, what it or
    # others need again from L2 as far as all that is being worked on fits.
    held = (demand.moved + demand.beside) * together
    l1_bytes = max(0.0, machine.l1_bytes - demand.shared * together)
    left = demand.beside + demand.again * (1 - min(1.0, l1_bytes / max(1.0, held)))
    missed = left * (1 - min(1.0, machine.l2_bytes / max(1.0, held * machine.sms)))
    # Of few that are missing some are computed anew; with many ptxas gives up, and nearly all
    # values live in memory.
    most = most_registers(demand)
    missing = max(0.0, demand.registers - most)
    spilled = machine.spills * missing * missing / most * demand.turns
    spilt = _SPILL_BYTES * spilled * WARP * demand.warps
    cycles = (demand.instructions + 2 * spilled) / machine.clock_hz
    issue = cycles * demand.warps / machine.issued
    delay = demand.steps * machine.load_s + demand.phases * machine.phase_s
    delay += demand.barriers * machine.barrier_s + spilled * machine.reload_s
    delay += (demand.moved + left) / machine.link_bytes / machine.clock_hz
    delay += max(0.0, demand.hidden * machine.load_s - cycles * machine.alone)
    delay += max(0.0, cycles * machine.alone - issue)
    alone = issue + delay
    of_each = demand.programs / machine.sms
    memory = demand.moved + missed + spilt + machine.pair * demand.single
    memory /= machine.copy_bytes_per_s
    # Of a sector that is written in parts L2 reads the rest.
    l2 = (demand.moved + left + spilt + demand.partial) / machine.l2_bytes_per_s
    begins = max(machine.program_s, demand.warps * machine.warp_s)
    # The first turns' loads and the last ones' stores have nothing beside them.
    ends = alone / (demand.turns if of_each <= together else 1.0)
    limits = (
        max(1.0, of_each / together) * alone - ends,
        of_each * issue,
        # Programs that begin are what asks memory: the slower one of both hides the other one.
        demand.programs * max(memory, begins),
        demand.programs * l2,
    )
    longest: float = max(limits)
    # Few programs are often all at the same, the more so if their warps are few: while they
    # compute, memory waits.
    company = together * math.sqrt(demand.warps)
    sharpness = 1 + (machine.sharpness - 1) * company / (company + machine.company)
    near: float = sum((one / longest) ** sharpness for one in limits)
    decided: float = ends + longest * near ** (1 / sharpness)
    return decided


def most_registers(demand: Demand) -> int:
    """Registers that a thread can have."""
    return min(REGISTERS_THREAD, REGISTERS_SM // (WARP * demand.warps))
