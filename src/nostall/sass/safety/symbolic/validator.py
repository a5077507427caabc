"""Symbolic translation validation: check that each block computes the same as in the original.

:mod:`.machine` executes each block of both with uninterpreted functions and explicit time.
Original and candidate must then agree on:

- each memory state, each branch and barrier, and each register at the end of the block;
- what is in flight at the end: not more than in the original, not later, and not less covered;
- the waits and distances that protect against what is in flight when the block begins.

This module shares no code with the hazard validator except the program and the latency table, so
that one error does not hide a violation from both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nostall.sass.program import registers
from nostall.sass.program.cover_rules import COVER, CoverTable
from nostall.sass.program.instruction import Instruction
from nostall.sass.program.opcodes import Effect
from nostall.sass.program.program import Function
from nostall.sass.safety.latency import LatencyTable
from nostall.sass.safety.symbolic.machine import SETTLED, SymbolicMachine
from nostall.sass.safety.symbolic.state import (
    SOURCES,
    Outcome,
    Terms,
    Unfinished,
    concerned_registers,
    proving_scoreboards,
)
from nostall.sass.safety.verdict import Finding

Arrivals = dict[tuple[int, str], int]
"""In flight at the start of a block: (index, "result" or "sources") -> cycles since issue."""


class SymbolicValidator:
    """Executes the functions of one architecture symbolically."""

    def __init__(
        self, sm: int, cover: CoverTable = COVER, *, measured_latencies: bool = False
    ) -> None:
        """A validator for ``sm`` that relies on the in-order rules of ``cover``."""
        self.sm = sm
        self.cover = cover
        self.table = LatencyTable.load(sm, measured_latencies=measured_latencies)

    def check(self, function: Function) -> list[Finding]:
        """Registers that are read, overwritten or ordered wrongly inside a block."""
        findings: list[Finding] = []
        for block in function.blocks:
            outcome = self._run(function.instructions[block.start : block.end], Terms())
            findings += _poison_findings(function, block.start, outcome)
        return findings

    def compare(self, original: Function, candidate: Function) -> list[Finding]:
        """Findings of :meth:`check`, and where the candidate computes or protects otherwise."""
        findings: list[Finding] = []
        outcomes: list[tuple[Outcome, Outcome]] = []
        for block in original.blocks:
            before = original.instructions[block.start : block.end]
            after = candidate.instructions[block.start : block.end]
            terms = Terms()
            old, new = self._run(before, terms), self._run(after, terms)
            outcomes.append((old, new))
            findings += _poison_findings(candidate, block.start, new)
            findings += _result_differences(candidate, block.start, after, old, new)
            findings += _weaker_exit(candidate, block.start, after, old, new)
            findings += _new_reliances(candidate, block.start, after, old, new)
        entry_arrivals = self._entry_arrivals(original, [old for old, _ in outcomes])
        for block, (old, new), arrivals in zip(
            original.blocks, outcomes, entry_arrivals, strict=True
        ):
            after = candidate.instructions[block.start : block.end]
            findings += self._weaker_entry(candidate, block.start, after, old, new, arrivals)
            findings += self._lost_waits(candidate, block.end - 1, old, new, arrivals)
            findings += _lost_completions(candidate, block.start, after, old, new)
            findings += self._weaker_order(candidate, block.start, after, old, new, arrivals)
        return findings

    def _entry_arrivals(self, function: Function, outcomes: list[Outcome]) -> list[Arrivals]:
        """Operations that may be in flight at the start of each block: the union over all paths."""
        by_index = {i.index: i for i in function.instructions}
        arrivals: list[Arrivals] = [{} for _ in function.blocks]
        worklist = list(range(len(function.blocks)))
        while worklist:
            number = worklist.pop()
            outcome = outcomes[number]
            leaving: Arrivals = dict(_departures(outcome))
            for (index, role), since in arrivals[number].items():
                instruction = by_index[index]
                later = since + outcome.length
                has_arrived = instruction.has_fixed_latency(
                    self.sm
                ) and later >= self.table.max_latency(instruction)
                was_waited_for = proving_scoreboards(instruction, role) & outcome.waited
                if not was_waited_for and not has_arrived:
                    key = (index, role)
                    leaving[key] = min(later, SETTLED, leaving.get(key, SETTLED))
            for successor in function.blocks[number].succ:
                into = arrivals[successor]
                worse = {k: v for k, v in leaving.items() if v < into.get(k, SETTLED + 1)}
                if worse:
                    into.update(worse)
                    worklist.append(successor)
        return arrivals

    def _weaker_entry(
        self,
        function: Function,
        start: int,
        order: Sequence[Instruction],
        old: Outcome,
        new: Outcome,
        arrivals: Arrivals,
    ) -> Iterator[Finding]:
        """Accesses with less protection than before against what is in flight at block entry."""
        touching: dict[int, list[tuple[Instruction, str, int]]] = {}
        by_index = {i.index: i for i in function.instructions}
        for (index, role), since in arrivals.items():
            first = by_index[index]
            for register in concerned_registers(first, role, self.sm):
                touching.setdefault(register, []).append((first, role, since))
        for position, instruction in enumerate(order):
            defs = set(instruction.defs)
            for register in {*instruction.uses, *defs}:
                for first, role, since in touching.get(register, ()):
                    if (role != SOURCES or register in defs) and self._is_less_protected(
                        first, role, since, instruction, old, new
                    ):
                        yield _finding(
                            "entry-weaker",
                            function,
                            start + position,
                            instruction.text,
                            f"{registers.name(register)} may be in flight from {first.text} when "
                            "the block begins; the wait or distance of the original is required",
                        )

    def _is_less_protected(
        self,
        first: Instruction,
        role: str,
        since: int,
        instruction: Instruction,
        old: Outcome,
        new: Outcome,
    ) -> bool:
        """Whether ``instruction`` is less protected against ``first`` than in the original.

        ``since``: cycles from the issue of ``first`` to the start of the block.
        """
        before, after = old.protection[instruction.index], new.protection[instruction.index]
        if first.has_fixed_latency(self.sm):
            return after.cycle < min(before.cycle, self.table.max_latency(first) - since)
        proving = proving_scoreboards(first, role) & before.waited
        if proving:
            return not proving & after.waited
        return bool(before.waited & ~after.waited or before.resolved & ~after.resolved)

    def _weaker_order(
        self,
        function: Function,
        start: int,
        order: Sequence[Instruction],
        old: Outcome,
        new: Outcome,
        arrivals: Arrivals,
    ) -> Iterator[Finding]:
        """Fences and accesses that may find an operation from before the block incomplete."""
        by_index = {i.index: i for i in function.instructions}
        operations = [
            (by_index[index], role)
            for index, role in arrivals
            if self._may_be_relied_on(by_index[index], role)
        ]
        if not operations:
            return
        for position, instruction in enumerate(order):
            if not (instruction.is_barrier or instruction.accesses_memory):
                continue
            before, after = old.protection[instruction.index], new.protection[instruction.index]
            for operation, role in operations:
                if not (instruction.is_barrier or operation.is_barrier):
                    continue
                proving = proving_scoreboards(operation, role)
                lost = (before.waited & ~after.waited) or (before.resolved & ~after.resolved)
                if proving:
                    lost = proving & before.waited and not proving & after.waited
                if lost:
                    yield _order_finding(function, start + position, instruction, operation)

    def _may_be_relied_on(self, operation: Instruction, role: str) -> bool:
        """Whether others may rely on a wait for the end of an operation of an earlier block.

        A read of a clock is a barrier to moves only: it ends after a fixed latency, without a wait.
        """
        is_ordered = operation.is_barrier or operation.accesses_memory
        needs_wait = not operation.has_fixed_latency(self.sm)
        return is_ordered and (needs_wait or bool(proving_scoreboards(operation, role)))

    def _lost_waits(
        self, function: Function, end: int, old: Outcome, new: Outcome, arrivals: Arrivals
    ) -> Iterator[Finding]:
        """Waits that are lost and that may end what is in flight when the block begins."""
        by_index = {i.index: i for i in function.instructions}
        relevant = 0
        for index, role in arrivals:
            if not by_index[index].has_fixed_latency(self.sm):
                relevant |= proving_scoreboards(by_index[index], role) or 0x3F
        missing = old.waited & ~new.waited & relevant
        lost = [scoreboard for scoreboard in range(6) if missing >> scoreboard & 1]
        if lost:
            yield _finding(
                "exit-weaker",
                function,
                end,
                function.instructions[end].text,
                f"the block does not wait for scoreboards {lost}, which the original waits for and "
                "which cover what is in flight when the block begins",
            )

    def _run(self, order: Sequence[Instruction], terms: Terms) -> Outcome:
        return SymbolicMachine(self.sm, self.table, terms, self.cover).run(order)


def _finding(kind: str, function: Function, position: int, text: str, reason: str) -> Finding:
    return Finding(kind, function.name, position * 16, text, reason, "symbolic")


def _poison_findings(function: Function, start: int, outcome: Outcome) -> Iterator[Finding]:
    for position, instruction, reason in outcome.poison:
        yield _finding("poison", function, start + position, instruction.text, reason)


def _result_differences(
    function: Function, start: int, order: Sequence[Instruction], old: Outcome, new: Outcome
) -> Iterator[Finding]:
    """Differences in events, memory and registers at the end of the block."""
    last = order[-1].text
    if old.events != new.events:
        yield _finding(
            "events-differ",
            function,
            start,
            order[0].text,
            "a barrier, branch, fence or atomic of this block gets other values than in the "
            "original; they must be equal",
        )
    if old.memory != new.memory:
        yield _finding(
            "memory-differs",
            function,
            start,
            order[0].text,
            "the block leaves other memory contents than in the original; they must be equal",
        )
    different = [r for r, value in new.values.items() if old.values.get(r) != value]
    if different:
        names = ", ".join(registers.name(r) for r in different[:6])
        yield _finding(
            "registers-differ",
            function,
            start + len(order) - 1,
            last,
            f"the block ends with other values in {names} than in the original; they must be equal",
        )


def _lost_completions(
    function: Function, start: int, order: Sequence[Instruction], old: Outcome, new: Outcome
) -> Iterator[Finding]:
    """Fences and accesses that may find an operation of the block incomplete that they rely on."""
    by_index = {i.index: i for i in order}
    early = {access[1]: access[0] for access in new.product_accesses - old.product_accesses}
    for position, instruction in enumerate(order):
        index = instruction.index
        if index in early:
            yield _order_finding(function, start + position, instruction, by_index[early[index]])
        may_be = new.unfinished.get(index, frozenset()) | _newly_assumed(index, old, new)
        unfinished = may_be - old.unfinished.get(index, frozenset())
        for operation in sorted(unfinished):
            first = by_index[operation[0]]
            is_fence = bool(instruction.effects & Effect.FENCE)
            awaited = operation in old.awaited.get(index, frozenset())
            if instruction.is_barrier or first.is_barrier or (is_fence and awaited):
                yield _order_finding(function, start + position, instruction, first)


def _newly_assumed(index: int, old: Outcome, new: Outcome) -> frozenset[Unfinished]:
    """Operations that an order without witnesses completes before an instruction only now."""
    found: list[Unfinished] = []
    for (waiter, operation), provers in new.assumed_complete.items():
        required = old.assumed_complete.get((waiter, operation))
        if waiter == index and (required is None or not required <= provers):
            found.append(operation)
    return frozenset(found)


def _new_reliances(
    function: Function, start: int, order: Sequence[Instruction], old: Outcome, new: Outcome
) -> Iterator[Finding]:
    """Accesses that rely on an order without witnesses otherwise than in the original."""
    position = {instruction.index: at for at, instruction in enumerate(order)}
    texts = {instruction.index: instruction.text for instruction in order}
    for (first, second, kind), provers in new.reliances.items():
        required = old.reliances.get((first, second, kind))
        if required is None or not required <= provers:
            yield _finding(
                "unwitnessed-order",
                function,
                start + position[second],
                texts[second],
                f"{kind}: only an order of {texts[first]} and {texts[min(provers)]} protects it, "
                "which no compiler output needs and on which the original does not rely here",
            )
    known = {key for key, _ in _departures(old)}
    for (index, role), provers in new.assumed_done.items():
        required = old.assumed_done.get((index, role))
        if (index, role) not in known and (required is None or not required <= provers):
            yield _finding(
                "unwitnessed-order",
                function,
                start + position[index],
                texts[index],
                f"only an order with {texts[min(provers)]} proves its {role} done at the end of "
                "the block, which no compiler output needs and on which the original does not rely",
            )


def _order_finding(
    function: Function, position: int, instruction: Instruction, operation: Instruction
) -> Finding:
    return _finding(
        "order-weaker",
        function,
        position,
        instruction.text,
        f"{operation.text} may be incomplete when it issues; in the original a wait before it "
        "completes that, and memory order may rely on it",
    )


def _departures(outcome: Outcome) -> Iterator[tuple[tuple[int, str], int]]:
    """Operations of a block that are in flight at its end: ((index, role), cycles since issue)."""
    for key, (since, _) in outcome.results_out.items():
        yield key, since
    for index in outcome.sources_out:
        yield (index, SOURCES), 0


def _weaker_exit(
    function: Function, start: int, order: Sequence[Instruction], old: Outcome, new: Outcome
) -> Iterator[Finding]:
    """Operations in flight at the end that are new, later or less covered than in the original."""
    position = {i.index: start + at for at, i in enumerate(order)}
    texts = {i.index: i.text for i in order}
    for (index, part), (since, scoreboards) in new.results_out.items():
        before = old.results_out.get((index, part))
        if before is None or before[1] & ~scoreboards or since < before[0]:
            yield _finding(
                "exit-weaker",
                function,
                position[index],
                texts[index],
                "its result may be in flight at the end of the block; in the original it is not, "
                "or it issues further from the end, or more scoreboards cover it",
            )
    for index, scoreboards in new.sources_out.items():
        if index not in old.sources_out or old.sources_out[index] & ~scoreboards:
            yield _finding(
                "exit-weaker",
                function,
                position[index],
                texts[index],
                "its sources may be unread at the end of the block; in the original they are read, "
                "or more scoreboards cover them",
            )
