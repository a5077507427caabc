"""Instruction words of sm_90 for the experiments: one word of compiled code for each form.

A form is the text of one instruction with named fields and the word that compiled code has for it.
:func:`word` replaces the fields.  A test compares the text of each form with nvdisasm's.
"""

from __future__ import annotations

from dataclasses import dataclass
from string import Formatter

from nostall.sass.binary.encoding import BitField

RZ, URZ, PT = 255, 63, 7
"""Numbers of the registers that are constants: zero, uniform zero, true."""

FIELDS = {
    "d": BitField(16, 8), "a": BitField(24, 8), "b": BitField(32, 8), "c": BitField(64, 8),
    "ud": BitField(16, 6), "ua": BitField(24, 6), "ub": BitField(32, 6), "uc": BitField(64, 6),
    "pd": BitField(81, 3), "ps": BitField(87, 3), "p2": BitField(77, 3), "p3": BitField(68, 3),
    "i": BitField(32, 32), "i8": BitField(72, 8), "off": BitField(40, 24),
}  # fmt: skip
"""Field of a form -> its bits: general (a, b, c, d), uniform (u) and predicate (p) registers,
immediate operands (i, i8), address offsets (off)."""
GUARD, GUARD_NOT = BitField(12, 3), BitField(15, 1)
_BRANCH_LOW, _BRANCH_HIGH = BitField(16, 8), BitField(34, 48)
"""Branch distance in units of 4 bytes, from the word after the branch: low and high part."""

_TABLE = """
NOP                | 0x7918
EXIT               | 0x3800000000000000000794d
BRA                | 0x38000000000000000007947
BAR.SYNC.DEFER_BLOCKING 0x0 | 0x100000000000000007b1d
IADD3 R{d}, R{a}, R{b}, R{c} | 0x7ffe007000000080d0b7210
IADD3 R{d}, P{pd}, R{a}, R{b}, R{c} | 0x7f1e0000000000f0a0a7210
IADD3 R{d}, R{a}, UR{ub}, R{c} | 0xfffe0070000000402077c10
IADD3.X R{d}, R{a}, R{b}, R{c}, P{ps}, !PT | 0xffe40f000000090b037210
LOP3.LUT R{d}, R{a}, R{b}, R{c}, 0x96, !PT | 0x78e960400000003060c7212
LOP3.LUT P{pd}, R{d}, R{a}, R{b}, R{c}, 0x96, !PT | 0x782960a000000070bff7212
LOP3.LUT R{d}, R{a}, UR{ub}, R{c}, 0x96, !PT | 0xf8e960f0000001008087c12
SHF.R.U32.HI R{d}, R{a}, R{b}, R{c} | 0x1160a00000007ff077219
SHF.R.U32 R{d}, R{a}, R{b}, R{c} | 0x16050000000604077219
SHF.L.U32 R{d}, R{a}, R{b}, R{c} | 0x60f0000000a07077219
SHF.L.W.U32.HI R{d}, R{a}, R{b}, R{c} | 0x10e050000000304027219
SEL R{d}, R{a}, R{b}, P{ps} | 0x403087207
FSEL R{d}, R{a}, R{b}, P{ps} | 0xc0a0a7208
PRMT R{d}, R{a}, R{b}, R{c} | 0x60000000803087216
LEA R{d}, R{a}, R{b}, 0x1 | 0x78e08ff000000020d087211
LEA R{d}, P{pd}, R{a}, R{b}, 0x1 | 0x78008ff0000000007007211
LEA R{d}, R{a}, UR{ub}, 0x3 | 0xf8e18ff0000000405007c11
LEA.HI R{d}, R{a}, R{b}, R{c}, 0x4 | 0x78f20050000000009097211
LEA.HI.X R{d}, R{a}, R{b}, R{c}, 0x2, P{ps} | 0xf1405000000ff04047211
MOV R{d}, R{b} | 0xf000000000300077202
MOV R{d}, UR{ub} | 0x8000f000000000a00027c02
MOV R{d}, {i} | 0xf000000040000027802
IABS R{d}, R{b} | 0x300097213
VIMNMX R{d}, R{a}, R{b}, PT | 0x3fe01000000000603067248
FMNMX R{d}, R{a}, R{b}, !PT | 0x78000000000000300037209
ISETP.NE.AND P{pd}, PT, R{a}, R{b}, PT | 0x3f05270000000141500720c
ISETP.NE.AND P{pd}, PT, R{a}, R{b}, P{ps} | 0xf05270000000141500720c
ISETP.NE.AND P{pd}, PT, R{a}, UR{ub}, PT | 0xbf0527000000004ff007c0c
ISETP.LT.AND P{pd}, PT, R{a}, R{b}, PT | 0x3f01270000000141500720c
FSETP.NEU.AND P{pd}, PT, R{a}, R{b}, PT | 0x3f0d000000000000700720b
FSETP.GT.AND P{pd}, PT, R{a}, R{b}, PT | 0x3f04000000000040200720b
PLOP3.LUT P{pd}, PT, P{ps}, P{p2}, P{p3}, 0x80, 0x0 | 0x3f0f070000000000000781c
PLOP3.LUT P{pd}, PT, PT, PT, UP{p3}, 0x80, 0x0 | 0x3f0f008000000000000781c
P2R R{d}, PR, R{a}, 0x1 | 0x1ff007803
R2P PR, R{a}, 0x1 | 0x100007804
VOTE.ANY P{pd}, P{ps} | 0x1000000000000ff7806
VOTE.ANY R{d}, PT, P{ps} | 0xe01000000000000027806
CS2R R{d}, SRZ | 0x1ff0000000000005e7805
CS2R.32 R{d}, SR_CLOCKLO | 0x50000000000000077805
IMAD R{d}, R{a}, R{b}, R{c} | 0x78e020e000000100f047224
IMAD R{d}, R{a}, UR{ub}, R{c} | 0xf8e0208000000060d0d7c24
IMAD R{d}, R{a}, {i}, R{c} | 0x78e02110000002000057824
IMAD.MOV.U32 R{d}, RZ, RZ, R{c} | 0x78e0003000000ffff077224
IMAD.X R{d}, R{a}, R{b}, R{c}, P{ps} | 0x8e06000000000a0b0b7224
IMAD.HI.U32 R{d}, R{a}, R{b}, R{c} | 0x78e000c0000000b0d0d7227
IMAD.HI.U32 R{d}, P{pd}, R{a}, R{b}, R{c} | 0x78000080000000b05087227
IMAD.WIDE R{d}, R{a}, R{b}, R{c} | 0x78e02020000000405047225
IMAD.WIDE.U32 R{d}, R{a}, R{b}, R{c} | 0x78e00020000000405047225
IMAD.WIDE.U32 R{d}, P{pd}, R{a}, R{b}, R{c} | 0x78000040000000a09047225
IMAD.WIDE.U32.X R{d}, R{a}, R{b}, R{c}, P{ps} | 0xe040a0000000f070a7225
IMAD.WIDE.U32 R{d}, R{a}, {i}, R{c} | 0x78e00020000000405027825
IMAD.WIDE.U32 R{d}, R{a}, UR{ub}, R{c} | 0xf8e0002000000080d067c25
VIADD R{d}, R{a}, {i} | 0x180d007836
VIADD R{d}, R{a}, UR{ub} | 0x80000000000000402027c36
IDP.4A.S8.S8 R{d}, R{a}, R{b}, R{c} | 0x6020000000603077226
FFMA R{d}, R{a}, R{b}, R{c} | 0xd00000008040d7223
FFMA R{d}, R{a}, UR{ub}, R{c} | 0x80000000000000709007c23
FADD R{d}, R{a}, R{b} | 0x306037221
FMUL R{d}, R{a}, R{b} | 0x40000000000009050d7220
HADD2 R{d}, R{a}, R{b} | 0x806067230
HMUL2 R{d}, R{a}, R{b} | 0x0a0b0a7232
HFMA2 R{d}, R{a}, R{b}, R{c} | 0x30000000704037231
HFMA2.MMA R{d}, R{a}, R{b}, R{c} | 0x30000000704037235
HMNMX2 R{d}, R{a}, R{b}, !PT | 0x78000000000000703047240
HSETP2.NEU.AND P{pd}, PT, R{a}, R{b}, PT | 0x3f0d000000000ff05007234
F2FP.F16.F32.PACK_AB R{d}, R{a}, R{b} | 0xff0000000b0c0b723e
F2FP.BF16.F32.PACK_AB R{d}, R{a}, R{b} | 0x10ff0000000b0c0b723e
I2FP.F32.S32 R{d}, R{b} | 0x2014000000000700087245
DADD R{d}, R{a}, R{c} | 0xa0000000004047229
DMUL R{d}, R{a}, R{b} | 0x6040a7228
DFMA R{d}, R{a}, R{b}, R{c} | 0x6000000080a0a722b
DSETP.NEU.AND P{pd}, PT, R{a}, R{b}, PT | 0x3f0d000000000ff0200722a
HMMA.16816.F32 R{d}, R{a}, R{b}, R{c} | 0x1808000000020c08723c
HMMA.16816.F32.BF16 R{d}, R{a}, R{b}, R{c} | 0x4180c000000080410723c
HMMA.16816.F16 R{d}, R{a}, R{b}, R{c} | 0x0808000000020c08723c
HMMA.1688.F32.TF32 R{d}, R{a}, R{b}, R{c} | 0x810ff00000008040c723c
IMMA.16832.S8.U8 R{d}, R{a}.ROW, R{b}.COL, R{c} | 0x401c0c0000000a040c7237
DMMA.8x8x4 R{d}, R{a}, R{b}, R{c} | 0x40000000e0c0c723f
MUFU.RCP R{d}, R{b} | 0x10000000000600067308
MUFU.EX2 R{d}, R{b} | 0x8000000000400047308
I2F.RP R{d}, R{b} | 0x2094000000000e00047306
I2F.F64 R{d}, R{b} | 0x201c000000000b00027312
F2I.TRUNC.NTZ R{d}, R{b} | 0x20f1000000000400047305
F2F.F64.F32 R{d}, R{b} | 0x2018000000000000127310
F2F.F32.F64 R{d}, R{b} | 0x3010000000000400047310
POPC R{d}, R{b} | 0x400097309
FLO.U32 R{d}, R{b} | 0xe00000000001800187300
BREV R{d}, R{b} | 0x5000a7301
SHFL.IDX PT, R{d}, R{a}, R{b}, 0x1f | 0xe000000001f0607037589
S2R R{d}, SR_TID.X | 0x21000000000000137919
S2R R{d}, SR_LANEID | 0x57919
S2UR UR{ud}, SR_CTAID.X | 0x250000000000000579c3
S2UR UR{ud}, SR_VIRTUALSMID | 0x430000000000000679c3
REDUX.SUM UR{ud}, R{a} | 0xc00000000000060673c4
LDG.E R{d}, desc[UR4][R{a}.64] | 0xc1e19000000000402007981
LDG.E.128 R{d}, desc[UR4][R{a}.64] | 0xc1e1d000000000404047981
STG.E desc[UR4][R{a}.64], R{b} | 0xc1019040000000702007986
STG.E.64 desc[UR4][R{a}.64], R{b} | 0xc101b040000001618007986
LDS R{d}, [R{a}] | 0x80000000000110b7984
LDS.128 R{d}, [R{a}] | 0xc00000000000b047984
LDS R{d}, [R{a}+UR{ub}] | 0x80008000000000403067984
STS [R{a}], R{b} | 0x8000000000304007388
ATOMS.EXCH R{d}, [R{a}], R{b} | 0x4000000000000030806738c
LDSM.16.M88.4 R{d}, [R{a}] | 0x200000000001a10783b
LDC R{d}, c[0x0][R{a}+0x210] | 0x800000084000c027b82
UIADD3 UR{ud}, UR{ua}, UR{ub}, UR{uc} | 0xfffe03f000000050b057290
UIADD3 UR{ud}, UP{pd}, UR{ua}, UR{ub}, UR{uc} | 0xff1e03f0000002006067290
UIADD3.X UR{ud}, UR{ua}, UR{ub}, UR{uc}, UP{ps}, !UPT | 0x87fe43f000000073f077290
ULOP3.LUT UR{ud}, UR{ua}, UR{ub}, UR{uc}, 0x96, !UPT | 0xf8e963f00000001040c7292
UIMAD UR{ud}, UR{ua}, UR{ub}, UR{uc} | 0xf8e020e0000000c0b0472a4
UIMAD.WIDE.U32 UR{ud}, UR{ua}, UR{ub}, UR{uc} | 0xf8e003f00000007050a72a5
USHF.R.U32.HI UR{ud}, UR{ua}, UR{ub}, UR{uc} | 0x8011604000000013f057299
ULEA UR{ud}, UR{ua}, UR{ub}, 0x1 | 0xf8e083f0000000407047291
USEL UR{ud}, UR{ua}, UR{ub}, UP{ps} | 0x80000000000000104047287
UMOV UR{ud}, UR{ub} | 0x80000000000000400047c82
UISETP.NE.AND UP{pd}, UPT, UR{ua}, UR{ub}, UPT | 0xbf05270000000120500728c
UPRMT UR{ud}, UR{ua}, UR{ub}, UR{uc} | 0x80000040000000604047296
UPOPC UR{ud}, UR{ub} | 0x800000000000004000572bf
UFLO.U32 UR{ud}, UR{ub} | 0x80e000000000004000572bd
R2UR UR{ud}, R{a} | 0xe000000000000040472ca
ULDC UR{ud}, c[0x0][0x220] | 0x8000000880000077ab9
ULDC.64 UR{ud}, c[0x0][0x208] | 0xa000000820000087ab9
LDC R{d}, c[0x0][0x220] | 0x80000008800ff017b82
LDC.64 R{d}, c[0x0][0x210] | 0xa0000008400ff027b82
LDC.64 R{d}, c[0x0][0x218] | 0xa0000008600ff027b82
LDC R{d}, c[0x0][0x224] | 0x80000008900ff017b82
VOTEU.ANY UR{ud}, UPT, P{ps} | 0xe01000000000000107886
VOTEU.ALL UP{pd}, P{ps} | 0x3f7886
"""


@dataclass(frozen=True, slots=True)
class Form:
    """One form of an instruction."""

    text: str
    """Text as nvdisasm prints it, with fields in braces."""
    payload: int
    """Word of compiled code, with its control bits 0."""
    fields: tuple[str, ...]


def _parse(line: str) -> Form:
    text, _, number = line.partition("|")
    text = text.strip()
    fields = tuple(name for _, name, _, _ in Formatter().parse(text) if name)
    return Form(text, int(number.replace(" ", ""), 16), fields)


FORMS = {form.text: form for form in map(_parse, _TABLE.strip().splitlines())}
"""Text of a form -> the form."""


def word(text: str, guard: str = "", **fields: int) -> int:
    """The word of a form with these fields, and its control bits 0.

    ``guard``: empty, ``P0`` or ``!P0`` and so on; for uniform instructions it names UP registers.
    Raises KeyError for an unknown form, or if a field is missing.
    """
    form = FORMS[text]
    payload = form.payload
    for name in form.fields:
        payload = _set(payload, FIELDS[name], fields[name])
    if guard:
        payload = _set(payload, GUARD, int(guard[-1]))
        payload = _set(payload, GUARD_NOT, int(guard.startswith("!")))
    return payload


def branch(words_from_next: int, guard: str = "") -> int:
    """A branch to the word that is ``words_from_next`` after the word behind the branch."""
    distance = 4 * words_from_next
    payload = _set(word("BRA", guard), _BRANCH_LOW, distance & 0xFF)
    return _set(payload, _BRANCH_HIGH, distance >> 8 & (1 << _BRANCH_HIGH.width) - 1)


def _set(payload: int, field: BitField, value: int) -> int:
    if value >> field.width:
        raise ValueError(f"{value} does not fit into {field.width} bits")
    return payload & ~field.mask | value << field.low
