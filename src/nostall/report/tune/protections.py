"""Register dependences of one schedule, and the mechanism that protects each of them.

Dependences come from reaching definitions over the function.  Their protection comes from the
verifier's analysis of what is in flight (:mod:`nostall.sass.safety.hazards.dataflow`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from nostall.sass.binary.encoding import SCOREBOARDS
from nostall.sass.program import Block, Function, Instruction, registers
from nostall.sass.safety.hazards import dataflow, in_flight
from nostall.sass.safety.hazards.facts import (
    InstructionFacts,
    drained_scoreboards,
    instruction_facts,
    negate_literals,
    register_numbers,
)
from nostall.sass.safety.latency import LatencyTable
from nostall.sass.safety.pairing import HazardKind

RegisterSets = dict[int, frozenset[int]]
"""Register number -> original indices of instructions."""
_NONE: frozenset[int] = frozenset()


class ReachingDefinitions:
    """Forward dataflow analysis of a function, and a cursor over its blocks.

    :meth:`enter` moves the cursor to the start of a block, :meth:`step` past an instruction;
    :meth:`writers` and :meth:`readers` answer for the cursor's position.
    """

    def __init__(
        self,
        order: Sequence[Instruction],
        blocks: Sequence[Block],
        late_sources: Mapping[int, Sequence[int]],
    ) -> None:
        """``late_sources``: registers that an instruction may still read after it is issued."""
        self._late_sources = late_sources
        self._written: RegisterSets = {}
        self._read: RegisterSets = {}
        self._entries = self._solve(order, blocks)

    def enter(self, block: int) -> None:
        """Move the cursor to the start of a block."""
        written, read = self._entries[block]
        self._written, self._read = dict(written), dict(read)

    def step(self, instruction: Instruction) -> None:
        """Move the cursor past an instruction.

        A write without a guard ends the earlier writes and reads of its register.
        """
        only_this = frozenset((instruction.index,))
        late_sources = self._late_sources.get(instruction.index, ())
        for register in late_sources:
            self._read[register] = self._read.get(register, _NONE) | only_this
        for register in instruction.defs:
            if instruction.is_guarded:
                self._written[register] = self._written.get(register, _NONE) | only_this
            else:
                self._written[register] = only_this
                self._read[register] = only_this if register in late_sources else _NONE

    def writers(self, register: int) -> Iterable[int]:
        """Instructions whose result may be in the register."""
        return sorted(self._written.get(register, _NONE))

    def readers(self, register: int) -> Iterable[int]:
        """Instructions that may still be reading the register."""
        return sorted(self._read.get(register, _NONE))

    def _solve(
        self, order: Sequence[Instruction], blocks: Sequence[Block]
    ) -> list[tuple[RegisterSets, RegisterSets]]:
        """(written, read) at the entry of each block, by a worklist until nothing changes."""
        entries: list[tuple[RegisterSets, RegisterSets]] = [({}, {}) for _ in blocks]
        worklist = list(range(len(blocks) - 1, -1, -1))
        queued = set(worklist)
        while worklist:
            number = worklist.pop()
            queued.discard(number)
            self._written, self._read = dict(entries[number][0]), dict(entries[number][1])
            for position in range(blocks[number].start, blocks[number].end):
                self.step(order[position])
            for successor in blocks[number].succ:
                written_grew = _merge(entries[successor][0], self._written)
                read_grew = _merge(entries[successor][1], self._read)
                if (written_grew or read_grew) and successor not in queued:
                    queued.add(successor)
                    worklist.append(successor)
        return entries


def _merge(into: RegisterSets, sets: RegisterSets) -> bool:
    """Add ``sets`` to ``into``; returns whether ``into`` grew."""
    changed = False
    for register, instructions in sets.items():
        known = into.get(register, _NONE)
        if not instructions <= known:
            into[register] = known | instructions
            changed = True
    return changed


Protection = tuple[str | int, ...]
"""A kind of protection and its values:

- ``("distance", cycles, minimum, safe)``: fixed latency; ``cycles`` between the two instructions,
  the minimum of any code, and the minimum for changed schedules
- ``("complete", cycles)``: fixed latency, and more than ``cycles`` lie between the two
- ``("scoreboard", mask, waiter, setter)``: ``waiter`` waits for a scoreboard of ``mask`` that
  ``setter`` releases (-1: not in this block)
- ``("other_block", waiter, ...)``: these instructions of other blocks wait for the scoreboard
- ``("queue",)``: both instructions go through one in-order queue
- ``("none",)``: no protection was found
"""

MAX_WAITERS = 12
"""Waiters of other blocks that are listed for one dependence."""
_NO_SETTER = -1


@dataclass(frozen=True, slots=True)
class Dependence:
    """``second`` reads or overwrites registers that ``first`` writes, or overwrites what it reads.

    Instructions are named by original index.
    """

    first: int
    second: int
    kind: HazardKind
    registers: str
    """Names of the registers, such as ``R4-R7``."""
    protection: Protection


@dataclass(frozen=True, slots=True)
class ScoreboardWait:
    """An instruction waits for scoreboards, which ends an item in flight of an earlier one."""

    waiter: int
    producer: int
    role: str
    """The item that ends: the producer's ``result``, its ``sources`` or its ``completion``."""
    scoreboards: int
    """Bit mask."""


@dataclass
class DependenceAnalysis:
    """All dependences and waits of one schedule."""

    dependences: list[Dependence] = field(default_factory=list[Dependence])
    waits: list[ScoreboardWait] = field(default_factory=list[ScoreboardWait])


_ROLE_NAMES = {
    in_flight.RESULT: "result",
    in_flight.EARLY_RESULT: "result",
    in_flight.SOURCES: "sources",
    in_flight.COMPLETION: "completion",
    in_flight.RELEASE: "completion",
}


def analyze_dependences(
    function: Function, sm: int, *, measured_latencies: bool = False
) -> DependenceAnalysis:
    """Find the dependences in the current schedule of ``function``.

    ``measured_latencies``: issue distances measured on a GPU may lower mined ones.
    """
    return _Analyzer(function, sm, measured_latencies).run()


def register_ranges(numbers: list[int]) -> str:
    """Names of registers, with neighbours as ranges: ``R4-R7, P0``."""
    parts: list[str] = []
    start = 0
    for at in range(1, len(numbers) + 1):
        if at < len(numbers) and numbers[at] == numbers[at - 1] + 1 and _same_file(numbers[at]):
            continue
        first, last = registers.name(numbers[start]), registers.name(numbers[at - 1])
        parts.append(first if start == at - 1 else f"{first}-{last}")
        start = at
    return ", ".join(parts)


def _same_file(register: int) -> bool:
    """Whether the register with the previous number is in the same register file."""
    return _register_file(register) == _register_file(register - 1)


def _register_file(register: int) -> str:
    return registers.name(register).rstrip("0123456789")


class _Analyzer:
    """State of the analysis while it goes through the blocks."""

    def __init__(self, function: Function, sm: int, measured_latencies: bool) -> None:
        self.function = function
        self.order = function.instructions
        self.latencies = LatencyTable.load(sm, measured_latencies=measured_latencies)
        self.facts = {
            i.index: instruction_facts(i, sm, self.latencies.max_latency(i)) for i in self.order
        }
        self.position = {i.index: at for at, i in enumerate(self.order)}
        self.result = DependenceAnalysis()
        self.waiters: dict[in_flight.Key, list[int]] = defaultdict(list)
        """Instructions that wait for an item in flight, in all blocks."""
        self.ended_here: dict[in_flight.Key, tuple[int, int]] = {}
        """Items that a wait has ended in the current block: (waiter, scoreboards)."""
        self.block_start = 0

    def run(self) -> DependenceAnalysis:
        blocks = self.function.blocks
        late_sources = {i: register_numbers(facts.late_sources) for i, facts in self.facts.items()}
        reaching = ReachingDefinitions(self.order, blocks, late_sources)
        entries = dataflow.entry_states(blocks, self.order, self.facts)
        for number, (block, state) in enumerate(zip(blocks, entries, strict=True)):
            reaching.enter(number)
            self._analyze_block(block, state, reaching)
        dependences = self.result.dependences
        for at, dependence in enumerate(dependences):
            if dependence.protection == ("other_block",):
                dependences[at] = self._with_waiters(dependence)
        return self.result

    def _analyze_block(
        self, block: Block, state: in_flight.State, reaching: ReachingDefinitions
    ) -> None:
        self.ended_here, self.block_start = {}, block.start
        for facts, items, ended in dataflow.step_through(state, block, self.order, self.facts):
            control = facts.instruction.control
            mask = control.wait | drained_scoreboards(facts.instruction)
            index = facts.instruction.index
            for key, item in ended:
                scoreboards = item.scoreboards & mask
                self.ended_here[key] = (index, scoreboards)
                self.waiters[key].append(index)
                role = _ROLE_NAMES[key[1]]
                self.result.waits.append(ScoreboardWait(index, key[0], role, scoreboards))
            self.result.dependences += self._dependences_of(facts, items, reaching)
            for role_number in _ROLE_NAMES:
                self.ended_here.pop((index, role_number), None)
            reaching.step(facts.instruction)

    def _dependences_of(
        self, second: InstructionFacts, items: in_flight.State, reaching: ReachingDefinitions
    ) -> Iterator[Dependence]:
        """Dependences that end at an instruction; registers with one protection are grouped."""
        groups: dict[tuple[int, HazardKind, Protection], list[int]] = defaultdict(list)
        for first, kind, register in self._pairs(second.instruction, reaching):
            protection = self._protection(self.facts[first], second, kind, register, items)
            if protection is not None:
                groups[first, kind, protection].append(register)
        for (first, kind, protection), numbers in groups.items():
            names = register_ranges(sorted(numbers))
            yield Dependence(first, second.instruction.index, kind, names, protection)

    def _pairs(
        self, instruction: Instruction, reaching: ReachingDefinitions
    ) -> Iterator[tuple[int, HazardKind, int]]:
        """(earlier instruction, kind, register) of each dependence of an instruction."""
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

    def _protection(
        self,
        first: InstructionFacts,
        second: InstructionFacts,
        kind: HazardKind,
        register: int,
        items: in_flight.State,
    ) -> Protection | None:
        """The protection of a dependence; None if it needs none, or none that is worth a line."""
        role = in_flight.EARLY_RESULT if first.early_defs >> register & 1 else in_flight.RESULT
        if kind == "WAR":
            role = in_flight.SOURCES
        key = (first.instruction.index, role)
        item = items.get(key)
        if item is not None:
            return self._protection_in_flight(first, second, kind, register, item)
        if key in self.ended_here:
            waiter, scoreboards = self.ended_here[key]
            return ("scoreboard", scoreboards, waiter, self._setter(key, waiter, scoreboards))
        if kind != "RAW":
            return None
        if first.fixed_latency:
            return ("complete", first.max_latency)
        return ("other_block",)

    def _protection_in_flight(
        self,
        first: InstructionFacts,
        second: InstructionFacts,
        kind: HazardKind,
        register: int,
        item: in_flight.InFlight,
    ) -> Protection | None:
        """The protection of a dependence on an item that is still in flight at ``second``."""
        if item.guard_literals & negate_literals(second.guard_literals):
            return None
        proofs = second.proofs
        follows = proofs.overwrites_sources if kind == "WAR" else proofs.overwrites_results
        if kind != "RAW" and first.group in follows:
            return ("queue",)
        if not first.fixed_latency:
            return ("none",)
        pair = (first.instruction, second.instruction, register, kind)
        minimum = self.latencies.min_distance(*pair)
        return ("distance", item.elapsed, minimum, self.latencies.safe_distance(*pair))

    def _setter(self, key: in_flight.Key, waiter: int, scoreboards: int) -> int:
        """The instruction that set the awaited scoreboard: the producer or one of its queue."""
        index, role = key
        producer = self.facts[index]
        control = producer.instruction.control
        if role == in_flight.EARLY_RESULT:
            return index
        own = producer.result_scoreboards
        if role != in_flight.RESULT:
            own |= sum(1 << b for b in (control.write_sb, control.read_sb) if b in SCOREBOARDS)
        if own & scoreboards:
            return index
        of_sources = role == in_flight.SOURCES
        for at in range(self.position[waiter] - 1, self.block_start - 1, -1):
            candidate = self.facts[self.order[at].index]
            fields = candidate.instruction.control
            proofs = candidate.proofs
            covers = proofs.sources if of_sources else proofs.results
            if producer.group not in covers:
                continue
            set_here = (fields.write_sb, fields.read_sb) if of_sources else (fields.write_sb,)
            if any(b in SCOREBOARDS and scoreboards >> b & 1 for b in set_here):
                return candidate.instruction.index
        return _NO_SETTER

    def _with_waiters(self, dependence: Dependence) -> Dependence:
        """Add the waiters of other blocks, which are known after all blocks were analyzed."""
        waiters = sorted(set(self.waiters[dependence.first, in_flight.RESULT]))[:MAX_WAITERS]
        protection: Protection = ("other_block", *waiters) if waiters else ("none",)
        return Dependence(
            dependence.first, dependence.second, dependence.kind, dependence.registers, protection
        )
