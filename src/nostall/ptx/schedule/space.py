"""Search space over the orders of a PTX kernel's blocks and the settings of the assembler.

Random orders of a block that keep its dependences.

The text of a module with blocks in another order.

A block has one slot for each unit: the place of the unit in the original text. What stands between
slots (labels, directives, comments on lines of their own) stays. A unit that moved takes a line of
its own, together with the comment that ends its line.

A dependence graph of the units of a block says which orders are legal.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from nostall.core.errors import BadRun
from nostall.core.space import NO_TAGS, Space, Tags
from nostall.ptx.program.blocks import Block, Unit
from nostall.ptx.program.module import Function, Module
from nostall.ptx.program.resources import MEMORY, Reference, Resource
from nostall.ptx.schedule.dependent_launch import can_wait, dependent_launch_edits
from nostall.ptx.schedule.edits import EditedText
from nostall.ptx.schedule.hints import allowed_hints
from nostall.ptx.schedule.kernel_edits import can_limit_registers, kernel_edits
from nostall.ptx.schedule.levers import NO_LEVERS, Levers, lever_value, with_lever
from nostall.ptx.schedule.moves import PtxMove, SetHint, SetLever, Shift
from nostall.ptx.schedule.state import PtxState


@dataclass(frozen=True)
class BlockGraph:
    """Which units of one block must keep their order."""

    block: Block
    predecessors: tuple[frozenset[int], ...]
    """Per unit, units that must come before it. Pairs that other pairs imply may be missing."""

    @cached_property
    def successors(self) -> tuple[frozenset[int], ...]:
        """Per unit, the units that have it as a predecessor."""
        found: list[set[int]] = [set() for _ in self.predecessors]
        for unit, before in enumerate(self.predecessors):
            for earlier in before:
                found[earlier].add(unit)
        return tuple(map(frozenset, found))

    @cached_property
    def freedom(self) -> int:
        """Number of pairs of units whose order is free."""
        units = len(self.predecessors)
        ancestors: list[int] = []
        ordered = 0
        for before in self.predecessors:
            bits = 0
            for earlier in before:
                bits |= ancestors[earlier] | 1 << earlier
            ancestors.append(bits)
            ordered += bits.bit_count()
        return units * (units - 1) // 2 - ordered

    def is_legal(self, order: tuple[int, ...]) -> bool:
        """Whether ``order`` is a permutation of the units that keeps all dependences."""
        if sorted(order) != list(range(len(self.predecessors))):
            return False
        position = {unit: at for at, unit in enumerate(order)}
        return all(
            position[unit] >= self.block.earliest[unit]
            and all(position[earlier] < position[unit] for earlier in before)
            for unit, before in enumerate(self.predecessors)
        )


def build_graph(block: Block) -> BlockGraph:
    """The dependences of a block: read after write, write after read, write after write."""
    last_write: dict[Reference, int] = {}
    reads_since: dict[Reference, list[int]] = {}
    predecessors: list[frozenset[int]] = []
    for number, unit in enumerate(block.units):
        before: set[int] = set()
        for name in unit.reads | unit.writes:
            if name in last_write:
                before.add(last_write[name])
        for name in unit.writes:
            before.update(reads_since.get(name, ()))
        for name in unit.writes:
            last_write[name] = number
            reads_since[name] = []
        for name in unit.reads - unit.writes:
            reads_since.setdefault(name, []).append(number)
        predecessors.append(frozenset(before))
    return BlockGraph(block, tuple(predecessors))


def random_order(
    graph: BlockGraph, present: Sequence[int], rng: np.random.Generator, sigma: float
) -> tuple[int, ...]:
    """A random legal order near the ``present`` one, by list scheduling.

    The key of a unit is its present position plus normal noise of standard deviation ``sigma``.
    The ready unit with the smallest key comes next; a unit is ready after its predecessors, and
    from its earliest position on. Some unit is always ready: of the units that are left, the first
    one in the text has no predecessor left, and its earliest position is at most its place there.
    """
    keys = np.empty(len(present))
    keys[list(present)] = np.arange(len(present)) + rng.normal(0.0, sigma, len(present))
    waiting = [len(before) for before in graph.predecessors]
    ready: list[tuple[float, int]] = []
    delayed: list[tuple[int, int]] = []

    def release(unit: int, position: int) -> None:
        earliest = graph.block.earliest[unit]
        if earliest > position:
            heapq.heappush(delayed, (earliest, unit))
        else:
            heapq.heappush(ready, (keys[unit], unit))

    for unit, count in enumerate(waiting):
        if count == 0:
            release(unit, 0)
    order: list[int] = []
    while len(order) < len(present):
        while delayed and delayed[0][0] <= len(order):
            unit = heapq.heappop(delayed)[1]
            heapq.heappush(ready, (keys[unit], unit))
        _, unit = heapq.heappop(ready)
        order.append(unit)
        for successor in graph.successors[unit]:
            waiting[successor] -= 1
            if waiting[successor] == 0:
                release(successor, len(order))
    return tuple(order)


class Renderer:
    """Writes ranges of an edited text, with new orders of blocks by the offset of the block."""

    def __init__(
        self, original: str, edited: EditedText, orders: Mapping[int, Sequence[int]]
    ) -> None:
        self._original = original
        self._edited = edited
        self._orders = orders

    def render(self, start: int, end: int, blocks: Sequence[Block]) -> str:
        """The range of the original text, which has ``blocks`` as its outermost blocks."""
        pieces: list[str] = []
        at = start
        for block in blocks:
            order = self._orders.get(block.start, range(len(block)))
            for slot, number in zip(block.units, order, strict=True):
                unit = block.units[number]
                pieces.append(self._edited.piece(at, slot.start))
                content = self.render(unit.start, unit.end, unit.blocks)
                if unit is slot:
                    pieces.append(content)
                else:
                    pieces += (
                        "" if self._begins_line(slot.start) else "\n\t",
                        content,
                        "" if self._ends_line(slot.end) else "\n",
                    )
                at = slot.end
        pieces.append(self._edited.piece(at, end))
        return "".join(pieces)

    def _begins_line(self, offset: int) -> bool:
        """Whether only white space stands between the line's start and ``offset``."""
        line_start = self._original.rfind("\n", 0, offset) + 1
        return not self._original[line_start:offset].strip()

    def _ends_line(self, offset: int) -> bool:
        """Whether only white space stands between ``offset`` and the line's end."""
        line_end = self._original.find("\n", offset)
        line_end = len(self._original) if line_end < 0 else line_end
        return not self._original[offset:line_end].strip()


MAX_OFFSET = 16
"""Longest shift in positions; :meth:`PtxSpace.reorder` moves units further."""
_OFFSETS = tuple(k for k in range(-MAX_OFFSET, MAX_OFFSET + 1) if k != 0)
_MEMORY = MEMORY | {Resource.STABLE, Resource.FENCE}
_ORDER = frozenset(("order",))
_Unit = tuple[int, int]
"""Number of a block, and index of a unit in it."""


class _Pool(NamedTuple):
    """Units whose shifts have the same tags."""

    tags: Tags
    units: list[_Unit]


class PtxSpace(Space[PtxState, PtxMove]):
    """Legal orders of one kernel, and of the device functions that it may call."""

    def __init__(
        self, module: Module, kernel: str | None = None, levers: Levers = NO_LEVERS
    ) -> None:
        self.module = module
        self.kernel = module.kernel(kernel)
        self.functions = _reachable(module, self.kernel)
        """The kernel, and the functions of the module that it may call."""
        self.levers = _allowed_levers(levers, module, self.functions)
        """The values of ``levers`` that this kernel can have."""
        self.blocks: tuple[Block, ...] = tuple(b for f in self.functions for b in f.blocks)
        self.graphs: tuple[BlockGraph, ...] = tuple(map(build_graph, self.blocks))
        self._units: dict[Tags, list[_Unit]] = defaultdict(list)
        for number, block in enumerate(self.blocks):
            for index, unit in enumerate(block.units):
                if len(block) > 1:
                    self._units[_tags(unit)].append((number, index))
        self._settings = dict.fromkeys(self._all_settings())
        self._pools: dict[Tags, tuple[list[_Pool], list[SetLever | SetHint]]] = {}
        """Tags -> shifts and settings that have them all."""

    def start(self) -> PtxState:
        return PtxState()

    def key(self, state: PtxState) -> bytes:
        return state.key()

    def dump(self, state: PtxState) -> str:
        return state.dump()

    def load(self, text: str) -> PtxState:
        """Restore a state; raises :class:`BadRun` if its orders are illegal for this kernel."""
        state = PtxState.load(text)
        if state.orders and len(state.orders) != len(self.blocks):
            raise BadRun(
                f"the saved PTX state has {len(state.orders)} blocks, this kernel has "
                f"{len(self.blocks)}; resume with the PTX of the run"
            )
        for number, order in enumerate(state.orders):
            if order and not self.graphs[number].is_legal(order):
                raise BadRun(
                    f"the saved order of block {number} breaks a dependence of this kernel; "
                    "resume with the PTX of the run"
                )
        return state

    def order(self, state: PtxState, block: int) -> tuple[int, ...]:
        """The original index of the unit at each position of a block."""
        order = state.orders[block] if state.orders else ()
        return order or tuple(range(len(self.blocks[block])))

    def text(self, state: PtxState) -> str:
        """The PTX of the whole module in this state; the start state gives the text unchanged.

        Options and assembler are no part of the text.
        """
        edits = kernel_edits(self.module, self.kernel, state)
        if state.dependent_launch:
            first = self.order(state, 0) if self.kernel.blocks else ()
            edits += dependent_launch_edits(
                self.module, self.functions, state.dependent_launch, first
            )
        orders = {
            self.blocks[number].start: order for number, order in enumerate(state.orders) if order
        }
        outer = [block for function in self.functions for block in function.outer_blocks]
        outer.sort(key=lambda block: block.start)
        text = self.module.text
        return Renderer(text, EditedText(text, edits), orders).render(0, len(text), outer)

    def reorder(
        self,
        state: PtxState,
        rng: np.random.Generator,
        sigma: float,
        blocks: Iterable[int] | None = None,
    ) -> PtxState:
        """The state with new random orders of ``blocks`` (all of them by default).

        Each order is legal and near the present one: a unit's key is its present position plus
        normal noise of standard deviation ``sigma``, in positions.
        """
        orders = {
            number: random_order(self.graphs[number], self.order(state, number), rng, sigma)
            for number in (range(len(self.blocks)) if blocks is None else blocks)
            if len(self.blocks[number]) > 1
        }
        return self.with_orders(state, orders)

    def draw(
        self, state: PtxState, rng: np.random.Generator, required_tags: Tags = NO_TAGS
    ) -> PtxMove | None:
        """One uniform draw over all shifts and settings that have the tags."""
        if required_tags not in self._pools:
            self._pools[required_tags] = (
                [_Pool(t, u) for t, u in self._units.items() if required_tags <= t],
                [move for move in self._settings if required_tags <= move.tags],
            )
        pools, settings = self._pools[required_tags]
        shifts = sum(len(pool.units) for pool in pools) * len(_OFFSETS)
        if shifts + len(settings) == 0:
            return None
        number = int(rng.integers(shifts + len(settings)))
        move = settings[number - shifts] if number >= shifts else _shift(pools, number)
        return None if self._after(state, move) is None else move

    def moves(self, state: PtxState) -> Iterator[PtxMove]:
        for tags, units in self._units.items():
            for block, unit in units:
                for offset in _OFFSETS:
                    move = Shift(block, unit, offset, tags)
                    if self._shifted(state, move) is not None:
                        yield move
        for setting in self._settings:
            if self._after(state, setting) is not None:
                yield setting

    def is_legal(self, state: PtxState, move: PtxMove) -> bool:
        """Whether ``move`` may be applied to ``state``."""
        return self._after(state, move) is not None

    def apply(self, state: PtxState, move: PtxMove) -> PtxState:
        after = self._after(state, move)
        if after is None:
            raise move.error(
                f"{move} is illegal: {(move.error.__doc__ or '').rstrip('.')}; use moves from "
                "propose() or moves()"
            )
        return after

    def _after(self, state: PtxState, move: PtxMove) -> PtxState | None:
        """The state after ``move``; None if the move is illegal."""
        match move:
            case Shift():
                return self._shifted(state, move)
            case SetLever():
                if move not in self._settings or lever_value(state, move.lever) == move.value:
                    return None
                return with_lever(state, move.lever, move.value)
            case SetHint():
                hints = dict(state.hints)
                if move not in self._settings or hints.get(move.instruction, "") == move.hint:
                    return None
                hints[move.instruction] = move.hint
                return replace(state, hints=tuple(sorted((i, h) for i, h in hints.items() if h)))

    def _shifted(self, state: PtxState, move: Shift) -> PtxState | None:
        graph = self.graphs[move.block]
        order = list(self.order(state, move.block))
        source = order.index(move.unit)
        target = source + move.offset
        if not 0 <= target < len(order):
            return None
        earliest = graph.block.earliest
        if move.offset > 0:
            passed = order[source + 1 : target + 1]
            blocked = not graph.successors[move.unit].isdisjoint(passed)
            early = any(source + at < earliest[unit] for at, unit in enumerate(passed))
        else:
            passed = order[target:source]
            blocked = not graph.predecessors[move.unit].isdisjoint(passed)
            early = target < earliest[move.unit]
        if blocked or early:
            return None
        del order[source]
        order.insert(target, move.unit)
        return self.with_orders(state, {move.block: tuple(order)})

    def with_orders(self, state: PtxState, orders: dict[int, tuple[int, ...]]) -> PtxState:
        """The state with these legal orders, in the normal form: () for an original order."""
        entries = list(state.orders or ((),) * len(self.blocks))
        for number, order in orders.items():
            is_original = all(unit == at for at, unit in enumerate(order))
            entries[number] = () if is_original else order
        return replace(state, orders=tuple(entries) if any(entries) else ())

    def _all_settings(self) -> Iterator[SetLever | SetHint]:
        for lever, value in self.levers.values():
            yield SetLever(lever, value, frozenset(("lever", lever)))
        for instruction in self.kernel.instructions:
            hints = [h for h in self.levers.hints if h in allowed_hints(instruction)]
            for hint in ("", *hints) if hints else ():
                yield SetHint(instruction.index, hint, frozenset(("lever", "hint")))


def _tags(unit: Unit) -> Tags:
    """The tags of a unit's shifts."""
    touched = unit.reads | unit.writes
    memory = ("memory",) if touched & _MEMORY else ()
    convergent = ("convergent",) if Resource.CONVERGENCE in touched else ()
    return _ORDER | {*memory, *convergent}


def _shift(pools: Sequence[_Pool], number: int) -> Shift:
    """Shift number ``number`` of the units in ``pools``."""
    at, offset = divmod(number, len(_OFFSETS))
    for pool in pools:
        if at < len(pool.units):
            return Shift(*pool.units[at], _OFFSETS[offset], pool.tags)
        at -= len(pool.units)
    raise AssertionError(f"{number} is beyond the shifts of the pools")


def _allowed_levers(levers: Levers, module: Module, functions: tuple[Function, ...]) -> Levers:
    """The levers without settings that the kernel ``functions[0]`` cannot have."""
    if not can_wait(module, functions):
        levers = replace(levers, dependent_launch=("",))
    if not can_limit_registers(functions[0]):
        levers = replace(levers, max_registers=(None,))
    return levers


def _reachable(module: Module, kernel: Function) -> tuple[Function, ...]:
    """The kernel, then the functions that it may call.

    A function counts as called if a function that counts names it in an instruction, or if the
    module names it in a table outside of functions, for indirect calls.
    """
    found = [kernel]
    names = set(kernel.words) | module.outer_words
    others = [function for function in module.functions if not function.is_kernel]
    while called := [
        f for f in others if f.name in names and all(f is not other for other in found)
    ]:
        found += called
        names = {name for function in called for name in function.words}
    return tuple(found)
