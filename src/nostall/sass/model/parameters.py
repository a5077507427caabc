"""Parameters of the SM issue model for each architecture; all of them are *modelled*.

Sources of the numbers:

- *vendor*: SM counts, clocks, bandwidths, lanes per SM and resource limits from the CUDA
  programming guide and the architecture white papers, for the product that ``device`` names.
- *measured by others*: LDS 23, SHFL 26, L1 hit 39, L2 282 / 283, DRAM 541 / 683 cycles on A100 /
  H100 (public micro-benchmarks); MUFU 17 and DMMA 38 on sm_86; the DRAIN form about 34 cycles;
  yielding after each instruction halves the issue rate (sm_120), hence one lost slot.
- *assumed*: the fields marked so below, and each latency of an architecture other than sm_80 and
  sm_90, which is that of its nearest relative.

Not modelled: instruction caches, shared-memory bank conflicts, divergence, uncoalesced accesses,
power and clock changes, the launch itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from nostall.core.errors import UnsupportedArchitecture

SUB_CORES = 4
"""Sub-cores per SM, each with one scheduler, on each architecture from sm_75 on."""


@dataclass(frozen=True, slots=True)
class SmParameters:
    """Parameters of one architecture.

    Latencies, occupancies and delays are in SM cycles. ``issue_*`` is how long one warp
    instruction occupies its pipe of one sub-core: 32 lanes / lanes of the pipe.
    """

    sm: int  # architecture number, e.g. 90
    device: str  # the product that the vendor's numbers are for
    sms: int  # SMs of the device
    clock_hz: float  # nominal SM clock
    dram_bytes_per_second: float

    max_warps: int  # per SM
    max_blocks: int  # per SM
    shared_bytes: int  # shared memory per SM
    reserved_shared: int  # bytes of shared memory per block that the system takes
    issue_fma: int
    issue_int: int
    issue_half: int
    issue_double: int
    mma_rate: float  # FP16 multiply-adds of mma.sync per cycle and sub-core
    f32_accumulate: float  # factor on that rate if sums are FP32
    dmma_rate: float  # FP64 multiply-adds of mma.sync per cycle and sub-core
    gmma_rate: float  # FP16 multiply-adds of wgmma per cycle and sub-core
    latency_l2: int
    latency_dram: int

    registers: int = 65536  # per SM
    shared_unit: int = 128  # shared memory is allocated in units of this many bytes
    barriers: int = 64  # named barriers per SM, assumed
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
    latency_uniform: int = 12  # assumed; of R2UR on architectures where it varies
    latency_double: int = 40  # assumed; on architectures where FP64 latency varies
    latency_dmma: int = 38
    latency_gmma: int = 32  # assumed, after the last cycle of the tensor unit
    latency_tensor: int = 30  # assumed; mbarrier and descriptor engines
    latency_atomic: int = 60  # assumed, beyond the L2's latency
    read_delay: int = 12  # assumed; until a queued instruction has read its sources
    barrier: int = 20  # assumed; from the last arrival to the next instruction
    drain: int = 34  # after an instruction with stall count 0
    yield_bubble: int = 1  # issue slots lost after a yielding instruction
    shared_bytes_per_cycle: int = 128  # per SM
    l2_bytes_per_cycle: int = 64  # per SM
    l2_hit: float = 0.75  # assumed share of global accesses that hit the L2
    queue_shared: int = 64  # assumed; cycles of accepted work at which the queue is full
    queue_global: int = 512  # assumed; as queue_shared
    queue_gmma: int = 1024  # assumed; as queue_shared

    @property
    def latency_global(self) -> int:
        """Mean latency of a global access that misses the L1."""
        return round(self.l2_hit * self.latency_l2 + (1 - self.l2_hit) * self.latency_dram)

    def global_bytes_per_cycle(self, active_sms: int) -> float:
        """Bytes per cycle that one SM gets while ``active_sms`` SMs share the DRAM."""
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
"""Architecture number -> parameters."""


def sm_parameters(sm: int) -> SmParameters:
    """Parameters of architecture ``sm``; raises :class:`UnsupportedArchitecture` without any."""
    try:
        return PARAMETERS[sm]
    except KeyError:
        known = ", ".join(f"sm_{n}" for n in PARAMETERS)
        raise UnsupportedArchitecture(
            f"the issue model has no parameters for sm_{sm}; it has those of {known}; measure on a "
            "GPU, or pass your own `parameters` to SmModel"
        ) from None
