"""A whole micro-kernel: prologue, windows of one pair, and instruction streams that compete.

Warps below a parameter run the windows.  The others run a stream of one pipe until the first warp
has finished.  The machine code replaces that of a compiled template, whose file says how many
registers and how much shared memory the kernel has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from benchmarks.sass.distances.microkernels import registers as r
from benchmarks.sass.distances.microkernels.consumers import Values
from benchmarks.sass.distances.microkernels.lines import (
    Align,
    Item,
    Label,
    Line,
    assemble,
    jump,
    line,
    number,
    settled,
)
from benchmarks.sass.distances.microkernels.pairs import Pair
from benchmarks.sass.distances.microkernels.windows import (
    BLIND,
    REFERENCE,
    SAFE_DISTANCE,
    THREADS,
    Window,
    window_items,
)
from benchmarks.sass.distances.microkernels.words import word
from nostall.core.errors import BadInput
from nostall.sass.binary.cubin import Cubin
from nostall.sass.binary.encoding import WORD_BYTES, Control, encode

KERNEL = "probe"
"""Name of the template's kernel."""
SCRATCH_OFFSET = 8 << 20
"""Bytes from the start of the output buffer to the scratch slots."""
SHARED_START = 1024
"""First shared address that a kernel may use; the system reserves those below."""
SHARED_SCRATCH = SHARED_START + 32 * THREADS
"""First of the shared scratch slots; two slots of values for each thread come before them."""
FLAG_ADDRESS = SHARED_SCRATCH + 32 * THREADS
"""Shared address of the end flag."""
STREAMS = ("none", "FFMA", "IMAD", "IADD3", "MUFU", "LDS", "HMMA", "DFMA", "UIADD3")
"""What the warps that run no windows do; the index is a kernel parameter."""
STREAM_LENGTH = 16


@dataclass(frozen=True, slots=True)
class Experiment:
    """The windows of one pair in one kernel."""

    pair: Pair
    alignment: int
    windows: tuple[Window, ...]
    """The first is the reference, the second the blind window; then those with stale words."""

    @property
    def count(self) -> int:
        """The number of loops, each with PASSES records."""
        return len(self.windows)

    @property
    def values(self) -> Values:
        """What the values of a pass are."""
        return self.pair.values

    @property
    def comparisons(self) -> int:
        """The number of windows before those that test a distance."""
        return 2 + (1 << self.pair.joint_words) - 2


def experiment(pair: Pair, alignment: int, windows: Sequence[Window]) -> Experiment:
    """An experiment whose first windows show the right result and each wrong one.

    The wrong ones are that of the stale value, and of each mix of fresh and stale words.
    """
    masks = range(1, (1 << pair.joint_words) - 1)
    torn = [Window(SAFE_DISTANCE, "stall", stale_words=mask) for mask in masks]
    return Experiment(pair, alignment, (REFERENCE, BLIND, *torn, *windows))


def build(template: bytes, subject: Experiment) -> bytes:
    """The cubin of an experiment; raises :class:`BadInput` if it does not fit the template."""
    return replace_code(template, assemble(kernel_items(subject))[0])


def kernel_items(subject: Experiment) -> list[Item]:
    """All lines of the kernel."""
    items: list[Item] = []
    for at, window in enumerate(subject.windows):
        items += [Align(0), *window_items(subject.pair, window, f"w{at}", subject.alignment)]
    return framed(items)


def framed(items: Sequence[Item]) -> list[Item]:
    """A kernel whose testing warps run ``items``."""
    role = jump("tests", f"P{r.P_ROLE}")
    return [*_prologue(), role, *_streams(), Label("tests"), *items, *_epilogue()]


def replace_code(template: bytes, code: bytes) -> bytes:
    """The template with ``code`` at the start of its kernel, then NOPs up to its own last EXIT."""
    text = Cubin.parse(template).texts[0]
    exits = [record.offset for record in text.records]
    room = min(exits, default=text.size)
    if len(code) > room:
        raise BadInput(
            f"the code has {len(code) // WORD_BYTES} words, but the template has room for "
            f"{room // WORD_BYTES}; use fewer windows"
        )
    nop = encode(word("NOP"), Control(1, False)).to_bytes(WORD_BYTES, "little")
    filled = code + nop * ((room - len(code)) // WORD_BYTES)
    return template[: text.file_offset] + filled + template[text.file_offset + room :]


@cache
def _prologue() -> tuple[Item, ...]:
    """Read parameters and constants, compute addresses, and choose the role of the warp."""
    wide = "IMAD.WIDE.U32 R{d}, R{a}, {i}, R{c}"
    one = number("ONE")
    lines: list[Item] = [
        line("S2R R{d}, SR_TID.X", d=r.THREAD),
        line("LDC.64 R{d}, c[0x0][0x210]", d=r.OUT_BASE),
        line("LDC.64 R{d}, c[0x0][0x218]", d=r.IN_BASE),
        line("LDC R{d}, c[0x0][0x220]", d=r.TEMPORARY),
        line("LDC R{d}, c[0x0][0x224]", d=r.OTHER_TEMPORARY),
        line("ULDC.64 UR{ud}, c[0x0][0x208]", ud=4),
        *(line("MOV R{d}, {i}", d=d, i=value) for d, value in r.VALUES.values()),
        *(line("R2UR UR{ud}, R{a}", ud=ud, a=number(name))
          for ud, name in r.UNIFORM_VALUES.values()),
        line("ISETP.NE.AND P{pd}, PT, R{a}, R{b}, PT", pd=r.P_FALSE, a=255, b=255),
        line("UISETP.NE.AND UP{pd}, UPT, UR{ua}, UR{ub}, UPT", pd=r.P_FALSE, ua=63, ub=63),
        line(wide, d=r.IN_BASE, a=r.THREAD, i=16, c=r.IN_BASE),
        line(wide, d=r.SCRATCH, a=one, i=SCRATCH_OFFSET, c=r.OUT_BASE),
        line(wide, d=r.SCRATCH, a=r.THREAD, i=16, c=r.SCRATCH),
        line(wide, d=r.OUT_BASE, a=r.THREAD, i=16, c=r.OUT_BASE),
        line("MOV R{d}, {i}", d=r.SCRATCH_SHARED, i=SHARED_SCRATCH),
        line("IMAD R{d}, R{a}, {i}, R{c}", d=r.SCRATCH_SHARED, a=r.THREAD, i=32,
             c=r.SCRATCH_SHARED),
        line("VIADD R{d}, R{a}, {i}", d=r.OTHER_SHARED, a=r.SCRATCH_SHARED, i=16),
        line("MOV R{d}, {i}", d=r.FLAG, i=FLAG_ADDRESS),
        line("MOV R{d}, {i}", d=r.RECORD, i=0),
        line("STS [R{a}], R{b}", a=r.FLAG, b=255),
        line("MOV R{d}, {i}", d=r.CLOCK_BEFORE, i=SHARED_START),
        line("IMAD R{d}, R{a}, {i}, R{c}", d=r.CLOCK_BEFORE, a=r.THREAD, i=32, c=r.CLOCK_BEFORE),
        line("STS [R{a}], R{b}", a=r.CLOCK_BEFORE, b=r.CLOCK_BEFORE),
        line("BAR.SYNC.DEFER_BLOCKING 0x0"),
        line("SHF.R.U32.HI R{d}, R{a}, R{b}, R{c}", d=r.CLOCK_AFTER, a=255, b=number("FIVE"),
             c=r.THREAD),
        line("ISETP.LT.AND P{pd}, PT, R{a}, R{b}, PT", pd=r.P_ROLE, a=r.CLOCK_AFTER,
             b=r.OTHER_TEMPORARY),
    ]  # fmt: skip
    return tuple(settled(lines))


def _epilogue() -> list[Item]:
    """End the streams; the NOPs that follow lead to the template's own EXIT."""
    return settled([line("STS [R{a}], R{b}", a=r.FLAG, b=number("ONE"))])


@cache
def _streams() -> tuple[Item, ...]:
    """The competing streams, each a loop that ends when the flag is set."""
    choices: list[Item] = []
    bodies: list[Item] = []
    for index, name in enumerate(STREAMS[1:], start=1):
        choices += [
            line("MOV R{d}, {i}", d=r.CLOCK_AFTER, i=index),
            line("ISETP.NE.AND P{pd}, PT, R{a}, R{b}, PT", pd=4, a=r.CLOCK_AFTER, b=r.TEMPORARY),
            jump(f"stream.{name}", "!P4"),
        ]
        bodies += [
            Label(f"stream.{name}"),
            *(_stream_line(name, at) for at in range(STREAM_LENGTH)),
            *settled(
                [
                    line("LDS R{d}, [R{a}]", d=r.CLOCK_BEFORE, a=r.FLAG),
                    line("ISETP.NE.AND P{pd}, PT, R{a}, R{b}, PT", pd=4, a=r.CLOCK_BEFORE, b=255),
                ],
                waits=0b10,
            ),
            jump(f"stream.{name}", "!P4"),
            line("EXIT"),
        ]
    return (*choices, line("EXIT"), *bodies)


def _stream_line(name: str, at: int) -> Line:
    """One instruction of a stream; those of the memory and special units set scoreboard 1."""
    d = 64 + 4 * (at % 8)
    forms = {
        "FFMA": word("FFMA R{d}, R{a}, R{b}, R{c}", d=d, a=44, b=46, c=32),
        "IMAD": word("IMAD R{d}, R{a}, R{b}, R{c}", d=d, a=44, b=46, c=32),
        "IADD3": word("IADD3 R{d}, R{a}, R{b}, R{c}", d=d, a=44, b=46, c=32),
        "MUFU": word("MUFU.RCP R{d}, R{b}", d=d, b=44),
        "LDS": word("LDS.128 R{d}, [R{a}]", d=d, a=r.SCRATCH_SHARED),
        "HMMA": word("HMMA.16816.F32 R{d}, R{a}, R{b}, R{c}", d=d, a=48, b=52, c=56),
        "DFMA": word("DFMA R{d}, R{a}, R{b}, R{c}", d=d, a=44, b=46, c=32),
        "UIADD3": word("UIADD3 UR{ud}, UR{ua}, UR{ub}, UR{uc}", ud=32 + at, ua=20, ub=21, uc=63),
    }
    stall = {"FFMA": 1, "MUFU": 2, "HMMA": 4, "DFMA": 2}.get(name, 2)
    sets = {"write_sb": 1} if name in ("MUFU", "LDS") else {}
    return Line(forms[name], stall=stall, yields=False, **sets)
