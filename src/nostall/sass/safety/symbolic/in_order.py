"""In-order rules in symbolic execution: what later instructions prove of earlier ones in flight.

Pairs with witnesses in compiler output are *proofs*; what pairs without witnesses prove is
*assumed*, and is recorded with the instructions that it relies on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from nostall.sass.program import queues
from nostall.sass.program.cover_rules import CoverTable, Proofs, group
from nostall.sass.program.instruction import Instruction
from nostall.sass.safety.symbolic.state import IssuedInstruction


@dataclass(frozen=True, slots=True)
class InOrderRules:
    """The in-order rules of one architecture, applied to the issued instructions of a block."""

    sm: int
    """Compute capability."""
    cover: CoverTable

    def proofs(self, instruction: Instruction) -> Proofs:
        """What an instruction proves by pairs with witnesses."""
        return self._proofs(instruction, witnessed=True)

    def assumed(self, instruction: Instruction) -> Proofs:
        """What an instruction proves by pairs without witnesses."""
        return self._proofs(instruction, witnessed=False)

    def _proofs(self, instruction: Instruction, *, witnessed: bool) -> Proofs:
        return self.cover.proofs(
            group(instruction, self.sm),
            self.sm,
            witnessed=witnessed,
            guarded=instruction.is_guarded,
        )

    def wait_partially(
        self, issued: Iterable[IssuedInstruction], scoreboard: int, count: int
    ) -> None:
        """All but the last ``count`` operations that set ``scoreboard`` are complete.

        That holds for operations that complete in order.
        """
        for earlier in issued:
            own, word = earlier.group, earlier.instruction
            in_order = own in self.proofs(word).in_order or own in self.assumed(word).in_order
            is_done = in_order and earlier.later_setters[scoreboard] >= count
            covering = earlier.result_scoreboards | earlier.source_scoreboards
            if is_done and covering >> scoreboard & 1:
                earlier.is_written = earlier.is_read = True

    def drain(self, issued: Iterable[IssuedInstruction], barrier: Instruction) -> None:
        """A BAR that blocks at once issues after earlier sources are read."""
        drained = queues.drained_sources(barrier, self.sm, self.cover, witnessed=True)
        assumed = queues.drained_sources(barrier, self.sm, self.cover, witnessed=False)
        for earlier in issued:
            earlier.is_read = earlier.is_read or earlier.group in drained
            if earlier.group in assumed:
                known = earlier.source_provers or frozenset()
                earlier.assume_sources().provers = known | {barrier.index}

    def cover_earlier(
        self, issued: Iterable[IssuedInstruction], later: IssuedInstruction, write: int, read: int
    ) -> None:
        """Let the scoreboards of ``later`` prove earlier instructions done.

        ``write`` and ``read`` are the bit masks of its write and read scoreboard.
        """
        proofs, assumed = self.proofs(later.instruction), self.assumed(later.instruction)
        index, has_assumed = later.instruction.index, any(assumed)
        for earlier in issued:
            if not earlier.group:
                continue
            if has_assumed:
                _assume(earlier, assumed, index, write, read)
            if earlier.group in proofs.in_order or earlier.group in assumed.in_order:
                shared = (earlier.source_scoreboards | earlier.result_scoreboards) & (write | read)
                for scoreboard in range(6):
                    earlier.later_setters[scoreboard] += shared >> scoreboard & 1
            if earlier.group in proofs.sources:
                earlier.source_scoreboards |= write | read
            if earlier.group in proofs.results:
                earlier.result_scoreboards |= write


def _assume(earlier: IssuedInstruction, assumed: Proofs, later: int, write: int, read: int) -> None:
    """Let scoreboards of a later instruction cover an earlier one by a pair without witnesses."""
    if earlier.group in assumed.sources:
        earlier.assume_sources().cover(later, write | read)
    if earlier.group in assumed.results:
        earlier.assume_result().cover(later, write)
        earlier.assume_sources().cover(later, write)
