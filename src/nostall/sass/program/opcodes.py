"""What each opcode is: its pipe, whether its latency varies, what it does to memory and order.

One row per base opcode (the mnemonic before the first dot).  An opcode without a row is not
guessed: it is pinned, counts as a fence, and the verifier refuses to judge code that has it.
Rows were written from nvdisasm's listings of open-source kernels and checked against compiler
output: a *fixed* opcode never sets a write scoreboard there, a *variable* one nearly always does.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cache


class Pipe(StrEnum):
    """Where an instruction executes; also its latency class."""

    INT = "int"
    FMA = "fma"
    HALF = "half"
    DOUBLE = "double"
    MMA = "mma"
    GMMA = "gmma"
    UNIFORM = "uniform"
    XU = "xu"
    LSU = "lsu"
    TEXTURE = "texture"
    CONST = "const"
    SPECIAL = "special"
    TENSOR = "tensor"
    CONTROL = "control"


class Does:
    """Effects besides registers, as bits of an int (an enum's operators would dominate analysis).

    ``WALL``: nothing may cross it in either direction.  ``FENCE``: no memory access may cross it.
    The others name an access to a memory space; accesses to one space keep their order unless
    both read.
    """

    NOTHING = 0
    WALL = 1 << 0
    FENCE = 1 << 1
    READ_GLOBAL = 1 << 2
    WRITE_GLOBAL = 1 << 3
    READ_SHARED = 1 << 4
    WRITE_SHARED = 1 << 5
    READ_LOCAL = 1 << 6
    WRITE_LOCAL = 1 << 7
    ENDS_BLOCK = 1 << 8

    READ_ANY = READ_GLOBAL | READ_SHARED | READ_LOCAL
    WRITE_ANY = WRITE_GLOBAL | WRITE_SHARED | WRITE_LOCAL


@dataclass(frozen=True, slots=True)
class Opcode:
    """A row of the table.  ``fixed_on``: architectures where the latency is fixed (None: all)."""

    pipe: Pipe
    does: int = Does.NOTHING
    fixed_on: frozenset[int] | None = None

    def fixed(self, sm: int) -> bool:
        """Whether results arrive after a fixed number of cycles, unprotected by a scoreboard."""
        return self.fixed_on is None or sm in self.fixed_on


_NEVER: frozenset[int] = frozenset()
_FP64 = frozenset((90, 100))
_R2UR = frozenset((90, 100, 120))


def _rows(
    names: str, pipe: Pipe, does: int = Does.NOTHING, fixed_on: frozenset[int] | None = None
) -> dict[str, Opcode]:
    return dict.fromkeys(names.split(), Opcode(pipe, does, fixed_on))


OPCODES: dict[str, Opcode] = {
    # Arithmetic with fixed latency.
    **_rows(
        "IADD3 IADD LOP3 LOP PLOP3 SHF SHL SHR LEA SEL ISETP ICMP MOV PRMT IABS IMNMX IMNMX3 "
        "VIMNMX VIMNMX3 VIADDMNMX VHMNMX SGXT BMSK FSEL FSETP FSET FMNMX FMNMX3 P2R R2P "
        "VOTE ELECT CS2R VABSDIFF VABSDIFF4 FSWZADD ISCADD I2IP",
        Pipe.INT,
    ),
    # Computes with its own address, so it must stay where it is.
    **_rows("LEPC", Pipe.INT, Does.WALL),
    **_rows("IMAD VIADD IDP IDP4A FFMA FADD FMUL FFMA2 FADD2 FMUL2", Pipe.FMA),
    **_rows(
        "HFMA2 HADD2 HMUL2 HSETP2 HSET2 HMNMX2 F2FP I2FP FHADD FHFMA FHMUL HADD2_32I", Pipe.HALF
    ),
    **_rows("DADD DMUL DFMA DSETP", Pipe.DOUBLE, fixed_on=_FP64),
    **_rows("HMMA IMMA BMMA QMMA OMMA", Pipe.MMA),
    **_rows("DMMA", Pipe.MMA, fixed_on=_NEVER),
    **_rows(
        "UIADD3 UIMAD ULOP3 USHF ULEA UMOV USEL UISETP UPRMT UPLOP3 UPOPC UFLO UBREV USGXT UBMSK "
        "UIMNMX UVIMNMX UIABS VOTEU CS2UR UP2UR UR2UP UFADD UFMUL UFFMA UFSETP UFSEL UFMNMX UI2F "
        "UI2FP UF2I UF2F UF2FP UFSET UI2I UI2IP UFRND",
        Pipe.UNIFORM,
    ),
    **_rows("ULDC CREDUX", Pipe.UNIFORM),
    **_rows("R2UR", Pipe.UNIFORM, fixed_on=_R2UR),
    # Variable latency, no memory that a program can write.
    **_rows("MUFU F2F F2I I2F I2I FRND FCHK POPC FLO BREV", Pipe.XU, fixed_on=_NEVER),
    **_rows("LDC LDCU", Pipe.CONST, fixed_on=_NEVER),
    **_rows("S2R S2UR", Pipe.SPECIAL, fixed_on=_NEVER),
    **_rows("SHFL MATCH REDUX MOVM QSPC", Pipe.LSU, fixed_on=_NEVER),
    # Memory.
    **_rows("LDG", Pipe.LSU, Does.READ_GLOBAL, _NEVER),
    **_rows("STG", Pipe.LSU, Does.WRITE_GLOBAL, _NEVER),
    **_rows("LDS LDSM", Pipe.LSU, Does.READ_SHARED, _NEVER),
    **_rows("STS STSM", Pipe.LSU, Does.WRITE_SHARED, _NEVER),
    **_rows("LDL", Pipe.LSU, Does.READ_LOCAL, _NEVER),
    **_rows("STL", Pipe.LSU, Does.WRITE_LOCAL, _NEVER),
    **_rows("LD", Pipe.LSU, Does.READ_ANY, _NEVER),
    **_rows("ST", Pipe.LSU, Does.WRITE_ANY, _NEVER),
    **_rows("LDGSTS", Pipe.LSU, Does.READ_GLOBAL | Does.WRITE_SHARED, _NEVER),
    **_rows("TEX TLD TLD4 TMML TXQ TXD TXA", Pipe.TEXTURE, Does.READ_GLOBAL, _NEVER),
    **_rows("ATOM ATOMG ATOMS RED REDG REDS REDAS STAS", Pipe.LSU, Does.FENCE, _NEVER),
    **_rows("SULD SUST SUATOM SURED SUQ PIXLD ISBERD", Pipe.TEXTURE, Does.FENCE, _NEVER),
    # Asynchronous machinery and order: nothing crosses.
    **_rows("HGMMA QGMMA IGMMA BGMMA", Pipe.GMMA, Does.WALL),
    **_rows(
        "LDGDEPBAR ARRIVES SYNCS UTMALDG UTMASTG UTMAREDG UTMAPF UTMACCTL UTMACMDFLUSH UBLKCP "
        "UBLKRED UBLKPF LDTM STTM LDT STT UTCHMMA UTCQMMA UTCIMMA UTCOMMA UTCCP UTCSHIFT UTCBAR "
        "UTCATOMSWS UTCMXQMMA UGETNEXTWORKID CCTL CCTLL CCTLT FENCE MEMBAR ERRBAR CGAERRBAR "
        "USETMAXREG USETSHMSZ",
        Pipe.TENSOR,
        Does.WALL,
        _NEVER,
    ),
    **_rows(
        "BAR DEPBAR WARPGROUP WARPGROUPSET NANOSLEEP NOP YIELD WARPSYNC ENDCOLLECTIVE BSSY BMOV "
        "B2R R2B ACQBULK PREEXIT UCGABAR_ARV UCGABAR_WAIT CGABAR_ARV CGABAR_WAIT UVIRTCOUNT PMTRIG "
        "VOTE_VTG GETLMEMBASE SETLMEMBASE SETCTAID S2CS ACQSHMINIT UPREEXIT",
        Pipe.CONTROL,
        Does.WALL,
    ),
    **_rows(
        "BRA BRX BRXU JMP JMX JMXU CALL RET EXIT BSYNC BREAK BPT KILL RTT LONGJMP JMXU WARPEXIT",
        Pipe.CONTROL,
        Does.WALL | Does.ENDS_BLOCK,
    ),
}

UNKNOWN = Opcode(Pipe.CONTROL, Does.WALL)

BATCH_FIELD = frozenset(
    ("DEPBAR", "TEX", "TLD", "TLD4", "TMML", "TXQ", "TXD", "TXA", "SULD", "SUST", "SUATOM", "SURED")
)
"""Opcodes whose bits 122..124 are the batch field, not reuse flags."""


@cache
def lookup(base: str) -> Opcode | None:
    """The row of a base opcode, or None when there is none."""
    return OPCODES.get(base)
