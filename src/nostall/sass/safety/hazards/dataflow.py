"""Forward dataflow analysis of what is in flight at each point of a function, and its conflicts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from nostall.sass.program import queues
from nostall.sass.program.blocks import Block
from nostall.sass.program.instruction import Instruction
from nostall.sass.safety.hazards.facts import (
    InstructionFacts,
    drained_scoreboards,
    guard_literal,
    negate_literals,
)
from nostall.sass.safety.hazards.in_flight import (
    COMPLETION,
    EARLY_RESULT,
    SOURCES,
    InFlight,
    Key,
    Provers,
    State,
    issue,
    join,
    wait,
    wait_partially,
)
from nostall.sass.safety.pairing import HazardKind


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
        if role < SOURCES:
            if hit := item.registers & current.uses:
                yield Conflict(first, current, "RAW", hit, item, item.relied_on)
            own = first.early_defs if role == EARLY_RESULT else first.defs & ~first.early_defs
            hit = own & current.defs
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
