"""What the issue model assumes of each architecture; every number here is *modelled*.

Where numbers come from:

- *vendor*: SM counts, clocks, bandwidths, lanes per SM and resource limits from the CUDA
  programming guide and the architecture white papers, for the product that ``device`` names.
- *measured by others*: LDS 23, SHFL 26, L1 hit 39, L2 282 / 283, DRAM 541 / 683 cycles on A100 /
  H100 (public micro-benchmarks); MUFU 17 and DMMA 38 on sm_86; the DRAIN form about 34 cycles;
  yielding after each instruction halves the issue rate (sm_120), hence one lost slot.
- *assumed*: everything marked so below, and every latency of an architecture other than sm_80 and
  sm_90, which is taken from its nearest relative.

Not modelled at all: instruction caches, shared-memory bank conflicts, divergence, uncoalesced
accesses, power and clock changes, the launch itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from nostall.core.errors import UnsupportedArchitecture

SUB_CORES = 4
"""Schedulers per SM, on every architecture from sm_75 on."""


@dataclass(frozen=True, slots=True)
class SmParameters:
    """One architecture.  Latencies, occupancies and delays are in SM cycles; ``issue_*`` is how
    long one warp instruction keeps its pipe of one sub-core (32 lanes / lanes of the pipe)."""

    sm: int
    device: str
    sms: int
    clock_hz: float
    dram_bytes_per_second: float

    max_warps: int
    max_blocks: int
    shared_bytes: int
    reserved_shared: int
    issue_fma: int
    issue_int: int
    issue_half: int
    issue_double: int
    mma_rate: float
    f32_accumulate: float
    dmma_rate: float
    gmma_rate: float
    latency_l2: int
    latency_dram: int

    registers: int = 65536
    shared_unit: int = 128
    barriers: int = 64  # assumed
    issue_imad: int = 2
    issue_xu: int = 8  # 16 lanes per SM
    issue_uniform: int = 2  # assumed
    issue_const: int = 4  # assumed
    issue_special: int = 8  # assumed
    issue_lsu: int = 2  # assumed: one instruction every second cycle into the memory queue
    issue_tensor: int = 4  # assumed
    latency_shared: int = 23
    latency_shared_wide: int = 3  # assumed, per doubling: 23, 26, 29
    latency_shuffle: int = 26
    latency_l1: int = 39
    latency_xu: int = 17
    latency_const: int = 30  # assumed
    latency_special: int = 30  # assumed
    latency_uniform: int = 12  # assumed; R2UR where it is not fixed
    latency_double: int = 40  # assumed; where FP64 is not fixed
    latency_dmma: int = 38
    latency_gmma: int = 32  # assumed, after the last cycle of the tensor unit
    latency_tensor: int = 30  # assumed; mbarrier and descriptor engines
    latency_atomic: int = 60  # assumed, beyond the L2's latency
    read_delay: int = 12  # assumed; until a queued instruction has read its sources
    barrier: int = 20  # assumed; from the last arrival to the next instruction
    drain: int = 34
    yield_bubble: int = 1
    shared_bytes_per_cycle: int = 128
    l2_bytes_per_cycle: int = 64  # per SM
    l2_hit: float = 0.75  # assumed share of global accesses that the L2 answers
    queue_shared: int = 64  # assumed; cycles of accepted work at which the queue is full
    queue_global: int = 512  # assumed
    queue_gmma: int = 1024  # assumed

    @property
    def latency_global(self) -> int:
        """Mean latency of a global access that misses the L1."""
        return round(self.l2_hit * self.latency_l2 + (1 - self.l2_hit) * self.latency_dram)

    def global_bytes_per_cycle(self, active_sms: int) -> float:
        """Bytes per cycle that one SM gets while ``active_sms`` of them share the DRAM."""
        dram = self.dram_bytes_per_second / self.clock_hz / max(1, active_sms)
        return 1 / (1 / self.l2_bytes_per_cycle + (1 - self.l2_hit) / dram)


_SM_80 = SmParameters(
    sm=80,
    device="A100 SXM 40 GB",
    sms=108,
    clock_hz=1.41e9,
    dram_bytes_per_second=1.555e12,
    max_warps=64,
    max_blocks=32,
    shared_bytes=164 * 1024,
    reserved_shared=1024,
    issue_fma=2,
    issue_int=2,
    issue_half=1,
    issue_double=4,
    mma_rate=256,
    f32_accumulate=1.0,
    dmma_rate=16,
    gmma_rate=256,
    latency_l2=282,
    latency_dram=541,
    latency_dmma=25,
)

_SM_90 = replace(
    _SM_80,
    sm=90,
    device="H100 SXM5",
    sms=132,
    clock_hz=1.83e9,
    dram_bytes_per_second=3.35e12,
    shared_bytes=228 * 1024,
    issue_fma=1,
    issue_double=2,
    mma_rate=340,  # assumed: mma.sync reaches about two thirds of wgmma
    dmma_rate=32,
    gmma_rate=512,
    latency_l2=283,
    latency_dram=683,
)

_SM_86 = replace(
    _SM_80,
    sm=86,
    device="GeForce RTX 3090",
    sms=82,
    clock_hz=1.695e9,
    dram_bytes_per_second=0.936e12,
    max_warps=48,
    max_blocks=16,
    shared_bytes=100 * 1024,
    issue_fma=1,
    issue_half=2,
    issue_double=64,
    mma_rate=128,
    f32_accumulate=0.5,
    dmma_rate=0.5,
    gmma_rate=128,
    latency_dmma=38,
)

PARAMETERS: dict[int, SmParameters] = {
    75: replace(
        _SM_80,
        sm=75,
        device="T4",
        sms=40,
        clock_hz=1.59e9,
        dram_bytes_per_second=0.32e12,
        max_warps=32,
        max_blocks=16,
        shared_bytes=64 * 1024,
        reserved_shared=0,
        shared_unit=256,
        issue_half=2,
        issue_double=64,
        mma_rate=128,
        dmma_rate=0.5,
        gmma_rate=128,
    ),
    80: _SM_80,
    86: _SM_86,
    89: replace(
        _SM_86,
        sm=89,
        device="GeForce RTX 4090",
        sms=128,
        clock_hz=2.52e9,
        dram_bytes_per_second=1.008e12,
        max_blocks=24,
    ),
    90: _SM_90,
    100: replace(
        _SM_90,
        sm=100,
        device="B200",
        sms=148,
        clock_hz=1.85e9,
        dram_bytes_per_second=8.0e12,
        gmma_rate=1024,
    ),
    120: replace(
        _SM_86,
        sm=120,
        device="GeForce RTX 5090",
        sms=170,
        clock_hz=2.407e9,
        dram_bytes_per_second=1.792e12,
        max_blocks=24,
        issue_int=1,
        issue_imad=1,
    ),
}
"""By architecture number."""


def parameters(sm: int) -> SmParameters:
    """The table row of ``sm``; raises :class:`UnsupportedArchitecture`."""
    try:
        return PARAMETERS[sm]
    except KeyError:
        known = ", ".join(f"sm_{n}" for n in PARAMETERS)
        raise UnsupportedArchitecture(
            f"the issue model has no parameters for sm_{sm}; it knows {known}; measure on a GPU or "
            "give SmModel a `parameters=` of your own"
        ) from None
