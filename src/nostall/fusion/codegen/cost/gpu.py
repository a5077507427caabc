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
from nostall.fusion.codegen.tiling.kernel_plan import (
    MAX_REGISTERS_PER_THREAD,
    REGISTERS_PER_SM,
    WARP_SIZE,
)
from nostall.fusion.hardware import H200 as GPU

REGISTER_UNCERTAINTY = (0.85, 1.0, 1.2)
"""The compiler's registers / the modelled ones: half of all kernels are within 15 %, and a few more
or less decide how many programs are resident."""
_SPILL_BYTES = 8
"""A register that does not fit goes to memory and back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCost:
    """One kernel's.  Of each of its ``programs``: ``instructions`` of a warp, ``registers`` of a
    thread, bytes of ``shared_bytes`` memory, bytes ``memory_bytes`` from and to memory, read ``reread_bytes`` by the
    program itself, and coming along unasked for (``overfetched_bytes``: those that other programs need).
    ``partial_sector_bytes``: of the latter those in sectors that are written in parts, ``unpaired_sector_bytes``: of ``memory_bytes``
    those in sectors without the other one of their pair.
    ``iterations``: how often the tile is worked on, one part of the rows or columns after the other;
    ``dependent_loads``: loads that wait for others, ``overlapped_loads``: those that do so while the program works on
    what came before, ``reduction_phases``: parts that a reduction ends."""

    programs: int
    warps: int
    instructions: float
    registers: float
    memory_bytes: float
    iterations: float = 1.0
    dependent_loads: float = 1.0
    overlapped_loads: float = 0.0
    reduction_phases: float = 0.0
    barriers: float = 0.0
    shared_bytes: int = 0
    reread_bytes: float = 0.0
    overfetched_bytes: float = 0.0
    partial_sector_bytes: float = 0.0
    unpaired_sector_bytes: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU; bytes, seconds, and cycles of an SM.

    ``launch_s``: a kernel's begin and end, after another one; ``issue_rate``: instructions of warps in
    a cycle (four schedulers could issue one each); ``dependent_issue_cycles``: cycles from one instruction of a warp
    to its next.  ``program_start_s``: from the begin of one program to that of the next, anywhere on the
    GPU, and ``warp_start_s`` of one warp; ``load_latency_s``: from a load to its value where others load too;
    ``reduction_phase_s``: what a reduction and what loads after it cost a program; ``sm_bytes_per_cycle``: what an SM
    gets in a cycle; ``spill_factor``: registers that go to memory for each one that is missing, where
    twice as many as there are would be needed; ``reload_s``: how long a warp waits for one of
    those; ``sharpness``: how sharply the slowest of several limits decides where many programs are
    on an SM, ``half_sharpness_programs``: how many, of one warp, make it half as sharp (of w warps sqrt(w) fewer);
    ``unpaired_sector_penalty``: bytes that memory loses for each one that comes in a sector without the other one of
    its pair.
    """

    sms: int
    clock_hz: float
    copy_bytes_per_s: float
    launch_s: float
    issue_rate: float
    sm_bytes_per_cycle: float
    program_start_s: float
    warp_start_s: float
    load_latency_s: float
    reduction_phase_s: float
    barrier_s: float
    dependent_issue_cycles: float
    spill_factor: float
    reload_s: float
    sharpness: float
    half_sharpness_programs: float
    unpaired_sector_penalty: float
    l1_bytes: float
    l2_bytes: float
    l2_bytes_per_s: float


H200 = Gpu(
    sms=GPU.sms,
    clock_hz=GPU.clock_hz,
    copy_bytes_per_s=GPU.copy_bytes_per_second,
    sm_bytes_per_cycle=64.0,  # public micro-benchmarks of an H100
    # Of 256 KB what is left for a kernel's own data is taken as three quarters.
    l1_bytes=192e3,
    l2_bytes=GPU.l2_bytes,
    # Fitted to the times of 1,251 plans on an H200, by `python -m benchmarks run fusion.cost_model_fit`,
    # before kernels were launched early.  Since then measured: program_s, by `python -m
    # benchmarks.fusion.chains.program_start_rate`; chosen among 0, 1, 2 and 4: company, by
    # benchmarks/fusion/results/cost_model.json.gz.
    launch_s=0.61e-6,
    issue_rate=3.35,
    load_latency_s=0.693e-6,
    program_start_s=1.21e-9,
    warp_start_s=0.095e-9,
    reduction_phase_s=0.37e-6,
    barrier_s=39e-9,
    dependent_issue_cycles=1.65,
    spill_factor=1.19,
    reload_s=0.021e-6,
    sharpness=4.7,
    half_sharpness_programs=2,
    unpaired_sector_penalty=0.32,
    l2_bytes_per_s=5.1e12,
)


def resident_programs(demand: KernelCost, machine: Gpu = H200) -> int:
    """Programs that are on an SM at once."""
    registers = int(min(demand.registers, max_registers(demand)))
    fit = blocks_per_sm(demand.warps, registers, demand.shared_bytes)
    return max(1, min(fit, -(-demand.programs // machine.sms)))


def kernel_seconds(demand: KernelCost, machine: Gpu = H200) -> float:
    """One kernel, launch included: the mean over what registers may turn out to be."""
    found = (
        _seconds_with_registers(replace(demand, registers=demand.registers * share), machine)
        for share in REGISTER_UNCERTAINTY
    )
    return machine.launch_s + sum(found) / len(REGISTER_UNCERTAINTY)


def _seconds_with_registers(demand: KernelCost, machine: Gpu) -> float:
    together = resident_programs(demand, machine)
    # What a program reads again comes from L1 as far as the programs of an SM fit, what it or
    # others need again from L2 as far as all that is being worked on fits.
    held = (demand.memory_bytes + demand.overfetched_bytes) * together
    l1_bytes = max(0.0, machine.l1_bytes - demand.shared_bytes * together)
    left = demand.overfetched_bytes + demand.reread_bytes * (
        1 - min(1.0, l1_bytes / max(1.0, held))
    )
    missed = left * (1 - min(1.0, machine.l2_bytes / max(1.0, held * machine.sms)))
    # Of few that are missing some are computed anew; with many ptxas gives up, and nearly all
    # values live in memory.
    most = max_registers(demand)
    missing = max(0.0, demand.registers - most)
    spilled = machine.spill_factor * missing * missing / most * demand.iterations
    spilt = _SPILL_BYTES * spilled * WARP_SIZE * demand.warps
    cycles = (demand.instructions + 2 * spilled) / machine.clock_hz
    issue = cycles * demand.warps / machine.issue_rate
    delay = (
        demand.dependent_loads * machine.load_latency_s
        + demand.reduction_phases * machine.reduction_phase_s
    )
    delay += demand.barriers * machine.barrier_s + spilled * machine.reload_s
    delay += (demand.memory_bytes + left) / machine.sm_bytes_per_cycle / machine.clock_hz
    delay += max(
        0.0,
        demand.overlapped_loads * machine.load_latency_s - cycles * machine.dependent_issue_cycles,
    )
    delay += max(0.0, cycles * machine.dependent_issue_cycles - issue)
    alone = issue + delay
    of_each = demand.programs / machine.sms
    memory = (
        demand.memory_bytes
        + missed
        + spilt
        + machine.unpaired_sector_penalty * demand.unpaired_sector_bytes
    )
    memory /= machine.copy_bytes_per_s
    # Of a sector that is written in parts L2 reads the rest.
    l2 = (demand.memory_bytes + left + spilt + demand.partial_sector_bytes) / machine.l2_bytes_per_s
    begins = max(machine.program_start_s, demand.warps * machine.warp_start_s)
    # The first turns' loads and the last ones' stores have nothing beside them.
    ends = alone / (demand.iterations if of_each <= together else 1.0)
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
    sharpness = 1 + (machine.sharpness - 1) * company / (company + machine.half_sharpness_programs)
    near: float = sum((one / longest) ** sharpness for one in limits)
    decided: float = ends + longest * near ** (1 / sharpness)
    return decided


def max_registers(demand: KernelCost) -> int:
    """Registers that a thread can have."""
    return min(MAX_REGISTERS_PER_THREAD, REGISTERS_PER_SM // (WARP_SIZE * demand.warps))
