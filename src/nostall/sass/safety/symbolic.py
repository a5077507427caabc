"""Symbolic translation validation: the second half of the verifier.

Each block is executed with uninterpreted functions: a result is the term "this word applied to
these operand terms".  Time is explicit: a register holds its new value only once the producer's
least latency has passed or a scoreboard that proves it written has been waited for; read too
early, overwritten too early or written in an unknown order it holds *poison*.  Original and
candidate must then agree on every memory state, every branch and barrier, and every register at
the end of each block; what is still in flight at the end must not be more, nor later, than in the
original, and what an instruction relies on from before the block must be waited for as before.

Shares no code with the hazard validator, only the program and the mined latency table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nostall.sass.program import queues, registers
from nostall.sass.program.instruction import Instruction
from nostall.sass.program.program import Function
from nostall.sass.safety.latency import Floors
from nostall.sass.safety.symbolic_machine import SETTLED, Machine, Outcome, Terms, proofs_of
from nostall.sass.safety.verdict import Finding

Arrivals = dict[tuple[int, str], int]
"""(index, "result" or "sources") -> cycles since issue, at least."""


class SymbolicValidator:
    """Executes the functions of one architecture."""

    def __init__(self, sm: int) -> None:
        self.sm = sm
        self.floors = Floors.of(sm)

    def check(self, function: Function) -> list[Finding]:
        """Absolute findings: registers read, overwritten or ordered wrongly inside a block."""
        findings: list[Finding] = []
        for block in function.blocks:
            out = self._run(function.instructions[block.start : block.end], Terms())
            findings += _poisoned(function, block.start, out)
        return findings

    def compare(self, original: Function, candidate: Function) -> list[Finding]:
        """Where the candidate does not compute, or does not protect, what the original does."""
        findings: list[Finding] = []
        pairs: list[tuple[Outcome, Outcome]] = []
        for block in original.blocks:
            before = original.instructions[block.start : block.end]
            after = candidate.instructions[block.start : block.end]
            terms = Terms()
            old, new = self._run(before, terms), self._run(after, terms)
            pairs.append((old, new))
            findings += _poisoned(candidate, block.start, new)
            findings += _different(candidate, block.start, after, old, new)
            findings += _weaker_exit(candidate, block.start, after, old, new)
        arriving = self._arriving(original, [old for old, _ in pairs])
        for block, (old, new), flights in zip(original.blocks, pairs, arriving, strict=True):
            after = candidate.instructions[block.start : block.end]
            findings += self._weaker_entry(candidate, block.start, after, old, new, flights)
            findings += self._lost_waits(candidate, block.end - 1, old, new, flights)
        return findings

    def _arriving(self, function: Function, outcomes: list[Outcome]) -> list[Arrivals]:
        """What may be in flight when each block begins: the union over all ways in."""
        by_index = {i.index: i for i in function.instructions}
        arriving: list[Arrivals] = [{} for _ in function.blocks]
        todo = list(range(len(function.blocks)))
        while todo:
            number = todo.pop()
            out = outcomes[number]
            leaving: Arrivals = dict(_departures(out))
            for (index, role), since in arriving[number].items():
                boards = proofs_of(by_index[index], role)
                later = since + out.length
                fixed = by_index[index].row.fixed(self.sm)
                gone = later >= self.floors.ceiling(by_index[index]) if fixed else False
                if not boards & out.waited and not gone:
                    key = (index, role)
                    leaving[key] = min(later, SETTLED, leaving.get(key, SETTLED))
            for successor in function.blocks[number].succ:
                into = arriving[successor]
                worse = {k: v for k, v in leaving.items() if v < into.get(k, SETTLED + 1)}
                if worse:
                    into.update(worse)
                    todo.append(successor)
        return arriving

    def _weaker_entry(
        self,
        function: Function,
        start: int,
        order: Sequence[Instruction],
        old: Outcome,
        new: Outcome,
        arrivals: Arrivals,
    ) -> Iterator[Finding]:
        """Instructions that trust less than before what was in flight when the block began."""
        touching: dict[int, list[tuple[Instruction, str, int]]] = {}
        by_index = {i.index: i for i in function.instructions}
        for (index, role), since in arrivals.items():
            first = by_index[index]
            concerned = first.defs if role == "result" else queues.late_sources(first, self.sm)
            for register in concerned:
                touching.setdefault(register, []).append((first, role, since))
        for at, instruction in enumerate(order):
            defs = set(instruction.defs)
            for register in {*instruction.uses, *defs}:
                for first, role, since in touching.get(register, ()):
                    if (role == "result" or register in defs) and self._trusts_less(
                        first, role, since, instruction, old, new
                    ):
                        yield _finding(
                            "entry-weaker",
                            function,
                            start + at,
                            instruction.text,
                            f"{registers.name(register)} may be in flight from {first.text} when "
                            "the block begins, and the protection the original had is gone",
                        )

    def _lost_waits(
        self, function: Function, end: int, old: Outcome, new: Outcome, arrivals: Arrivals
    ) -> Iterator[Finding]:
        """Scoreboards no longer waited for, which something in flight at the start relies on."""
        by_index = {i.index: i for i in function.instructions}
        relied = 0
        for index, role in arrivals:
            if not by_index[index].row.fixed(self.sm):
                relied |= proofs_of(by_index[index], role) or 0x3F
        lost = [board for board in range(6) if (old.waited & ~new.waited & relied) >> board & 1]
        if lost:
            yield _finding(
                "exit-weaker",
                function,
                end,
                function.instructions[end].text,
                f"the block no longer waits for scoreboards {lost}, on which what is in flight at "
                "its start relies",
            )

    def _trusts_less(
        self,
        first: Instruction,
        role: str,
        since: int,
        instruction: Instruction,
        old: Outcome,
        new: Outcome,
    ) -> bool:
        before, now = old.trust[instruction.index], new.trust[instruction.index]
        if first.row.fixed(self.sm):
            return now.cycle < min(before.cycle, self.floors.ceiling(first) - since)
        proven = proofs_of(first, role) & before.waited
        if proven:
            return not proven & now.waited
        return bool(before.waited & ~now.waited or before.resolved & ~now.resolved)

    def _run(self, order: Sequence[Instruction], terms: Terms) -> Outcome:
        return Machine(self.sm, self.floors, terms).run(order)


def _finding(kind: str, function: Function, at: int, text: str, reason: str) -> Finding:
    return Finding(kind, function.name, at * 16, text, reason, "symbolic")


def _poisoned(function: Function, start: int, out: Outcome) -> Iterator[Finding]:
    for at, instruction, why in out.poison:
        yield _finding("poison", function, start + at, instruction.text, why)


def _different(
    function: Function, start: int, order: Sequence[Instruction], old: Outcome, new: Outcome
) -> Iterator[Finding]:
    """Memory, events and registers at the end of the block."""
    last = order[-1].text
    if old.events != new.events:
        yield _finding(
            "events-differ",
            function,
            start,
            order[0].text,
            "a barrier, branch, fence or atomic of this block sees other values than before",
        )
    if old.memory != new.memory:
        yield _finding(
            "memory-differs", function, start, order[0].text, "the block leaves another memory"
        )
    wrong = [r for r, value in new.values.items() if old.values.get(r) != value]
    if wrong:
        names = ", ".join(registers.name(r) for r in wrong[:6])
        yield _finding(
            "registers-differ",
            function,
            start + len(order) - 1,
            last,
            f"the block ends with other values in {names}",
        )


def _departures(out: Outcome) -> Iterator[tuple[tuple[int, str], int]]:
    for index, (since, _) in out.results_out.items():
        yield (index, "result"), since
    for index in out.sources_out:
        yield (index, "sources"), 0


def _weaker_exit(
    function: Function, start: int, order: Sequence[Instruction], old: Outcome, new: Outcome
) -> Iterator[Finding]:
    """What is in flight at the end may not be more, later, or less covered than before."""
    end = start + len(order) - 1
    texts = {i.index: i.text for i in order}
    for index, (since, proofs) in new.results_out.items():
        before = old.results_out.get(index)
        if before is None or before[1] & ~proofs or since < before[0]:
            yield _finding(
                "exit-weaker",
                function,
                end,
                texts[index],
                "its result is in flight at the end of the block, later or less covered than in "
                "the original",
            )
    for index, proofs in new.sources_out.items():
        if index not in old.sources_out or old.sources_out[index] & ~proofs:
            yield _finding(
                "exit-weaker",
                function,
                end,
                texts[index],
                "its sources are still being read at the end of the block, less covered than in "
                "the original",
            )
