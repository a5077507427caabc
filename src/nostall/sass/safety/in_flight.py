"""Forward dataflow analysis of what is in flight at each point of a function.

An item is *in flight* if the result of its instruction is not yet written, or if its sources are
not yet read.  With fixed latency an item ends after the latency.  With variable latency it ends
when an instruction waits for a scoreboard that covers it.  Where paths join, the state keeps the
worse of both sides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from nostall.sass.program import queues
from nostall.sass.program.blocks import Block
from nostall.sass.program.instruction import Instruction
from nostall.sass.safety.facts import (
    NEVER,
    InstructionFacts,
    drained_scoreboards,
    guard_literal,
    negate_literals,
)
from nostall.sass.safety.pairing import HazardKind

RESULT, SOURCES, COMPLETION, RELEASE = 0, 1, 2, 3
"""Roles of an item: a result to be written, sources to be read, or what a write scoreboard
(COMPLETION) or a read scoreboard (RELEASE) of an operation announces, whatever its registers."""

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


@dataclass(frozen=True, slots=True)
class Conflict:
    """``second`` accesses registers (bit mask ``registers``) that ``first`` has in flight."""

    first: InstructionFacts
    second: InstructionFacts
    kind: HazardKind
    registers: int
    item: InFlight
    relies_on: Provers | None = None
    """What protects it if the order of pairs without witnesses holds; None if nothing does."""


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
    if facts.defs and stall < facts.max_latency:
        state[instruction.index, RESULT] = InFlight(
            facts.defs, stall, facts.result_scoreboards, literals, facts.max_latency
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
            if key[1] == RESULT or item.relied_on is not None:
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


def entry_states(
    blocks: Sequence[Block],
    order: Sequence[Instruction],
    facts: dict[int, InstructionFacts],
) -> list[State]:
    """The fixpoint of the analysis: what may be in flight at the start of each block.

    A subroutine receives what its callers have in flight, but its RET passes on only items of the
    subroutine itself.  The items of the caller flow from the CALL to the block after it.
    """
    states: list[State] = [{} for _ in blocks]
    subroutine = {order[at].index: b.subroutine for b in blocks for at in range(b.start, b.end)}
    worklist = list(range(len(blocks)))
    queued = set(worklist)
    while worklist:
        number = heappop(worklist)
        queued.discard(number)
        block = blocks[number]
        last = order[block.end - 1]
        state = {key: item.copy() for key, item in states[number].items()}
        for _ in step_through(state, block, order, facts):
            pass
        if last.base == "RET":
            state = {
                key: item for key, item in state.items() if subroutine[key[0]] == block.subroutine
            }
        for successor in block.succ:
            falls_through = blocks[successor].start == block.end
            edge = edge_state(state, last, falls_through)
            if join(states[successor], edge) and successor not in queued:
                heappush(worklist, successor)
                queued.add(successor)
    return states


def edge_state(state: State, last: Instruction, falls_through: bool) -> State:
    """The state on one edge out of a block whose last instruction is ``last``.

    After a conditional branch the value of its predicate is known.
    """
    condition = _branch_condition(last)
    if not condition or last.base == "CALL":
        return state
    known = negate_literals(condition) if falls_through else condition
    contradicting = negate_literals(known)
    remaining = {
        key: item.copy() for key, item in state.items() if not item.guard_literals & contradicting
    }
    for item in remaining.values():
        item.guard_literals |= known
    return remaining


def _branch_condition(last: Instruction) -> int:
    """The only literal that decides how a block's last instruction leaves the block, or 0."""
    if last.base not in ("BRA", "EXIT", "RET") or not last.guard:
        return 0
    if last.base == "BRA" and not last.operands[0].startswith("`"):
        return 0
    return guard_literal(last.guard)


def step_through(
    state: State,
    block: Block,
    order: Sequence[Instruction],
    facts: dict[int, InstructionFacts],
) -> Iterator[tuple[InstructionFacts, State, list[tuple[Key, InFlight]]]]:
    """Step through a block and change ``state`` on the way.

    Yields for each instruction its facts, the state as it issues (after its own waits), and the
    items that its waits ended.
    """
    for at in range(block.start, block.end):
        current = facts[order[at].index]
        waited = current.instruction.control.wait | drained_scoreboards(current.instruction)
        ended = wait(state, waited) if waited else []
        partial = queues.partial_wait(current.instruction)
        if partial is not None:
            wait_partially(state, *partial, facts)
        yield current, state, ended
        issue(state, current, facts)


def find_conflicts(
    current: InstructionFacts, state: State, facts: dict[int, InstructionFacts]
) -> Iterator[Conflict]:
    """The items in flight whose registers ``current`` accesses.

    Items that the issue distance may protect are included.
    """
    for (index, role), item in state.items():
        first = facts[index]
        if role >= COMPLETION or item.guard_literals & negate_literals(current.guard_literals):
            continue
        assumed = current.assumed
        if role == RESULT:
            if hit := item.registers & current.uses:
                yield Conflict(first, current, "RAW", hit, item, item.relied_on)
            hit = first.defs & current.defs
            if hit and first.group not in current.proofs.overwrites_results:
                is_assumed = assumed is not None and first.group in assumed.overwrites_results
                relies_on = _own_proof(current, item, is_assumed)
                yield Conflict(first, current, "WAW", hit, item, relies_on)
        elif (hit := item.registers & current.defs) and (
            first.group not in current.proofs.overwrites_sources
        ):
            is_assumed = assumed is not None and first.group in assumed.overwrites_sources
            relies_on = _own_proof(current, item, is_assumed)
            yield Conflict(first, current, "WAR", hit, item, relies_on)


def _own_proof(current: InstructionFacts, item: InFlight, is_assumed: bool) -> Provers | None:
    """What protects an item from the result of ``current``, by pairs without witnesses.

    ``is_assumed``: whether the order of the two is such a pair.
    """
    if not is_assumed:
        return item.relied_on
    return frozenset((current.instruction.index,)) | (item.relied_on or frozenset())
