"""Seeded mutants and what each half of the verifier says about them, alone."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

from nostall.core.errors import BadBinary
from nostall.sass import Program
from nostall.sass.binary import encoding
from nostall.sass.binary.cubin import Cubin
from nostall.sass.program import Function, Instruction
from nostall.sass.safety.hazards import HazardValidator
from nostall.sass.safety.order import order_findings
from nostall.sass.safety.structure import Mismatch, align
from nostall.sass.safety.symbolic import SymbolicValidator
from nostall.sass.safety.verdict import Finding
from tests.mutations.contents import CONTENTS
from tests.mutations.edits import Mutation
from tests.mutations.kernels import functions
from tests.mutations.orders import ORDERS
from tests.mutations.scoreboards import SCOREBOARDS
from tests.mutations.timings import TIMINGS

KINDS: dict[str, Mutation] = {**SCOREBOARDS, **TIMINGS, **ORDERS, **CONTENTS}


@dataclass(frozen=True)
class Mutant:
    """One seeded violation of one function."""

    kind: str
    cubin: str
    program: Program
    function: Function
    data: bytes

    def __str__(self) -> str:
        return f"{self.kind} in {self.cubin}, {self.function.name}"


def mutants(kind: str, count: int, each: int) -> Iterator[Mutant]:
    """Up to ``count`` different mutants of a kind, seeded: ``each`` per function, and more of
    them from the same functions when that is not enough."""
    made: set[bytes] = set()
    for most in (each, 4 * each):
        for cubin, program, function in functions():
            rng = random.Random(zlib.crc32(f"{kind} {cubin} {function.name} {most}".encode()))
            here = 0
            for _ in range(2 * most):
                if len(made) >= count:
                    return
                data = KINDS[kind](program, function, rng) if here < most else None
                if data is None:
                    break
                if data not in made and data != program.cubin.data:
                    made.add(data)
                    here += 1
                    yield Mutant(kind, cubin, program, function, data)


@dataclass(frozen=True)
class Opinions:
    """What refused a mutant: the reader (not a cubin any more), or findings by half."""

    unreadable: bool
    structure: bool
    hazards: tuple[Finding, ...]
    symbolic: tuple[Finding, ...]

    @property
    def refused(self) -> bool:
        return bool(self.unreadable or self.structure or self.hazards or self.symbolic)


def reread(program: Program, data: bytes) -> Program:
    """What :meth:`Program.from_cubin` makes of ``data``, without disassembling it: words that the
    original has are known, any other word keeps the text and registers of the one it replaced."""
    known = [{i.payload: i for i in function.instructions} for function in program.functions]
    found: list[Function] = []
    for function, texts in zip(program.functions, known, strict=True):
        at = function.text.at
        order: list[Instruction] = []
        for index in range(len(function.instructions)):
            word = data[at + 16 * index : at + 16 * index + 16]
            payload, control = encoding.decode(int.from_bytes(word, "little"))
            here = texts.get(payload, function.instructions[index])
            order.append(replace(here, index=index, payload=payload, control=control))
        found.append(replace(function, instructions=tuple(order)))
    return Program(Cubin.parse(data), tuple(found))


def opinions(mutant: Mutant, *, full: bool) -> Opinions:
    """Ask each half separately, about the mutated function; ``full`` disassembles again."""
    try:
        read = Program.from_cubin(mutant.data) if full else reread(mutant.program, mutant.data)
    except BadBinary:
        return Opinions(True, False, (), ())
    try:
        after = align(mutant.program, read).function(mutant.function.name)
    except Mismatch:
        return Opinions(False, True, (), ())
    before, sm = mutant.function, mutant.program.sm
    hazards = [*HazardValidator(sm).compare(before, after), *order_findings(before, after)]
    symbolic = SymbolicValidator(sm).compare(before, after)
    return Opinions(False, False, tuple(hazards), tuple(symbolic))
