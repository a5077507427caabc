"""The constraints of one block, as a scan collects them."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from nostall.sass.program.instruction import Instruction
from nostall.sass.safety.latency import LatencyTable
from nostall.sass.safety.pairing import HazardKind


@dataclass(frozen=True, slots=True)
class Leftover:
    """Something a block leaves in flight: which registers, and the scoreboards that end it."""

    index: int
    is_result: bool
    registers: frozenset[int]
    boards: int
    fixed: bool
    ceiling: int


@dataclass(slots=True)
class BoardUse:
    """Which scoreboards could be replaced by others.

    ``waiters``: (instruction, write board?) -> the instructions whose wait relies on that board.
    ``locked``: boards of instructions that something outside the block relies on.  ``special``
    and ``entry``: masks of boards used asynchronously, and relied on from before the block;
    ``unknown_entry``: something in flight at the start has no scoreboard of its own.
    """

    waiters: dict[tuple[int, bool], set[int]] = field(default_factory=lambda: defaultdict(set[int]))
    locked: set[tuple[int, bool]] = field(default_factory=set[tuple[int, bool]])
    special: int = 0
    entry: int = 0
    unknown_entry: bool = False


@dataclass(slots=True)
class BlockScan:
    """The constraints of one block; instruction numbers are original indices."""

    order: Sequence[Instruction]
    sm: int
    floors: LatencyTable
    edges: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    after_start: dict[int, int] = field(default_factory=dict[int, int])
    before_end: dict[int, int] = field(default_factory=dict[int, int])
    leftovers: dict[Leftover, int] = field(default_factory=dict[Leftover, int])
    waited: int = 0
    length: int = 0
    issue: dict[int, int] = field(default_factory=dict[int, int])
    waits: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    boards: BoardUse = field(default_factory=lambda: BoardUse())

    def edge(self, first: int, second: int, cycles: int = 1) -> None:
        """``second`` issues at least ``cycles`` after ``first``, or as many as in the original: a
        stall of 0 puts none between them."""
        if first == second:
            return
        now = self.issue[second] - self.issue[first]
        if now < cycles:
            cycles = now
        if self.edges.get((first, second), -1) < cycles:
            self.edges[first, second] = cycles

    def apart(
        self, first: Instruction, second: Instruction, register: int, kind: HazardKind
    ) -> None:
        """Keep a fixed-latency pair as far apart as it is, or as far as is usual."""
        usual = self.floors.safe_distance(first, second, register, kind)
        self.edge(first.index, second.index, max(1, usual))

    def protect_entry(self, arriving: dict[Leftover, int]) -> None:
        """Instructions keep the protection they have against what is in flight at the start."""
        touching: dict[int, list[tuple[Leftover, int]]] = defaultdict(list)
        for item, since in arriving.items():
            self.boards.entry |= item.boards
            self.boards.unknown_entry |= not item.fixed and not item.boards
            for register in item.registers:
                touching[register].append((item, since))
        for instruction in self.order:
            defs = frozenset(instruction.defs)
            for register in {*instruction.uses, *defs}:
                for item, since in touching.get(register, ()):
                    if item.is_result or register in defs:
                        self._protect(instruction, item, since)

    def _protect(self, instruction: Instruction, item: Leftover, since: int) -> None:
        here = instruction.index
        if item.fixed:
            need = min(self.issue[here], item.ceiling - since)
            self.after_start[here] = max(need, self.after_start.get(here, 0))
            return
        until = bisect_right(self.waits, self.issue[here], key=lambda wait: self.issue[wait[0]])
        earlier = self.waits[:until]
        for at, mask in earlier:
            if mask & item.boards:
                self.edge(at, here)
                return
        for at, _ in earlier:
            self.edge(at, here)
