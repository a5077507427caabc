"""Who needs what from whom in one schedule, and how each such pair is protected.

Links come from reaching definitions over the whole function (:mod:`nostall.report.tune.reaching_definitions`);
what protects them comes from the verifier's own analysis of what is in flight
(:mod:`nostall.sass.safety.in_flight`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from nostall.report.tune.reaching_definitions import Reaching
from nostall.sass.binary.encoding import SCOREBOARDS
from nostall.sass.program import Block, Function, Instruction, registers
from nostall.sass.program.queues import result_scoreboards
from nostall.sass.safety import in_flight as pending
from nostall.sass.safety.facts import (
    InstructionFacts,
    drained_scoreboards,
    instruction_facts,
    negate_literals,
    register_numbers,
)
from nostall.sass.safety.latency import LatencyTable
from nostall.sass.safety.pairing import HazardKind

How = tuple[str | int, ...]
"""A kind of protection and its figures:

- ``("distance", cycles, least, usual)``: fixed latency, cycles between the two;
- ``("arrived", cycles)``: fixed latency, and more than ``cycles`` lie between them;
- ``("board", mask, waiter, setter)``: ``waiter`` waits for a scoreboard of ``mask`` that
  ``setter`` (-1: not in this block) releases;
- ``("earlier", waiter ...)``: waited for in another block, by these instructions;
- ``("queue",)``: both go through one in-order queue;
- ``("open",)``: nothing was found that protects the pair.
"""

MOST = 12
"""Instructions of other blocks that are named as waiters of one pair."""


@dataclass(frozen=True, slots=True)
class Link:
    """``second`` reads (RAW) or writes (WAW) what ``first`` writes, or writes what it reads (WAR).

    Both are original indices.
    """

    first: int
    second: int
    kind: HazardKind
    registers: str
    how: How


@dataclass(frozen=True, slots=True)
class Wait:
    """``waiter`` waits for the scoreboards in ``boards`` and so ends what ``producer`` had in
    flight: its ``result``, its ``sources``, or its ``completion``."""

    waiter: int
    producer: int
    what: str
    boards: int


@dataclass
class Protections:
    """All links and waits of one schedule."""

    links: list[Link] = field(default_factory=list[Link])
    waits: list[Wait] = field(default_factory=list[Wait])


_WHAT = {pending.RESULT: "result", pending.SOURCES: "sources", pending.COMPLETION: "completion"}


def protections(function: Function, sm: int) -> Protections:
    """Analyse the schedule that ``function`` has now."""
    return _Analysis(function, sm).run()


def names(numbers: list[int]) -> str:
    """Registers as text, neighbours as ranges: ``R4-R7, P0``."""
    parts: list[str] = []
    start = 0
    for at in range(1, len(numbers) + 1):
        if at < len(numbers) and numbers[at] == numbers[at - 1] + 1 and _neighbours(numbers[at]):
            continue
        first, last = registers.name(numbers[start]), registers.name(numbers[at - 1])
        parts.append(first if start == at - 1 else f"{first}-{last}")
        start = at
    return ", ".join(parts)


def _neighbours(register: int) -> bool:
    """Whether the number before is in the same register file."""
    return _file(register) == _file(register - 1)


def _file(register: int) -> str:
    return registers.name(register).rstrip("0123456789")


class _Analysis:
    def __init__(self, function: Function, sm: int) -> None:
        self.function = function
        self.order = function.instructions
        self.floors = LatencyTable.load(sm)
        self.facts = {
            i.index: instruction_facts(i, sm, self.floors.max_latency(i)) for i in self.order
        }
        self.position = {i.index: at for at, i in enumerate(self.order)}
        self.found = Protections()
        self.waiters: dict[pending.Key, list[int]] = defaultdict(list)
        self.local: dict[pending.Key, tuple[int, int]] = {}
        self.start = 0

    def run(self) -> Protections:
        blocks = self.function.blocks
        late = {i: register_numbers(facts.late_sources) for i, facts in self.facts.items()}
        reaching = Reaching(self.order, blocks, late)
        entries = pending.entry_states(blocks, self.order, self.facts)
        for number, (block, state) in enumerate(zip(blocks, entries, strict=True)):
            self._block(block, state, reaching, number)
        for at, link in enumerate(self.found.links):
            if link.how == ("earlier",):
                self.found.links[at] = self._resolved(link)
        return self.found

    def _block(self, block: Block, state: pending.State, reaching: Reaching, number: int) -> None:
        self.local, self.start = {}, block.start
        reaching.enter(number)
        for here, in_flight, ended in pending.step_through(state, block, self.order, self.facts):
            control = here.instruction.control
            mask = control.wait | drained_scoreboards(here.instruction)
            index = here.instruction.index
            for key, item in ended:
                self.local[key] = (index, item.scoreboards & mask)
                self.waiters[key].append(index)
                self.found.waits.append(Wait(index, key[0], _WHAT[key[1]], item.scoreboards & mask))
            self.found.links += self._links(here, in_flight, reaching)
            for role in _WHAT:
                self.local.pop((index, role), None)
            reaching.step(here.instruction)

    def _links(
        self, here: InstructionFacts, state: pending.State, reaching: Reaching
    ) -> Iterator[Link]:
        """The links that end at ``here``; registers with one protection share a link."""
        together: dict[tuple[int, HazardKind, How], list[int]] = defaultdict(list)
        for first, kind, register in self._pairs(here.instruction, reaching):
            how = self._how(self.facts[first], here, kind, register, state)
            if how is not None:
                together[first, kind, how].append(register)
        for (first, kind, how), numbers in together.items():
            yield Link(first, here.instruction.index, kind, names(sorted(numbers)), how)

    def _pairs(
        self, instruction: Instruction, reaching: Reaching
    ) -> Iterator[tuple[int, HazardKind, int]]:
        for register in instruction.uses:
            for first in reaching.writers(register):
                yield first, "RAW", register
        for register in instruction.defs:
            for first in reaching.readers(register):
                if first != instruction.index:
                    yield first, "WAR", register
            for first in reaching.writers(register):
                if first != instruction.index:
                    yield first, "WAW", register

    def _how(
        self,
        first: InstructionFacts,
        here: InstructionFacts,
        kind: HazardKind,
        register: int,
        state: pending.State,
    ) -> How | None:
        """What protects a pair; None when it needs no protection worth a line."""
        role = pending.SOURCES if kind == "WAR" else pending.RESULT
        key = (first.instruction.index, role)
        item = state.get(key)
        if item is not None:
            return self._in_flight(first, here, kind, register, item)
        if key in self.local:
            waiter, boards = self.local[key]
            return ("board", boards, waiter, self._setter(key, waiter, boards))
        if kind != "RAW":
            return None
        if first.fixed_latency:
            return ("arrived", first.max_latency)
        return ("earlier",)

    def _in_flight(
        self,
        first: InstructionFacts,
        here: InstructionFacts,
        kind: HazardKind,
        register: int,
        item: pending.InFlight,
    ) -> How | None:
        if item.guard_literals & negate_literals(here.guard_literals):
            return None
        queue = "source_queue" if kind == "WAR" else "result_queue"
        mine = getattr(first, queue)
        if kind != "RAW" and mine and mine == getattr(here, queue):
            return ("queue",)
        if not first.fixed_latency:
            return ("open",)
        one, two = first.instruction, here.instruction
        least = self.floors.min_distance(one, two, register, kind)
        return (
            "distance",
            item.elapsed,
            least,
            self.floors.safe_distance(one, two, register, kind),
        )

    def _setter(self, key: pending.Key, waiter: int, boards: int) -> int:
        """The instruction whose scoreboard was waited for: the producer or one of its queue."""
        index, role = key
        first = self.facts[index]
        control = first.instruction.control
        own = result_scoreboards(first.instruction)
        if role != pending.RESULT:
            own |= sum(1 << b for b in (control.write_sb, control.read_sb) if b in SCOREBOARDS)
        if own & boards:
            return index
        for at in range(self.position[waiter] - 1, self.start - 1, -1):
            other = self.facts[self.order[at].index]
            fields = other.instruction.control
            of_sources = role == pending.SOURCES
            queue = "source_queue" if of_sources else "result_queue"
            if getattr(other, queue) != getattr(first, queue):
                continue
            mine = (fields.write_sb, fields.read_sb) if of_sources else (fields.write_sb,)
            if any(b in SCOREBOARDS and boards >> b & 1 for b in mine):
                return other.instruction.index
        return -1

    def _resolved(self, link: Link) -> Link:
        """Name the waiters of other blocks, now that every block was walked."""
        found = sorted(set(self.waiters[link.first, pending.RESULT]))[:MOST]
        how: How = ("earlier", *found) if found else ("open",)
        return Link(link.first, link.second, link.kind, link.registers, how)
