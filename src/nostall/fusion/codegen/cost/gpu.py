"""Modelled time of a kernel, from its cost and the figures of a GPU.

The latency evaluator of FusionStitching (arXiv:2009.10924) has L = N_wave * L_warp: waves of
programs that registers, warps and shared memory let be resident at once. That is one of four limits
here (Little's law for the latency of a program). The others are the instructions that all warps
issue, the bytes of memory and of L2, and how fast programs start. The slowest limit decides, less
sharply if two are close, and nothing overlaps what the first and the last programs do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.tiling.legality import max_registers
from nostall.fusion.codegen.tiling.planned_kernel import PlannedKernel
from nostall.fusion.codegen.tiling.tile_sizes import WARP_SIZE
from nostall.fusion.graph.operations import DTYPE_BYTES
from nostall.fusion.hardware import H200 as HARDWARE

REGISTER_UNCERTAINTY = (0.85, 1.0, 1.2)
"""Registers of the compiled kernel as fractions of the modelled ones, for a sensitivity range.

Half of all kernels are within 15 %, and a few registers decide how many programs are resident.
"""
_SPILL_BYTES = 8
"""Bytes for each register that does not fit: it is stored and loaded again."""
# The vendor's figures for compute capability 9.0
MAX_BLOCKS_PER_SM = 32
RESERVED_SHARED_BYTES = 1024
"""Shared memory that the system reserves in every block."""
SHARED_BYTES_PER_SM = HARDWARE.shared_bytes + RESERVED_SHARED_BYTES
"""A single block can have all of it but its own reserved part."""
REGISTER_GRANULARITY = 8
"""Registers of a thread are allocated in multiples of this."""


PARTIAL_RESULT_BYTES = 4
"""Bytes of one partial result of a reduction."""
SECTOR_BYTES = 32
"""The smallest amount of memory that L2 transfers."""
_SECTOR_PAIR_BYTES = 64
"""Two sectors. Memory prefers to transfer them together (measured: single ones take longer)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCost:
    """Modelled cost of one kernel launch. All fields but ``programs`` are those of one program."""

    programs: int
    warps: int
    instructions: float  # of each warp
    registers: float  # of each thread
    memory_bytes: float  # read from memory and written to it, each byte once
    iterations: float = 1.0  # how often the tile is worked on: loop iterations of all passes
    dependent_loads: float = 1.0  # loads that wait for earlier loads
    overlapped_loads: float = 0.0  # loads that wait while the program works on earlier data
    reduction_phases: float = 0.0  # parts of the kernel that end with a reduction
    barriers: float = 0.0
    shared_bytes: int = 0
    reread_bytes: float = 0.0  # read again by the program itself
    overfetched_bytes: float = 0.0  # in sectors that are read, but needed by other programs
    partial_sector_bytes: float = 0.0  # in sectors that are written in parts
    unpaired_sector_bytes: float = 0.0  # in sectors without the other one of their pair


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """Figures of a GPU for the cost model."""

    sms: int
    clock_hz: float
    copy_bytes_per_s: float
    launch_s: float  # start and end of a kernel that follows another one
    issue_rate: float  # warp instructions of an SM in a cycle; at most 4
    sm_bytes_per_cycle: float  # that an SM receives
    program_start_s: float  # from the start of a program to the next one, anywhere on the GPU
    warp_start_s: float  # the same for each warp of a program
    load_latency_s: float  # from a load to its value, under load
    reduction_phase_s: float  # a reduction and the loads after it
    barrier_s: float
    dependent_issue_cycles: float  # from one instruction of a warp to its next
    spill_factor: float  # spills for each missing register, if twice the available ones are needed
    reload_s: float  # how long a warp waits for a spilled register
    sharpness: float  # exponent of the norm that combines limits, if an SM has many programs
    half_sharpness_programs: float  # resident programs of one warp that halve that (w: / sqrt(w))
    unpaired_sector_penalty: float  # bytes that memory loses for each unpaired sector byte
    l1_bytes: float
    l2_bytes: float
    l2_bytes_per_s: float


H200 = Gpu(
    sms=HARDWARE.sms,
    clock_hz=HARDWARE.clock_hz,
    copy_bytes_per_s=HARDWARE.copy_bytes_per_second,
    sm_bytes_per_cycle=64.0,  # public micro-benchmarks of an H100
    # Three quarters of 256 KB are assumed to be left for a kernel's own data.
    l1_bytes=192e3,
    l2_bytes=HARDWARE.l2_bytes,
    # Fitted to the measured times of 1,473 plans of 146 kernels of the train half of the generated
    # chains on an H200, by `python -m benchmarks run fusion.cost_model_fit --gpu-only --measured
    # benchmarks/fusion/results/unseen_train.json.gz` (unseen_fit.json).
    launch_s=5.66e-07,
    issue_rate=3.95,
    load_latency_s=5.5e-07,
    program_start_s=1.1e-09,
    warp_start_s=1.22e-10,
    reduction_phase_s=2.3e-08,
    barrier_s=4.98e-08,
    dependent_issue_cycles=2.56,
    spill_factor=1.01,
    reload_s=1.14e-08,
    sharpness=2.7,
    half_sharpness_programs=8.65,
    unpaired_sector_penalty=0.389,
    l2_bytes_per_s=25500000000000.0,
)

H200_DOTS = replace(
    H200,
    # The train half has no small dots: these are of an earlier fit to 1,251 plans of the named
    # chains, which have some (benchmarks/fusion/results/cost_model.json.gz).
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
"""The same GPU for kernels with small dots."""


def blocks_per_sm(warps: int, registers_per_thread: int, shared_bytes: int) -> int:
    """Resident blocks of so many warps, registers and shared bytes; 0 if not even one fits."""
    allocated = -(-registers_per_thread // REGISTER_GRANULARITY) * REGISTER_GRANULARITY
    return min(
        MAX_BLOCKS_PER_SM,
        HARDWARE.max_warps // warps,
        HARDWARE.registers // (WARP_SIZE * warps * allocated),
        SHARED_BYTES_PER_SM // (shared_bytes + RESERVED_SHARED_BYTES),
    )


def resident_programs(cost: KernelCost, gpu: Gpu = H200) -> int:
    """Programs that are resident on an SM at once."""
    registers = int(min(cost.registers, max_registers(cost.warps)))
    fitting = blocks_per_sm(cost.warps, registers, cost.shared_bytes)
    return max(1, min(fitting, -(-cost.programs // gpu.sms)))


def kernel_seconds(cost: KernelCost, gpu: Gpu = H200) -> float:
    """Seconds of one launch, *modelled*: the mean over :data:`REGISTER_UNCERTAINTY`."""
    times = (
        _seconds_with_registers(replace(cost, registers=cost.registers * share), gpu)
        for share in REGISTER_UNCERTAINTY
    )
    return gpu.launch_s + sum(times) / len(REGISTER_UNCERTAINTY)


def _seconds_with_registers(cost: KernelCost, gpu: Gpu) -> float:
    resident = resident_programs(cost, gpu)
    refetched, missed = _cache_traffic(cost, gpu, resident)
    spills = _spilled_registers(cost, gpu)
    spill_bytes = _SPILL_BYTES * spills * WARP_SIZE * cost.warps
    instruction_s = (cost.instructions + 2 * spills) / gpu.clock_hz
    issue = instruction_s * cost.warps / gpu.issue_rate
    latency = issue + _delay(cost, gpu, refetched, spills, instruction_s, issue)
    memory = cost.memory_bytes + missed + spill_bytes
    memory += gpu.unpaired_sector_penalty * cost.unpaired_sector_bytes
    memory /= gpu.copy_bytes_per_s
    # L2 reads the rest of a sector that is written in parts.
    l2 = cost.memory_bytes + refetched + spill_bytes + cost.partial_sector_bytes
    l2 /= gpu.l2_bytes_per_s
    start = max(gpu.program_start_s, cost.warps * gpu.warp_start_s)
    programs_per_sm = cost.programs / gpu.sms
    # Nothing overlaps the loads of the first iterations and the stores of the last ones.
    exposed = latency / (cost.iterations if programs_per_sm <= resident else 1.0)
    limits = (
        max(1.0, programs_per_sm / resident) * latency - exposed,
        programs_per_sm * issue,
        # Starting programs issue the loads: the slower of the two hides the other.
        cost.programs * max(memory, start),
        cost.programs * l2,
    )
    longest: float = max(limits)
    # A few programs of few warps often do the same at once: while they compute, memory is idle.
    company = resident * math.sqrt(cost.warps)
    sharpness = 1 + (gpu.sharpness - 1) * company / (company + gpu.half_sharpness_programs)
    norm: float = sum((limit / longest) ** sharpness for limit in limits)
    seconds: float = exposed + longest * norm ** (1 / sharpness)
    return seconds


def _cache_traffic(cost: KernelCost, gpu: Gpu, resident: int) -> tuple[float, float]:
    """Bytes of a program that L2 delivers in addition, and those of them that miss L2.

    What a program reads again hits L1 as far as the data of the resident programs fits. What it or
    other programs need again hits L2 as far as the data of all programs at work fits.
    """
    working_set = (cost.memory_bytes + cost.overfetched_bytes) * resident
    l1_bytes = max(0.0, gpu.l1_bytes - cost.shared_bytes * resident)
    l1_hits = min(1.0, l1_bytes / max(1.0, working_set))
    refetched = cost.overfetched_bytes + cost.reread_bytes * (1 - l1_hits)
    missed = refetched * (1 - min(1.0, gpu.l2_bytes / max(1.0, working_set * gpu.sms)))
    return refetched, missed


def _spilled_registers(cost: KernelCost, gpu: Gpu) -> float:
    """Registers of a thread that are spilled, over all iterations.

    If a few are missing, the compiler computes some values again. If many are missing, ptxas gives
    up, and nearly all values live in memory: so spills grow with the square.
    """
    available = max_registers(cost.warps)
    missing = max(0.0, cost.registers - available)
    return gpu.spill_factor * missing * missing / available * cost.iterations


def _delay(
    cost: KernelCost,
    gpu: Gpu,
    refetched: float,
    spills: float,
    instruction_s: float,
    issue: float,
) -> float:
    """Seconds that a program waits besides issuing instructions."""
    dependent_s = instruction_s * gpu.dependent_issue_cycles
    loads = cost.dependent_loads * gpu.load_latency_s
    delay = loads + cost.reduction_phases * gpu.reduction_phase_s
    delay += cost.barriers * gpu.barrier_s + spills * gpu.reload_s
    delay += (cost.memory_bytes + refetched) / gpu.sm_bytes_per_cycle / gpu.clock_hz
    delay += max(0.0, cost.overlapped_loads * gpu.load_latency_s - dependent_s)
    delay += max(0.0, dependent_s - issue)
    return delay


def tensor_bytes(schedule: Schedule, reads: Iterable[int], writes: Iterable[int]) -> float:
    """Bytes of the tensors that are read and written, each once."""
    return float(sum(schedule.mapping.graph[index].bytes for index in (*reads, *writes)))


def with_sector_waste(kernel: PlannedKernel, cost: KernelCost) -> KernelCost:
    """The cost with the traffic of partly used sectors, if rows are contiguous in memory.

    A tile of few rows then reads short runs: sectors contain bytes that only other programs need,
    sectors are written in parts, and sectors are transferred without the other one of their pair.
    """
    schedule = kernel.schedule
    if not schedule.is_column_major:
        return cost
    graph, outputs = schedule.mapping.graph, set(schedule.mapping.outputs)
    needed = wasted = partial = unpaired = 0.0
    for index in (*schedule.mapping.inputs, *schedule.mapping.outputs):
        run, size = kernel.plan.rows * DTYPE_BYTES[graph[index].dtype], graph[index].bytes
        waste = size * max(0.0, SECTOR_BYTES / run - 1)
        needed += size
        wasted += waste
        partial += waste * (index in outputs)
        unpaired += size * (run < _SECTOR_PAIR_BYTES)
    share = 1 / max(1.0, needed)
    return replace(
        cost,
        overfetched_bytes=(cost.memory_bytes + cost.reread_bytes) * wasted * share,
        partial_sector_bytes=cost.memory_bytes * partial * share,
        unpaired_sector_bytes=cost.memory_bytes * unpaired * share,
    )
