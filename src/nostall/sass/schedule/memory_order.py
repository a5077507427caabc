"""Constraints on the order of memory accesses in one block."""

from __future__ import annotations

from nostall.sass.program.addresses import reads_shared_in_order, shared_address
from nostall.sass.program.opcodes import Effect
from nostall.sass.schedule.constraints import BlockConstraints

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
