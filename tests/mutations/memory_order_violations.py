"""Memory order violations: acquires without their fence, swapped reads of one shared location."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from nostall.sass.program import Instruction
from tests.mutations.edits import BARRIERS, Edit, block_mutation, general_registers, opcodes

Order = Sequence[Instruction]

FENCES = opcodes("CCTL NOP ERRBAR MEMBAR FENCE BAR CGAERRBAR")
"""Opcodes that order the accesses before them and those after them."""

ACCESSES = opcodes(
    "LDG STG LDS STS LDSM LDL STL LD ST LDGSTS ATOM ATOMG ATOMS RED REDG REDS TEX TLD SULD SUST"
)

_OFFSET = re.compile(r"\+-?0x[0-9a-f]+(?=\])|(?<=\[)-?0x[0-9a-f]+(?=\])")
_WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}


def _is_access(instruction: Instruction) -> bool:
    return instruction.base in ACCESSES and not instruction.never_executes


def _scoreboards(order: Order) -> set[int]:
    """All scoreboards that a block sets or waits for."""
    return {sb for i in order for sb in (i.control.write_sb, i.control.read_sb, *i.control.waits)}


def detached_accesses(order: Order) -> Iterator[tuple[int, int]]:
    """(access, fence) pairs in which the fence is the first to wait for the access's result."""
    for at, access in enumerate(order):
        scoreboard = access.control.write_sb
        if scoreboard > 5 or not _is_access(access):
            continue
        for later in range(at + 1, len(order)):
            if scoreboard in order[later].control.waits:
                if order[later].base in FENCES:
                    yield at, later
                break
            if order[later].base == "DEPBAR" or order[later].base == access.base == "LDS":
                break


def _detached_acquire(order: Order) -> Iterator[Edit]:
    """An access sets a scoreboard that its fence does not wait for; its first reader does."""
    for at, fence in detached_accesses(order):
        access = order[at]
        for free in set(range(6)) - _scoreboards(order):
            edit = {at: access.control.with_(write_sb=free)}
            result = general_registers(access.defs)
            for reader in range(fence + 1, len(order)):
                if result & {*order[reader].uses, *order[reader].defs}:
                    control = order[reader].control
                    edit[reader] = control.with_(wait=control.wait | 1 << free)
                    break
            yield Edit(edit)


def _above_fence_scoreboard(order: Order) -> Iterator[Edit]:
    """A load moves above the instruction that waits until a fence is complete."""
    for at, fence in enumerate(order):
        boards = {fence.control.write_sb, fence.control.read_sb} - {7}
        if fence.base not in ("MEMBAR", "FENCE") or not boards:
            continue
        waiter = next(
            (k for k in range(at + 1, len(order)) if boards & set(order[k].control.waits)), None
        )
        if waiter is None or order[waiter].base in BARRIERS:
            continue
        for load in range(waiter + 1, len(order)):
            if order[load].base in BARRIERS:
                break
            if order[load].base in ("LDG", "LD", "LDS") and not order[load].control.wait:
                written = {r for i in order[waiter:load] for r in i.defs}
                if not written & set(order[load].uses):
                    yield Edit(move=(load, waiter))


def _place(load: Instruction) -> tuple[str, int, int]:
    """(address without its constant, constant, bytes) of a load from shared memory."""
    address = next(operand for operand in load.operands if "[" in operand)
    found = _OFFSET.search(address)
    constant = int(found[0].lstrip("+"), 16) if found else 0
    width = next((_WIDTHS[m] for m in load.modifiers if m in _WIDTHS), 4)
    return _OFFSET.sub("", address), constant, width


def may_read_the_same(first: Instruction, second: Instruction) -> bool:
    """Whether two loads from shared memory may read one location, by their address operands."""
    (base, low, width), (other, high, wide) = _place(first), _place(second)
    return base != other or (low < high + wide and high < low + width)


def _shared_reads_swapped(order: Order) -> Iterator[Edit]:
    """Two loads that may read one shared location are exchanged."""
    for at, first in enumerate(order):
        if first.base != "LDS" or first.never_executes or first.is_guarded:
            continue
        written: set[int] = set()
        for later in range(at + 1, min(at + 24, len(order))):
            second = order[later]
            if second.base in BARRIERS or second.base == "STS":
                break
            written |= set(order[later - 1].defs)
            if second.base != "LDS" or second.is_guarded or written & set(second.uses):
                continue
            if may_read_the_same(first, second) and not second.control.wait:
                yield Edit(move=(later, at))


MEMORY_ORDERS = {
    "access detached from its fence": block_mutation(_detached_acquire),
    "load above the wait for a fence": block_mutation(_above_fence_scoreboard),
    "shared reads swapped": block_mutation(_shared_reads_swapped),
}
