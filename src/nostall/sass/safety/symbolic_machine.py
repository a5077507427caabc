"""Symbolic execution of one block with explicit time: the engine of :mod:`.symbolic`.

A result is the term "this word applied to these operand terms".  A register holds its new value
only once the producer's least latency has passed or a scoreboard that proves it written has been
waited for; read too early, overwritten too early or written in an unknown order it is *poison*.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from nostall.sass.program import queues, registers
from nostall.sass.program.instruction import Instruction
from nostall.sass.program.opcodes import Does, Pipe
from nostall.sass.safety.latency import WAITER_GAP, Floors
from nostall.sass.safety.pairing import Kind

Term = int
_SPACES = (Does.READ_GLOBAL, Does.READ_SHARED, Does.READ_LOCAL)
_WRITE_OF = dict(
    zip(_SPACES, (Does.WRITE_GLOBAL, Does.WRITE_SHARED, Does.WRITE_LOCAL), strict=True)
)
SETTLED = 64
"""Cycles after which every fixed-latency result has arrived."""


class Terms:
    """Hash-consed terms: equal structure, equal number."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[object, ...], Term] = {}

    def __call__(self, *parts: object) -> Term:
        return self._numbers.setdefault(parts, len(self._numbers))


@dataclass(slots=True)
class Flight:
    """An instruction of this block whose result or sources may be outstanding."""

    instruction: Instruction
    issued: int
    fixed: bool
    late: frozenset[int]
    guard: tuple[Term, bool] | None
    written: bool = False
    read: bool = False
    proofs: int = 0
    source_proofs: int = 0
    source_queue: str = ""
    result_queue: str = ""
    overtaken: list[int] = field(default_factory=lambda: [0] * 6)

    def cover(self, write: int, read: int, *, results: str) -> None:
        """A later instruction of the same queue sets scoreboards, which prove this one too."""
        if self.source_queue == Pipe.TEXTURE:
            both = self.source_proofs & (write | read)
            for board in range(6):
                self.overtaken[board] += both >> board & 1
        self.source_proofs |= write | read
        if results and self.result_queue == results:
            self.proofs |= write


class Trust(NamedTuple):
    """What an instruction can rely on when it issues: bit masks of the scoreboards waited for and
    of the block's instructions thereby resolved, and cycles since the block began."""

    waited: int
    resolved: int
    cycle: int


@dataclass(slots=True)
class Outcome:
    """Everything observable about one execution of a block.

    ``results_out``: index -> (cycles since issue, scoreboards that prove it) of results in flight
    at the end; ``sources_out``: index -> scoreboards that prove the sources read.
    """

    values: dict[int, Term] = field(default_factory=dict[int, Term])
    memory: list[Term] = field(default_factory=list[Term])
    events: list[Term] = field(default_factory=list[Term])
    poison: list[tuple[int, Instruction, str]] = field(
        default_factory=list[tuple[int, Instruction, str]]
    )
    results_out: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    sources_out: dict[int, int] = field(default_factory=dict[int, int])
    trust: dict[int, Trust] = field(default_factory=dict[int, "Trust"])
    waited: int = 0
    length: int = 0


class Machine:
    """Executes one block once."""

    def __init__(self, sm: int, floors: Floors, terms: Terms) -> None:
        self.sm, self.floors, self.terms = sm, floors, terms
        self.now = 0
        self.out = Outcome(memory=[terms("memory", i) for i in range(len(_SPACES))])
        self.flights: list[Flight] = []
        self.crowd = 32
        self.writers: dict[int, list[Flight]] = {}
        self.visible: dict[int, list[Flight]] = {}
        self.entry_waits = 0
        self.resolved = 0

    def run(self, order: Sequence[Instruction]) -> Outcome:
        for at, instruction in enumerate(order):
            self._wait(at, instruction)
            operands = [self._read(at, instruction, r) for r in instruction.uses]
            self._clobber(at, instruction)
            self._execute(instruction, operands)
            self.out.trust[instruction.index] = Trust(self.entry_waits, self.resolved, self.now)
            self.now += instruction.control.stall
        self._finish()
        return self.out

    def _wait(self, at: int, instruction: Instruction) -> None:
        partial = queues.partial_wait(instruction)
        if partial is not None:
            self._wait_partly(*partial)
        boards = instruction.control.wait
        for board in drained_boards(instruction):
            boards |= 1 << board
        if not boards:
            return
        self.entry_waits |= boards
        for flight in self.flights:
            proven = flight.proofs & boards
            if proven and not flight.written:
                soon = self.now - flight.issued < WAITER_GAP
                if soon and not flight.instruction.is_wall and instruction.base != "DEPBAR":
                    self._poison(at, instruction, f"waits too soon after {flight.instruction.text}")
                flight.written = True
            if (flight.proofs | flight.source_proofs) & boards:
                flight.read = True
                self.resolved |= 1 << flight.instruction.index

    def _wait_partly(self, board: int, count: int) -> None:
        """Texture accesses complete in order: all but the last ``count`` setters are done."""
        for flight in self.flights:
            done = flight.instruction.row.pipe is Pipe.TEXTURE and flight.overtaken[board] >= count
            if done and (flight.proofs | flight.source_proofs) >> board & 1:
                flight.written = flight.read = True

    def _read(self, at: int, instruction: Instruction, register: int) -> Term:
        value = self.out.values.get(register)
        if value is None:
            return self.terms("in", register)
        for flight in self.visible.get(register, ()):
            if self._late_result(flight, instruction, register, "RAW"):
                self._poison(
                    at,
                    instruction,
                    f"reads {registers.name(register)} before {flight.instruction.text} wrote it",
                )
                return self.terms("poison", instruction.index, register)
        return value

    def _late_result(
        self, flight: Flight, instruction: Instruction, register: int, kind: Kind
    ) -> bool:
        """Whether ``flight`` may still be going to write ``register`` now."""
        if self._never_together(flight, instruction):
            return False
        if flight.written or not flight.fixed:
            return not flight.written
        least = self.floors.least(flight.instruction, instruction, register, kind)
        return self.now - flight.issued < least

    def _never_together(self, flight: Flight, instruction: Instruction) -> bool:
        """Guards that test the same predicate value with opposite signs."""
        mine = self._guard(instruction)
        return (
            mine is not None
            and flight.guard is not None
            and mine[0] == flight.guard[0]
            and mine[1] != flight.guard[1]
        )

    def _clobber(self, at: int, instruction: Instruction) -> None:
        """Writes that come while an earlier instruction still writes or reads the register."""
        mine = queues.source_queue(instruction, self.sm)
        results = queues.result_queue(instruction, self.sm)
        for register in instruction.defs:
            for flight in self.writers.get(register, ()):
                ordered = results and results == queues.result_queue(flight.instruction, self.sm)
                if not ordered and self._late_result(flight, instruction, register, "WAW"):
                    name = registers.name(register)
                    self._poison(
                        at, instruction, f"writes {name} before {flight.instruction.text} has"
                    )
        if not instruction.defs:
            return
        written = frozenset(instruction.defs)
        for flight in self.flights:
            hit = flight.late & written
            if not hit or flight.read or self._never_together(flight, instruction):
                continue
            if flight.fixed:
                early = any(
                    self.now - flight.issued
                    < self.floors.least(flight.instruction, instruction, r, "WAR")
                    for r in hit
                )
            else:
                early = mine != queues.source_queue(flight.instruction, self.sm)
            if early:
                name = registers.name(min(hit))
                self._poison(
                    at, instruction, f"overwrites {name} before {flight.instruction.text} read it"
                )

    def _execute(self, instruction: Instruction, operands: list[Term]) -> None:
        does, memory = instruction.does, self.out.memory
        touched = [
            i
            for i, read in enumerate(_SPACES)
            if does & (Does.FENCE | Does.WALL | read | _WRITE_OF[read])
        ]
        seen = [memory[i] for i in touched]
        old = [self._value(r) for r in instruction.defs] if instruction.is_guarded else []
        effect = self.terms("op", instruction.payload, *operands, "memory", *seen, "old", *old)
        for i in touched:
            if does & (Does.FENCE | Does.WALL | _WRITE_OF[_SPACES[i]]):
                memory[i] = self.terms("after", effect, i)
        if does & (Does.FENCE | Does.WALL):
            self.out.events.append(effect)
        guard = self._guard(instruction)
        flight = self._launch(instruction, guard)
        for register in instruction.defs:
            self.out.values[register] = self.terms("def", effect, register)
            earlier = [f for f in self.writers.get(register, ()) if not self._settled(f)]
            self.writers[register] = [*earlier, flight]
            still = self.visible.get(register, ()) if instruction.is_guarded else ()
            self.visible[register] = [*still, flight]

    def _launch(self, instruction: Instruction, guard: tuple[Term, bool] | None) -> Flight:
        control = instruction.control
        flight = Flight(
            instruction,
            self.now,
            instruction.row.fixed(self.sm),
            frozenset(queues.late_sources(instruction, self.sm)),
            guard,
        )
        write, read = _bit(control.write_sb), _bit(control.read_sb)
        flight.source_queue = queues.source_queue(instruction, self.sm)
        flight.result_queue = queues.result_queue(instruction, self.sm)
        flight.proofs |= queues.result_boards(instruction)
        flight.source_proofs |= read | write
        if queues.drains_sources(instruction):
            for earlier in self.flights:
                earlier.read = earlier.read or earlier.source_queue == Pipe.LSU
        if flight.source_queue and (write or read):
            for earlier in self.flights:
                if earlier.source_queue == flight.source_queue:
                    earlier.cover(write, read, results=flight.result_queue)
        self.flights.append(flight)
        if len(self.flights) >= self.crowd:
            self.flights = [f for f in self.flights if not self._finished(f)]
            self.crowd = 2 * len(self.flights) + 32
        return flight

    def _finished(self, flight: Flight) -> bool:
        """Nothing can wait for it any more, and nothing it holds can be disturbed."""
        if flight.fixed:
            return self.now - flight.issued >= SETTLED
        return flight.written and flight.read

    def _settled(self, flight: Flight) -> bool:
        if flight.fixed and self.now - flight.issued >= self.floors.ceiling(flight.instruction):
            return True
        return flight.written

    def _value(self, register: int) -> Term:
        value = self.out.values.get(register)
        return self.terms("in", register) if value is None else value

    def _guard(self, instruction: Instruction) -> tuple[Term, bool] | None:
        if not instruction.guards or instruction.guard is None:
            return None
        return self._value(instruction.guards[0]), instruction.guard.startswith("!")

    def _poison(self, at: int, instruction: Instruction, why: str) -> None:
        self.out.poison.append((at, instruction, why))

    def _finish(self) -> None:
        out = self.out
        out.length = self.now
        out.waited = self.entry_waits
        for flight in self.flights:
            index, since = flight.instruction.index, self.now - flight.issued
            if flight.instruction.defs and not self._settled(flight):
                kept = since if flight.fixed else min(since, WAITER_GAP)
                out.results_out[index] = (kept, flight.proofs)
            if flight.late and not flight.read and not flight.fixed:
                out.sources_out[index] = flight.proofs | flight.source_proofs


def _bit(board: int) -> int:
    return 1 << board if board in range(6) else 0


def proofs_of(instruction: Instruction, role: str) -> int:
    """The scoreboards of an instruction that announce its result, or that its sources are read."""
    write = queues.result_boards(instruction)
    return write if role == "result" else write | _bit(instruction.control.read_sb)


def drained_boards(instruction: Instruction) -> Iterator[int]:
    """Scoreboards that a DEPBAR waits to reach zero."""
    if instruction.base != "DEPBAR":
        return
    for at, operand in enumerate(instruction.operands):
        if operand.startswith("SB"):
            count = instruction.operands[at + 1] if at + 1 < len(instruction.operands) else "0x0"
            if count == "0x0":
                yield int(operand[2:])
        elif operand.startswith("{"):
            yield from (int(d) for d in operand.strip("{}").split(",") if d.strip().isdigit())
