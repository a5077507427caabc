"""Edits of a cubin, and helpers that find where a mutation can edit one.

This module uses neither the move generator nor the verifier, so that it cannot share their errors.
It reads only registers, control words and mnemonics, and has its own list of units and opcodes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from nostall.sass.binary.encoding import Control
from nostall.sass.program import Function, Instruction, Program


def opcodes(text: str) -> frozenset[str]:
    """The opcodes of a text as a set."""
    return frozenset(text.split())


Mutation = Callable[[Program, Function, random.Random], bytes | None]
"""Mutates a function: the bytes of the changed cubin, or None if there is no place for it."""

ALU = opcodes(
    "IADD3 LOP3 IMAD FFMA FADD FMUL SHF LEA SEL MOV PRMT ISETP FSETP FSEL FMNMX IMNMX HFMA2 HADD2 "
    "HMUL2 VIADD IABS"
)
"""Arithmetic with fixed latency on all architectures."""

IN_ORDER_RESULTS = opcodes("LDS LDSM SHFL")
"""Opcodes whose results arrive in issue order."""

LOAD_STORE = opcodes(
    "LDG STG LDS STS LDSM STSM LDL STL LD ST LDGSTS SHFL ATOM ATOMG ATOMS RED REDG REDS REDUX "
    "MATCH MOVM QSPC STAS REDAS"
)
TEXTURE = opcodes("TEX TLD TLD4 TMML TXQ TXD TXA")
UNITS = (
    LOAD_STORE,
    opcodes("LDC LDCU"),
    opcodes("MUFU F2F F2I I2F I2I FRND FCHK POPC FLO BREV"),
    opcodes("S2R S2UR"),
    TEXTURE,
)
MEMORY_ACCESSES = opcodes("LDG STG LDS STS LDSM STSM LDGSTS")
BARRIERS = opcodes(
    "BAR DEPBAR LDGDEPBAR WARPGROUP WARPSYNC MEMBAR ERRBAR CCTL FENCE NOP YIELD NANOSLEEP EXIT BRA "
    "BSSY BSYNC CALL RET BREAK BMOV B2R BRX JMP SYNCS UTMALDG UTMASTG UTMACMDFLUSH ARRIVES HGMMA "
    "QGMMA IGMMA UTCBAR UTCHMMA UTCQMMA LDTM STTM ACQBULK PREEXIT ATOM ATOMG ATOMS RED REDG "
    "PADDING DEPBAR CS2R S2R S2UR VOTE ELECT KILL WARPSYNC ENDCOLLECTIVE"
)
"""Opcodes that mutations do not move anything across, unless that is the violation itself."""


@dataclass(frozen=True)
class Edit:
    """Changes of one function, applied in the order of the fields."""

    controls: dict[int, Control] = field(default_factory=dict[int, Control])
    """Position -> new control word."""
    move: tuple[int, int] | None = None
    """(present position, new position) of one instruction."""
    patches: dict[int, bytes] = field(default_factory=dict[int, bytes])
    """File position -> new bytes."""


Finder = Callable[[Program, Function], Iterator[Edit]]
"""Finds all edits of one kind that a function allows."""


def apply_edit(program: Program, function: Function, edit: Edit) -> bytes:
    """Apply an edit to ``function``; returns the bytes of the changed cubin."""
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
    """A mutation that applies one of the edits that ``find`` yields, chosen at random."""

    cached: list[tuple[Program, Function, list[Edit]]] = []

    def mutate(program: Program, function: Function, rng: random.Random) -> bytes | None:
        if not cached or cached[0][0] is not program or cached[0][1] is not function:
            cached[:] = [(program, function, list(find(program, function)))]
        edits = cached[0][2]
        return apply_edit(program, function, rng.choice(edits)) if edits else None

    mutate.__name__ = find.__name__
    mutate.__doc__ = find.__doc__
    return mutate


def blocks(function: Function) -> Iterator[tuple[int, Sequence[Instruction]]]:
    """(position of the first instruction, instructions) of each block."""
    for block in function.blocks:
        yield block.start, function.instructions[block.start : block.end]


def unit_number(instruction: Instruction) -> int:
    """Number of the variable-latency unit that executes the instruction, or -1."""
    return next((n for n, opcodes in enumerate(UNITS) if instruction.base in opcodes), -1)


def general_registers(registers: Sequence[int]) -> set[int]:
    """The general registers among register numbers."""
    return {r for r in registers if r < 256}


def may_both_execute(first: Instruction, second: Instruction) -> bool:
    """Whether a thread may execute both: their guards cannot exclude each other."""
    guards = {first.guard, second.guard} - {None, "PT", "UPT"}
    return len(guards) < 2 and not guards & {"!PT", "!UPT"}


def has_barrier(order: Sequence[Instruction], first: int, last: int) -> bool:
    """Whether a barrier or fence is at positions ``first`` to ``last``."""
    return any(
        i.base in BARRIERS or i.acts_as_barrier or _is_strong(i) for i in order[first : last + 1]
    )


def _is_strong(instruction: Instruction) -> bool:
    return bool(instruction.modifiers & {"STRONG", "MMIO"})


def first_reader(order: Sequence[Instruction], at: int) -> int | None:
    """Position where the block first reads a result of instruction ``at``, or None.

    The result must not be overwritten before.
    """
    live = set(order[at].defs)
    for later in range(at + 1, len(order)):
        if live & set(order[later].uses):
            return later if may_both_execute(order[at], order[later]) else None
        if live & set(order[later].defs):
            return None
    return None


def first_overwriter(order: Sequence[Instruction], at: int) -> int | None:
    """Position where the block first overwrites a general register that ``at`` reads, or None."""
    sources = general_registers(order[at].uses)
    for later in range(at, len(order)):
        if sources & set(order[later].defs):
            if later == at or not may_both_execute(order[at], order[later]):
                return None
            return later
    return None


def waits(order: Sequence[Instruction], first: int, last: int) -> list[tuple[int, int]]:
    """(position, scoreboard) of each wait at positions ``first`` to ``last``."""
    return [(at, sb) for at in range(first, last + 1) for sb in order[at].control.waits]


def has_depbar(order: Sequence[Instruction], first: int, last: int) -> bool:
    """Whether a DEPBAR, which waits without a wait mask, is at positions ``first`` to ``last``."""
    return any(i.base == "DEPBAR" for i in order[first : last + 1])


def has_bar(order: Sequence[Instruction], first: int, last: int) -> bool:
    """Whether a BAR, which may drain the load/store unit, is at positions ``first`` to ``last``."""
    return any(i.base == "BAR" for i in order[first : last + 1])


@dataclass(frozen=True)
class ScoreboardProtection:
    """A scoreboard that protects a pair of instructions."""

    setter: int
    """Position of the instruction that sets the scoreboard."""
    is_write: bool
    """Whether it is the setter's write scoreboard (else its read scoreboard)."""
    scoreboard: int
    waiters: tuple[int, ...]
    """Positions of the instructions that wait for it."""

    def removed(self, order: Sequence[Instruction]) -> dict[int, Control]:
        """The setter without this scoreboard."""
        control = order[self.setter].control
        return {
            self.setter: control.with_(write_sb=7) if self.is_write else control.with_(read_sb=7)
        }


def find_protections(
    order: Sequence[Instruction], at: int, until: int, *, of_sources: bool
) -> list[ScoreboardProtection]:
    """All scoreboards that may prove instruction ``at`` done before ``until`` issues.

    They are its own and those of all later instructions of its unit, which may be more than the
    hardware honours.  ``of_sources``: done means that the sources are read, not the result written.
    """
    protections: list[ScoreboardProtection] = []
    for setter in range(at, until):
        instruction = order[setter]
        if unit_number(instruction) != unit_number(order[at]) or unit_number(instruction) < 0:
            continue
        fields = [(instruction.control.write_sb, True)]
        if of_sources or instruction.base.startswith("ATOM"):
            fields.append((instruction.control.read_sb, False))
        for scoreboard, is_write in fields:
            waiters = tuple(w for w, sb in waits(order, setter + 1, until) if sb == scoreboard)
            if scoreboard < 6 and waiters:
                protections.append(ScoreboardProtection(setter, is_write, scoreboard, waiters))
    return protections


def unused_scoreboards(order: Sequence[Instruction], first: int, last: int) -> list[int]:
    """Scoreboards that no instruction waits for at positions ``first`` to ``last``."""
    used = {sb for _, sb in waits(order, first, last)}
    return [sb for sb in range(6) if sb not in used]


def shift_edit(edit: Edit, start: int) -> Edit:
    """Convert an edit from positions in a block, which begins at ``start``, to the function's."""
    move = None if edit.move is None else (edit.move[0] + start, edit.move[1] + start)
    return Edit({at + start: c for at, c in edit.controls.items()}, move, edit.patches)


def block_mutation(
    find: Callable[[Sequence[Instruction]], Iterator[Edit]], *, frozen: bool = True
) -> Mutation:
    """A mutation whose edits ``find`` yields for each block.

    ``frozen``: whether to edit frozen blocks as well, in which the verifier allows no change.
    """

    def find_in_blocks(_: Program, function: Function) -> Iterator[Edit]:
        for start, order in blocks(function):
            if frozen or start not in function.frozen:
                for edit in find(order):
                    yield shift_edit(edit, start)

    find_in_blocks.__name__ = find.__name__
    find_in_blocks.__doc__ = find.__doc__
    return mutation(find_in_blocks)
