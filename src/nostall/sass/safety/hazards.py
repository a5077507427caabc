"""The hazard validator: the first half of the verifier.

Absolute rules hold for any code: every result and source in flight is protected by distance or by
a scoreboard, encodings are legal, operand caches are not stale.  Relative rules compare with the
original: nothing got closer than nostall ever brings a pair, and no wait for an asynchronous
operation was lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from nostall.sass.binary.encoding import illegal
from nostall.sass.program import registers
from nostall.sass.program.blocks import Block
from nostall.sass.program.instruction import Instruction
from nostall.sass.program.program import Function
from nostall.sass.safety import in_flight as pending
from nostall.sass.safety.barrier_distance import near_walls
from nostall.sass.safety.facts import Facts, facts_of, registers_in
from nostall.sass.safety.latency import WAITER_GAP, Floors
from nostall.sass.safety.pairing import Kind
from nostall.sass.safety.reuse import changed_reuse, stale_reuse
from nostall.sass.safety.verdict import Finding, at

Distances = dict[tuple[int, int, Kind, int], int]
"""(first, second, kind, register) -> cycles, for fixed-latency pairs that are close together."""


@dataclass(frozen=True)
class Observed:
    """What one pass over a function saw."""

    findings: list[Finding]
    distances: Distances
    async_waits: set[tuple[int, int]]
    """(asynchronous operation, instruction that waits for it)."""
    unfinished: set[tuple[int, int]]
    """(asynchronous operation, watched instruction that issues while it may be in flight)."""
    gaps: dict[tuple[int, int], int]
    """(first, second) -> stall between neighbours of a block."""


class HazardValidator:
    """Checks functions of one architecture."""

    def __init__(self, sm: int) -> None:
        self.sm = sm
        self.floors = Floors.of(sm)

    def observe(self, function: Function, watched: frozenset[int] = frozenset()) -> Observed:
        """Walk every block with the fixpoint of what is in flight; apply the absolute rules.

        ``watched``: instructions whose asynchronous operations in flight are wanted.
        """
        order = function.instructions
        position = {ins.index: at_ for at_, ins in enumerate(order)}
        facts = {i.index: facts_of(i, self.sm, self.floors.ceiling(i)) for i in order}
        seen = Observed([], {}, set(), set(), {})
        report = _Reporter(function.name, position, seen.findings)
        for instruction in order:
            self._encoding(instruction, report)
        entries = pending.entry_states(function.blocks, order, facts)
        for block, state in zip(function.blocks, entries, strict=True):
            self._walk(block, state, order, facts, watched, seen, report)
            for finding in stale_reuse(order[block.start : block.end]):
                report("stale-reuse", *finding)
            for first, second in pairwise(order[block.start : block.end]):
                seen.gaps[first.index, second.index] = first.control.stall
        return seen

    def check(self, function: Function) -> list[Finding]:
        """Absolute findings only."""
        return self.observe(function).findings

    def compare(self, original: Function, candidate: Function) -> list[Finding]:
        """Absolute findings of the candidate and what got worse against the original."""
        before = self.observe(original)
        after = self.observe(candidate, frozenset(waiter for _, waiter in before.async_waits))
        by_index = {i.index: i for i in candidate.instructions}
        position = {ins.index: at_ for at_, ins in enumerate(candidate.instructions)}
        report = _Reporter(candidate.name, position, after.findings)
        for key, distance in after.distances.items():
            self._shrunk(key, distance, before.distances.get(key), by_index, report)
        for instruction in candidate.instructions:
            self._new_board(original.instructions[instruction.index], instruction, report)
        for (first, second), stall in after.gaps.items():
            if stall < before.gaps.get((first, second), 16):
                self._issue_gap(by_index[first], by_index[second], report)
        for instruction, reason in near_walls(original, candidate, self.floors):
            report("near-wall", instruction, reason)
        for instruction, reason in changed_reuse(original, candidate):
            report("stale-reuse", instruction, reason)
        for producer, waiter in sorted(before.async_waits - after.async_waits):
            passed = (producer < waiter) != (position[producer] < position[waiter])
            if passed or (producer, waiter) in after.unfinished:
                report(
                    "lost-wait",
                    by_index[waiter],
                    f"no longer waits for {at(by_index[producer])}, an asynchronous operation",
                )
        return after.findings

    def _walk(
        self,
        block: Block,
        state: pending.State,
        order: tuple[Instruction, ...],
        facts: dict[int, Facts],
        watched: frozenset[int],
        seen: Observed,
        report: _Reporter,
    ) -> None:
        for here, in_flight, ended in pending.walk(state, block, order, facts):
            for (index, role), item in ended:
                if role == pending.ORDER:
                    seen.async_waits.add((index, here.instruction.index))
                elif item.elapsed < WAITER_GAP and here.instruction.base != "DEPBAR":
                    report(
                        "scoreboard-gap",
                        here.instruction,
                        f"waits {item.elapsed} cycle after {at(facts[index].instruction)} set the "
                        f"scoreboard; at least {WAITER_GAP} are needed",
                    )
            index = here.instruction.index
            if index in watched:
                pairs = ((p, index) for p, role in in_flight if role == pending.ORDER)
                seen.unfinished.update(pairs)
            for hit in pending.conflicts(here, in_flight, facts):
                self._judge(hit, seen, report)

    def _judge(self, hit: pending.Conflict, seen: Observed, report: _Reporter) -> None:
        first, second = hit.first.instruction, hit.second.instruction
        numbers = registers_in(hit.mask)
        if not hit.first.fixed:
            names = ", ".join(registers.name(n) for n in numbers)
            verb = "writes" if hit.kind == "WAW" else "reads"
            report(
                f"uncovered-{hit.kind.lower()}",
                second,
                f"{names}: {at(first)} still {verb} it and no scoreboard that covers it has been "
                "waited for on some path",
            )
            return
        for number in numbers:
            key = (first.index, second.index, hit.kind, number)
            distance = min(hit.item.elapsed, seen.distances.get(key, pending.FOREVER))
            seen.distances[key] = distance
            least = self.floors.least(first, second, number, hit.kind)
            if distance < least:
                report(
                    "short-latency",
                    second,
                    f"{hit.kind} on {registers.name(number)}: {distance} cycles after {at(first)}; "
                    f"at least {least} are needed",
                )

    def _shrunk(
        self,
        key: tuple[int, int, Kind, int],
        distance: int,
        before: int | None,
        by_index: dict[int, Instruction],
        report: _Reporter,
    ) -> None:
        if before is not None and distance >= before:
            return
        first, second, kind, number = key
        usual = self.floors.usual(by_index[first], by_index[second], number, kind)
        if distance < usual:
            was = "further apart" if before is None else f"{before} cycles"
            report(
                "short-latency",
                by_index[second],
                f"{kind} on {registers.name(number)}: brought to {distance} cycles after "
                f"{at(by_index[first])} (originally {was}); at least {usual} are needed to change",
            )

    def _new_board(self, old: Instruction, new: Instruction, report: _Reporter) -> None:
        """A scoreboard may replace another, but not appear where the unit never releases one."""
        for name in ("write_sb", "read_sb"):
            had, has = getattr(old.control, name) < 6, getattr(new.control, name) < 6
            if has and not had:
                report(
                    "illegal-encoding",
                    new,
                    f"sets a {name.partition('_')[0]} scoreboard, which it did not before; the "
                    "unit may never release it",
                )

    def _encoding(self, instruction: Instruction, report: _Reporter) -> None:
        wrong = illegal(instruction.control, batch_field=instruction.batch_field)
        if wrong:
            report("illegal-encoding", instruction, wrong)
        if not instruction.known:
            report(
                "unmodelled-opcode",
                instruction,
                f"{instruction.base} has no row in the opcode table, so it cannot be judged",
            )
        if instruction.unmarked:
            report(
                "unknown-register",
                instruction,
                f"names {', '.join(instruction.unmarked)}, which the register marks do not show",
            )

    def _issue_gap(self, first: Instruction, second: Instruction, report: _Reporter) -> None:
        if first.control.drains:
            return
        least = self.floors.issue_gap(first, second)
        if first.control.stall < least:
            report(
                "short-issue",
                first,
                f"stalls {first.control.stall} before {at(second)}; compilers leave at least "
                f"{least} between these pipes",
            )


@dataclass(frozen=True)
class _Reporter:
    function: str
    position: dict[int, int]
    findings: list[Finding]

    def __call__(self, kind: str, instruction: Instruction, reason: str) -> None:
        offset = self.position[instruction.index] * 16
        finding = Finding(kind, self.function, offset, instruction.text, reason, "hazards")
        if finding not in self.findings[-8:]:
            self.findings.append(finding)
