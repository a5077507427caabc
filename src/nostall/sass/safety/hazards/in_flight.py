"""What is in flight at one point of a function, and how instructions, waits and joins change it.

An item is *in flight* if the result of its instruction is not yet written, or if its sources are
not yet read.  With fixed latency an item ends after the latency.  With variable latency it ends
when an instruction waits for a scoreboard that covers it.  Where paths join, the state keeps the
worse of both sides.
"""

from __future__ import annotations

from dataclasses import dataclass

from nostall.sass.safety.hazards.facts import NEVER, InstructionFacts

RESULT, EARLY_RESULT, SOURCES, COMPLETION, RELEASE = 0, 1, 2, 3, 4
"""Roles of an item: a result to be written, the part of it with scoreboards of its own, sources to
be read, or what a write scoreboard (COMPLETION) or a read scoreboard (RELEASE) of an operation
announces, whatever its registers."""

MAX_ELAPSED = 255
"""Cycles at which the count of elapsed cycles stops."""

Key = tuple[int, int]
"""(original index of the instruction, role)."""

Provers = frozenset[int]
"""Original indices of later instructions whose order with an item ends it."""


@dataclass(slots=True)
class InFlight:
    """One item in flight."""

    registers: int
    """Bit mask: registers whose value is still to be written, or still to be read."""
    elapsed: int
    """Cycles since issue, at least."""
    scoreboards: int
    """Bit mask of the scoreboards that cover the item: a wait for any of them ends it."""
    guard_literals: int
    """Predicate literals (see :func:`.facts.guard_literal`) that hold in each thread with this
    item in flight: its guard, and the branches taken since."""
    ends_after: int = NEVER
    """Cycles after issue at which the item ends without a wait."""
    later_setters: int = 0
    """8 bits per scoreboard: how many later operations that complete in order set it."""
    assumed: frozenset[tuple[int, int]] = frozenset()
    """(later instruction, its scoreboard) that cover the item if the order of a pair without
    witnesses holds."""
    relied_on: Provers | None = None
    """Those whose scoreboards an instruction waited for; None if none.  The item is in flight
    unless their order holds."""

    def copy(self) -> InFlight:
        """An independent copy."""
        return InFlight(
            self.registers,
            self.elapsed,
            self.scoreboards,
            self.guard_literals,
            self.ends_after,
            self.later_setters,
            self.assumed,
            self.relied_on,
        )

    def rely(self, provers: Provers) -> None:
        """Note that an instruction waited for the scoreboards of ``provers``."""
        self.relied_on = provers if self.relied_on is None else self.relied_on | provers


State = dict[Key, InFlight]


def wait(state: State, scoreboards: int) -> list[tuple[Key, InFlight]]:
    """End all items that one of ``scoreboards`` (bit mask) covers; returns the ended items.

    An item that only pairs without witnesses end is returned, too, and stays in ``state``.
    """
    ended = [(key, item) for key, item in state.items() if item.scoreboards & scoreboards]
    for key, _ in ended:
        del state[key]
    for key, item in state.items():
        if item.assumed:
            provers = frozenset(later for later, n in item.assumed if scoreboards >> n & 1)
            if provers:
                item.rely(provers)
                ended.append((key, item))
    return ended


def wait_partially(
    state: State, scoreboard: int, count: int, facts: dict[int, InstructionFacts]
) -> None:
    """End the operations that ``DEPBAR.LE scoreboard, count`` proves complete."""
    for key, item in list(state.items()):
        is_in_order = facts[key[0]].completes_in_order
        is_covered = item.scoreboards >> scoreboard & 1
        if is_in_order and is_covered and item.later_setters >> 8 * scoreboard & 0xFF >= count:
            del state[key]


def _unit_counts(scoreboards: int) -> int:
    """A count of 1 for each scoreboard of a bit mask, in the layout of ``later_setters``."""
    return sum(1 << 8 * n for n in range(6) if scoreboards >> n & 1)


def _minimum_counts(first: int, second: int) -> int:
    """The smaller of two counts for each scoreboard."""
    if first == second:
        return first
    pairs = ((first >> 8 * n & 0xFF, second >> 8 * n & 0xFF, 8 * n) for n in range(6))
    return sum(min(x, y) << low for x, y, low in pairs)


def issue(state: State, facts: InstructionFacts, all_facts: dict[int, InstructionFacts]) -> None:
    """Apply the effect of issuing one instruction, after its waits, to ``state``."""
    instruction = facts.instruction
    control = instruction.control
    write = 1 << control.write_sb if control.write_sb < 6 else 0
    read = 1 << control.read_sb if control.read_sb < 6 else 0
    if facts.drains_sources or facts.assumed_drains:
        _end_sources(state, facts, all_facts)
    if (write or read) and facts.group:
        _cover_earlier_items(state, facts, write, read, all_facts)
    _advance(state, facts)
    stall, literals = control.stall, facts.guard_literals & ~facts.redefined_literals
    late_defs = facts.defs & ~facts.early_defs
    if late_defs and stall < facts.max_latency:
        state[instruction.index, RESULT] = InFlight(
            late_defs, stall, facts.result_scoreboards, literals, facts.max_latency
        )
    if facts.early_defs:
        state[instruction.index, EARLY_RESULT] = InFlight(
            facts.early_defs, stall, facts.early_scoreboards, literals
        )
    if facts.completion:
        state[instruction.index, COMPLETION] = InFlight(0, stall, facts.completion, 0)
    if facts.release:
        state[instruction.index, RELEASE] = InFlight(0, stall, facts.release, 0)
    if facts.late_sources:
        state[instruction.index, SOURCES] = InFlight(
            facts.late_sources, stall, write | read, literals, facts.max_latency
        )


def _advance(state: State, facts: InstructionFacts) -> None:
    """Let the cycles of an instruction pass, and apply what it overwrites, to all items.

    A wall in the DRAIN form ends all results and source reads of fixed latency.
    """
    instruction = facts.instruction
    drains = instruction.control.drains and instruction.is_barrier
    stall = MAX_ELAPSED if drains else instruction.control.stall
    expired: list[Key] = []
    for key, item in state.items():
        elapsed = item.elapsed + stall
        if elapsed >= item.ends_after:
            expired.append(key)
        item.elapsed = elapsed if elapsed < MAX_ELAPSED else MAX_ELAPSED
    for key in expired:
        del state[key]
    if facts.kills:
        unkilled = ~facts.kills
        overwritten: list[Key] = []
        for key, item in state.items():
            if key[1] < SOURCES or item.relied_on is not None:
                item.registers &= unkilled
                if item.relied_on is not None and not item.registers:
                    overwritten.append(key)
        for key in overwritten:
            del state[key]
    if facts.redefined_literals:
        unchanged = ~facts.redefined_literals
        for item in state.values():
            item.guard_literals &= unchanged


def _end_sources(
    state: State, facts: InstructionFacts, all_facts: dict[int, InstructionFacts]
) -> None:
    """End the source reads of all instructions that a barrier drains."""
    drained = facts.drains_sources
    for key in [k for k in state if k[1] == SOURCES and all_facts[k[0]].group in drained]:
        del state[key]
    for key, item in state.items():
        if key[1] == SOURCES and all_facts[key[0]].group in facts.assumed_drains:
            item.rely(frozenset((facts.instruction.index,)))


def _cover_earlier_items(
    state: State,
    facts: InstructionFacts,
    write: int,
    read: int,
    all_facts: dict[int, InstructionFacts],
) -> None:
    """Let the scoreboards of an instruction cover earlier items, as the in-order rules say.

    ``write`` and ``read`` are the bit masks of its write and read scoreboard.
    """
    results, sources, assumed = facts.proofs.results, facts.proofs.sources, facts.assumed
    completes_in_order = facts.completes_in_order
    for (index, role), item in state.items():
        producer = all_facts[index]
        group = producer.group
        if role > SOURCES or not group:
            continue
        set_now = write | read if role == SOURCES else write
        if completes_in_order and producer.completes_in_order:
            item.later_setters += _unit_counts(item.scoreboards & set_now)
        if role == SOURCES and group in sources:
            item.scoreboards |= set_now
        elif group in results:  # a written result proves the sources read
            item.scoreboards |= write
        if assumed is not None:
            if role == SOURCES and group in assumed.sources:
                _assume(item, facts, set_now)
            elif group in assumed.results:
                _assume(item, facts, write)


def _assume(item: InFlight, later: InstructionFacts, scoreboards: int) -> None:
    """Note that scoreboards of a later instruction cover an item if the order of the two holds."""
    index, new = later.instruction.index, scoreboards & ~item.scoreboards
    if new:
        item.assumed |= {(index, board) for board in range(6) if new >> board & 1}


def join(into: State, state: State) -> bool:
    """Merge ``state`` into ``into``; returns whether ``into`` became worse."""
    changed = False
    for key, item in state.items():
        merged = into.get(key)
        if merged is None:
            into[key] = item.copy()
            changed = True
        elif (
            item.elapsed < merged.elapsed
            or item.registers & ~merged.registers
            or merged.scoreboards & ~item.scoreboards
            or merged.guard_literals & ~item.guard_literals
            or _minimum_counts(item.later_setters, merged.later_setters) != merged.later_setters
            or not merged.assumed <= item.assumed
            or _all_provers(merged.relied_on, item.relied_on) != merged.relied_on
        ):
            merged.later_setters = _minimum_counts(item.later_setters, merged.later_setters)
            merged.registers |= item.registers
            merged.elapsed = min(merged.elapsed, item.elapsed)
            merged.scoreboards &= item.scoreboards
            merged.guard_literals &= item.guard_literals
            merged.assumed &= item.assumed
            merged.relied_on = _all_provers(merged.relied_on, item.relied_on)
            changed = True
    return changed


def _all_provers(first: Provers | None, second: Provers | None) -> Provers | None:
    """What protects an item on two paths; None if nothing protects it on one of them."""
    return None if first is None or second is None else first | second
