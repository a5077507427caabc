"""Hazard validator: checks all results and sources in flight against distances and scoreboards.

Absolute rules hold for any code: distance or a scoreboard protects every result and source in
flight, control words are legal, and the reuse cache has no stale entry.  Relative rules compare a
candidate with its original: no pair came closer than nostall allows, and no wait for an
asynchronous operation was lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from nostall.sass.binary.encoding import illegal_reason
from nostall.sass.program import registers
from nostall.sass.program.blocks import Block, has_unread_targets
from nostall.sass.program.cover_rules import COVER, CoverTable
from nostall.sass.program.instruction import Instruction
from nostall.sass.program.program import Function
from nostall.sass.safety.hazards.bar_sync_distance import short_barrier_distances
from nostall.sass.safety.hazards.dataflow import (
    Conflict,
    entry_states,
    find_conflicts,
    step_through,
)
from nostall.sass.safety.hazards.facts import InstructionFacts, instruction_facts, register_numbers
from nostall.sass.safety.hazards.in_flight import COMPLETION, MAX_ELAPSED, Key, Provers, State
from nostall.sass.safety.hazards.memory_order import CompletionRecord, lost_completions
from nostall.sass.safety.hazards.reuse import changed_reuse, stale_reuse
from nostall.sass.safety.hazards.warpgroup import EarlyAccess, early_accesses
from nostall.sass.safety.latency import SCOREBOARD_GAP, LatencyTable
from nostall.sass.safety.pairing import HazardKind
from nostall.sass.safety.verdict import Finding, describe

Distances = dict[tuple[int, int, HazardKind, int], int]
"""(first, second, kind, register) -> smallest distance in cycles, for fixed-latency pairs."""


@dataclass(frozen=True)
class Analysis:
    """Results of one pass over a function.  Instructions are named by original index."""

    findings: list[Finding]
    """Violations of the absolute rules."""
    distances: Distances
    """Pairs whose first result or sources are still in flight at the second instruction."""
    async_waits: set[tuple[Key, int]]
    """(asynchronous operation, instruction whose wait ends it)."""
    unfinished: set[tuple[Key, int]]
    """(asynchronous operation, watched instruction that issues while it may be in flight)."""
    issue_gaps: dict[tuple[int, int], int]
    """(first, second) neighbours of a block -> stall of the first, in cycles."""
    completions: CompletionRecord
    """What is in flight at fences and memory accesses."""
    early_accesses: set[EarlyAccess]
    """Accesses to registers that a product of a warpgroup may still use."""
    reliances: dict[tuple[int, int, HazardKind], Provers]
    """(first, second, kind) of accesses that only the order of pairs without witnesses protects."""


class HazardValidator:
    """Checks the functions of one architecture for hazards."""

    def __init__(
        self, sm: int, cover: CoverTable = COVER, *, measured_latencies: bool = False
    ) -> None:
        """A validator for ``sm`` that relies on the in-order rules of ``cover``."""
        self.sm = sm
        self.cover = cover
        self.table = LatencyTable.load(sm, measured_latencies=measured_latencies)

    def analyse(self, function: Function, watched: frozenset[int] = frozenset()) -> Analysis:
        """Check a function against the absolute rules, from the fixpoint of what is in flight.

        ``watched``: instructions for which ``Analysis.unfinished`` is recorded.
        """
        order = function.instructions
        position = {ins.index: at for at, ins in enumerate(order)}
        facts = {
            i.index: instruction_facts(i, self.sm, self.table.max_latency(i), self.cover)
            for i in order
        }
        products_in_use = early_accesses(function.blocks, order)
        analysis = Analysis([], {}, set(), set(), {}, CompletionRecord(), products_in_use, {})
        report = _Reporter(function.name, position, analysis.findings)
        for instruction in order:
            self._check_encoding(instruction, report)
        entries = entry_states(function.blocks, order, facts)
        for block, state in zip(function.blocks, entries, strict=True):
            self._check_block(block, state, order, facts, watched, analysis, report)
            for finding in stale_reuse(order[block.start : block.end]):
                report("stale-reuse", *finding)
            for first, second in pairwise(order[block.start : block.end]):
                analysis.issue_gaps[first.index, second.index] = first.control.stall
        return analysis

    def check(self, function: Function) -> list[Finding]:
        """Violations of the absolute rules."""
        return self.analyse(function).findings

    def remarks(self, function: Function) -> list[Finding]:
        """What looks wrong in compiler output and does not forbid to reorder it.

        ptxas 12.9 reuses registers of products in flight (Triton pull request 11781, fixed in CUDA
        13.3).  A candidate must not add such an access.
        """
        order = function.instructions
        findings: list[Finding] = []
        report = _Reporter(function.name, {i.index: at for at, i in enumerate(order)}, findings)
        by_index = {i.index: i for i in order}
        _report_early_accesses(early_accesses(function.blocks, order), by_index, report)
        return findings

    def compare(self, original: Function, candidate: Function) -> list[Finding]:
        """Violations of the absolute rules in the candidate, and of the relative rules."""
        before = self.analyse(original)
        after = self.analyse(candidate, frozenset(waiter for _, waiter in before.async_waits))
        by_index = {i.index: i for i in candidate.instructions}
        position = {ins.index: at for at, ins in enumerate(candidate.instructions)}
        report = _Reporter(candidate.name, position, after.findings)
        for key, distance in after.distances.items():
            self._check_reduced_distance(key, distance, before.distances.get(key), by_index, report)
        for instruction in candidate.instructions:
            self._check_added_scoreboards(
                original.instructions[instruction.index], instruction, report
            )
        for (first, second), stall in after.issue_gaps.items():
            if stall < before.issue_gaps.get((first, second), 16):
                self._check_issue_gap(by_index[first], by_index[second], report)
        for instruction, reason in short_barrier_distances(original, candidate, self.table):
            report("near-wall", instruction, reason)
        for instruction, reason in changed_reuse(original, candidate):
            report("stale-reuse", instruction, reason)
        for (producer, role), waiter in sorted(before.async_waits - after.async_waits):
            swapped = (producer < waiter) != (position[producer] < position[waiter])
            if swapped or ((producer, role), waiter) in after.unfinished:
                report(
                    "lost-wait",
                    by_index[waiter],
                    f"does not wait for {describe(by_index[producer])}, an asynchronous operation; "
                    "the wait of the original is required",
                )
        _report_new_reliances(before.reliances, after.reliances, by_index, report)
        new_accesses = after.early_accesses - before.early_accesses
        _report_early_accesses(new_accesses, by_index, report)
        for instruction, operation in lost_completions(
            before.completions, after.completions, by_index
        ):
            report(
                "lost-order",
                instruction,
                f"{describe(operation)} may be in flight when it issues; in the original a wait "
                "ends it before, and memory order may rely on that",
            )
        return after.findings

    def _check_block(
        self,
        block: Block,
        state: State,
        order: tuple[Instruction, ...],
        facts: dict[int, InstructionFacts],
        watched: frozenset[int],
        analysis: Analysis,
        report: _Reporter,
    ) -> None:
        """Check the waits and register accesses of one block; ``state`` is its entry state."""
        for current, in_flight, ended in step_through(state, block, order, facts):
            analysis.completions.add(current, in_flight, ended, facts)
            for (index, role), item in ended:
                if role >= COMPLETION:
                    analysis.async_waits.add(((index, role), current.instruction.index))
                elif item.elapsed < SCOREBOARD_GAP and current.instruction.base != "DEPBAR":
                    report(
                        "scoreboard-gap",
                        current.instruction,
                        f"waits for a scoreboard {item.elapsed} cycles after "
                        f"{describe(facts[index].instruction)} set it; at least {SCOREBOARD_GAP} "
                        "are required",
                    )
            index = current.instruction.index
            if index in watched:
                pairs = ((key, index) for key in in_flight if key[1] >= COMPLETION)
                analysis.unfinished.update(pairs)
            for conflict in find_conflicts(current, in_flight, facts):
                self._check_conflict(conflict, analysis, report)

    def _check_conflict(self, conflict: Conflict, analysis: Analysis, report: _Reporter) -> None:
        """Report a conflict that no scoreboard covers or whose distance is below the floor."""
        first, second = conflict.first.instruction, conflict.second.instruction
        if not conflict.first.fixed_latency and conflict.relies_on is not None:
            pair = (first.index, second.index, conflict.kind)
            known = analysis.reliances.get(pair, frozenset())
            analysis.reliances[pair] = known | conflict.relies_on
            return
        numbers = register_numbers(conflict.registers)
        if not conflict.first.fixed_latency:
            names = ", ".join(registers.name(n) for n in numbers)
            verb = "reads" if conflict.kind == "RAW" else "overwrites"
            pending = "read" if conflict.kind == "WAR" else "written"
            report(
                f"uncovered-{conflict.kind.lower()}",
                second,
                f"{verb} {names}, which {describe(first)} may not have {pending} yet; a wait for "
                "a scoreboard that covers it is required on each path",
            )
            return
        for number in numbers:
            key = (first.index, second.index, conflict.kind, number)
            distance = min(conflict.item.elapsed, analysis.distances.get(key, MAX_ELAPSED))
            analysis.distances[key] = distance
            access = (first, second, number, conflict.kind)
            required = self.table.min_distance(*access)
            if distance < required:
                report(
                    "short-latency",
                    second,
                    f"{conflict.kind} on {registers.name(number)}: issues {distance} cycles after "
                    f"{describe(first)}; at least {required} are required "
                    f"({self.table.evidence(*access, required)})",
                )

    def _check_reduced_distance(
        self,
        key: tuple[int, int, HazardKind, int],
        distance: int,
        original_distance: int | None,
        by_index: dict[int, Instruction],
        report: _Reporter,
    ) -> None:
        """Report a pair that came closer than in the original and than a change may bring it.

        ``original_distance`` is None if the first instruction was not in flight any more.
        """
        if original_distance is not None and distance >= original_distance:
            return
        first, second, kind, number = key
        pair = (by_index[first], by_index[second], number, kind)
        required = self.table.safe_distance(*pair)
        if distance < required:
            before = "more" if original_distance is None else f"{original_distance} cycles"
            report(
                "short-latency",
                by_index[second],
                f"{kind} on {registers.name(number)}: issues {distance} cycles after "
                f"{describe(by_index[first])} (in the original: {before}); a changed distance must "
                f"be at least {required} ({self.table.evidence(*pair, required)})",
            )

    def _check_added_scoreboards(
        self, before: Instruction, after: Instruction, report: _Reporter
    ) -> None:
        """Report a scoreboard on an instruction that sets none of its kind in the original.

        One scoreboard may replace another, but some units never release any.
        """
        for name in ("write_sb", "read_sb"):
            is_set_before = getattr(before.control, name) < 6
            is_set_after = getattr(after.control, name) < 6
            if is_set_after and not is_set_before:
                report(
                    "illegal-encoding",
                    after,
                    f"sets a {name.partition('_')[0]} scoreboard, which it does not in the "
                    "original; its unit may never release one",
                )

    def _check_encoding(self, instruction: Instruction, report: _Reporter) -> None:
        """Report an illegal control word, an unknown opcode, or registers without marks."""
        reason = illegal_reason(instruction.control, has_batch_field=instruction.has_batch_field)
        if reason:
            report("illegal-encoding", instruction, reason)
        if not instruction.is_known_opcode:
            report(
                "unmodelled-opcode",
                instruction,
                f"{instruction.base} has no row in the opcode table, so the verifier cannot check "
                "it",
            )
        if has_unread_targets(instruction):
            report(
                "unread-targets",
                instruction,
                "the jump targets cannot be read from this cubin: their record holds only zeros, "
                "as ptxas 11.8 writes it for sm_90; assemble it with ptxas 12.1 or newer",
            )
        if instruction.unmarked:
            report(
                "unknown-register",
                instruction,
                f"names {', '.join(instruction.unmarked)}, for which nvdisasm prints no register "
                "mark, so the verifier cannot check it",
            )

    def _check_issue_gap(self, first: Instruction, second: Instruction, report: _Reporter) -> None:
        """Report a stall that is shorter than compilers leave between these two pipes."""
        if first.control.drains:
            return
        required = self.table.min_issue_gap(first, second)
        if first.control.stall < required:
            report(
                "short-issue",
                first,
                f"stalls {first.control.stall} cycles before {describe(second)}; at least "
                f"{required} are required between {first.pipe} and {second.pipe}",
            )


def _report_new_reliances(
    before: dict[tuple[int, int, HazardKind], Provers],
    after: dict[tuple[int, int, HazardKind], Provers],
    by_index: dict[int, Instruction],
    report: _Reporter,
) -> None:
    """Report accesses that rely on an order without witnesses otherwise than in the original."""
    for (first, second, kind), provers in after.items():
        required = before.get((first, second, kind))
        if required is None or not required <= provers:
            report(
                "unwitnessed-order",
                by_index[second],
                f"{kind} on the registers of {describe(by_index[first])}: only its order with "
                f"{describe(by_index[min(provers)])} protects it, no compiler output needs that "
                "order, and the original does not rely on it here; a wait for a scoreboard of its "
                "own is required",
            )


def _report_early_accesses(
    accesses: set[EarlyAccess], by_index: dict[int, Instruction], report: _Reporter
) -> None:
    """Report accesses to registers of products in flight, one for each pair of instructions."""
    pairs: dict[tuple[int, int], EarlyAccess] = {}
    for access in sorted(accesses, key=lambda a: (a.instruction, a.product, a.register)):
        pairs.setdefault((access.product, access.instruction), access)
    for access in pairs.values():
        role = "matrix operand" if access.is_operand else "accumulator"
        report(
            "wgmma-register",
            by_index[access.instruction],
            f"accesses {registers.name(access.register)}, {role} of "
            f"{describe(by_index[access.product])}, which may be in flight; a WARPGROUP.DEPBAR "
            "that waits for its group is required before",
        )


@dataclass(frozen=True)
class _Reporter:
    """Appends findings about one function, without repeating one of the last eight."""

    function: str
    position: dict[int, int]
    """Original index -> present position."""
    findings: list[Finding]

    def __call__(self, kind: str, instruction: Instruction, reason: str) -> None:
        offset = self.position[instruction.index] * 16
        finding = Finding(kind, self.function, offset, instruction.text, reason, "hazards")
        if finding not in self.findings[-8:]:
            self.findings.append(finding)
