"""Fixed-latency producers: instructions whose result depends on the fresh value of a pass.

Most producers are the identity of their source, so that a result can be an address too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

File = Literal["R", "UR", "P", "UP"]


@dataclass(frozen=True, slots=True)
class Producer:
    """One instruction form with its operands."""

    form: str
    """Text of the form in :mod:`.words`."""
    operands: tuple[tuple[str, str], ...]
    """(field, name of a register); ``SOURCE`` is the source of the tested word."""
    file: File
    words: int = 1
    """Consecutive registers that the result has."""
    is_identity: bool = True
    """Whether the result equals the source, bit by bit."""

    @property
    def target_field(self) -> str:
        """The field of the register that is tested."""
        return {"R": "d", "UR": "ud", "P": "pd", "UP": "pd"}[self.file]

    @property
    def label(self) -> str:
        """The opcode, with the register file of the result."""
        return f"{self.form.split(' ')[0]}>{self.file}"


def _rows(file: File, table: str, words: int = 1, is_identity: bool = True) -> list[Producer]:
    rows: list[Producer] = []
    for line in table.strip().splitlines():
        form, _, text = line.partition("|")
        pairs = (item.partition("=") for item in text.split())
        operands = tuple((field, name) for field, _, name in pairs)
        rows.append(Producer(form.strip(), operands, file, words, is_identity))
    return rows


PRODUCERS: tuple[Producer, ...] = (
    *_rows("R", """
        IADD3 R{d}, R{a}, R{b}, R{c} | a=SOURCE b=ZERO c=ZERO
        IADD3 R{d}, P{pd}, R{a}, R{b}, R{c} | a=SOURCE b=ZERO c=ZERO pd=PT
        IADD3.X R{d}, R{a}, R{b}, R{c}, P{ps}, !PT | a=SOURCE b=ZERO c=ZERO ps=NO
        LOP3.LUT R{d}, R{a}, R{b}, R{c}, 0x96, !PT | a=SOURCE b=ZERO c=ZERO
        SHF.R.U32.HI R{d}, R{a}, R{b}, R{c} | a=ZERO b=ZERO c=SOURCE
        SHF.R.U32 R{d}, R{a}, R{b}, R{c} | a=SOURCE b=ZERO c=ZERO
        SHF.L.U32 R{d}, R{a}, R{b}, R{c} | a=SOURCE b=ZERO c=ZERO
        SHF.L.W.U32.HI R{d}, R{a}, R{b}, R{c} | a=ZERO b=ZERO c=SOURCE
        SEL R{d}, R{a}, R{b}, P{ps} | a=SOURCE b=ZERO ps=PT
        FSEL R{d}, R{a}, R{b}, P{ps} | a=SOURCE b=ZERO ps=PT
        PRMT R{d}, R{a}, R{b}, R{c} | a=SOURCE b=BYTES c=ZERO
        LEA R{d}, R{a}, R{b}, 0x1 | a=ZERO b=SOURCE
        LEA.HI R{d}, R{a}, R{b}, R{c}, 0x4 | a=ZERO b=SOURCE c=ZERO
        LEA.HI.X R{d}, R{a}, R{b}, R{c}, 0x2, P{ps} | a=ZERO b=SOURCE c=ZERO ps=NO
        MOV R{d}, R{b} | b=SOURCE
        IABS R{d}, R{b} | b=SOURCE
        VIMNMX R{d}, R{a}, R{b}, PT | a=SOURCE b=SOURCE
        IMAD R{d}, R{a}, R{b}, R{c} | a=SOURCE b=ONE c=ZERO
        IMAD.MOV.U32 R{d}, RZ, RZ, R{c} | c=SOURCE
        IMAD.X R{d}, R{a}, R{b}, R{c}, P{ps} | a=SOURCE b=ONE c=ZERO ps=NO
        VIADD R{d}, R{a}, {i} | a=SOURCE i=#0
        FFMA R{d}, R{a}, R{b}, R{c} | a=SOURCE b=FLOAT_ONE c=FLOAT_ZERO
        FADD R{d}, R{a}, R{b} | a=SOURCE b=FLOAT_ZERO
        FMUL R{d}, R{a}, R{b} | a=SOURCE b=FLOAT_ONE
        FMNMX R{d}, R{a}, R{b}, !PT | a=SOURCE b=SOURCE
    """),
    *_rows("R", """
        IMAD.HI.U32 R{d}, R{a}, R{b}, R{c} | a=SOURCE b=ZERO_MINUS_ONE c=ZERO
        IDP.4A.S8.S8 R{d}, R{a}, R{b}, R{c} | a=SOURCE b=A c=ZERO
        HADD2 R{d}, R{a}, R{b} | a=SOURCE b=HALF_ZERO
        HMUL2 R{d}, R{a}, R{b} | a=SOURCE b=HALF_ONE
        HFMA2 R{d}, R{a}, R{b}, R{c} | a=SOURCE b=HALF_ONE c=HALF_ZERO
        HFMA2.MMA R{d}, R{a}, R{b}, R{c} | a=SOURCE b=HALF_ONE c=HALF_ZERO
        HMNMX2 R{d}, R{a}, R{b}, !PT | a=SOURCE b=SOURCE
        F2FP.F16.F32.PACK_AB R{d}, R{a}, R{b} | a=SOURCE b=SOURCE
        F2FP.BF16.F32.PACK_AB R{d}, R{a}, R{b} | a=SOURCE b=SOURCE
        I2FP.F32.S32 R{d}, R{b} | b=SOURCE
        P2R R{d}, PR, R{a}, 0x1 | a=SOURCE
        VOTE.ANY R{d}, PT, P{ps} | ps=P_FRESH
    """, is_identity=False),
    *_rows("R", """
        IMAD.WIDE R{d}, R{a}, R{b}, R{c} | a=ZERO b=ONE c=FRESH_PAIR
        IMAD.WIDE.U32 R{d}, R{a}, R{b}, R{c} | a=ZERO b=ONE c=FRESH_PAIR
        IMAD.WIDE.U32.X R{d}, R{a}, R{b}, R{c}, P{ps} | a=ZERO b=ONE c=FRESH_PAIR ps=NO
    """, words=2),
    *_rows("R", """
        DADD R{d}, R{a}, R{c} | a=FRESH_PAIR c=DOUBLE_ZERO
        DMUL R{d}, R{a}, R{b} | a=FRESH_PAIR b=DOUBLE_ONE
        DFMA R{d}, R{a}, R{b}, R{c} | a=FRESH_PAIR b=DOUBLE_ONE c=DOUBLE_ZERO
        CS2R R{d}, SRZ |
    """, words=2, is_identity=False),
    *_rows("R", """
        HMMA.16816.F32 R{d}, R{a}, R{b}, R{c} | a=MMA_A b=MMA_B c=FRESH_QUAD
        HMMA.16816.F32.BF16 R{d}, R{a}, R{b}, R{c} | a=MMA_A b=MMA_B c=FRESH_QUAD
        HMMA.1688.F32.TF32 R{d}, R{a}, R{b}, R{c} | a=MMA_A b=MMA_B c=FRESH_QUAD
        IMMA.16832.S8.U8 R{d}, R{a}.ROW, R{b}.COL, R{c} | a=MMA_A b=MMA_B c=FRESH_QUAD
    """, words=4, is_identity=False),
    *_rows("R", """
        HMMA.16816.F16 R{d}, R{a}, R{b}, R{c} | a=MMA_A b=MMA_B c=FRESH_QUAD
    """, words=2, is_identity=False),
    *_rows("P", """
        ISETP.NE.AND P{pd}, PT, R{a}, R{b}, PT | a=SOURCE b=ZERO
        FSETP.NEU.AND P{pd}, PT, R{a}, R{b}, PT | a=SOURCE b=ZERO
        DSETP.NEU.AND P{pd}, PT, R{a}, R{b}, PT | a=FRESH_PAIR b=ZERO
        HSETP2.NEU.AND P{pd}, PT, R{a}, R{b}, PT | a=SOURCE b=ZERO
        PLOP3.LUT P{pd}, PT, P{ps}, P{p2}, P{p3}, 0x80, 0x0 | ps=P_FRESH p2=PT p3=PT
        LOP3.LUT P{pd}, R{d}, R{a}, R{b}, R{c}, 0x96, !PT | a=SOURCE b=ZERO c=ZERO d=ZERO
        IADD3 R{d}, P{pd}, R{a}, R{b}, R{c} | a=SOURCE b=ZERO_MINUS_ONE c=ZERO d=ZERO
        LEA R{d}, P{pd}, R{a}, R{b}, 0x1 | a=SOURCE b=MINUS_TWO d=ZERO
        IMAD.HI.U32 R{d}, P{pd}, R{a}, R{b}, R{c} | a=SOURCE b=ONE c=MINUS_ONE_64 d=ZERO
        IMAD.WIDE.U32 R{d}, P{pd}, R{a}, R{b}, R{c} | a=SOURCE b=ONE c=MINUS_ONE_64 d=ZERO
        VOTE.ANY P{pd}, P{ps} | ps=P_FRESH
    """),
    *_rows("UR", """
        UIADD3 UR{ud}, UR{ua}, UR{ub}, UR{uc} | ua=U_SOURCE ub=U_ZERO uc=U_ZERO
        UIADD3.X UR{ud}, UR{ua}, UR{ub}, UR{uc}, UP{ps}, !UPT | ua=U_SOURCE ub=UZ uc=UZ ps=NO
        ULOP3.LUT UR{ud}, UR{ua}, UR{ub}, UR{uc}, 0x96, !UPT | ua=U_SOURCE ub=U_ZERO uc=U_ZERO
        UIMAD UR{ud}, UR{ua}, UR{ub}, UR{uc} | ua=U_SOURCE ub=U_ONE uc=U_ZERO
        USHF.R.U32.HI UR{ud}, UR{ua}, UR{ub}, UR{uc} | ua=U_ZERO ub=U_ZERO uc=U_SOURCE
        ULEA UR{ud}, UR{ua}, UR{ub}, 0x1 | ua=U_ZERO ub=U_SOURCE
        USEL UR{ud}, UR{ua}, UR{ub}, UP{ps} | ua=U_SOURCE ub=U_ZERO ps=PT
        UMOV UR{ud}, UR{ub} | ub=U_SOURCE
        UPRMT UR{ud}, UR{ua}, UR{ub}, UR{uc} | ua=U_SOURCE ub=U_BYTES uc=U_ZERO
        R2UR UR{ud}, R{a} | a=SOURCE
    """),
    *_rows("UR", """
        UPOPC UR{ud}, UR{ub} | ub=U_SOURCE
        UFLO.U32 UR{ud}, UR{ub} | ub=U_SOURCE
        ULDC UR{ud}, c[0x0][0x220] |
        VOTEU.ANY UR{ud}, UPT, P{ps} | ps=P_FRESH
    """, is_identity=False),
    *_rows("UR", """
        UIMAD.WIDE.U32 UR{ud}, UR{ua}, UR{ub}, UR{uc} | ua=U_ZERO ub=U_ONE uc=U_FRESH
    """, words=2),
    *_rows("UR", """
        ULDC.64 UR{ud}, c[0x0][0x208] |
    """, words=2, is_identity=False),
    *_rows("UP", """
        UISETP.NE.AND UP{pd}, UPT, UR{ua}, UR{ub}, UPT | ua=U_SOURCE ub=U_ZERO
        UIADD3 UR{ud}, UP{pd}, UR{ua}, UR{ub}, UR{uc} | ua=U_SOURCE ub=U_ALL uc=U_ZERO ud=U_ZERO
        VOTEU.ALL UP{pd}, P{ps} | ps=P_FRESH
    """),
)  # fmt: skip
"""All producers.  ``NO`` is a predicate that is false in every pass."""
