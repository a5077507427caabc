"""What a mutation does to a cubin, and how the places for it are found.

Nothing here uses the move generator or the verifier.  Places are found from registers, control
words and mnemonics alone; which unit an opcode belongs to is written down here once more.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from nostall.sass.binary.encoding import Control
from nostall.sass.program import Function, Instruction, Program


def names(text: str) -> frozenset[str]:
    """The words of a text as a set."""
    return frozenset(text.split())


Mutation = Callable[[Program, Function, random.Random], bytes | None]

ALU = names(
    "IADD3 LOP3 IMAD FFMA FADD FMUL SHF LEA SEL MOV PRMT ISETP FSETP FSEL FMNMX IMNMX HFMA2 HADD2 "
    "HMUL2 VIADD IABS"
)
"""Arithmetic whose latency is fixed everywhere."""
SHARED_RESULTS = names("LDS LDSM SHFL")
"""Results that come back in issue order."""
MEMORY_UNIT = names(
    "LDG STG LDS STS LDSM STSM LDL STL LD ST LDGSTS SHFL ATOM ATOMG ATOMS RED REDG REDS REDUX "
    "MATCH MOVM QSPC STAS REDAS"
)
TEXTURE = names("TEX TLD TLD4 TMML TXQ TXD TXA")
UNITS = (
    MEMORY_UNIT,
    names("LDC LDCU"),
    names("MUFU F2F F2I I2F I2I FRND FCHK POPC FLO BREV"),
    names("S2R S2UR"),
    TEXTURE,
)
ACCESSES = names("LDG STG LDS STS LDSM STSM LDGSTS")
FENCES = names(
    "BAR DEPBAR LDGDEPBAR WARPGROUP WARPSYNC MEMBAR ERRBAR CCTL FENCE NOP YIELD NANOSLEEP EXIT BRA "
    "BSSY BSYNC CALL RET BREAK BMOV B2R BRX JMP SYNCS UTMALDG UTMASTG UTMACMDFLUSH ARRIVES HGMMA "
    "QGMMA IGMMA UTCBAR UTCHMMA UTCQMMA LDTM STTM ACQBULK PREEXIT ATOM ATOMG ATOMS RED REDG "
    "PADDING DEPBAR CS2R S2R S2UR VOTE ELECT KILL WARPSYNC ENDCOLLECTIVE"
)
"""What nothing is moved across by accident, so that a mutation has one cause."""


@dataclass(frozen=True)
class Edit:
    """New control words by position, then one move (from, to), then bytes by file position."""

    controls: dict[int, Control] = field(default_factory=dict[int, Control])
    move: tuple[int, int] | None = None
    patches: dict[int, bytes] = field(default_factory=dict[int, bytes])


Finder = Callable[[Program, Function], Iterator[Edit]]


def perform(program: Program, function: Function, edit: Edit) -> bytes:
    """The bytes of the cubin after an edit of ``function``."""
    order = list(function.instructions)
    for at, control in edit.controls.items():
        order[at] = order[at].with_control(control)
    if edit.move is not None:
        source, target = edit.move
        order.insert(target, order.pop(source))
    data = bytearray(program.with_function(function.reordered(order)).to_cubin())
    for at, new in edit.patches.items():
        data[at : at + len(new)] = new
    return bytes(data)


def mutation(find: Finder) -> Mutation:
    """Turn a search for places into a mutation that takes one of them at random."""

    known: list[tuple[Program, Function, list[Edit]]] = []

    def mutate(program: Program, function: Function, rng: random.Random) -> bytes | None:
        if not known or known[0][0] is not program or known[0][1] is not function:
            known[:] = [(program, function, list(find(program, function)))]
        found = known[0][2]
        return perform(program, function, rng.choice(found)) if found else None

    mutate.__name__ = find.__name__
    mutate.__doc__ = find.__doc__
    return mutate


def blocks(function: Function) -> Iterator[tuple[int, Sequence[Instruction]]]:
    """(position of the first instruction, instructions) of each block."""
    for block in function.blocks:
        yield block.start, function.instructions[block.start : block.end]


def unit(instruction: Instruction) -> int:
    """Number of the variable-latency unit, or -1."""
    return next((n for n, names in enumerate(UNITS) if instruction.base in names), -1)


def general(registers: Sequence[int]) -> set[int]:
    """The general registers among register numbers."""
    return {r for r in registers if r < 256}


def together(first: Instruction, second: Instruction) -> bool:
    """Whether some thread surely may execute both: no guards that could exclude each other."""
    guards = {first.guard, second.guard} - {None, "PT", "UPT"}
    return len(guards) < 2 and not guards & {"!PT", "!UPT"}


def fenced(order: Sequence[Instruction], first: int, last: int) -> bool:
    """Whether a fence of any kind stands at positions ``first`` .. ``last``."""
    return any(i.base in FENCES or i.glued or _strong(i) for i in order[first : last + 1])


def _strong(instruction: Instruction) -> bool:
    return bool(instruction.modifiers & {"STRONG", "MMIO"})


def first_reader(order: Sequence[Instruction], at: int) -> int | None:
    """Where the block first reads a result of instruction ``at`` that still is its own."""
    live = set(order[at].defs)
    for later in range(at + 1, len(order)):
        if live & set(order[later].uses):
            return later if together(order[at], order[later]) else None
        if live & set(order[later].defs):
            return None
    return None


def first_overwriter(order: Sequence[Instruction], at: int) -> int | None:
    """Where the block first overwrites a general register that instruction ``at`` reads."""
    sources = general(order[at].uses)
    for later in range(at, len(order)):
        if sources & set(order[later].defs):
            if later == at or not together(order[at], order[later]):
                return None
            return later
    return None


def waits(order: Sequence[Instruction], first: int, last: int) -> list[tuple[int, int]]:
    """(position, scoreboard) of every wait at positions ``first`` .. ``last``."""
    return [(at, sb) for at in range(first, last + 1) for sb in order[at].control.waits]


def counted_wait(order: Sequence[Instruction], first: int, last: int) -> bool:
    """Whether DEPBAR, which waits without wait bits, stands in between."""
    return any(i.base == "DEPBAR" for i in order[first : last + 1])


def drains(order: Sequence[Instruction], first: int, last: int) -> bool:
    """Whether a barrier that may drain the memory unit stands in between."""
    return any(i.base == "BAR" for i in order[first : last + 1])


@dataclass(frozen=True)
class Guardian:
    """A scoreboard field that protects something: who sets it, which field, who waits."""

    setter: int
    is_write: bool
    board: int
    waiters: tuple[int, ...]

    def removed(self, order: Sequence[Instruction]) -> dict[int, Control]:
        """The setter without this scoreboard."""
        control = order[self.setter].control
        return {
            self.setter: control.with_(write_sb=7) if self.is_write else control.with_(read_sb=7)
        }


def guardians(
    order: Sequence[Instruction], at: int, until: int, *, of_sources: bool
) -> list[Guardian]:
    """All scoreboard fields that may prove instruction ``at`` done before ``until`` issues: its
    own and those of any later instruction of its unit (more than the hardware may honour)."""
    found: list[Guardian] = []
    for setter in range(at, until):
        instruction = order[setter]
        if unit(instruction) != unit(order[at]) or unit(instruction) < 0:
            continue
        fields = [(instruction.control.write_sb, True)]
        if of_sources or instruction.base.startswith("ATOM"):
            fields.append((instruction.control.read_sb, False))
        for board, is_write in fields:
            who = tuple(w for w, sb in waits(order, setter + 1, until) if sb == board)
            if board < 6 and who:
                found.append(Guardian(setter, is_write, board, who))
    return found


def unwaited(order: Sequence[Instruction], first: int, last: int) -> list[int]:
    """Scoreboards that nobody waits for at positions ``first`` .. ``last``."""
    taken = {sb for _, sb in waits(order, first, last)}
    return [sb for sb in range(6) if sb not in taken]


def shifted(edit: Edit, by: int) -> Edit:
    """An edit of a block, in positions of the function."""
    move = None if edit.move is None else (edit.move[0] + by, edit.move[1] + by)
    return Edit({at + by: c for at, c in edit.controls.items()}, move, edit.patches)


def in_blocks(
    find: Callable[[Sequence[Instruction]], Iterator[Edit]], *, frozen: bool = True
) -> Mutation:
    """A mutation whose places are found block by block; without ``frozen`` not in those next to
    code that cannot be seen, where nothing may change."""

    def everywhere(_: Program, function: Function) -> Iterator[Edit]:
        for start, order in blocks(function):
            if frozen or start not in function.frozen:
                for edit in find(order):
                    yield shifted(edit, start)

    everywhere.__name__ = find.__name__
    everywhere.__doc__ = find.__doc__
    return mutation(everywhere)
