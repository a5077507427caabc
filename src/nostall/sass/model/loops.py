"""The natural loops of a function, numbered by the position of their headers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nostall.sass.program.blocks import Block


@dataclass(frozen=True, slots=True)
class Loop:
    """A natural loop; all numbers are block numbers.

    ``number`` is its place among the function's loops (0 first in the text) and the key of
    ``LaunchSpec.trips``.  ``latches`` are the blocks that jump back to ``header``.
    """

    number: int
    header: int
    body: frozenset[int]
    latches: frozenset[int]


def natural_loops(blocks: Sequence[Block], entry: int = 0) -> tuple[Loop, ...]:
    """Loops that control can reach from ``entry``; those with one header are one loop."""
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
    """For each block that is reachable from ``entry``, the blocks on every path to it."""
    order = _reverse_postorder(blocks, entry)
    found: dict[int, set[int]] = {entry: {entry}}
    changed = True
    while changed:
        changed = False
        for block in order[1:]:
            before = [found[p] for p in blocks[block].pred if p in found]
            now = set.intersection(*before) | {block}
            if found.get(block) != now:
                found[block] = now
                changed = True
    return found


def _reverse_postorder(blocks: Sequence[Block], entry: int) -> list[int]:
    done: list[int] = []
    seen = {entry}
    stack = [(entry, iter(blocks[entry].succ))]
    while stack:
        block, rest = stack[-1]
        for following in rest:
            if following not in seen:
                seen.add(following)
                stack.append((following, iter(blocks[following].succ)))
                break
        else:
            stack.pop()
            done.append(block)
    return done[::-1]


def _body(
    blocks: Sequence[Block], header: int, latches: set[int], reachable: dict[int, set[int]]
) -> frozenset[int]:
    """The header and every block that reaches a latch without passing it."""
    body = {header}
    todo = [latch for latch in latches if latch != header]
    body.update(todo)
    while todo:
        for before in blocks[todo.pop()].pred:
            if before in reachable and before not in body:
                body.add(before)
                todo.append(before)
    return frozenset(body)
