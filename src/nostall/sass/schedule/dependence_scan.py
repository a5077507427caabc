"""Scan of one block in its original order that collects its scheduling constraints.

Variable-latency operations are tracked until an instruction waits for them. Memory accesses keep
their order by rules of their own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from nostall.sass.program import queues
from nostall.sass.program.addresses import reads_shared_in_order, shared_address
from nostall.sass.program.cover_rules import COVER, group
from nostall.sass.program.instruction import Instruction
from nostall.sass.program.opcodes import Effect
from nostall.sass.safety.latency import OVERWRITE_GAP, SCOREBOARD_GAP, LatencyTable
from nostall.sass.safety.pairing import HazardKind
from nostall.sass.schedule.constraints import BlockConstraints, InFlight


@dataclass(slots=True)
class Pending:
    """A variable-latency result, or sources read after issue, that the scan still tracks.

    For memory accesses and walls also a scoreboard that announces their completion without
    registers, because others may rely on it.
    """

    instruction: Instruction
    is_result: bool
    group: str
    """Group of the operation in the in-order rules; "" without one."""
    registers: frozenset[int]
    proofs: dict[int, int]
    """Scoreboard -> the instruction that sets it: this one, or a later one of the same queue."""
    waiter: int | None = None
    """The instruction that waits for the completion, once the scan has passed it."""
    assumed: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """(scoreboard, later instruction of the same queue that sets it) of pairs without witnesses."""
    assumed_waits: list[tuple[int, int, int]] = field(default_factory=list[tuple[int, int, int]])
    """(scoreboard, instruction that sets it, instruction that waits for it) of these."""


_MEMORY_SPACES = (
    (Effect.READ_GLOBAL, Effect.WRITE_GLOBAL),
    (Effect.READ_SHARED, Effect.WRITE_SHARED),
    (Effect.READ_LOCAL, Effect.WRITE_LOCAL),
)


def order_memory_accesses(constraints: BlockConstraints) -> None:
    """Keep the order of two accesses to one memory space, unless both read."""
    for read, write in _MEMORY_SPACES:
        writer: int | None = None
        readers: list[int] = []
        for instruction in constraints.order:
            effects, index = instruction.effects, instruction.index
            if effects & (write | Effect.FENCE):
                for earlier in (*readers, *([writer] if writer is not None else [])):
                    constraints.add_edge(earlier, index)
                writer, readers = index, []
            elif effects & read:
                if writer is not None:
                    constraints.add_edge(writer, index)
                readers.append(index)


def order_shared_reads(constraints: BlockConstraints) -> None:
    """Keep the order of loads that may read one shared location.

    Relaxed and volatile loads look like weak ones, and two reads of one location by one thread
    must keep their order. Two loads read different locations if their addresses have the same
    registers, not overwritten between them, and constants that are far enough apart.
    """
    writers: dict[int, int] = {}
    group: list[int] = []
    last_group: list[int] = []
    base: tuple[object, ...] = ()
    last_reader: dict[int, int] = {}
    for instruction in constraints.order:
        index = instruction.index
        if reads_shared_in_order(instruction):
            address = shared_address(instruction)
            values = [(r, writers.get(r)) for r in sorted(instruction.address_registers)]
            if base != (address.base, *values):
                base, last_group, group, last_reader = (address.base, *values), group, [], {}
            for earlier in (*last_group, *(last_reader.get(b, index) for b in address.bytes)):
                constraints.add_edge(earlier, index)
            last_reader.update(dict.fromkeys(address.bytes, index))
            group.append(index)
        if instruction.is_barrier:
            group, last_group, base, last_reader = [], [], (), {}
        writers.update(dict.fromkeys(instruction.defs, index))


_NEAR_WALLS = 16
"""Number of preceding walls to which distances are kept. Walls issue at least 1 cycle apart."""
_WAW_CHAIN = 40
"""Cycles of chained writes after which an earlier writer of a register has surely written."""


def scan_block(
    order: Sequence[Instruction], sm: int, floors: LatencyTable, pinned: frozenset[int]
) -> BlockConstraints:
    """Collect the constraints inside a block; ``protect_live_in`` adds those from outside."""
    constraints = BlockConstraints(order, sm, floors)
    now = 0
    for instruction in order:
        constraints.issue[instruction.index] = now
        now += instruction.control.stall
    constraints.length = now
    _scan_registers(constraints)
    order_memory_accesses(constraints)
    order_shared_reads(constraints)
    _keep_wall_distances(constraints, pinned)
    _order_asynchronous_scoreboards(constraints)
    return constraints


def _scan_registers(constraints: BlockConstraints) -> None:
    """Add register dependences, and the waits that protect them."""
    tracker = _RegisterTracker(constraints)
    for instruction in constraints.order:
        tracker.process_waits(instruction)
        tracker.process_accesses(instruction)
        tracker.record_issue(instruction)
    tracker.finish()


class _RegisterTracker:
    """Writers, readers and pending operations of each register along a block."""

    def __init__(self, constraints: BlockConstraints) -> None:
        self.constraints = constraints
        self.sm = constraints.sm
        self.by_index = {i.index: i for i in constraints.order}
        self.late = {
            i.index: frozenset(_fixed_late_sources(i, constraints.sm)) for i in constraints.order
        }
        self.pending: list[Pending] = []
        """Operations for which no instruction has waited yet."""
        self.by_register: dict[int, list[Pending]] = defaultdict(list)
        self.writers: dict[int, list[Instruction]] = defaultdict(list)
        """The last unguarded writer of a register, and the guarded ones after it."""
        self.past_writers: dict[int, list[Instruction]] = defaultdict(list)
        """Earlier fixed-latency writers that may not have written yet."""
        self.readers: dict[int, list[Instruction]] = defaultdict(list)
        self.completed_walls: list[int] = []
        """Since the last wall: the instructions that wait for the scoreboard of a wall."""

    def process_waits(self, instruction: Instruction) -> None:
        """Order each pending operation before the instruction that waits for it."""
        mask = instruction.control.wait
        for scoreboard in _drained_scoreboards(instruction):
            mask |= 1 << scoreboard
        if not mask:
            return
        constraints, index = self.constraints, instruction.index
        constraints.waits.append((index, mask))
        constraints.waited |= mask
        still_pending: list[Pending] = []
        for item in self.pending:
            scoreboards = [board for board in item.proofs if mask >> board & 1]
            if not scoreboards:
                item.assumed_waits += [(b, s, index) for b, s in item.assumed if mask >> b & 1]
                still_pending.append(item)
                continue
            item.waiter = index
            if item.instruction.is_barrier:
                self.completed_walls.append(index)
            setter = item.proofs[scoreboards[0]]
            constraints.add_edge(item.instruction.index, index, SCOREBOARD_GAP)
            constraints.add_edge(item.instruction.index, setter)
            constraints.add_edge(setter, index, SCOREBOARD_GAP)
            for key in self._fields(setter, scoreboards[0]):
                constraints.scoreboards.waiters[key].add(index)
        self.pending = still_pending

    def _fields(self, index: int, scoreboard: int) -> Iterator[tuple[int, bool]]:
        """(instruction, write field?) of each control field that holds ``scoreboard``."""
        control = self.by_index[index].control
        if control.write_sb == scoreboard:
            yield index, True
        if control.read_sb == scoreboard:
            yield index, False

    def process_accesses(self, instruction: Instruction) -> None:
        """Add the RAW, WAW and WAR dependences of an instruction, and those on fences."""
        if instruction.is_barrier or instruction.effects & Effect.FENCE:
            for item in self.pending:
                for waiter in self._keep_assumed_waits(item):
                    self.constraints.add_edge(waiter, instruction.index)
        if instruction.is_barrier:
            self.completed_walls = []
        elif instruction.accesses_memory:
            for waiter in self.completed_walls:
                self.constraints.add_edge(waiter, instruction.index)
        for register in instruction.uses:
            for writer in self.writers[register]:
                self._add_write_dependence(writer, instruction, register, "RAW")
            self._add_wait_dependences(instruction, register, of_sources=False)
        for register in instruction.defs:
            for writer in (*self.writers[register], *self.past_writers[register]):
                self._add_write_dependence(writer, instruction, register, "WAW")
            for reader in self.readers[register]:
                self._add_read_dependence(reader, instruction, register)
            self._add_wait_dependences(instruction, register, of_sources=True)

    def _add_write_dependence(
        self, writer: Instruction, instruction: Instruction, register: int, kind: HazardKind
    ) -> None:
        if writer.has_fixed_latency(self.sm):
            self.constraints.add_latency_edge(writer, instruction, register, kind)
        else:
            self.constraints.add_edge(writer.index, instruction.index)

    def _add_read_dependence(
        self, reader: Instruction, instruction: Instruction, register: int
    ) -> None:
        if not reader.has_fixed_latency(self.sm):
            self.constraints.add_edge(reader.index, instruction.index)
        elif register in self.late[reader.index]:
            self.constraints.add_latency_edge(reader, instruction, register, "WAR")
        else:
            gap = 1 if instruction.has_fixed_latency(self.sm) else OVERWRITE_GAP
            self.constraints.add_edge(reader.index, instruction.index, gap)

    def _add_wait_dependences(
        self, instruction: Instruction, register: int, *, of_sources: bool
    ) -> None:
        """Keep the waits that make ``register`` safe to access before the instruction."""
        for item in self.by_register[register]:
            if (item.is_result or of_sources) and item.waiter is not None:
                self.constraints.add_edge(item.waiter, instruction.index)
                self.constraints.add_edge(item.instruction.index, instruction.index)
            elif item.is_result or of_sources:
                for waiter in self._keep_assumed_waits(item):
                    self.constraints.add_edge(waiter, instruction.index)

    def _keep_assumed_waits(self, item: Pending) -> Iterator[int]:
        """Keep the waits by pairs without witnesses that protect an item; yields the waiters."""
        for scoreboard, setter, waiter in item.assumed_waits:
            self.constraints.add_edge(item.instruction.index, setter)
            self.constraints.add_edge(setter, waiter, SCOREBOARD_GAP)
            for key in self._fields(setter, scoreboard):
                self.constraints.scoreboards.waiters[key].add(waiter)
            yield waiter

    def record_issue(self, instruction: Instruction) -> None:
        """Make an instruction the latest reader and writer of its registers."""
        self._add_proofs(instruction)
        for register in instruction.uses:
            self.readers[register].append(instruction)
        for register in instruction.defs:
            if instruction.is_guarded:
                self.writers[register].append(instruction)
                continue
            self.constraints.overwritten.add(register)
            self.past_writers[register] = self._recent_writers(register, instruction)
            self.writers[register] = [instruction]
            late = [r for r in self.readers[register] if register in self.late[r.index]]
            self.readers[register] = late[-4:]
            self.by_register[register] = [
                item for item in self.by_register[register] if item.waiter is None
            ]
        control = instruction.control
        is_announced = instruction.is_barrier and control.read_sb < 6
        if instruction.has_fixed_latency(self.sm) and control.write_sb > 5 and not is_announced:
            return
        result, early = queues.announced_results(instruction)
        write = _setters(instruction, result)
        read = {control.read_sb: instruction.index} if control.read_sb < 6 else {}
        self._track(instruction, True, frozenset(result.registers), dict(write))
        if early is not None:
            proofs = _setters(instruction, early)
            self._track(instruction, True, frozenset(early.registers), proofs)
        late_sources = frozenset(queues.late_sources(instruction, self.sm))
        self._track(instruction, False, late_sources, {**write, **read})
        if instruction.is_barrier or (instruction.accesses_memory and not late_sources):
            self._track_scoreboard(instruction, False, read)
        if not instruction.defs and (instruction.is_barrier or instruction.accesses_memory):
            self._track_scoreboard(instruction, True, write)

    def _track(
        self,
        instruction: Instruction,
        is_result: bool,
        registers: frozenset[int],
        proofs: dict[int, int],
    ) -> None:
        if not registers:
            return
        own_group = group(instruction, self.sm)
        item = Pending(instruction, is_result, own_group, registers, proofs)
        self.pending.append(item)
        for register in registers:
            self.by_register[register].append(item)

    def _track_scoreboard(
        self, instruction: Instruction, is_result: bool, proofs: dict[int, int]
    ) -> None:
        """Track what the scoreboards ``proofs`` of a wall or memory access announce."""
        if proofs:
            self.pending.append(Pending(instruction, is_result, "", frozenset(), proofs))

    def _recent_writers(self, register: int, instruction: Instruction) -> list[Instruction]:
        """Earlier fixed-latency writers that the next writer could still come too close to."""
        now = self.constraints.issue[instruction.index]
        known = [*self.past_writers[register], *self.writers[register]]
        return [
            w
            for w in known[-6:]
            if w.has_fixed_latency(self.sm)
            and now - self.constraints.issue[w.index] < 2 * _WAW_CHAIN
        ]

    def _add_proofs(self, instruction: Instruction) -> None:
        """Mark earlier operations as covered by the scoreboards of a later one."""
        control = instruction.control
        own_group = group(instruction, self.sm)
        if not own_group or (control.write_sb > 5 and control.read_sb > 5):
            return
        guarded = instruction.is_guarded
        proofs = COVER.proofs(own_group, self.sm, witnessed=True, guarded=guarded)
        assumed = COVER.proofs(own_group, self.sm, witnessed=False, guarded=guarded)
        for item in self.pending:
            boards: tuple[int, ...] = ()
            if not item.is_result and item.group in proofs.sources:
                boards = (control.write_sb, control.read_sb)
            elif item.group in proofs.results:
                boards = (control.write_sb,)
            for board in boards:
                if board < 6:
                    item.proofs.setdefault(board, instruction.index)
            if not item.is_result and item.group in assumed.sources:
                boards = (control.write_sb, control.read_sb)
            elif item.group in assumed.results:
                boards = (control.write_sb,)
            else:
                continue
            item.assumed += [(board, instruction.index) for board in boards if board < 6]

    def finish(self) -> None:
        """Record the operations that are in flight when the block ends."""
        constraints, end = self.constraints, self.constraints.length
        for item in self.pending:
            index, is_wall = item.instruction.index, item.instruction.is_barrier
            boards = sum(1 << board for board, setter in item.proofs.items() if setter == index)
            for waiter in self._keep_assumed_waits(item):
                constraints.add_edge(index, waiter)
            assumed = bool(item.assumed_waits) and not item.proofs
            key = InFlight(
                index, item.is_result, item.registers, boards, False, is_wall, 0, assumed
            )
            since = end - constraints.issue[index]
            constraints.live_out[key] = since if item.is_result else 0
            for board, setter in (*item.proofs.items(), *item.assumed):
                constraints.add_edge(index, setter)
                constraints.scoreboards.locked.update(self._fields(setter, board))
        for instruction in constraints.order:
            self._keep_end_distance(instruction)

    def _keep_end_distance(self, instruction: Instruction) -> None:
        constraints, index = self.constraints, instruction.index
        since = constraints.length - constraints.issue[index]
        if instruction.has_fixed_latency(self.sm):
            max_latency = constraints.floors.max_latency(instruction)
            if instruction.defs:
                constraints.before_end[index] = min(since, max_latency)
                if since < max_latency:
                    key = InFlight(
                        index, True, frozenset(instruction.defs), 0, True, False, max_latency
                    )
                    constraints.live_out[key] = since
            if self.late[index] and since < max_latency:
                key = InFlight(index, False, self.late[index], 0, True, False, max_latency)
                constraints.live_out[key] = since
        elif instruction.control.write_sb < 6 or instruction.control.read_sb < 6:
            constraints.before_end[index] = min(since, SCOREBOARD_GAP)
        if instruction.defs and not instruction.has_fixed_latency(self.sm):
            distance = constraints.before_end.get(index, 0)
            constraints.before_end[index] = max(distance, min(since, SCOREBOARD_GAP))


def _setters(instruction: Instruction, announced: queues.Announced) -> dict[int, int]:
    """Each scoreboard of a part of a result -> the instruction that sets it."""
    boards = [board for board in range(6) if announced.scoreboards >> board & 1]
    return dict.fromkeys(boards, instruction.index)


def _fixed_late_sources(instruction: Instruction, sm: int) -> tuple[int, ...]:
    """Registers that a fixed-latency instruction reads after issue; () for the other ones."""
    return queues.late_sources(instruction, sm) if instruction.has_fixed_latency(sm) else ()


def _keep_wall_distances(constraints: BlockConstraints, pinned: frozenset[int]) -> None:
    """Let no instruction cross a wall, nor come closer to it than compilers place it.

    A wall is an instruction that no other may cross: a barrier, a branch, an asynchronous
    operation, or a pinned instruction.
    """
    floors = constraints.floors
    walls: list[Instruction] = []
    since_wall: list[Instruction] = []
    for instruction in constraints.order:
        for wall in walls[-_NEAR_WALLS:-1]:
            if (cycles := floors.min_distance_after_barrier(wall, instruction)) > 1:
                _add_wall_edge(constraints, wall, instruction, cycles)
        # Earlier walls need no edge of 1 cycle: the last wall already follows them.
        for wall in walls[-1:]:
            cycles = floors.min_distance_after_barrier(wall, instruction)
            _add_wall_edge(constraints, wall, instruction, cycles)
        if instruction.is_barrier or instruction.index in pinned:
            for earlier in since_wall:
                cycles = floors.min_distance_before_barrier(earlier, instruction)
                _add_wall_edge(constraints, earlier, instruction, cycles)
            walls.append(instruction)
            since_wall = [instruction]
        else:
            since_wall.append(instruction)


def _add_wall_edge(
    constraints: BlockConstraints, first: Instruction, second: Instruction, cycles: int
) -> None:
    constraints.add_edge(first.index, second.index, max(1, cycles))


def _order_asynchronous_scoreboards(constraints: BlockConstraints) -> None:
    """Keep the order of all instructions that set or wait for an asynchronous scoreboard.

    These are the scoreboards of asynchronous operations, and those that DEPBAR counts.
    """
    asynchronous = 0
    for instruction in constraints.order:
        control = instruction.control
        if instruction.is_barrier:
            asynchronous |= sum(1 << b for b in (control.write_sb, control.read_sb) if b < 6)
        if instruction.base == "DEPBAR":
            asynchronous |= sum(1 << int(o[2:]) for o in instruction.operands if o.startswith("SB"))
    constraints.scoreboards.asynchronous = asynchronous
    for scoreboard in range(6):
        last: int | None = None
        for instruction in constraints.order:
            if asynchronous >> scoreboard & 1 and _uses_scoreboard(instruction, scoreboard):
                if last is not None:
                    constraints.add_edge(last, instruction.index)
                last = instruction.index


def _uses_scoreboard(instruction: Instruction, scoreboard: int) -> bool:
    control = instruction.control
    return bool(control.wait >> scoreboard & 1) or scoreboard in (control.write_sb, control.read_sb)


def _drained_scoreboards(instruction: Instruction) -> Iterator[int]:
    """Scoreboards that a DEPBAR waits for until they are 0."""
    if instruction.base == "DEPBAR":
        text = " ".join(instruction.operands)
        if text.startswith("SB") and (len(instruction.operands) < 2 or " 0x0" in text):
            yield int(text[2])
        inside = text.partition("{")[2].partition("}")[0]
        yield from (int(d) for d in inside.split(",") if d.strip().isdigit())
