"""Scan one block in its original order and collect the constraints between its instructions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nostall.sass.program import queues
from nostall.sass.program.instruction import Instruction
from nostall.sass.program.opcodes import Effect
from nostall.sass.safety.latency import OVERWRITE_GAP, SCOREBOARD_GAP, LatencyTable
from nostall.sass.safety.pairing import HazardKind
from nostall.sass.schedule.constraints import BlockScan, Leftover

_SPACES = (
    (Effect.READ_GLOBAL, Effect.WRITE_GLOBAL),
    (Effect.READ_SHARED, Effect.WRITE_SHARED),
    (Effect.READ_LOCAL, Effect.WRITE_LOCAL),
)
_NEAR_WALLS = 16
"""How many walls back distances are kept; each issues at least a cycle after the one before."""
_WAW_CHAIN = 40
"""Cycles of chained writes after which an earlier writer of a register has surely written."""


@dataclass(slots=True)
class _Open:
    """A variable-latency result, or late-read sources, of this block.

    ``proofs`` maps a scoreboard to the instruction whose completion it announces: the item's own,
    or a later one of the same in-order queue.  ``queue`` is the name of that queue, "" when there
    is none.  ``waiter`` is set once it was waited for.
    """

    instruction: Instruction
    is_result: bool
    queue: str
    registers: frozenset[int]
    proofs: dict[int, int]
    waiter: int | None = None


def scan(
    order: Sequence[Instruction], sm: int, floors: LatencyTable, pinned: frozenset[int]
) -> BlockScan:
    """Collect the constraints inside a block (``protect_entry`` adds those from outside)."""
    found = BlockScan(order, sm, floors)
    now = 0
    for instruction in order:
        found.issue[instruction.index] = now
        now += instruction.control.stall
    found.length = now
    _registers(found)
    _memory(found)
    _walls(found, pinned)
    _counted_boards(found)
    return found


def _registers(found: BlockScan) -> None:
    """Register dependences with their protections."""
    tracker = _Tracker(found)
    for instruction in found.order:
        tracker.wait(instruction)
        tracker.touch(instruction)
        tracker.issue(instruction)
    tracker.finish()


class _Tracker:
    """Follows writers, readers and open items through a block."""

    def __init__(self, found: BlockScan) -> None:
        self.found = found
        self.sm = found.sm
        self.by_index = {i.index: i for i in found.order}
        self.late = {i.index: frozenset(_fixed_late(i, found.sm)) for i in found.order}
        self.open: list[_Open] = []
        self.items: dict[int, list[_Open]] = defaultdict(list)
        self.writers: dict[int, list[Instruction]] = defaultdict(list)
        self.past: dict[int, list[Instruction]] = defaultdict(list)
        self.readers: dict[int, list[Instruction]] = defaultdict(list)

    def wait(self, instruction: Instruction) -> None:
        mask = instruction.control.wait
        for board in _drained(instruction):
            mask |= 1 << board
        if not mask:
            return
        self.found.waits.append((instruction.index, mask))
        self.found.waited |= mask
        here = instruction.index
        still: list[_Open] = []
        for item in self.open:
            boards = [board for board in item.proofs if mask >> board & 1]
            if not boards:
                still.append(item)
                continue
            item.waiter = here
            cover = item.proofs[boards[0]]
            self.found.edge(item.instruction.index, here, SCOREBOARD_GAP)
            self.found.edge(item.instruction.index, cover)
            self.found.edge(cover, here, SCOREBOARD_GAP)
            for key in self._fields(cover, boards[0]):
                self.found.boards.waiters[key].add(here)
        self.open = still

    def _fields(self, index: int, board: int) -> Iterator[tuple[int, bool]]:
        """The control fields of an instruction that hold ``board``."""
        control = self.by_index[index].control
        if control.write_sb == board:
            yield index, True
        if control.read_sb == board:
            yield index, False

    def touch(self, instruction: Instruction) -> None:
        for register in instruction.uses:
            for writer in self.writers[register]:
                self._after(writer, instruction, register, "RAW")
            self._protected(instruction, register, of_sources=False)
        for register in instruction.defs:
            for writer in (*self.writers[register], *self.past[register]):
                self._after(writer, instruction, register, "WAW")
            for reader in self.readers[register]:
                self._overwrites(reader, instruction, register)
            self._protected(instruction, register, of_sources=True)

    def _after(
        self, writer: Instruction, instruction: Instruction, register: int, kind: HazardKind
    ) -> None:
        if writer.has_fixed_latency(self.sm):
            self.found.apart(writer, instruction, register, kind)
        else:
            self.found.edge(writer.index, instruction.index)

    def _overwrites(self, reader: Instruction, instruction: Instruction, register: int) -> None:
        if not reader.has_fixed_latency(self.sm):
            self.found.edge(reader.index, instruction.index)
        elif register in self.late[reader.index]:
            self.found.apart(reader, instruction, register, "WAR")
        else:
            least = 1 if instruction.has_fixed_latency(self.sm) else OVERWRITE_GAP
            self.found.edge(reader.index, instruction.index, least)

    def _protected(self, instruction: Instruction, register: int, *, of_sources: bool) -> None:
        """The waits that make ``register`` safe to touch must stay in front."""
        for item in self.items[register]:
            if (item.is_result or of_sources) and item.waiter is not None:
                self.found.edge(item.waiter, instruction.index)
                self.found.edge(item.instruction.index, instruction.index)

    def issue(self, instruction: Instruction) -> None:
        self._cover(instruction)
        for register in instruction.uses:
            self.readers[register].append(instruction)
        for register in instruction.defs:
            if instruction.is_guarded:
                self.writers[register].append(instruction)
                continue
            self.past[register] = self._recent(register, instruction)
            self.writers[register] = [instruction]
            still = [r for r in self.readers[register] if register in self.late[r.index]]
            self.readers[register] = still[-4:]
            self.items[register] = [i for i in self.items[register] if i.waiter is None]
        control = instruction.control
        if instruction.has_fixed_latency(self.sm) and control.write_sb > 5:
            return
        own = queues.result_scoreboards(instruction)
        write = {board: instruction.index for board in range(6) if own >> board & 1}
        read = {control.read_sb: instruction.index} if control.read_sb < 6 else {}
        self._open(instruction, True, frozenset(instruction.defs), dict(write))
        late = frozenset(queues.late_sources(instruction, self.sm))
        self._open(instruction, False, late, {**write, **read})

    def _open(
        self,
        instruction: Instruction,
        is_result: bool,
        concerned: frozenset[int],
        proofs: dict[int, int],
    ) -> None:
        if not concerned:
            return
        queue_of = queues.result_queue if is_result else queues.source_queue
        queue = queue_of(instruction, self.sm)
        item = _Open(instruction, is_result, queue, concerned, proofs)
        self.open.append(item)
        for register in concerned:
            self.items[register].append(item)

    def _recent(self, register: int, instruction: Instruction) -> list[Instruction]:
        """Earlier fixed-latency writers that the next writer might still be too close to."""
        now = self.found.issue[instruction.index]
        known = [*self.past[register], *self.writers[register]]
        return [
            w
            for w in known[-6:]
            if w.has_fixed_latency(self.sm) and now - self.found.issue[w.index] < 2 * _WAW_CHAIN
        ]

    def _cover(self, instruction: Instruction) -> None:
        """A later instruction of an in-order queue covers the open items before it."""
        control = instruction.control
        mine = queues.source_queue(instruction, self.sm)
        if not mine:
            return
        results = queues.result_queue(instruction, self.sm)
        for item in self.open:
            if not item.queue or item.queue != (results if item.is_result else mine):
                continue
            boards = (control.write_sb,) if item.is_result else (control.write_sb, control.read_sb)
            for board in boards:
                if board < 6:
                    item.proofs.setdefault(board, instruction.index)

    def finish(self) -> None:
        found, end = self.found, self.found.length
        for item in self.open:
            control = item.instruction.control
            boards = queues.result_scoreboards(item.instruction)
            if not item.is_result and control.read_sb < 6:
                boards |= 1 << control.read_sb
            key = Leftover(item.instruction.index, item.is_result, item.registers, boards, False, 0)
            since = end - found.issue[item.instruction.index]
            found.leftovers[key] = since if item.is_result else 0
            for board, cover in item.proofs.items():
                found.edge(item.instruction.index, cover)
                found.boards.locked.update(self._fields(cover, board))
        for instruction in found.order:
            self._keep_from_end(instruction)

    def _keep_from_end(self, instruction: Instruction) -> None:
        found, index = self.found, instruction.index
        since = found.length - found.issue[index]
        if instruction.has_fixed_latency(self.sm):
            ceiling = found.floors.max_latency(instruction)
            if instruction.defs:
                found.before_end[index] = min(since, ceiling)
                if since < ceiling:
                    key = Leftover(index, True, frozenset(instruction.defs), 0, True, ceiling)
                    found.leftovers[key] = since
            if self.late[index] and since < ceiling:
                key = Leftover(index, False, self.late[index], 0, True, ceiling)
                found.leftovers[key] = since
        elif instruction.control.write_sb < 6 or instruction.control.read_sb < 6:
            found.before_end[index] = min(since, SCOREBOARD_GAP)
        if instruction.defs and not instruction.has_fixed_latency(self.sm):
            found.before_end[index] = max(
                found.before_end.get(index, 0), min(since, SCOREBOARD_GAP)
            )


def _fixed_late(instruction: Instruction, sm: int) -> tuple[int, ...]:
    """What a fixed-latency instruction reads after issue."""
    return queues.late_sources(instruction, sm) if instruction.has_fixed_latency(sm) else ()


def _memory(found: BlockScan) -> None:
    """Accesses to one space keep their order unless both read."""
    for read, write in _SPACES:
        writer: int | None = None
        readers: list[int] = []
        for instruction in found.order:
            does, here = instruction.effects, instruction.index
            if does & (write | Effect.FENCE):
                for earlier in (*readers, *([writer] if writer is not None else [])):
                    found.edge(earlier, here)
                writer, readers = here, []
            elif does & read:
                if writer is not None:
                    found.edge(writer, here)
                readers.append(here)


def _walls(found: BlockScan, pinned: frozenset[int]) -> None:
    """Nothing crosses a wall, nor comes closer to it than compilers let it."""
    walls: list[Instruction] = []
    since: list[Instruction] = []
    for instruction in found.order:
        for wall in walls[-_NEAR_WALLS:-1]:
            if (cycles := found.floors.min_distance_after_barrier(wall, instruction)) > 1:
                _near(found, wall, instruction, cycles)
        for wall in walls[-1:]:  # its own predecessors are bound to it
            _near(
                found, wall, instruction, found.floors.min_distance_after_barrier(wall, instruction)
            )
        if instruction.is_barrier or instruction.index in pinned:
            for earlier in since:
                _near(
                    found,
                    earlier,
                    instruction,
                    found.floors.min_distance_before_barrier(earlier, instruction),
                )
            walls.append(instruction)
            since = [instruction]
        else:
            since.append(instruction)


def _near(found: BlockScan, first: Instruction, second: Instruction, cycles: int) -> None:
    found.edge(first.index, second.index, max(1, cycles))


def _counted_boards(found: BlockScan) -> None:
    """Scoreboards of asynchronous operations, and those that DEPBAR counts: every instruction
    that sets or waits for one keeps its place among the others."""
    special = 0
    for instruction in found.order:
        control = instruction.control
        if instruction.is_barrier:
            special |= sum(1 << b for b in (control.write_sb, control.read_sb) if b < 6)
        if instruction.base == "DEPBAR":
            special |= sum(1 << int(o[2:]) for o in instruction.operands if o.startswith("SB"))
    found.boards.special = special
    for board in range(6):
        last: int | None = None
        for instruction in found.order:
            if special >> board & 1 and _uses_board(instruction, board):
                if last is not None:
                    found.edge(last, instruction.index)
                last = instruction.index


def _uses_board(instruction: Instruction, board: int) -> bool:
    control = instruction.control
    return bool(control.wait >> board & 1) or board in (control.write_sb, control.read_sb)


def _drained(instruction: Instruction) -> Iterator[int]:
    """Scoreboards that a DEPBAR drains completely."""
    if instruction.base == "DEPBAR":
        text = " ".join(instruction.operands)
        if text.startswith("SB") and (len(instruction.operands) < 2 or " 0x0" in text):
            yield int(text[2])
        inside = text.partition("{")[2].partition("}")[0]
        yield from (int(d) for d in inside.split(",") if d.strip().isdigit())
