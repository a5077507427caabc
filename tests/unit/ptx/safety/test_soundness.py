"""The validator against an interpreter: an order that it accepts gives the same results.

The programs are random, with few registers and addresses, so that most orders of them are wrong.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from nostall.ptx.safety.validate import Validator
from tests.unit.ptx.safety.texts import kernel

_MASK = 0xFFFFFFFF
_REGISTERS, _PREDICATES, _ADDRESSES = 4, 2, 2


@dataclass
class _Machine:
    """One thread with two memory spaces and a device-wide counter."""

    registers: list[int]
    predicates: list[bool]
    memory: dict[tuple[str, int], int]
    carry: bool = False
    counter: int = 0
    effects: list[int] = field(default_factory=list[int])

    @classmethod
    def random(cls, seed: int) -> _Machine:
        rng = random.Random(seed)
        memory = {(s, a): rng.getrandbits(32) for s in "gs" for a in range(_ADDRESSES)}
        registers = [rng.getrandbits(32) for _ in range(_REGISTERS)]
        return cls(registers, [rng.random() < 0.5 for _ in range(_PREDICATES)], memory)

    def run(self, code: list[_Code]) -> tuple[object, ...]:
        for opcode, guard, a, b, c in code:
            if guard is None or self.predicates[guard[1]] is not guard[0]:
                self._execute(opcode, a, b, c)
        state = (self.registers, self.predicates, self.memory, self.counter, self.effects)
        return (*map(str, state), self.carry)

    def _execute(self, opcode: str, a: int, b: int, c: int) -> None:
        r = self.registers
        if opcode in ("add", "addcc", "addc"):
            total = r[b] + r[c] + (opcode == "addc" and self.carry)
            r[a] = total & _MASK
            if opcode == "addcc":
                self.carry = total > _MASK
        elif opcode == "xor":
            r[a] = r[b] ^ r[c]
        elif opcode == "setp":
            self.predicates[a % _PREDICATES] = r[b] < r[c]
        elif opcode == "ldg":
            r[a] = self.memory["g", b % _ADDRESSES]
        elif opcode == "lds":
            r[a] = self.memory["s", b % _ADDRESSES]
        elif opcode == "stg":
            self.memory["g", a % _ADDRESSES] = r[b]
        elif opcode == "sts":
            self.memory["s", a % _ADDRESSES] = r[b]
        elif opcode == "atom":
            r[a], self.counter = self.counter, (self.counter + r[b]) & _MASK
        elif opcode == "vol":
            self.effects.append(r[a])


_Guard = tuple[bool, int] | None
_Code = tuple[str, _Guard, int, int, int]
"""Opcode, (negated, predicate) or None, three operand numbers."""
_TEXTS = {
    "add": "add.u32 %r{a}, %r{b}, %r{c};",
    "addcc": "add.cc.u32 %r{a}, %r{b}, %r{c};",
    "addc": "addc.u32 %r{a}, %r{b}, %r{c};",
    "xor": "xor.b32 %r{a}, %r{b}, %r{c};",
    "setp": "setp.lt.u32 %p{ap}, %r{b}, %r{c};",
    "ldg": "ld.global.b32 %r{a}, [%rd{ba}];",
    "lds": "ld.shared.b32 %r{a}, [buffer+{ba}];",
    "stg": "st.global.b32 [%rd{aa}], %r{b};",
    "sts": "st.shared.b32 [buffer+{aa}], %r{b};",
    "atom": "atom.global.add.u32 %r{a}, [%rd5], %r{b};",
    "vol": "st.volatile.global.b32 [%rd6], %r{a};",
}
_CODE = st.tuples(
    st.sampled_from(sorted(_TEXTS)),
    st.none() | st.tuples(st.booleans(), st.integers(0, _PREDICATES - 1)),
    *(st.integers(0, _REGISTERS - 1) for _ in range(3)),
)


def _text(code: list[_Code]) -> str:
    lines: list[str] = []
    for opcode, guard, a, b, c in code:
        prefix = "" if guard is None else f"@{'!' if guard[0] else ''}%p{guard[1]} "
        operands = {"a": a, "b": b, "c": c, "ap": a % _PREDICATES}
        operands |= {"aa": a % _ADDRESSES, "ba": b % _ADDRESSES}
        lines.append(prefix + _TEXTS[opcode].format(**operands))
    return kernel("\n".join(lines))


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.lists(_CODE, min_size=2, max_size=9), st.randoms(use_true_random=False))
def test_an_accepted_order_computes_the_same(code: list[_Code], rng: random.Random) -> None:
    validator = Validator(_text(code))
    for _ in range(8):
        order = list(code)
        if rng.random() < 0.7:
            at = rng.randrange(len(order) - 1)
            order[at], order[at + 1] = order[at + 1], order[at]
        else:
            rng.shuffle(order)
        if validator.check(_text(order)).accepted:
            for seed in range(6):
                assert _Machine.random(seed).run(code) == _Machine.random(seed).run(order)


def test_the_random_programs_have_legal_and_illegal_exchanges() -> None:
    rng = random.Random(0)
    accepted = 0
    for _ in range(100):
        code: list[_Code] = []
        for _ in range(4):
            a, b, c = (rng.randrange(_REGISTERS) for _ in range(3))
            code.append((rng.choice(sorted(_TEXTS)), None, a, b, c))
        order = [code[0], code[2], code[1], code[3]]
        accepted += Validator(_text(code)).check(_text(order)).accepted
    assert 20 <= accepted <= 80
