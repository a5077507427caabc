"""Opcode table: pipe, fixed or variable latency, and memory and ordering effects of each opcode.

There is one row for each base opcode (the mnemonic before the first dot).  An opcode without a row
is a scheduling barrier, and the verifier rejects code that contains it.  The rows were written
from nvdisasm's listings of open-source kernels and checked against compiler output, where an
opcode with *fixed* latency never sets a write scoreboard and one with *variable* latency nearly
always does.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cache


class Pipe(StrEnum):
    """The unit that executes an instruction; the latency tables are by pipe."""

    INT = "int"  # integer and logic arithmetic, comparisons, selects
    FMA = "fma"  # FP32 arithmetic, IMAD
    HALF = "half"  # FP16 and BF16 arithmetic, packed conversions
    DOUBLE = "double"  # FP64 arithmetic
    MMA = "mma"  # matrix products of one warp
    GMMA = "gmma"  # asynchronous matrix products of a warpgroup
    UNIFORM = "uniform"  # uniform datapath: one value for all threads of a warp
    XU = "xu"  # transcendental functions, conversions, bit counts
    LSU = "lsu"  # load/store unit: memory accesses, atomics, shuffles
    TEXTURE = "texture"  # texture and surface accesses
    CONST = "const"  # loads from constant memory
    SPECIAL = "special"  # reads of special registers, such as the thread index
    TENSOR = "tensor"  # asynchronous copies, tensor memory, mbarriers, memory barriers
    CONTROL = "control"  # branches, barriers, convergence


class Effect:
    """Effects on memory and order, as bits of an int.

    The bits are plain integers because the operators of an enum would dominate the run time of the
    analyses.  READ and WRITE bits name an access to a memory space.  Two accesses to one space
    keep their order unless both read.
    """

    NONE = 0
    BARRIER = 1 << 0
    """Scheduling barrier: no instruction may move across it in either direction."""
    FENCE = 1 << 1
    """No memory access may move across it."""
    READ_GLOBAL = 1 << 2
    WRITE_GLOBAL = 1 << 3
    READ_SHARED = 1 << 4
    WRITE_SHARED = 1 << 5
    READ_LOCAL = 1 << 6
    WRITE_LOCAL = 1 << 7
    ENDS_BLOCK = 1 << 8
    """Last instruction of its basic block."""

    READ_ANY = READ_GLOBAL | READ_SHARED | READ_LOCAL
    WRITE_ANY = WRITE_GLOBAL | WRITE_SHARED | WRITE_LOCAL
    ACCESS = READ_ANY | WRITE_ANY | FENCE


@dataclass(frozen=True, slots=True)
class OpcodeClass:
    """One row of the opcode table."""

    pipe: Pipe
    effects: int = Effect.NONE
    """Bits of :class:`Effect`."""
    fixed_on: frozenset[int] | None = None
    """Architectures on which the latency is fixed; None means all."""

    def has_fixed_latency(self, sm: int) -> bool:
        """Whether the result arrives after a fixed number of cycles, without a scoreboard."""
        return self.fixed_on is None or sm in self.fixed_on


_VARIABLE: frozenset[int] = frozenset()
_FIXED_FP64 = frozenset((90, 100))
_FIXED_R2UR = frozenset((90, 100, 120))


def _rows(
    names: str, pipe: Pipe, effects: int = Effect.NONE, fixed_on: frozenset[int] | None = None
) -> dict[str, OpcodeClass]:
    return dict.fromkeys(names.split(), OpcodeClass(pipe, effects, fixed_on))


UNREACHED = "UNREACHED"
"""Opcode that stands for a word that nvdisasm does not list, because control does not reach it."""

OPCODES: dict[str, OpcodeClass] = {
    # Arithmetic with fixed latency.
    **_rows(
        "IADD3 IADD LOP3 LOP PLOP3 SHF SHL SHR LEA SEL ISETP ICMP MOV PRMT IABS IMNMX IMNMX3 "
        "VIMNMX VIMNMX3 VIADDMNMX VHMNMX SGXT BMSK FSEL FSETP FSET FMNMX FMNMX3 P2R R2P "
        "VOTE ELECT CS2R VABSDIFF VABSDIFF4 FSWZADD ISCADD I2IP",
        Pipe.INT,
    ),
    # The result depends on the instruction's own address, so it must not move.
    **_rows("LEPC", Pipe.INT, Effect.BARRIER),
    **_rows("IMAD VIADD IDP IDP4A FFMA FADD FMUL FFMA2 FADD2 FMUL2", Pipe.FMA),
    **_rows(
        "HFMA2 HADD2 HMUL2 HSETP2 HSET2 HMNMX2 F2FP F2IP I2FP FHADD FHFMA FHMUL HADD2_32I",
        Pipe.HALF,
    ),
    **_rows("DADD DMUL DFMA DSETP", Pipe.DOUBLE, fixed_on=_FIXED_FP64),
    **_rows("HMMA IMMA BMMA QMMA OMMA", Pipe.MMA),
    **_rows("DMMA", Pipe.MMA, fixed_on=_VARIABLE),
    **_rows(
        "UIADD3 UIMAD ULOP3 USHF ULEA UMOV USEL UISETP UPRMT UPLOP3 UPOPC UFLO UBREV USGXT UBMSK "
        "UIMNMX UVIMNMX UIABS VOTEU CS2UR UP2UR UR2UP UFADD UFMUL UFFMA UFSETP UFSEL UFMNMX UI2F "
        "UI2FP UF2I UF2F UF2FP UFSET UI2I UI2IP UFRND",
        Pipe.UNIFORM,
    ),
    **_rows("ULDC CREDUX", Pipe.UNIFORM),
    **_rows("R2UR", Pipe.UNIFORM, fixed_on=_FIXED_R2UR),
    # Variable latency, no access to memory that a kernel can write.
    **_rows("MUFU F2F F2I I2F I2I FRND FCHK POPC FLO BREV", Pipe.XU, fixed_on=_VARIABLE),
    **_rows("LDC LDCU", Pipe.CONST, fixed_on=_VARIABLE),
    **_rows("S2R S2UR", Pipe.SPECIAL, fixed_on=_VARIABLE),
    **_rows("SHFL MATCH REDUX MOVM QSPC", Pipe.LSU, fixed_on=_VARIABLE),
    # Memory.
    **_rows("LDG", Pipe.LSU, Effect.READ_GLOBAL, _VARIABLE),
    **_rows("STG", Pipe.LSU, Effect.WRITE_GLOBAL, _VARIABLE),
    **_rows("LDS LDSM", Pipe.LSU, Effect.READ_SHARED, _VARIABLE),
    **_rows("STS STSM", Pipe.LSU, Effect.WRITE_SHARED, _VARIABLE),
    **_rows("LDL", Pipe.LSU, Effect.READ_LOCAL, _VARIABLE),
    **_rows("STL", Pipe.LSU, Effect.WRITE_LOCAL, _VARIABLE),
    **_rows("LD", Pipe.LSU, Effect.READ_ANY, _VARIABLE),
    **_rows("ST", Pipe.LSU, Effect.WRITE_ANY, _VARIABLE),
    **_rows("LDGSTS", Pipe.LSU, Effect.READ_GLOBAL | Effect.WRITE_SHARED, _VARIABLE),
    **_rows("TEX TLD TLD4 TMML TXQ TXD TXA", Pipe.TEXTURE, Effect.READ_GLOBAL, _VARIABLE),
    **_rows("ATOM ATOMG ATOMS LDGMC RED REDG REDS REDAS STAS", Pipe.LSU, Effect.FENCE, _VARIABLE),
    **_rows("SULD SUST SUATOM SURED SUQ PIXLD ISBERD", Pipe.TEXTURE, Effect.FENCE, _VARIABLE),
    # Asynchronous operations, synchronisation and control flow: scheduling barriers.
    **_rows("HGMMA QGMMA IGMMA BGMMA", Pipe.GMMA, Effect.BARRIER),
    **_rows(
        "LDGDEPBAR ARRIVES SYNCS UTMALDG UTMASTG UTMAREDG UTMAPF UTMACCTL UTMACMDFLUSH UBLKCP "
        "UBLKRED UBLKPF LDTM STTM LDT STT UTCHMMA UTCQMMA UTCIMMA UTCOMMA UTCCP UTCSHIFT UTCBAR "
        "UTCATOMSWS UTCMXQMMA UGETNEXTWORKID CCTL CCTLL CCTLT FENCE MEMBAR ERRBAR CGAERRBAR "
        "USETMAXREG USETSHMSZ",
        Pipe.TENSOR,
        Effect.BARRIER,
        _VARIABLE,
    ),
    **_rows(
        "BAR DEPBAR WARPGROUP WARPGROUPSET NANOSLEEP NOP YIELD WARPSYNC ENDCOLLECTIVE BSSY BMOV "
        "B2R R2B ACQBULK PREEXIT UCGABAR_ARV UCGABAR_WAIT CGABAR_ARV CGABAR_WAIT UVIRTCOUNT PMTRIG "
        "RPCMOV VOTE_VTG GETLMEMBASE SETLMEMBASE SETCTAID S2CS ACQSHMINIT UPREEXIT",
        Pipe.CONTROL,
        Effect.BARRIER,
    ),
    **_rows(
        "BRA BRX BRXU JMP JMX JMXU CALL RET EXIT BSYNC BREAK BPT KILL RTT LONGJMP JMXU WARPEXIT "
        f"{UNREACHED}",
        Pipe.CONTROL,
        Effect.BARRIER | Effect.ENDS_BLOCK,
    ),
}

FORMS: dict[tuple[str, str], OpcodeClass] = {("I2I", "SAT"): OpcodeClass(Pipe.INT)}
"""(base opcode, modifier) -> the row of a form that another unit executes than the base opcode.

I2I with saturation has no scoreboard on any architecture, and its result is read after 4 cycles
(``tests/corpus/nvcc/conversions.cu``)."""

UNKNOWN = OpcodeClass(Pipe.CONTROL, Effect.BARRIER)
"""The row that stands in for an opcode without one."""

BATCH_FIELD_OPCODES = frozenset(
    ("DEPBAR", "TEX", "TLD", "TLD4", "TMML", "TXQ", "TXD", "TXA", "SULD", "SUST", "SUATOM", "SURED")
)
"""Opcodes whose bits 122..124 are the batch field, not reuse flags."""


@cache
def lookup(base: str) -> OpcodeClass | None:
    """The row of a base opcode, or None if it has none."""
    return OPCODES.get(base)
