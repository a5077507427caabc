"""Legal orders compute the same: random blocks run on a small interpreter of their own.

Each operation is a PTX text and a function that does what the text says. A fence shows memory to
other threads, which then change it; so a load or a store on the wrong side of a fence is seen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from nostall.ptx.schedule.space import PtxSpace
from tests.unit.ptx.ptx_texts import module

MASK = 0xFFFFFFFF


@dataclass
class Machine:
    """Registers, predicates, the carry flag and memory of one thread."""

    r: list[int] = field(default_factory=lambda: [0xFFFFFFF0 + n for n in range(4)])
    p: list[bool] = field(default_factory=lambda: [True, False])
    carry: int = 0
    memory: dict[str, int] = field(default_factory=lambda: {"g": 11, "s": 22})
    seen: list[object] = field(default_factory=list)
    """What other threads see, in order."""
    exchanged: list[int] = field(default_factory=list)

    def add(self, d: int, value: int, *, sets_carry: bool = False) -> None:
        self.r[d] = value & MASK
        if sets_carry:
            self.carry = value >> 32

    def fence(self, name: str) -> None:
        self.seen.append((name, dict(self.memory)))
        self.memory = {k: v * 31 + len(self.seen) & MASK for k, v in self.memory.items()}

    def atomic(self, d: int, a: int) -> None:
        old = self.memory["g"]
        self.memory["g"] = old + self.r[a] & MASK
        self.fence("atom")
        self.r[d] = old

    def exchange(self, d: int, a: int) -> None:
        self.exchanged.append(self.r[a])
        self.r[d] = self.r[a] ^ len(self.exchanged)

    def unknown(self, d: int) -> None:
        self.exchange(d, d)
        self.fence("unknown")

    def compare(self, a: int, b: int) -> None:
        self.p = [self.r[a] < self.r[b], self.r[a] >= self.r[b]]


Operation = tuple[str, Callable[[Machine, int, int, int], None]]
"""A text with the registers {d}, {a} and {b}, and what it does."""

OPERATIONS: tuple[Operation, ...] = (
    ("add.u32 %r{d}, %r{a}, %r{b};", lambda m, d, a, b: m.add(d, m.r[a] + m.r[b])),
    ("add.cc.u32 %r{d}, %r{a}, %r{b};",
     lambda m, d, a, b: m.add(d, m.r[a] + m.r[b], sets_carry=True)),
    ("addc.u32 %r{d}, %r{a}, %r{b};", lambda m, d, a, b: m.add(d, m.r[a] + m.r[b] + m.carry)),
    ("addc.cc.u32 %r{d}, %r{a}, %r{b};",
     lambda m, d, a, b: m.add(d, m.r[a] + m.r[b] + m.carry, sets_carry=True)),
    ("@%p0 mov.b32 %r{d}, %r{a};", lambda m, d, a, b: m.add(d, m.r[a] if m.p[0] else m.r[d])),
    ("@!%p1 mov.b32 %r{d}, %r{a};", lambda m, d, a, b: m.add(d, m.r[d] if m.p[1] else m.r[a])),
    ("setp.lt.u32 %p0|%p1, %r{a}, %r{b};", lambda m, d, a, b: m.compare(a, b)),
    ("{{ .reg .b32 t; add.u32 t, %r{a}, %r{b}; mov.b32 %r{d}, t; }}",
     lambda m, d, a, b: m.add(d, m.r[a] + m.r[b])),
    ("ld.shared.b32 %r{d}, [s];", lambda m, d, a, b: m.add(d, m.memory["s"])),
    ("ld.global.b32 %r{d}, [g];", lambda m, d, a, b: m.add(d, m.memory["g"])),
    ("ld.b32 %r{d}, [%rd1];", lambda m, d, a, b: m.add(d, m.memory["s"])),
    ("st.shared.b32 [s], %r{a};", lambda m, d, a, b: m.memory.update(s=m.r[a])),
    ("@%p0 st.global.b32 [g], %r{a};",
     lambda m, d, a, b: m.memory.update(g=m.r[a] if m.p[0] else m.memory["g"])),
    ("st.b32 [%rd2], %r{a};", lambda m, d, a, b: m.memory.update(g=m.r[a])),
    ("atom.global.add.u32 %r{d}, [g], %r{a};", lambda m, d, a, b: m.atomic(d, a)),
    ("bar.sync 0;", lambda m, d, a, b: m.fence("barrier")),
    ("membar.gl;", lambda m, d, a, b: m.fence("membar")),
    ("frob.b32 %r{d};", lambda m, d, a, b: m.unknown(d)),
    ("shfl.sync.bfly.b32 %r{d}, %r{a}, 1, 31, -1;", lambda m, d, a, b: m.exchange(d, a)),
)  # fmt: skip

REGISTER = st.integers(0, 3)
BLOCKS = st.lists(
    st.tuples(st.sampled_from(OPERATIONS), REGISTER, REGISTER, REGISTER), min_size=2, max_size=14
)


@settings(max_examples=60)
@given(BLOCKS, st.integers(0, 2**32 - 1))
def test_legal_orders_compute_the_same(
    block: list[tuple[Operation, int, int, int]], seed: int
) -> None:
    body = "\n".join(operation[0].format(d=d, a=a, b=b) for operation, d, a, b in block)
    space = PtxSpace(module(f".shared .b32 s;\n{body}", outer=".global .b32 g;"))
    rng = np.random.default_rng(seed)
    expected = run(block, range(len(block)))
    state = space.start()
    for sigma in (3.0, 50.0, 50.0):
        state = space.reorder(state, rng, sigma)
        assert run(block, space.order(state, 0)) == expected
        move = space.propose(state, rng)
        if move is not None:
            assert run(block, space.order(space.apply(state, move), 0)) == expected


def run(block: list[tuple[Operation, int, int, int]], order: range | tuple[int, ...]) -> Machine:
    machine = Machine()
    for number in order:
        (_, effect), d, a, b = block[number]
        effect(machine, d, a, b)
    return machine
