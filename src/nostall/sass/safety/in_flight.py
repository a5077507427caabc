"""What is still in flight at each point of a function: a forward dataflow over its blocks.

A *pending* item is an instruction whose result is not yet written, or whose sources are not yet
read.  It ends when its latency has elapsed (fixed latency) or when a scoreboard that covers it
has been waited for (variable latency).  Joins keep the worse of both sides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from nostall.sass.program import queues
from nostall.sass.program.blocks import Block
from nostall.sass.program.instruction import Instruction
from nostall.sass.program.opcodes import Pipe
from nostall.sass.safety.facts import Facts, depbar_mask, literal, opposite
from nostall.sass.safety.pairing import Kind

RESULT, SOURCES, ORDER = 0, 1, 2
FOREVER = 255

Key = tuple[int, int]
"""(original index of the producer, what is in flight): ORDER is the completion of an asynchronous
operation that a scoreboard announces, whatever registers it has."""


@dataclass(slots=True)
class Pending:
    """``live``: the registers concerned (results not overwritten since, or sources not yet read).
    ``elapsed``: cycles since issue, at least.  ``cover``: bit mask of scoreboards any of which,
    once waited for, proves the item done.  ``when``: predicate literals (see :func:`literal`) that
    all hold for a thread that has the item in flight: its guard and the branches it took since.
    ``behind``: per covering scoreboard (8 bits each), how many setters of it came later in the
    same in-order queue.
    """

    live: int
    elapsed: int
    cover: int
    when: int
    behind: int = 0

    def copy(self) -> Pending:
        return Pending(self.live, self.elapsed, self.cover, self.when, self.behind)


State = dict[Key, Pending]


@dataclass(frozen=True, slots=True)
class Conflict:
    """``second`` touches registers (``mask``) that ``first`` still has in flight."""

    first: Facts
    second: Facts
    kind: Kind
    mask: int
    item: Pending


def wait(state: State, mask: int) -> list[tuple[Key, Pending]]:
    """End every item that one of the scoreboards in ``mask`` covers; returns what ended."""
    ended = [(key, item) for key, item in state.items() if item.cover & mask]
    for key, _ in ended:
        del state[key]
    return ended


def wait_partly(state: State, board: int, count: int, facts: dict[int, Facts]) -> None:
    """End the texture accesses that ``DEPBAR.LE board, count`` proves done: they are in order."""
    for key, item in list(state.items()):
        in_order = facts[key[0]].instruction.row.pipe is Pipe.TEXTURE
        if in_order and item.cover >> board & 1 and item.behind >> 8 * board & 0xFF >= count:
            del state[key]


def _ones(boards: int) -> int:
    """One in the count of each scoreboard of a bit mask."""
    return sum(1 << 8 * board for board in range(6) if boards >> board & 1)


def _lesser(one: int, other: int) -> int:
    """The smaller count of each scoreboard."""
    if one == other:
        return one
    pairs = ((one >> 8 * b & 0xFF, other >> 8 * b & 0xFF, 8 * b) for b in range(6))
    return sum(min(x, y) << low for x, y, low in pairs)


def issue(state: State, facts: Facts, all_facts: dict[int, Facts]) -> None:
    """The effect of issuing one instruction (its waits already applied)."""
    instruction = facts.instruction
    control = instruction.control
    write = 1 << control.write_sb if control.write_sb < 6 else 0
    read = 1 << control.read_sb if control.read_sb < 6 else 0
    if queues.drains_sources(instruction):
        _finish_sources(state, all_facts)
    if facts.source_queue and (write or read):
        _cover_earlier(state, facts, write, read, all_facts)
    gap, kills, keeps = control.stall, ~facts.kills, ~facts.forgets
    over: list[Key] = []
    for key, item in state.items():
        item.elapsed = min(item.elapsed + gap, FOREVER)
        if key[1] == RESULT:
            if item.elapsed >= all_facts[key[0]].expires:
                over.append(key)
            item.live &= kills
        elif key[1] == SOURCES and item.elapsed >= all_facts[key[0]].expires:
            over.append(key)
        item.when &= keeps
    for key in over:
        del state[key]
    if facts.defs and gap < facts.expires:
        state[instruction.index, RESULT] = Pending(
            facts.defs, gap, queues.result_boards(instruction), facts.when & ~facts.forgets
        )
    if instruction.is_wall and (write or read):
        state[instruction.index, ORDER] = Pending(0, gap, write | read, 0)
    if facts.late:
        state[instruction.index, SOURCES] = Pending(
            facts.late, gap, write | read, facts.when & ~facts.forgets
        )


def _finish_sources(state: State, all_facts: dict[int, Facts]) -> None:
    """A barrier that blocks at once is behind every earlier access of the load/store queue."""
    queue = Pipe.LSU
    for key in [k for k in state if k[1] == SOURCES and all_facts[k[0]].source_queue == queue]:
        del state[key]


def _cover_earlier(
    state: State, facts: Facts, write: int, read: int, all_facts: dict[int, Facts]
) -> None:
    """In-order queues: a later instruction's scoreboard also covers earlier ones of its queue,
    even when its guard is false: compilers rely on that."""
    for (index, role), item in state.items():
        producer = all_facts[index]
        if role == SOURCES and producer.source_queue == facts.source_queue:
            item.behind += _ones(item.cover & (write | read))
            item.cover |= write | read
        elif (
            role == RESULT and producer.result_queue and producer.result_queue == facts.result_queue
        ):
            item.behind += _ones(item.cover & write)
            item.cover |= write


def join(into: State, other: State) -> bool:
    """Merge ``other`` into ``into``; True when ``into`` became worse."""
    changed = False
    for key, item in other.items():
        mine = into.get(key)
        if mine is None:
            into[key] = item.copy()
            changed = True
        elif (
            item.elapsed < mine.elapsed
            or item.live & ~mine.live
            or mine.cover & ~item.cover
            or mine.when & ~item.when
            or _lesser(item.behind, mine.behind) != mine.behind
        ):
            mine.behind = _lesser(item.behind, mine.behind)
            mine.live |= item.live
            mine.elapsed = min(mine.elapsed, item.elapsed)
            mine.cover &= item.cover
            mine.when &= item.when
            changed = True
    return changed


def entry_states(
    blocks: Sequence[Block], order: Sequence[Instruction], facts: dict[int, Facts]
) -> list[State]:
    """The fixpoint: what may be in flight when each block begins.

    A subroutine gets what its callers have in flight but hands back only its own items: the call
    site itself passes the caller's on.
    """
    states: list[State] = [{} for _ in blocks]
    region = {order[at].index: b.region for b in blocks for at in range(b.start, b.end)}
    todo = list(range(len(blocks)))
    queued = set(todo)
    while todo:
        number = heappop(todo)
        queued.discard(number)
        block = blocks[number]
        state = {key: item.copy() for key, item in states[number].items()}
        for _ in walk(state, block, order, facts):
            pass
        if order[block.end - 1].base == "RET":
            state = {key: item for key, item in state.items() if region[key[0]] == block.region}
        for successor in block.succ:
            taken = along(state, order[block.end - 1], blocks[successor].start == block.end)
            if join(states[successor], taken) and successor not in queued:
                heappush(todo, successor)
                queued.add(successor)
    return states


def along(state: State, last: Instruction, falls: bool) -> State:
    """The state on one way out of a block: a conditional branch tells its predicate's value."""
    condition = _condition(last)
    if not condition or last.base == "CALL":
        return state
    known = opposite(condition) if falls else condition
    against = opposite(known)
    return {
        key: Pending(item.live, item.elapsed, item.cover, item.when | known, item.behind)
        for key, item in state.items()
        if not item.when & against
    }


def _condition(last: Instruction) -> int:
    """The literal on which alone a block's last instruction leaves it, or 0."""
    if last.base not in ("BRA", "EXIT", "RET") or not last.guard:
        return 0
    if last.base == "BRA" and not last.operands[0].startswith("`"):
        return 0
    return literal(last.guard)


def walk(
    state: State, block: Block, order: Sequence[Instruction], facts: dict[int, Facts]
) -> Iterator[tuple[Facts, State, list[tuple[Key, Pending]]]]:
    """Step through a block: each instruction, what is in flight as it issues (after its own
    waits), and what those waits ended; mutates ``state``."""
    for at in range(block.start, block.end):
        here = facts[order[at].index]
        mask = here.instruction.control.wait | depbar_mask(here.instruction)
        ended = wait(state, mask) if mask else []
        partial = queues.partial_wait(here.instruction)
        if partial is not None:
            wait_partly(state, *partial, facts)
        yield here, state, ended
        issue(state, here, facts)


def same_queue(first: Facts, second: Facts) -> bool:
    """Whether the two deliver their results in issue order."""
    return bool(first.result_queue) and first.result_queue == second.result_queue


def conflicts(here: Facts, state: State, facts: dict[int, Facts]) -> Iterator[Conflict]:
    """The items in flight that ``here`` runs into, whether protected by distance or not."""
    for (index, role), item in state.items():
        first = facts[index]
        if role == ORDER or item.when & opposite(here.when):
            continue
        if role == RESULT:
            if hit := item.live & here.uses:
                yield Conflict(first, here, "RAW", hit, item)
            if (hit := first.defs & here.defs) and not same_queue(first, here):
                yield Conflict(first, here, "WAW", hit, item)
        elif (hit := item.live & here.defs) and not (
            first.source_queue and first.source_queue == here.source_queue
        ):
            yield Conflict(first, here, "WAR", hit, item)
