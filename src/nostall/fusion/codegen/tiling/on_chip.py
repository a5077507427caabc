"""What a row leaves in shared memory from one pass to the next, and what is computed again.

Block composition (arXiv:2009.10924): a value that several passes over the columns need is kept on
chip.  Where that takes too much, values are demoted, one after the other, to being computed again
(arXiv:1811.05213): cheap operators, then expensive ones, of equal ones the nearest to the root
first, and at last what was read, which is then read again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from nostall.fusion.codegen.expressions.templates import computed
from nostall.fusion.codegen.loops.addresses import offset, terms
from nostall.fusion.codegen.loops.mapping import Operand, used
from nostall.fusion.codegen.loops.reduction_levels import Pass, Value
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.tiling.loop_peeling import WHOLE_BYTES, is_by_lanes, lanes, widens
from nostall.fusion.codegen.tiling.shared_memory import Arena, Buffer, Reuse, arena, dominators
from nostall.fusion.graph.operations import DTYPE_BYTES

MOST_DEMOTIONS = 16
"""Ways to keep less that are looked at, from everything on."""
COPIED_BYTES = 4
"""The least that ``cp.async`` copies at a time."""
MOST_BYTES = 227 * 1024 - 1024
"""Shared memory of a block on Hopper, less what reductions across warps are given of it."""


@dataclass(frozen=True)
class Kept:
    """Which values of a schedule stay on chip; passes and buffers follow from it.

    ``ahead``: what is read from memory is copied to shared memory, a whole row at once, before the
    pass that needs it first, where the hardware can (:func:`copied`).  ``peeled``: values lie by
    lane (:mod:`nostall.fusion.codegen.tiling.loop_peeling`).
    """

    of: Schedule
    values: frozenset[Value]
    ahead: bool = False
    peeled: bool = False

    @cached_property
    def passes(self) -> tuple[Pass, ...]:
        """The passes, each with what earlier ones left on chip."""
        found: list[Pass] = []
        there: frozenset[Value] = frozenset()
        for level in range(max(self.of.level.values(), default=0) + 1):
            part = Pass(self.of, level, there)
            found.append(part)
            there |= self.values.intersection((*part.taken, *part.wide))
        return tuple(found)

    @cached_property
    def needed(self) -> dict[Value, tuple[int, ...]]:
        """Of every value that is kept the passes that make or read it: the first one leaves it."""
        found: dict[Value, list[int]] = {}
        for number, part in enumerate(self.passes):
            for value in dict.fromkeys((*part.taken, *part.wide)):
                if value in self.values:
                    found.setdefault(value, []).append(number)
        return {value: tuple(numbers) for value, numbers in found.items()}

    @cached_property
    def buffers(self) -> tuple[Buffer, ...]:
        """The values as buffers, in the order in which passes leave them."""
        found = []
        for at, (value, numbers) in enumerate(self.needed.items()):
            element = DTYPE_BYTES[storage(self.of, value)]
            found.append(Buffer(at, numbers[0], numbers[-1], element, self.is_early(value)))
        return tuple(found)

    @cached_property
    def neighbours(self) -> int:
        """Elements side by side that a thread has: of the widest, as many as one access takes."""
        return WHOLE_BYTES // max(DTYPE_BYTES[storage(self.of, value)] for value in self.needed)

    def is_early(self, value: Value) -> bool:
        """Whether a value is copied before the first pass that needs it."""
        if not self.ahead or isinstance(value, int) or not copied(self.of, value, self.peeled):
            return False
        return self.neighbours * DTYPE_BYTES[storage(self.of, value)] >= COPIED_BYTES

    def without_idle(self) -> Kept:
        """The same without values that no later pass reads."""
        used = frozenset(value for value, numbers in self.needed.items() if len(numbers) > 1)
        return replace(self, values=used)

    def arena(self, width: int, reuse: Reuse = "order") -> Arena:
        """Places of the buffers in shared memory, for passes in chunks of ``width`` lanes."""
        chunks = -(-lanes(self.of, self.peeled) // width)
        outlives = self.dominated if reuse == "dominance" else frozenset()
        return arena(self.buffers, chunks, width, reuse, outlives)

    @cached_property
    def dominated(self) -> frozenset[tuple[int, int]]:
        """Pairs of buffers (a, b) where the step that makes b dominates the one that makes a."""
        steps, after = self._steps()
        above = dominators(after)
        makers = [steps[value, numbers[0]] for value, numbers in self.needed.items()]
        found = set()
        for a, step in enumerate(makers):
            over = set()
            while (step := above[step]) < len(after):
                over.add(step)
            found |= {(a, b) for b, other in enumerate(makers) if other in over}
        return frozenset(found)

    def _steps(self) -> tuple[dict[tuple[Value, int], int], list[list[int]]]:
        """All operators and reads, those that are done again once for each pass, in the order in
        which they run; and of each step those that read what it makes."""
        steps: dict[tuple[Value, int], int] = {}
        after: list[list[int]] = []
        latest: dict[Value, int] = {}
        for number, part in enumerate(self.passes):
            reads: list[Value] = [
                v for v in part.taken if not isinstance(v, int) and v not in part.there
            ]
            narrow = [index for index in part.narrow if index not in latest]
            for value in [*reads, *sorted({*part.wide, *narrow, *part.reductions})]:
                step = steps[value, number] = latest[value] = len(after)
                after.append([])
                for source in () if not isinstance(value, int) else sources(self.of, value):
                    if source in latest:
                        after[latest[source]].append(step)
        return steps, after


def sources(of: Schedule, index: int) -> list[Value]:
    """What an operator reads: operators of the pattern, and places in memory."""
    mapping = of.mapping
    inside = mapping.places
    operands = mapping.operands[index]
    return [
        o.source if o.source in inside else o
        for o in operands
        if o.source in inside or mapping.is_outside(o)
    ]


def storage(of: Schedule, value: Value) -> str:
    """The dtype in which a value is kept, exactly: narrow only where it is so already."""
    graph = of.mapping.graph
    node = graph[value if isinstance(value, int) else value.source]
    narrow = not isinstance(value, int) or node.op == "cast"
    dtype = node.dtype if narrow else computed(node.dtype)
    # Shared memory has no bits; all numbers of fp8 are numbers of fp16.
    return "int8" if dtype == "bool" else "float16" if dtype.startswith("float8") else dtype


@lru_cache(maxsize=16)
def demotions(of: Schedule, ahead: bool = False, is_peeled: bool = False) -> tuple[Kept, ...]:
    """Ways to run a schedule with a row's values on chip: first all that several passes need, then
    fewer and fewer bytes.  With ``ahead`` those of which some are copied ahead."""
    demoted: set[Value] = set()
    everything = frozenset(_candidates(of))
    found: list[Kept] = []
    for _ in range(len(everything)):
        kept = Kept(of, everything - demoted, ahead, is_peeled).without_idle()
        if not kept.values or len(found) == MOST_DEMOTIONS:
            break
        fits = not ahead or any(buffer.early for buffer in kept.buffers)
        if fits and (not found or _bytes(kept) < _bytes(found[-1])):
            found.append(kept)
        demoted.add(min(kept.values, key=lambda value: _price(of, value)))
    return tuple(found)


def _bytes(kept: Kept) -> int:
    return kept.arena(lanes(kept.of, kept.peeled)).bytes


def _price(of: Schedule, value: Value) -> tuple[int, int, str]:
    """What is dearest to have again comes last."""
    if isinstance(value, Operand):
        return 2, -value.source, str(value)
    return int(of.mapping.graph[value].kind != "light"), -value, ""


def _candidates(of: Schedule) -> Iterable[Value]:
    """Values that have a number for each row and column; what all rows share stays in L2."""
    by_column, by_row = varying(of, of.columns), varying(of, of.rows)
    for value in by_column:
        if (value in by_row or not of.rows) and value not in of.mapping.reduced:
            yield value


def varying(of: Schedule, loops: Iterable[int]) -> frozenset[Value]:
    """The values that are tensors along ``loops``; of others one element stands for all."""
    mapping, among = of.mapping, set(loops)
    found: set[Value] = {o for o in mapping.reads if used(o.places) & among}
    for index in of.body:
        gone = mapping.reduced.get(index, frozenset())
        counted = any(
            mapping.graph[o.source].op == "iota" and used(o.places) & among
            for o in mapping.operands[index]
        )
        if not gone & among and (counted or any(s in found for s in sources(of, index))):
            found.add(index)
    return frozenset(found)


def copied(of: Schedule, operand: Operand, is_peeled: bool = False) -> bool:
    """Whether the hardware can copy an operand to shared memory without registers: as it lies in
    memory, 4 bytes at least at a time, which every row and the last chunk have to be multiples of,
    or by lanes.  (A tensor that begins at an odd place is for the launch to see.)"""
    node, sizes = of.mapping.graph[operand.source], of.mapping.sizes
    if storage(of, operand) != node.dtype:
        return False
    if is_peeled:
        return is_by_lanes(of, operand)
    where = offset(operand.places, node.strides, sizes)
    by_row = [where.weights.get(loop, 0) for loop in of.rows]
    steps = math.gcd(of.column_count, where.start, *by_row) * DTYPE_BYTES[node.dtype]
    return terms(where, of.columns, sizes, "c") == ["c"] and steps % COPIED_BYTES == 0


def unfit(of: Schedule, demoted: int, width: int, ahead: bool, is_peeled: bool) -> str | None:
    """Why a schedule cannot run in chunks of ``width`` columns with what is left on chip after so
    many demotions; None where it can."""
    graph, mapping = of.mapping.graph, of.mapping
    if of.kind != "rows":
        return "shared memory keeps the columns of rows that are reduced; there are none"
    by_column = varying(of, of.columns)
    for index in of.body:
        if graph[index].op == "random":
            return f"{graph[index]}: Gluon has no random numbers"
        if mapping.reduced.get(index) and not any(s in by_column for s in sources(of, index)):
            return f"{graph[index]}: Gluon has no broadcast for what is the same in all columns"
    ways = demotions(of, ahead, is_peeled)
    if demoted >= len(ways):
        what = "copy something ahead" if ahead else "keep something"
        return f"{demoted} demotions; there are {len(ways)} ways to {what} for a later pass"
    if is_peeled and not widens(of, ways[demoted].neighbours):
        return "no access would be wider by lanes than it is by columns"
    needed = ways[demoted].arena(width).bytes
    if needed > MOST_BYTES:
        return f"{needed} bytes of shared memory; at most {MOST_BYTES}"
    return None
