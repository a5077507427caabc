"""Symbolic execution of one basic block with explicit time.

A result is the term "this instruction word applied to these operand terms".  A register holds its
new value once the floor of the latency table has passed since the producer issued, or once an
instruction has waited for a scoreboard that proves the result written.  A register that is read too
early, overwritten too early or written in an unknown order is *poison*.

Warpgroup products run after they issue, and still use their registers then.

In-order rules in symbolic execution: what later instructions prove of earlier ones in flight.

Pairs with witnesses in compiler output are *proofs*; what pairs without witnesses prove is
*assumed*, and is recorded with the instructions that it relies on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from nostall.sass.program import queues, registers
from nostall.sass.program.addresses import reads_shared_in_order
from nostall.sass.program.cover_rules import COVER, CoverTable, Proofs, group
from nostall.sass.program.instruction import Instruction
from nostall.sass.program.opcodes import Effect, Pipe
from nostall.sass.safety.latency import SCOREBOARD_GAP, LatencyTable
from nostall.sass.safety.pairing import HazardKind
from nostall.sass.safety.symbolic.state import (
    EARLY,
    SOURCES,
    AssumedProof,
    IssuedInstruction,
    Outcome,
    Protection,
    Provers,
    SharedReads,
    Term,
    Terms,
    Unfinished,
    drained_scoreboards,
    scoreboard_bit,
)


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


_COMMIT = "gsb0"


@dataclass(slots=True)
class RunningProducts:
    """The products of a block that no wait has completed yet."""

    running: list[tuple[Instruction, int]] = field(default_factory=list[tuple[Instruction, int]])
    """(product, number of the group that contains it)."""
    group: int = 0
    """Number of the group that the next commit closes."""
    accesses: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])
    """(product, instruction) of accesses to registers that the product still uses, by index."""

    def execute(self, instruction: Instruction) -> None:
        """Execute one instruction of the block."""
        if instruction.pipe is Pipe.GMMA:
            self._check(instruction)
            self.running.append((instruction, self.group))
            self.group += _COMMIT in instruction.operands
        elif self.running:
            if instruction.base == "WARPGROUP" and "DEPBAR" in instruction.modifiers:
                oldest = self.group - int(instruction.operands[-1], 16)
                self.running = [(p, group) for p, group in self.running if group >= oldest]
            else:
                self._check(instruction)

    def _check(self, instruction: Instruction) -> None:
        written = set(instruction.defs)
        read = set(instruction.uses)
        if instruction.pipe is Pipe.GMMA:
            read -= written  # products follow each other on the same accumulators
        for product, _ in self.running:
            results = set(product.defs)
            operand = {r for r in product.uses if r < 256 and not registers.is_predicate(r)}
            free = results if instruction.pipe is Pipe.GMMA else set[int]()
            if (results & read) or (written & (operand | results) - free):
                self.accesses.add((product.index, instruction.index))


_READS = (Effect.READ_GLOBAL, Effect.READ_SHARED, Effect.READ_LOCAL)
_WRITE_OF = dict(
    zip(_READS, (Effect.WRITE_GLOBAL, Effect.WRITE_SHARED, Effect.WRITE_LOCAL), strict=True)
)
_ORDERED = Effect.FENCE | Effect.BARRIER
SETTLED = 64
"""Cycles after which each fixed-latency result has arrived; a wall in the DRAIN form waits for it.
"""


class SymbolicMachine:
    """Executes one block once."""

    def __init__(
        self, sm: int, table: LatencyTable, terms: Terms, cover: CoverTable = COVER
    ) -> None:
        self.sm, self.table, self.terms, self.cover = sm, table, terms, cover
        self.rules = InOrderRules(sm, cover)
        self.now = 0
        self.outcome = Outcome(memory=[terms("memory", i) for i in range(len(_READS))])
        self.issued: list[IssuedInstruction] = []
        # The issued accesses and asynchronous operations that may be incomplete.
        self.ordered: list[IssuedInstruction] = []
        # Length of ``issued`` at which finished instructions are removed from it.
        self.cleanup_size = 32
        # Register -> its writers that may not have written yet.
        self.writers: dict[int, list[IssuedInstruction]] = {}
        # Register -> the writers whose result its present value may be.
        self.visible_writers: dict[int, list[IssuedInstruction]] = {}
        self.waited = 0
        self.resolved = 0
        self.reads = SharedReads(terms)

    def run(self, order: Sequence[Instruction]) -> Outcome:
        """Execute the instructions of a block in this order."""
        products = RunningProducts()
        for position, instruction in enumerate(order):
            if self.ordered and (instruction.is_barrier or instruction.accesses_memory):
                self._wait_and_record(position, instruction)
            else:
                self._wait(position, instruction)
            operands = [self._register_term(position, instruction, r) for r in instruction.uses]
            self._check_overwrites(position, instruction)
            self._execute(instruction, operands)
            products.execute(instruction)
            self.outcome.protection[instruction.index] = Protection(
                self.waited, self.resolved, self.now
            )
            drains = instruction.control.drains and instruction.is_barrier
            self.now += SETTLED if drains else instruction.control.stall
        self._finish()
        self.outcome.product_accesses = products.accesses
        return self.outcome

    def _wait(self, position: int, instruction: Instruction) -> int:
        """Apply the wait mask of an instruction, and the wait of a DEPBAR.

        Returns the bit mask of the scoreboards that it waits for.
        """
        partial = queues.partial_wait(instruction)
        if partial is not None:
            self.rules.wait_partially(self.issued, *partial)
        waited = instruction.control.wait
        for scoreboard in drained_scoreboards(instruction):
            waited |= 1 << scoreboard
        if not waited:
            return 0
        self.waited |= waited
        for earlier in self.issued:
            if earlier.result_scoreboards & waited and not earlier.is_written:
                exempt = earlier.instruction.is_barrier or instruction.base == "DEPBAR"
                if self.now - earlier.issued < SCOREBOARD_GAP and not exempt:
                    self._poison(
                        position,
                        instruction,
                        f"waits for the scoreboard of {earlier.instruction.text} less than "
                        f"{SCOREBOARD_GAP} cycles after that issued; {SCOREBOARD_GAP} are required",
                    )
                earlier.is_written = True
            if (earlier.result_scoreboards | earlier.source_scoreboards) & waited:
                earlier.is_read = True
                self.resolved |= 1 << earlier.instruction.index
            for proof in (earlier.assumed_result, earlier.assumed_sources):
                if proof is not None:
                    proof.wait(waited)
        return waited

    def _wait_and_record(self, position: int, instruction: Instruction) -> None:
        """Apply the waits of an instruction that relies on the completion of earlier ones."""
        relies_on_all = instruction.is_barrier or bool(instruction.effects & Effect.FENCE)
        before = self._pending(relies_on_all)
        waited = self._wait(position, instruction)
        if not before:
            return
        after = self._pending(relies_on_all)
        unfinished: set[Unfinished] = set()
        awaited = before.keys() - after.keys()
        for operation, proof in after.items():
            if proof is None or proof.provers is None:
                unfinished.add(operation)
                continue
            self.outcome.assumed_complete[instruction.index, operation] = proof.provers
            if proof.waited_for(waited):
                awaited.add(operation)
        self.outcome.unfinished[instruction.index] = frozenset(unfinished)
        self.outcome.awaited[instruction.index] = frozenset(awaited)

    def _pending(self, relies_on_all: bool) -> dict[Unfinished, AssumedProof | None]:
        """The operations of the block that no wait has completed yet.

        The value is what proves an operation done by pairs without witnesses. ``relies_on_all``:
        accesses and asynchronous operations, else asynchronous ones only.
        """
        found: dict[Unfinished, AssumedProof | None] = {}
        finished = False
        for issued in self.ordered:
            index = issued.instruction.index
            waits_result = issued.has_result and not issued.is_written
            waits_sources = issued.has_sources and not issued.is_read
            finished |= not waits_result and not waits_sources
            if relies_on_all or issued.instruction.is_barrier:
                if waits_result:
                    found[index, issued.part] = issued.assumed_result
                if waits_sources:
                    found[index, SOURCES] = issued.assumed_sources
        if finished:
            self.ordered = [i for i in self.ordered if not self._is_finished(i)]
        return found

    def _register_term(self, position: int, instruction: Instruction, register: int) -> Term:
        """The term that the instruction reads from ``register``."""
        value = self.outcome.values.get(register)
        if value is None:
            return self.terms("in", register)
        for writer in self.visible_writers.get(register, ()):
            if self._may_still_write(writer, instruction, register, "RAW"):
                self._poison(
                    position,
                    instruction,
                    f"reads {registers.name(register)} before {writer.instruction.text} has "
                    "written it; a wait or a larger distance is required",
                )
                return self.terms("poison", instruction.index, register)
        return value

    def _may_still_write(
        self, writer: IssuedInstruction, instruction: Instruction, register: int, kind: HazardKind
    ) -> bool:
        """Whether ``writer`` may write ``register`` after ``instruction`` accesses it now."""
        if self._exclude_each_other(writer, instruction):
            return False
        if writer.is_written:
            return False
        if not writer.fixed_latency:
            provers = writer.result_provers
            if kind == "WAW" and writer.group in self.rules.assumed(instruction).overwrites_results:
                provers = frozenset((instruction.index,)) | (provers or frozenset())
            return not self._rely(writer, instruction, kind, provers)
        required = self.table.min_distance(writer.instruction, instruction, register, kind)
        return self.now - writer.issued < required

    def _rely(
        self,
        earlier: IssuedInstruction,
        instruction: Instruction,
        kind: HazardKind,
        provers: Provers | None,
    ) -> bool:
        """Record that only pairs without witnesses protect an access; False without ``provers``."""
        if provers is None:
            return False
        pair = (earlier.instruction.index, instruction.index, kind)
        known = self.outcome.reliances.get(pair, frozenset())
        self.outcome.reliances[pair] = known | provers
        return True

    def _exclude_each_other(self, earlier: IssuedInstruction, instruction: Instruction) -> bool:
        """Whether the guards test the same predicate value with opposite signs."""
        guard = self._guard(instruction)
        return (
            guard is not None
            and earlier.guard is not None
            and guard[0] == earlier.guard[0]
            and guard[1] != earlier.guard[1]
        )

    def _check_overwrites(self, position: int, instruction: Instruction) -> None:
        """Poison writes to a register that an earlier instruction may still write or read."""
        follows = self.rules.proofs(instruction).overwrites_results
        for register in instruction.defs:
            for writer in self.writers.get(register, ()):
                if writer.group not in follows and self._may_still_write(
                    writer, instruction, register, "WAW"
                ):
                    self._poison(
                        position,
                        instruction,
                        f"writes {registers.name(register)} before {writer.instruction.text} has "
                        "written it; a wait or a larger distance is required",
                    )
        if not instruction.defs:
            return
        written = frozenset(instruction.defs)
        for reader in self.issued:
            overwritten = reader.late_sources & written
            if not overwritten or reader.is_read or self._exclude_each_other(reader, instruction):
                continue
            if self._may_still_read(reader, instruction, overwritten):
                self._poison(
                    position,
                    instruction,
                    f"overwrites {registers.name(min(overwritten))} before "
                    f"{reader.instruction.text} has read it; a wait or a larger distance is "
                    "required",
                )

    def _may_still_read(
        self, reader: IssuedInstruction, instruction: Instruction, overwritten: frozenset[int]
    ) -> bool:
        """Whether ``reader`` may read one of its registers after ``instruction`` writes it."""
        if reader.fixed_latency:
            return any(
                self.now - reader.issued
                < self.table.min_distance(reader.instruction, instruction, r, "WAR")
                for r in overwritten
            )
        if reader.group in self.rules.proofs(instruction).overwrites_sources:
            return False
        provers = reader.source_provers
        if reader.group in self.rules.assumed(instruction).overwrites_sources:
            provers = frozenset((instruction.index,)) | (provers or frozenset())
        return not self._rely(reader, instruction, "WAR", provers)

    def _execute(self, instruction: Instruction, operands: list[Term]) -> None:
        """Compute the terms of an instruction's results, memory effects and event."""
        effects, memory = instruction.effects, self.outcome.memory
        touched = [
            i for i, read in enumerate(_READS) if effects & (_ORDERED | read | _WRITE_OF[read])
        ]
        seen = [memory[i] for i in touched]
        if reads_shared_in_order(instruction):
            seen += self.reads.before(instruction, self._value)
        old = [self._value(r) for r in instruction.defs] if instruction.is_guarded else []
        effect = self.terms("op", instruction.payload, *operands, "memory", *seen, "old", *old)
        for i in touched:
            if effects & (_ORDERED | _WRITE_OF[_READS[i]]):
                memory[i] = self.terms("after", effect, i)
        if effects & _ORDERED:
            self.outcome.events.append(effect)
        if reads_shared_in_order(instruction):
            self.reads.add(instruction, effect)
        guard = self._guard(instruction)
        for issued in self._issue(instruction, guard):
            for register in issued.results:
                self.outcome.values[register] = self.terms("def", effect, register)
                pending = [w for w in self.writers.get(register, ()) if not self._has_settled(w)]
                self.writers[register] = [*pending, issued]
                visible = self.visible_writers.get(register, ()) if instruction.is_guarded else ()
                self.visible_writers[register] = [*visible, issued]

    def _issue(
        self, instruction: Instruction, guard: tuple[Term, bool] | None
    ) -> list[IssuedInstruction]:
        """Add an instruction to ``issued``; its scoreboards cover earlier ones of its queues.

        Returns its result, and as a second item the part of it with scoreboards of its own.
        """
        control = instruction.control
        write, read = scoreboard_bit(control.write_sb), scoreboard_bit(control.read_sb)
        result, early = queues.announced_results(instruction, self.cover)
        fixed_latency = instruction.has_fixed_latency(self.sm)
        issued = IssuedInstruction(
            instruction,
            self.now,
            fixed_latency,
            frozenset(result.registers),
            frozenset(queues.late_sources(instruction, self.sm)),
            guard,
            result_scoreboards=result.scoreboards,
            source_scoreboards=read | write,
            group=group(instruction, self.sm),
        )
        parts = [issued]
        if early is not None:
            parts.append(
                IssuedInstruction(
                    instruction,
                    self.now,
                    fixed_latency,
                    frozenset(early.registers),
                    frozenset(),
                    guard,
                    result_scoreboards=early.scoreboards,
                    part=EARLY,
                )
            )
        if instruction.base == "BAR":
            self.rules.drain(self.issued, instruction)
        if issued.group and (write or read):
            self.rules.cover_earlier(self.issued, issued, write, read)
        self.issued += parts
        self.ordered += [part for part in parts if part.is_ordered]
        if len(self.issued) >= self.cleanup_size:
            self.issued = [i for i in self.issued if not self._is_finished(i)]
            self.cleanup_size = 2 * len(self.issued) + 32
        return parts

    def _is_finished(self, issued: IssuedInstruction) -> bool:
        """Whether no later instruction can wait for it or disturb its result or sources."""
        if issued.fixed_latency and self.now - issued.issued < SETTLED:
            return False
        if issued.fixed_latency and not issued.is_ordered:
            return True
        is_written = issued.is_written or not issued.has_result
        return is_written and (issued.is_read or not issued.has_sources)

    def _has_settled(self, writer: IssuedInstruction) -> bool:
        """Whether the result of ``writer`` is certainly written."""
        elapsed = self.now - writer.issued
        if writer.fixed_latency and elapsed >= self.table.max_latency(writer.instruction):
            return True
        return writer.is_written

    def _value(self, register: int) -> Term:
        """The present term of a register."""
        value = self.outcome.values.get(register)
        return self.terms("in", register) if value is None else value

    def _guard(self, instruction: Instruction) -> tuple[Term, bool] | None:
        """(term of the guard predicate, whether it is negated), or None without a guard."""
        if not instruction.guard_registers or instruction.guard is None:
            return None
        return self._value(instruction.guard_registers[0]), instruction.guard.startswith("!")

    def _poison(self, position: int, instruction: Instruction, reason: str) -> None:
        self.outcome.poison.append((position, instruction, reason))

    def _finish(self) -> None:
        """Record what is in flight at the end of the block."""
        outcome = self.outcome
        outcome.length = self.now
        outcome.memory.append(self.reads.history())
        outcome.waited = self.waited
        for issued in self.issued:
            index, since = issued.instruction.index, self.now - issued.issued
            if issued.has_result and not self._has_settled(issued):
                proof = issued.assumed_result
                if proof is not None and proof.provers is not None:
                    outcome.assumed_done[index, issued.part] = proof.provers
                else:
                    cycles = since if issued.fixed_latency else min(since, SCOREBOARD_GAP)
                    assumed = 0 if proof is None else proof.scoreboards()
                    outcome.results_out[index, issued.part] = (
                        cycles,
                        issued.result_scoreboards | assumed,
                    )
            is_tracked = issued.is_ordered or not issued.fixed_latency
            if issued.has_sources and not issued.is_read and is_tracked:
                proof = issued.assumed_sources
                if proof is not None and proof.provers is not None:
                    outcome.assumed_done[index, SOURCES] = proof.provers
                else:
                    assumed = 0 if proof is None else proof.scoreboards()
                    boards = issued.result_scoreboards | issued.source_scoreboards
                    outcome.sources_out[index] = boards | assumed
