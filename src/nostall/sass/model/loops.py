"""Natural loops of a function, numbered by the position of their headers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nostall.sass.program.blocks import Block


@dataclass(frozen=True, slots=True)
class Loop:
    """A natural loop; header, body and latches are block numbers."""

    number: int
    """Number of the loop in the order of the text, from 0; the key of ``LaunchSpec.trips``."""
    header: int
    body: frozenset[int]
    latches: frozenset[int]
    """Blocks that jump back to the header."""


def natural_loops(blocks: Sequence[Block], entry: int = 0) -> tuple[Loop, ...]:
    """Loops that control flow can reach from ``entry``; loops with one header are merged."""
    dominators = _dominators(blocks, entry)
    latches: dict[int, set[int]] = {}
    for block in dominators:
        for target in blocks[block].succ:
            if target in dominators[block]:
                latches.setdefault(target, set()).add(block)
    return tuple(
        Loop(number, header, _body(blocks, header, latches[header], dominators), frozenset(ends))
        for number, (header, ends) in enumerate(
            sorted(latches.items(), key=lambda item: blocks[item[0]].start)
        )
    )


def _dominators(blocks: Sequence[Block], entry: int) -> dict[int, set[int]]:
    """Block reachable from ``entry`` -> the blocks on each path to it."""
    order = _reverse_postorder(blocks, entry)
    dominators: dict[int, set[int]] = {entry: {entry}}
    changed = True
    while changed:
        changed = False
        for block in order[1:]:
            before = [dominators[p] for p in blocks[block].pred if p in dominators]
            new = set.intersection(*before) | {block}
            if dominators.get(block) != new:
                dominators[block] = new
                changed = True
    return dominators


def _reverse_postorder(blocks: Sequence[Block], entry: int) -> list[int]:
    postorder: list[int] = []
    seen = {entry}
    stack = [(entry, iter(blocks[entry].succ))]
    while stack:
        block, successors = stack[-1]
        for successor in successors:
            if successor not in seen:
                seen.add(successor)
                stack.append((successor, iter(blocks[successor].succ)))
                break
        else:
            stack.pop()
            postorder.append(block)
    return postorder[::-1]


def _body(
    blocks: Sequence[Block], header: int, latches: set[int], reachable: dict[int, set[int]]
) -> frozenset[int]:
    """The header, and each block from which a path reaches a latch without the header."""
    body = {header}
    worklist = [latch for latch in latches if latch != header]
    body.update(worklist)
    while worklist:
        for predecessor in blocks[worklist.pop()].pred:
            if predecessor in reachable and predecessor not in body:
                body.add(predecessor)
                worklist.append(predecessor)
    return frozenset(body)
