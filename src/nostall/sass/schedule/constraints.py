"""Scheduling constraints of one basic block, collected while its original order is scanned."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from nostall.sass.program.instruction import Instruction
from nostall.sass.safety.latency import LatencyTable
from nostall.sass.safety.pairing import HazardKind


@dataclass(frozen=True, slots=True)
class InFlight:
    """A result that is not written yet, or sources that are not read yet, when a block ends."""

    index: int
    """Original index of the instruction."""
    is_result: bool
    """True for results, False for sources that are read after issue."""
    registers: frozenset[int]
    scoreboards: int
    """Bit mask of the scoreboards that announce the completion; 0 without a scoreboard."""
    fixed_latency: bool
    is_wall: bool
    """Whether the item is of a wall: memory accesses may rely on its completion."""
    ceiling: int
    """Cycles after issue by which a fixed-latency item is complete; 0 for the others."""
    is_assumed: bool = False
    """Whether only pairs without witnesses complete the item before the block ends. Each wait of a
    later block may be for one more such pair, until the registers are overwritten."""


@dataclass(slots=True)
class ScoreboardUse:
    """Which instructions of a block depend on which scoreboards."""

    waiters: dict[tuple[int, bool], set[int]] = field(default_factory=lambda: defaultdict(set[int]))
    """(instruction, write scoreboard?) -> the instructions whose wait relies on that scoreboard."""
    locked: set[tuple[int, bool]] = field(default_factory=set[tuple[int, bool]])
    """(instruction, write scoreboard?) that code outside the block relies on."""
    asynchronous: int = 0
    """Bit mask: scoreboards of asynchronous operations, and those that DEPBAR counts."""
    live_in: int = 0
    """Bit mask: scoreboards of operations that are in flight when the block begins."""
    unknown_live_in: bool = False
    """Whether an operation without a scoreboard of its own is in flight when the block begins."""


@dataclass(slots=True)
class BlockConstraints:
    """Constraints between the instructions of one block, by original index."""

    order: Sequence[Instruction]
    """The instructions in the original order."""
    sm: int
    floors: LatencyTable
    edges: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    """(first, second) -> least cycles from the issue of ``first`` to that of ``second``."""
    after_start: dict[int, int] = field(default_factory=dict[int, int])
    """Least cycles from the start of the block to the issue of an instruction."""
    before_end: dict[int, int] = field(default_factory=dict[int, int])
    """Least cycles from the issue of an instruction to the end of the block."""
    live_out: dict[InFlight, int] = field(default_factory=dict[InFlight, int])
    """Items in flight at the end of the block -> cycles since their issue."""
    waited: int = 0
    """Bit mask of the scoreboards for which the block waits."""
    overwritten: set[int] = field(default_factory=set[int])
    """Registers that the block writes in all threads."""
    length: int = 0
    """Cycles of the block by its stall counts."""
    issue: dict[int, int] = field(default_factory=dict[int, int])
    """Cycle in which an instruction issues, from the start of the block, by stall counts."""
    waits: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """(instruction, bit mask of the scoreboards for which it waits), in order."""
    scoreboards: ScoreboardUse = field(default_factory=lambda: ScoreboardUse())

    def add_edge(self, first: int, second: int, cycles: int = 1) -> None:
        """Require that ``second`` issues at least ``cycles`` after ``first``.

        If the original has fewer cycles between the two, its distance is required. This can be 0:
        a stall count of 0 leaves no cycle between two instructions.
        """
        if first == second:
            return
        distance = self.issue[second] - self.issue[first]
        if distance < cycles:
            cycles = distance
        if self.edges.get((first, second), -1) < cycles:
            self.edges[first, second] = cycles

    def add_latency_edge(
        self, first: Instruction, second: Instruction, register: int, kind: HazardKind
    ) -> None:
        """Require the latency that compilers leave between a fixed-latency pair."""
        safe_distance = self.floors.safe_distance(first, second, register, kind)
        self.add_edge(first.index, second.index, max(1, safe_distance))

    def protect_live_in(self, live_in: dict[InFlight, int]) -> None:
        """Keep each instruction protected from the operations in flight at the block's start.

        ``live_in`` maps each item to the cycles since its issue.
        """
        by_register: dict[int, list[tuple[InFlight, int]]] = defaultdict(list)
        completing = self._first_waiters([item for item in live_in if item.is_wall])
        for item, since in live_in.items():
            self.scoreboards.live_in |= item.scoreboards
            self.scoreboards.unknown_live_in |= not item.fixed_latency and not item.scoreboards
            for register in item.registers:
                by_register[register].append((item, since))
        overwritten: set[int] = set()
        for instruction in self.order:
            defs = frozenset(instruction.defs)
            if completing and instruction.accesses_memory and not instruction.is_barrier:
                for waiter in completing:
                    if self.issue[waiter] <= self.issue[instruction.index]:
                        self.add_edge(waiter, instruction.index)
            for register in {*instruction.uses, *defs}:
                for item, since in by_register.get(register, ()):
                    concerned = item.registers if item.is_result else {register}
                    if item.is_assumed and concerned <= overwritten:
                        continue
                    if item.is_result or register in defs:
                        self._protect(instruction, item, since)
            if not instruction.is_guarded:
                overwritten |= defs

    def _first_waiters(self, items: Iterable[InFlight]) -> set[int]:
        """The instructions that end operations from before the block, by original index."""
        firsts = (
            next((waiter for waiter, mask in self.waits if mask & item.scoreboards), None)
            for item in items
        )
        return {waiter for waiter in firsts if waiter is not None}

    def _protect(self, instruction: Instruction, item: InFlight, since: int) -> None:
        index = instruction.index
        if item.fixed_latency:
            needed = min(self.issue[index], item.ceiling - since)
            self.after_start[index] = max(needed, self.after_start.get(index, 0))
            return
        until = bisect_right(self.waits, self.issue[index], key=lambda wait: self.issue[wait[0]])
        earlier = self.waits[:until]
        for waiter, mask in earlier:
            if mask & item.scoreboards:
                self.add_edge(waiter, index)
                return
        for waiter, _ in earlier:
            self.add_edge(waiter, index)
