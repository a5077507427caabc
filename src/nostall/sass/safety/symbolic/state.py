"""State of the symbolic execution of a block, and its outcome.

Pairs without witnesses prove something about an instruction only if they keep their order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from nostall.sass.program import queues
from nostall.sass.program.addresses import shared_address
from nostall.sass.program.instruction import Instruction

Term = int


class Terms:
    """Hash-consed terms: terms of equal structure have equal numbers."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[object, ...], Term] = {}

    def __call__(self, *parts: object) -> Term:
        return self._numbers.setdefault(parts, len(self._numbers))


class SharedReads:
    """The loads from shared memory of a block so far, as terms of what each load must follow.

    Two loads of one location must keep their order (see :mod:`.order`).  A *group* is a sequence
    of loads whose addresses have the same register values.  A load follows all loads of earlier
    groups, and in its own group those that read one of its bytes.
    """

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self._earlier_groups = terms("no reads")
        self._registers: tuple[object, ...] = ()
        self._group: set[Term] = set()
        self._last_read: dict[int, Term] = {}

    def before(self, instruction: Instruction, value: Callable[[int], Term]) -> list[Term]:
        """Terms of the reads that a load must follow.

        ``value`` gives the present term of a register.
        """
        address = shared_address(instruction)
        read = sorted(instruction.address_registers)
        registers = (address.base, *(value(register) for register in read))
        if registers != self._registers:
            self._earlier_groups = self.history()
            self._registers, self._group, self._last_read = registers, set(), {}
        last = [self._last_read[byte] for byte in address.bytes if byte in self._last_read]
        return [self._earlier_groups, *last]

    def add(self, instruction: Instruction, effect: Term) -> None:
        """Add a load; ``effect`` is its term."""
        self._group.add(effect)
        self._last_read.update(dict.fromkeys(shared_address(instruction).bytes, effect))

    def history(self) -> Term:
        """The term of all reads so far; the order of independent reads does not change it."""
        return self._terms("reads", self._earlier_groups, frozenset(self._group))


Provers = frozenset[int]
"""Indices of later instructions whose order with an earlier one proves it done."""


@dataclass(slots=True)
class AssumedProof:
    """What proves a result written or sources read if pairs without witnesses keep their order."""

    covering: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])
    """(later instruction, its scoreboard)."""
    provers: Provers | None = None
    """The later instructions whose scoreboards were waited for; None if none was."""

    def cover(self, later: int, scoreboards: int) -> None:
        """Add the scoreboards (bit mask) of a later instruction."""
        self.covering |= {(later, n) for n in range(6) if scoreboards >> n & 1}

    def wait(self, scoreboards: int) -> None:
        """Note a wait for scoreboards (bit mask)."""
        found = self.waited_for(scoreboards)
        if found:
            self.provers = found | (self.provers or frozenset())

    def waited_for(self, scoreboards: int) -> Provers:
        """The covering instructions for which a wait for scoreboards (bit mask) waits."""
        return frozenset(later for later, n in self.covering if scoreboards >> n & 1)

    def scoreboards(self) -> int:
        """Bit mask of the covering scoreboards."""
        mask = 0
        for _, number in self.covering:
            mask |= 1 << number
        return mask


RESULT, EARLY, SOURCES = "result", "early result", "sources"
"""What may be in flight of an instruction: its result, the part of it that has scoreboards of its
own, and the reads of its sources."""

Unfinished = tuple[int, str]
"""(index, RESULT, EARLY or SOURCES) of an operation that others may have to find complete."""


@dataclass(slots=True)
class IssuedInstruction:
    """An instruction of this block whose result or source reads may be outstanding.

    Sets of scoreboards are bit masks.
    """

    instruction: Instruction
    issued: int
    """Cycle of issue since the block began."""
    fixed_latency: bool
    results: frozenset[int]
    """Registers that it writes."""
    late_sources: frozenset[int]
    """Registers that may still be read after issue."""
    guard: tuple[Term, bool] | None
    """(term of the guard predicate, whether it is negated); None without a guard."""
    is_written: bool = False
    """Whether a wait has proved the result written."""
    is_read: bool = False
    """Whether a wait has proved the sources read."""
    result_scoreboards: int = 0
    """Scoreboards that prove the result written."""
    source_scoreboards: int = 0
    """Scoreboards that prove the sources read."""
    group: str = ""
    """Group in the in-order rules, or ""."""
    part: str = RESULT
    """``RESULT``, or ``EARLY`` for the part of a result with scoreboards of its own."""
    later_setters: list[int] = field(default_factory=lambda: [0] * 6)
    """For each scoreboard: how many later operations that complete in order set it."""
    assumed_result: AssumedProof | None = None
    """What proves the result written, by pairs without witnesses."""
    assumed_sources: AssumedProof | None = None
    """What proves the sources read, by pairs without witnesses."""

    is_ordered: bool = False
    """Whether other instructions may rely on its completion, whatever its registers."""
    has_result: bool = False
    """Whether a result, or a completion that a scoreboard announces, may be outstanding."""
    has_sources: bool = False
    """Whether source reads, or a scoreboard for them, may be outstanding."""

    def __post_init__(self) -> None:
        instruction = self.instruction
        if instruction.is_barrier:
            self.is_ordered = self.source_scoreboards != 0
        else:
            self.is_ordered = instruction.accesses_memory
        is_ordered = self.is_ordered
        self.has_result = bool(self.results) or (is_ordered and self.result_scoreboards != 0)
        self.has_sources = bool(self.late_sources) or (is_ordered and self.source_scoreboards != 0)

    def assume_result(self) -> AssumedProof:
        """The proof of the result by pairs without witnesses, to be extended."""
        if self.assumed_result is None:
            self.assumed_result = AssumedProof()
        return self.assumed_result

    def assume_sources(self) -> AssumedProof:
        """The same for the sources."""
        if self.assumed_sources is None:
            self.assumed_sources = AssumedProof()
        return self.assumed_sources

    @property
    def result_provers(self) -> Provers | None:
        """What proved the result written by pairs without witnesses; None if nothing did."""
        return None if self.assumed_result is None else self.assumed_result.provers

    @property
    def source_provers(self) -> Provers | None:
        """The same for the sources."""
        return None if self.assumed_sources is None else self.assumed_sources.provers


class Protection(NamedTuple):
    """Protection of an instruction, at its issue, against operations in flight at block entry."""

    waited: int
    """Bit mask of the scoreboards waited for since the block began."""
    resolved: int
    """Bit mask of the instructions of the block, by index, that these waits proved done."""
    cycle: int
    """Cycles since the block began."""


@dataclass(slots=True)
class Outcome:
    """Everything observable about one execution of a block."""

    values: dict[int, Term] = field(default_factory=dict[int, Term])
    """Register -> its term at the end of the block."""
    memory: list[Term] = field(default_factory=list[Term])
    """Terms of global, shared and local memory at the end of the block, and of the order in which
    shared memory was read."""
    events: list[Term] = field(default_factory=list[Term])
    """Terms of the scheduling barriers and fences, in order."""
    poison: list[tuple[int, Instruction, str]] = field(
        default_factory=list[tuple[int, Instruction, str]]
    )
    """(position in the block, instruction, reason) of each poisoned register."""
    results_out: dict[Unfinished, tuple[int, int]] = field(
        default_factory=dict[Unfinished, tuple[int, int]]
    )
    """Results in flight at the end: (index, RESULT or EARLY) -> (cycles since issue, scoreboards
    that prove it)."""
    sources_out: dict[int, int] = field(default_factory=dict[int, int])
    """Sources in flight at the end: index -> scoreboards that prove them read."""
    protection: dict[int, Protection] = field(default_factory=dict[int, "Protection"])
    """Index -> protection of the instruction when it issues."""
    unfinished: dict[int, frozenset[Unfinished]] = field(
        default_factory=dict[int, "frozenset[Unfinished]"]
    )
    """Index of a barrier or memory access -> accesses and asynchronous operations of the block
    that may be incomplete when it issues."""
    awaited: dict[int, frozenset[Unfinished]] = field(
        default_factory=dict[int, "frozenset[Unfinished]"]
    )
    """Index of a barrier or memory access -> those that its own wait completes, by pairs without
    witnesses, too."""
    reliances: dict[tuple[int, int, str], Provers] = field(
        default_factory=dict[tuple[int, int, str], Provers]
    )
    """(first, second, kind of hazard) of accesses that only pairs without witnesses protect."""
    assumed_complete: dict[tuple[int, Unfinished], Provers] = field(
        default_factory=dict[tuple[int, Unfinished], Provers]
    )
    """(barrier or memory access, operation) -> what completes the operation before it, by pairs
    without witnesses."""
    assumed_done: dict[Unfinished, Provers] = field(default_factory=dict[Unfinished, Provers])
    """Operation -> what proves it done at the end of the block, by pairs without witnesses."""
    product_accesses: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])
    """(warpgroup product, instruction that accesses one of its registers while it may run)."""
    waited: int = 0
    """Bit mask of all scoreboards that the block waits for."""
    length: int = 0
    """Length of the block in cycles."""


def proving_scoreboards(instruction: Instruction, role: str) -> int:
    """Bit mask of an instruction's own scoreboards that prove its ``role`` done.

    ``role``: RESULT or EARLY (written), SOURCES (read).
    """
    result, early = queues.announced_results(instruction)
    if role == EARLY:
        return early.scoreboards if early else 0
    read = scoreboard_bit(instruction.control.read_sb)
    return result.scoreboards if role == RESULT else result.scoreboards | read


def concerned_registers(instruction: Instruction, role: str, sm: int) -> tuple[int, ...]:
    """The registers that an instruction writes or reads in one role."""
    if role == SOURCES:
        return queues.late_sources(instruction, sm)
    result, early = queues.announced_results(instruction)
    if role == EARLY:
        return early.registers if early else ()
    return result.registers


def scoreboard_bit(scoreboard: int) -> int:
    """The bit mask of one scoreboard; 0 for none."""
    return 1 << scoreboard if scoreboard in range(6) else 0


def drained_scoreboards(instruction: Instruction) -> Iterator[int]:
    """Scoreboards that a DEPBAR waits for until they are 0."""
    if instruction.base != "DEPBAR":
        return
    for position, operand in enumerate(instruction.operands):
        if operand.startswith("SB"):
            count = (
                instruction.operands[position + 1]
                if position + 1 < len(instruction.operands)
                else "0x0"
            )
            if count == "0x0":
                yield int(operand[2:])
        elif operand.startswith("{"):
            yield from (int(d) for d in operand.strip("{}").split(",") if d.strip().isdigit())
