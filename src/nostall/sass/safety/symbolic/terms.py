"""Terms of the symbolic execution, and the order of reads from shared memory as a term."""

from __future__ import annotations

from collections.abc import Callable

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
