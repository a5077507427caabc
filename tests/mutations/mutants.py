"""Seeded mutants of the corpus kernels, and the findings of each part of the verifier about one."""

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
from nostall.sass.safety.hazards.validator import HazardValidator
from nostall.sass.safety.order import order_findings
from nostall.sass.safety.structure import Mismatch, align
from nostall.sass.safety.symbolic.validator import SymbolicValidator
from nostall.sass.safety.verdict import Finding
from tests.mutations.async_violations import ASYNCHRONOUS
from tests.mutations.content_violations import CONTENTS
from tests.mutations.cover_violations import COVERS
from tests.mutations.edits import Mutation
from tests.mutations.kernels import all_functions, special_functions
from tests.mutations.memory_order_violations import MEMORY_ORDERS
from tests.mutations.order_violations import ORDERS
from tests.mutations.scoreboard_violations import SCOREBOARDS
from tests.mutations.timing_violations import TIMINGS

MUTATIONS: dict[str, Mutation] = {
    **SCOREBOARDS,
    **TIMINGS,
    **ORDERS,
    **CONTENTS,
    **MEMORY_ORDERS,
    **ASYNCHRONOUS,
    **COVERS,
}
"""Kind of violation -> the mutation that creates it."""

SPECIAL_KINDS = frozenset((*MEMORY_ORDERS, *ASYNCHRONOUS, *COVERS))
"""Kinds whose constructs are only in the cubins ``kernels.SPECIAL``."""


@dataclass(frozen=True)
class Mutant:
    """One seeded violation in one function."""

    kind: str
    cubin: str
    program: Program
    """The original program."""
    function: Function
    """The original function."""
    data: bytes
    """The changed cubin."""

    def __str__(self) -> str:
        return f"{self.kind} in {self.cubin}, {self.function.name}"


def mutants(kind: str, count: int, per_function: int) -> Iterator[Mutant]:
    """Up to ``count`` different mutants of a kind, from fixed seeds.

    The first pass takes up to ``per_function`` of each function.  If these are too few, a second
    pass takes up to four times as many.
    """
    made: set[bytes] = set()
    for most in (per_function, 4 * per_function):
        functions = special_functions() if kind in SPECIAL_KINDS else all_functions()
        for cubin, program, function in functions:
            rng = random.Random(zlib.crc32(f"{kind} {cubin} {function.name} {most}".encode()))
            from_function = 0
            for _ in range(2 * most):
                if len(made) >= count:
                    return
                data = MUTATIONS[kind](program, function, rng) if from_function < most else None
                if data is None:
                    break
                if data not in made and data != program.cubin.data:
                    made.add(data)
                    from_function += 1
                    yield Mutant(kind, cubin, program, function, data)


@dataclass(frozen=True)
class PartResults:
    """What rejects a mutant: the parser, or the findings of each part of the verifier."""

    unreadable: bool
    structure: bool
    hazards: tuple[Finding, ...]
    """Of the hazard validator, without the check of the order."""
    order: tuple[Finding, ...]
    symbolic: tuple[Finding, ...]

    @property
    def rejected(self) -> bool:
        """Whether the parser or any part of the verifier rejects the mutant."""
        return bool(not self.judged or self.hazards or self.order or self.symbolic)

    @property
    def judged(self) -> bool:
        """Whether parser and structure check accept the mutant, so that the halves judge it."""
        return not (self.unreadable or self.structure)


def parse_known_words(program: Program, data: bytes) -> Program:
    """Parse a changed cubin without nvdisasm, which makes it much faster.

    Words that the original has are known from there.  Any other word keeps the text and the
    registers of the word that it replaces.
    """
    known = [{i.payload: i for i in function.instructions} for function in program.functions]
    functions: list[Function] = []
    for function, by_payload in zip(program.functions, known, strict=True):
        start = function.text.file_offset
        order: list[Instruction] = []
        for index in range(len(function.instructions)):
            word = data[start + 16 * index : start + 16 * index + 16]
            payload, control = encoding.decode(int.from_bytes(word, "little"))
            instruction = by_payload.get(payload, function.instructions[index])
            order.append(replace(instruction, index=index, payload=payload, control=control))
        functions.append(replace(function, instructions=tuple(order)))
    return Program(Cubin.parse(data), tuple(functions))


def only(program: Program, function: Function) -> Program:
    """A program as if its cubin held this function alone, for edits that change no other.

    Bytes outside the function are still compared: they are taken from the cubin.
    """
    return replace(program, functions=(function,))


def check_by_part(mutant: Mutant, *, disassemble: bool) -> PartResults:
    """Check the mutated function with each part of the verifier separately.

    ``disassemble``: parse the mutant with nvdisasm, not with :func:`parse_known_words`.
    """
    original = only(mutant.program, mutant.function)
    try:
        if disassemble:
            changed = Program.from_cubin(mutant.data)
            changed = only(changed, changed.function(mutant.function.name))
        else:
            changed = parse_known_words(original, mutant.data)
    except BadBinary:
        return PartResults(True, False, (), (), ())
    try:
        after = align(original, changed).function(mutant.function.name)
    except Mismatch:
        return PartResults(False, True, (), (), ())
    before, sm = mutant.function, mutant.program.sm
    return PartResults(
        unreadable=False,
        structure=False,
        hazards=tuple(HazardValidator(sm).compare(before, after)),
        order=tuple(order_findings(before, after)),
        symbolic=tuple(SymbolicValidator(sm).compare(before, after)),
    )
