"""Violations around asynchronous operations, fences, calls and loops."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from nostall.sass.binary import encoding
from nostall.sass.binary.encoding import Control
from nostall.sass.program import Function, Instruction, Program
from tests.mutations.edits import (
    ALU,
    Edit,
    Mutation,
    block_mutation,
    blocks,
    general_registers,
    has_barrier,
    may_both_execute,
    mutation,
    opcodes,
    shift_edit,
    unit_number,
    unused_scoreboards,
)

Order = Sequence[Instruction]
_ACCESSES = opcodes("LDG STG LDS STS LDSM STSM LD ST LDGSTS")

CONSTRUCTS = {
    "warpgroup product": opcodes("HGMMA QGMMA IGMMA WARPGROUP"),
    "tensor copy": opcodes(
        "UTMALDG UTMASTG UTMAREDG UTMACCTL UTMACMDFLUSH UBLKCP UBLKRED UTMAPF UBLKPF"
    ),
    "mbarrier": opcodes("SYNCS ARRIVES"),
    "copy group": opcodes("LDGDEPBAR DEPBAR"),
    "cluster barrier": opcodes("UCGABAR_ARV UCGABAR_WAIT CGABAR_ARV CGABAR_WAIT"),
    "register reallocation": opcodes("USETMAXREG"),
    "fence": opcodes("MEMBAR FENCE CCTL ERRBAR CGAERRBAR"),
    "call": opcodes("CALL RET"),
}
"""Construct -> opcodes whose place and control words must stay."""


def _crossed(construct: frozenset[str]) -> Callable[[Order], Iterator[Edit]]:
    def find(order: Order) -> Iterator[Edit]:
        """An access or arithmetic instruction moves to the other side of the operation."""
        for at, operation in enumerate(order):
            if operation.base not in construct:
                continue
            for sides in (range(at - 1, max(at - 8, -1), -1), range(at + 1, at + 8)):
                for k in sides:
                    if not 0 <= k < len(order) or order[k].base in construct:
                        break
                    if order[k].base in _ACCESSES | ALU and not order[k].never_executes:
                        yield Edit(move=(k, at))
                        break

    return find


def _wait_dropped(construct: frozenset[str]) -> Callable[[Order], Iterator[Edit]]:
    def find(order: Order) -> Iterator[Edit]:
        """The operation does not wait for an earlier instruction any more."""
        for at, operation in enumerate(order):
            if operation.base in construct:
                for scoreboard in operation.control.waits:
                    yield Edit({at: _without_wait(operation.control, scoreboard)})

    return find


def _scoreboard_changed(construct: frozenset[str]) -> Callable[[Order], Iterator[Edit]]:
    def find(order: Order) -> Iterator[Edit]:
        """The operation announces its completion with another scoreboard, or with none."""
        for at, operation in enumerate(order):
            control = operation.control
            if operation.base not in construct:
                continue
            for scoreboard in (*range(6), 7):
                if control.write_sb < 6 and scoreboard != control.write_sb:
                    yield Edit({at: control.with_(write_sb=scoreboard)})
                if control.read_sb < 6 and scoreboard != control.read_sb:
                    yield Edit({at: control.with_(read_sb=scoreboard)})

    return find


def _stall_lowered(construct: frozenset[str]) -> Callable[[Order], Iterator[Edit]]:
    def find(order: Order) -> Iterator[Edit]:
        """The instruction after the operation issues earlier."""
        for at, operation in enumerate(order):
            control = operation.control
            if operation.base in construct and control.stall > 1:
                yield Edit({at: control.with_(stall=control.stall - 1)})
                yield Edit({at: control.with_(stall=1)})

    return find


def _waiter_dropped(construct: frozenset[str]) -> Callable[[Order], Iterator[Edit]]:
    def find(order: Order) -> Iterator[Edit]:
        """The first instruction that waits for the operation's scoreboard does not wait."""
        for at, operation in enumerate(order):
            boards = {operation.control.write_sb, operation.control.read_sb} - {6, 7}
            if operation.base not in construct:
                continue
            for scoreboard in boards:
                waiter = _first_waiter(order, at, scoreboard)
                if waiter is not None:
                    yield Edit({waiter: _without_wait(order[waiter].control, scoreboard)})

    return find


def _first_waiter(order: Order, at: int, scoreboard: int) -> int | None:
    """Position of the first wait for a scoreboard that no instruction in between sets again."""
    for later in range(at + 1, len(order)):
        control = order[later].control
        if scoreboard in control.waits:
            return later
        if scoreboard in (control.write_sb, control.read_sb) or order[later].base == "DEPBAR":
            return None
    return None


def _without_wait(control: Control, scoreboard: int) -> Control:
    return control.with_(wait=control.wait & ~(1 << scoreboard))


def _operand_overwritten(_: Program, function: Function) -> Iterator[Edit]:
    """A load or arithmetic instruction overwrites a product's register before its wait."""
    for start, order in blocks(function):
        for at, product in enumerate(order):
            if not product.base.endswith("GMMA"):
                continue
            used = general_registers((*product.uses, *product.defs))
            for later in range(at + 1, min(at + 40, len(order))):
                if order[later].base.endswith("GMMA"):
                    break
                if used & set(order[later].defs):
                    yield shift_edit(Edit(move=(later, at + 1)), start)
                    break


def _accumulator_read_early(_: Program, function: Function) -> Iterator[Edit]:
    """An instruction reads an accumulator before the wait for the product."""
    for start, order in blocks(function):
        for at, product in enumerate(order):
            if not product.base.endswith("GMMA"):
                continue
            results = general_registers(product.defs)
            for later in range(at + 1, min(at + 60, len(order))):
                reader = order[later]
                if reader.base.endswith("GMMA"):
                    break
                if results & set(reader.uses) and "WARPGROUP" in {i.base for i in order[at:later]}:
                    yield shift_edit(Edit(move=(later, at + 1)), start)
                    break


def _group_count(_: Program, function: Function) -> Iterator[Edit]:
    """WARPGROUP.DEPBAR lets another number of groups be in flight."""
    for at, instruction in enumerate(function.instructions):
        if instruction.base == "WARPGROUP" and "DEPBAR" in instruction.modifiers:
            for other, payload in _other_counts(function, instruction):
                word = payload | other
                start = function.text.file_offset + at * 16
                yield Edit(patches={start: word.to_bytes(16, "little")})


def _other_counts(function: Function, instruction: Instruction) -> Iterator[tuple[int, int]]:
    """(control bits of the instruction, payload of a WARPGROUP.DEPBAR with another count)."""
    control = encoding.encode(0, instruction.control)
    others = {i.payload for i in function.instructions if i.base == "WARPGROUP"}
    for payload in others - {instruction.payload}:
        yield control, payload


def _uniform_to_vector(order: Order) -> Iterator[Edit]:
    """A vector or uniform instruction reads the result of R2UR after one cycle."""
    for at, first in enumerate(order):
        if first.base != "R2UR" or first.control.write_sb < 6:
            continue
        live = set(first.defs)
        for later in range(at + 1, min(at + 8, len(order))):
            if live & set(order[later].uses) and may_both_execute(first, order[later]):
                distance = sum(i.control.stall for i in order[at:later])
                if distance > 2 * (later - at) and not has_barrier(order, at + 1, later - 1):
                    yield Edit({k: order[k].control.with_(stall=1) for k in range(at, later)})
                break
            if live & set(order[later].defs):
                break


def _uniform_wait_dropped(order: Order) -> Iterator[Edit]:
    """The first reader of the result of a variable-latency R2UR or S2UR does not wait."""
    for at, first in enumerate(order):
        scoreboard = first.control.write_sb
        if first.base not in ("R2UR", "S2UR") or scoreboard > 5:
            continue
        waiter = _first_waiter(order, at, scoreboard)
        if waiter is None:
            continue
        touched = {r for i in order[at + 1 : waiter] for r in i.uses}
        covers = any(i.base == first.base for i in order[at + 1 : waiter])
        is_reader = set(first.defs) & set(order[waiter].uses)
        if is_reader and not covers and not set(first.defs) & touched:
            yield Edit({waiter: _without_wait(order[waiter].control, scoreboard)})


def _over_back_edge(_: Program, function: Function) -> Iterator[Edit]:
    """A result that crosses a back edge loses the scoreboard that the loop head waits for."""
    for block in function.blocks:
        for number in block.succ:
            head = function.blocks[number]
            if head.start > block.start:
                continue
            order = function.instructions[block.start : block.end]
            first = function.instructions[head.start : head.end]
            yield from _carried_results(block.start, order, first)


def _carried_results(start: int, order: Order, head: Order) -> Iterator[Edit]:
    """Edits of producers at the end of a loop whose results its head reads after a wait."""
    for at in range(len(order) - 1, max(len(order) - 40, -1), -1):
        producer, rest = order[at], order[at + 1 :]
        board = producer.control.write_sb
        if unit_number(producer) < 0 or board > 5 or not producer.defs or producer.is_guarded:
            continue
        if any(board in i.control.waits or i.base == "DEPBAR" for i in rest):
            continue
        if any(unit_number(i) == unit_number(producer) for i in rest):
            continue
        live = set(producer.defs)
        if any(live & {*i.uses, *i.defs} for i in rest):
            continue
        reader = next((k for k, i in enumerate(head) if live & set(i.uses)), None)
        if reader is None or any(i.base == "DEPBAR" for i in head[: reader + 1]):
            continue
        if any(unit_number(i) == unit_number(producer) for i in head[:reader]):
            continue
        yield Edit({start + at: producer.control.with_(write_sb=7)})
        for other in unused_scoreboards(head, 0, reader):
            yield Edit({start + at: producer.control.with_(write_sb=other)})


def _back_edge_distance(_: Program, function: Function) -> Iterator[Edit]:
    """Arithmetic at the end of a loop is read at its head after fewer cycles."""
    for block in function.blocks:
        for number in block.succ:
            head = function.blocks[number]
            last = function.instructions[block.end - 1]
            if head.start > block.start or last.base != "BRA" or block.end - block.start < 3:
                continue
            position = block.end - 2
            producer = function.instructions[position]
            reader = function.instructions[head.start]
            both = general_registers(producer.defs) & set(reader.uses)
            if producer.base in ALU and both and reader.base in ALU:
                yield Edit(
                    {
                        position: producer.control.with_(stall=1),
                        block.end - 1: last.control.with_(stall=1),
                    }
                )


def _misplaced(construct: frozenset[str]) -> Mutation:
    """A mutation of one construct: moved across, wait or scoreboard or stall changed."""
    finders = [
        make(construct)
        for make in (_crossed, _wait_dropped, _scoreboard_changed, _stall_lowered, _waiter_dropped)
    ]

    def find(order: Order) -> Iterator[Edit]:
        """All edits of one construct."""
        for finder in finders:
            yield from finder(order)

    return block_mutation(find)


ASYNCHRONOUS: dict[str, Mutation] = {
    **{f"{name} misplaced": _misplaced(opcodes) for name, opcodes in CONSTRUCTS.items()},
    "product's register overwritten": mutation(_operand_overwritten),
    "accumulator read before its wait": mutation(_accumulator_read_early),
    "warpgroup count changed": mutation(_group_count),
    "short distance from R2UR": block_mutation(_uniform_to_vector),
    "dropped wait for R2UR": block_mutation(_uniform_wait_dropped),
    "result over a back edge": mutation(_over_back_edge),
    "short distance over a back edge": mutation(_back_edge_distance),
}
