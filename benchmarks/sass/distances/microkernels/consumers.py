"""Consumer ports: instructions that read the result of a producer in one operand.

The result of a consumer goes to stored data only.  Ports for addresses and guards get values that
are harmless whether they are stale or fresh (see ``Values``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from benchmarks.sass.distances.microkernels.producers import File

Values = Literal["data", "uniform", "predicate", "shared", "global", "global_high", "constant",
                 "offset", "shift", "magnitude", "exponent"]  # fmt: skip
"""What the fresh and the stale value of a pass are:

- ``data``: numbers that are valid in every format, different in each thread; ``uniform``: the same
  in all threads of a warp
- ``predicate``: 0 and 1, the same in all threads of a warp
- ``shared``, ``global``: two addresses of a thread's own slots; ``offset``: two offsets to a shared
  address; ``constant``: two offsets in the parameters
- ``shift``: numbers below 32, the same in all threads of a warp
- ``magnitude``: floats of 8 to 2^22; ``exponent``: as ``data``, with different upper four bits
- ``global_high``: the upper words of two addresses that are 4 GiB apart
"""
Result = Literal["R", "P", "UR", "UP", "memory"]
Step = tuple[str, str, str]
"""(guard, form, operands): an instruction before or after the tested pair, with full waits."""


@dataclass(frozen=True, slots=True)
class Consumer:
    """One operand of one instruction form."""

    form: str
    port: str
    """Field that reads the producer's result, or ``guard``."""
    operands: tuple[tuple[str, str], ...]
    file: File
    """Register file of the port."""
    width: int = 1
    """Consecutive registers that the port reads."""
    result: Result = "R"
    values: Values = "data"
    has_fixed_latency: bool = True
    before: tuple[Step, ...] = ()
    after: tuple[Step, ...] = ()

    @property
    def label(self) -> str:
        """The opcode and the port."""
        return f"{self.form.split(' ')[0]}.{self.port}"


_SLOT_FILL = (("", "STS [R{a}], R{b}", "a=FRESH b=A"), ("", "STS [R{a}], R{b}", "a=STALE b=B"))
_SLOT_CLEAR = tuple((g, f, o.replace("b=A", "b=ZERO").replace("b=B", "b=ZERO"))
                    for g, f, o in _SLOT_FILL)  # fmt: skip
_SLOT_READ = (("", "LDS R{d}, [R{a}]", "d=RESULT a=FRESH"),
              ("", "LDS R{d}, [R{a}]", "d=RESULT.1 a=STALE"))  # fmt: skip
_STG, _LDG = "STG.E desc[UR4][R{a}.64], R{b}", "LDG.E R{d}, desc[UR4][R{a}.64]"
_GLOBAL_FILL = (("", _STG, "a=FRESH_PAIR b=A"), ("", _STG, "a=STALE_PAIR b=B"))
_GLOBAL_CLEAR = (("", _STG, "a=FRESH_PAIR b=ZERO"), ("", _STG, "a=STALE_PAIR b=ZERO"))
_GLOBAL_READ = (("", _LDG, "d=RESULT a=FRESH_PAIR"), ("", _LDG, "d=RESULT.1 a=STALE_PAIR"))
_SCRATCH_READ = (("", _LDG, "d=RESULT a=SCRATCH"),)
_SHARED_READ = (("", "LDS R{d}, [R{a}]", "d=RESULT a=SCRATCH_SHARED"),)
_SHARED_FILL = (("", "STS [R{a}], R{b}", "a=SCRATCH_SHARED b=B"),)


def _operands(text: str) -> tuple[tuple[str, str], ...]:
    pairs = (item.partition("=") for item in text.split())
    return tuple((field, name) for field, _, name in pairs)


def _ports(form: str, operands: str, ports: str, width: int = 1, **more: object) -> list[Consumer]:
    """A consumer for each of ``ports``; the others have the registers in ``operands``."""
    rest = _operands(operands)
    return [
        Consumer(form, port, tuple(p for p in rest if p[0] != port), "R", width, **more)  # type: ignore[arg-type]
        for port in ports.split()
    ]


_ABC = "R{d}, R{a}, R{b}, R{c}"
_FLOATS = "a=A b=B c=C"
_VARIABLE = {"has_fixed_latency": False}

DATA: tuple[Consumer, ...] = (
    *_ports(f"IADD3 {_ABC}", _FLOATS, "a b c"),
    *_ports(f"LOP3.LUT {_ABC}, 0x96, !PT", _FLOATS, "a b c"),
    *_ports(f"SHF.R.U32 {_ABC}", "a=A b=FIVE c=C", "a c"),
    *_ports(f"SHF.R.U32 {_ABC}", "a=A c=C", "b", values="shift"),
    *_ports("SEL R{d}, R{a}, R{b}, P{ps}", "a=A b=B ps=PT", "a"),
    *_ports("SEL R{d}, R{a}, R{b}, P{ps}", "a=A b=B ps=NO", "b"),
    *_ports(f"PRMT {_ABC}", "a=A b=BYTES c=C", "a b"),
    *_ports(f"PRMT {_ABC}", "a=A b=HIGH_BYTES", "c"),
    *_ports("LEA R{d}, R{a}, R{b}, 0x1", "a=A b=B", "a b"),
    *_ports(f"LEA.HI {_ABC}, 0x4", _FLOATS, "a", values="exponent"),
    *_ports(f"LEA.HI {_ABC}, 0x4", _FLOATS, "b c"),
    *_ports("MOV R{d}, R{b}", "", "b"),
    *_ports("ISETP.LT.AND P{pd}, PT, R{a}, R{b}, PT", "a=B b=B", "a b", result="P"),
    *_ports("FSETP.GT.AND P{pd}, PT, R{a}, R{b}, PT", "a=B b=B", "a b", result="P"),
    *_ports("FMNMX R{d}, R{a}, R{b}, !PT", "a=ZERO b=ZERO", "a b"),
    *_ports(f"IMAD {_ABC}", _FLOATS, "a b c"),
    *_ports(f"IMAD.WIDE.U32 {_ABC}", _FLOATS, "a b"),
    *_ports(f"IMAD.WIDE.U32 {_ABC}", _FLOATS, "c", 2),
    *_ports(f"IMAD.HI.U32 {_ABC}", _FLOATS, "a b"),
    *_ports(f"FFMA {_ABC}", _FLOATS, "a b c"),
    *_ports("FADD R{d}, R{a}, R{b}", "a=A b=B", "a b"),
    *_ports("FMUL R{d}, R{a}, R{b}", "a=A b=B", "a b"),
    *_ports("VIADD R{d}, R{a}, {i}", "i=#16", "a"),
    *_ports("HADD2 R{d}, R{a}, R{b}", "a=A b=B", "a b"),
    *_ports("HMUL2 R{d}, R{a}, R{b}", "a=A b=B", "a b"),
    *_ports(f"HFMA2 {_ABC}", _FLOATS, "a b c"),
    *_ports(f"HFMA2.MMA {_ABC}", _FLOATS, "a b c"),
    *_ports("F2FP.BF16.F32.PACK_AB R{d}, R{a}, R{b}", "a=A b=B", "a b"),
    *_ports("I2FP.F32.S32 R{d}, R{b}", "", "b"),
    *_ports("DADD R{d}, R{a}, R{c}", "a=A c=C", "a c", 2),
    *_ports("DMUL R{d}, R{a}, R{b}", "a=A b=B", "a b", 2),
    *_ports(f"DFMA {_ABC}", _FLOATS, "a b c", 2),
    *_ports(f"HMMA.16816.F32 {_ABC}", "a=MMA_A b=MMA_B c=MMA_C", "a c", 4),
    *_ports(f"HMMA.16816.F32 {_ABC}", "a=MMA_A b=MMA_B c=MMA_C", "b", 2),
    *_ports("IMMA.16832.S8.U8 R{d}, R{a}.ROW, R{b}.COL, R{c}", "a=MMA_A b=MMA_B c=MMA_C", "a", 4),
    *_ports(f"DMMA.8x8x4 {_ABC}", "a=A b=B c=MMA_C", "a b", 2, **_VARIABLE),
    *_ports("MUFU.RCP R{d}, R{b}", "", "b", **_VARIABLE),
    *_ports("MUFU.EX2 R{d}, R{b}", "", "b", **_VARIABLE),
    *_ports("I2F.RP R{d}, R{b}", "", "b", **_VARIABLE),
    *_ports("F2I.TRUNC.NTZ R{d}, R{b}", "", "b", values="magnitude", **_VARIABLE),
    *_ports("F2F.F64.F32 R{d}, R{b}", "", "b", **_VARIABLE),
    *_ports("F2F.F32.F64 R{d}, R{b}", "", "b", 2, values="exponent", **_VARIABLE),
    *_ports("POPC R{d}, R{b}", "", "b", **_VARIABLE),
    *_ports("SHFL.IDX PT, R{d}, R{a}, R{b}, 0x1f", "a=THREAD b=FIVE", "a b", **_VARIABLE),
    *_ports("STG.E desc[UR4][R{a}.64], R{b}", "a=SCRATCH", "b", result="memory",
            after=_SCRATCH_READ, **_VARIABLE),
    *_ports("STS [R{a}], R{b}", "a=SCRATCH_SHARED", "b", result="memory", after=_SHARED_READ,
            **_VARIABLE),
    *_ports("R2UR UR{ud}, R{a}", "", "a", result="UR", values="uniform"),
    *_ports("REDUX.SUM UR{ud}, R{a}", "", "a", result="UR", values="uniform", **_VARIABLE),
)  # fmt: skip

ADDRESSES: tuple[Consumer, ...] = (
    *_ports("LDS R{d}, [R{a}]", "", "a", values="shared", before=_SLOT_FILL, **_VARIABLE),
    *_ports("STS [R{a}], R{b}", "b=C", "a", values="shared", result="memory", before=_SLOT_CLEAR,
            after=_SLOT_READ, **_VARIABLE),
    *_ports("ATOMS.EXCH R{d}, [R{a}], R{b}", "b=C", "a", values="shared", before=_SLOT_FILL,
            **_VARIABLE),
    *_ports(_LDG, "", "a", 2, values="global", before=_GLOBAL_FILL, **_VARIABLE),
    *_ports(_STG, "b=C", "a", 2, values="global", result="memory", before=_GLOBAL_CLEAR,
            after=_GLOBAL_READ, **_VARIABLE),
    *_ports(_LDG, "", "a", 2, values="global_high", before=_GLOBAL_FILL, **_VARIABLE),
    *_ports(_STG, "b=C", "a", 2, values="global_high", result="memory", before=_GLOBAL_CLEAR,
            after=_GLOBAL_READ, **_VARIABLE),
    *_ports("LDC R{d}, c[0x0][R{a}+0x210]", "", "a", values="constant", **_VARIABLE),
)  # fmt: skip


def _of(file: File, table: str, port: str, **more: object) -> list[Consumer]:
    consumers = []
    for line in table.strip().splitlines():
        form, _, operands = line.partition("|")
        consumers.append(
            Consumer(form.strip(), port, _operands(operands), file, **more)  # type: ignore[arg-type]
        )
    return consumers


_BIT = {"values": "predicate"}
PREDICATES: tuple[Consumer, ...] = (
    *_of("P", """
        SEL R{d}, R{a}, R{b}, P{ps} | a=A b=B
        FSEL R{d}, R{a}, R{b}, P{ps} | a=A b=B
        IADD3.X R{d}, R{a}, R{b}, R{c}, P{ps}, !PT | a=A b=B c=C
        IMAD.X R{d}, R{a}, R{b}, R{c}, P{ps} | a=A b=B c=C
        IMAD.WIDE.U32.X R{d}, R{a}, R{b}, R{c}, P{ps} | a=A b=B c=C
        LEA.HI.X R{d}, R{a}, R{b}, R{c}, 0x2, P{ps} | a=A b=B c=C
        VOTE.ANY R{d}, PT, P{ps} |
    """, "ps", **_BIT),
    *_of("P", """
        PLOP3.LUT P{pd}, PT, P{ps}, P{p2}, P{p3}, 0x80, 0x0 | p2=PT p3=PT
        ISETP.NE.AND P{pd}, PT, R{a}, R{b}, P{ps} | a=A b=B
    """, "ps", result="P", **_BIT),
    *_of("P", "PLOP3.LUT P{pd}, PT, P{ps}, P{p2}, P{p3}, 0x80, 0x0 | ps=PT p3=PT", "p2",
         result="P", **_BIT),
    *_of("P", "PLOP3.LUT P{pd}, PT, P{ps}, P{p2}, P{p3}, 0x80, 0x0 | ps=PT p2=PT", "p3",
         result="P", **_BIT),
    *_of("P", "VOTEU.ANY UR{ud}, UPT, P{ps} |", "ps", result="UR", **_BIT),
    *_of("P", """
        MOV R{d}, R{b} | b=B
        IADD3 R{d}, R{a}, R{b}, R{c} | a=A b=B c=C
        IMAD R{d}, R{a}, R{b}, R{c} | a=A b=B c=C
        FADD R{d}, R{a}, R{b} | a=A b=B
        HADD2 R{d}, R{a}, R{b} | a=A b=B
        DADD R{d}, R{a}, R{c} | a=A c=C
        HMMA.16816.F32 R{d}, R{a}, R{b}, R{c} | a=MMA_A b=MMA_B c=MMA_C
        BRA |
    """, "guard", **_BIT),
    *_of("P", "ISETP.NE.AND P{pd}, PT, R{a}, R{b}, PT | a=A b=B", "guard", result="P", **_BIT),
    *_of("P", "R2UR UR{ud}, R{a} | a=A", "guard", result="UR", **_BIT),
    *_of("P", """
        MUFU.RCP R{d}, R{b} | b=B
        SHFL.IDX PT, R{d}, R{a}, R{b}, 0x1f | a=THREAD b=FIVE
        S2R R{d}, SR_LANEID |
        LDC R{d}, c[0x0][0x220] |
    """, "guard", has_fixed_latency=False, **_BIT),
    *_of("P", "LDS R{d}, [R{a}] | a=SCRATCH_SHARED", "guard", has_fixed_latency=False,
         before=_SHARED_FILL, **_BIT),
    *_of("P", f"{_LDG} | a=SCRATCH", "guard", has_fixed_latency=False,
         before=(("", _STG, "a=SCRATCH b=B"),), **_BIT),
    *_of("P", "STS [R{a}], R{b} | a=SCRATCH_SHARED b=C", "guard", result="memory",
         has_fixed_latency=False, before=_SHARED_FILL, after=_SHARED_READ, **_BIT),
    *_of("P", f"{_STG} | a=SCRATCH b=C", "guard", result="memory", has_fixed_latency=False,
         before=(("", _STG, "a=SCRATCH b=B"),), after=_SCRATCH_READ, **_BIT),
)  # fmt: skip

_U_ABC = "UR{ud}, UR{ua}, UR{ub}, UR{uc}"
_U_OPERANDS = "ua=U_A ub=U_B uc=U_ONE"
_UNIFORM = {"values": "uniform"}


def _uniform_ports(
    form: str, ports: str, operands: str, result: Result = "UR", values: Values = "uniform"
) -> list[Consumer]:
    rest = _operands(operands)
    return [
        Consumer(form, port, tuple(p for p in rest if p[0] != port), "UR", 1, result, values)
        for port in ports.split()
    ]


UNIFORM: tuple[Consumer, ...] = (
    *_uniform_ports(f"UIADD3 {_U_ABC}", "ua ub uc", _U_OPERANDS),
    *_uniform_ports(f"ULOP3.LUT {_U_ABC}, 0x96, !UPT", "ua ub uc", _U_OPERANDS),
    *_uniform_ports(f"UIMAD {_U_ABC}", "ua ub uc", _U_OPERANDS),
    *_uniform_ports(f"USHF.R.U32.HI {_U_ABC}", "ub", "ua=U_ZERO uc=U_A", values="shift"),
    *_uniform_ports(f"USHF.R.U32.HI {_U_ABC}", "uc", "ua=U_ZERO ub=U_ONE"),
    *_uniform_ports("UMOV UR{ud}, UR{ub}", "ub", ""),
    *_uniform_ports("UPOPC UR{ud}, UR{ub}", "ub", ""),
    *_uniform_ports("UISETP.NE.AND UP{pd}, UPT, UR{ua}, UR{ub}, UPT", "ua ub",
                    "ua=U_STALE ub=U_STALE", "UP"),
    *_uniform_ports("IADD3 R{d}, R{a}, UR{ub}, R{c}", "ub", "a=A c=C", "R"),
    *_uniform_ports("LOP3.LUT R{d}, R{a}, UR{ub}, R{c}, 0x96, !PT", "ub", "a=A c=C", "R"),
    *_uniform_ports("MOV R{d}, UR{ub}", "ub", "", "R"),
    *_uniform_ports("IMAD R{d}, R{a}, UR{ub}, R{c}", "ub", "a=A c=C", "R"),
    *_uniform_ports("IMAD.WIDE.U32 R{d}, R{a}, UR{ub}, R{c}", "ub", "a=A c=C", "R"),
    *_uniform_ports("VIADD R{d}, R{a}, UR{ub}", "ub", "a=A", "R"),
    *_uniform_ports("FFMA R{d}, R{a}, UR{ub}, R{c}", "ub", "a=A c=C", "R"),
    *_uniform_ports("LEA R{d}, R{a}, UR{ub}, 0x3", "ub", "a=A", "R"),
    *_uniform_ports("ISETP.NE.AND P{pd}, PT, R{a}, UR{ub}, PT", "ub", "a=STALE", "P"),
    Consumer("LDS R{d}, [R{a}+UR{ub}]", "ub", (("a", "SCRATCH_SHARED"),), "UR", 1, "R", "offset",
             has_fixed_latency=False,
             before=(("", "STS [R{a}], R{b}", "a=SCRATCH_SHARED b=A"),
                     ("", "STS [R{a}], R{b}", "a=OTHER_SHARED b=B"))),
    *_of("UP", """
        USEL UR{ud}, UR{ua}, UR{ub}, UP{ps} | ua=U_A ub=U_B
        UIADD3.X UR{ud}, UR{ua}, UR{ub}, UR{uc}, UP{ps}, !UPT | ua=U_A ub=U_B uc=U_ONE
    """, "ps", result="UR", **_BIT),
    *_of("UP", "PLOP3.LUT P{pd}, PT, PT, PT, UP{p3}, 0x80, 0x0 |", "p3", result="P", **_BIT),
    *_of("UP", """
        UIADD3 UR{ud}, UR{ua}, UR{ub}, UR{uc} | ua=U_A ub=U_B uc=U_ONE
        UMOV UR{ud}, UR{ub} | ub=U_B
    """, "guard", result="UR", **_BIT),
)  # fmt: skip

CONSUMERS = (*DATA, *ADDRESSES, *PREDICATES, *UNIFORM)
