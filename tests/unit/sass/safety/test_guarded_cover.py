"""A result that only a later instruction with a guard proves: what a candidate may rely on.

Each case is legal compiler output in which an instruction and a later one of its queue have
scoreboards of their own.  The candidate waits for the later one's in place of the first one's.
"""

from collections.abc import Iterator
from typing import NamedTuple

import pytest
from tests.corpus.catalogue import NVCC
from tests.mutations.mutants import only, parse_known_words

from nostall.sass import Program
from nostall.sass.binary.encoding import WORD_BYTES
from nostall.sass.program import Function
from nostall.sass.program.cover_rules import WITNESSED, WITNESSED_GUARDED, Claim, OrderedPair, group
from nostall.sass.safety.verify import verify_program

CUBINS = ("unit_order.sm_80", "unit_order.sm_90", "warps.lines.sm_90", "arithmetic.sm_80")
GUARD_SHIFT, ALWAYS = 12, 7
"""Bits 12 to 14 of a word are its guard predicate; 7 is PT."""


class Case(NamedTuple):
    program: Program
    function: Function
    first: int
    later: int
    reader: int


def cases(queue: str) -> Iterator[Case]:
    """Places in which the later one of two instructions of a group could cover the first one."""
    for name in CUBINS:
        program = Program.from_cubin((NVCC / f"{name}.cubin").read_bytes())
        for function in program.functions:
            for block in function.blocks:
                if not block.adjoins_unknown_code:
                    yield from _in_block(program, function, range(block.start, block.end), queue)


def _in_block(program: Program, function: Function, block: range, queue: str) -> Iterator[Case]:
    order = function.instructions
    members = [
        at
        for at in block
        if group(order[at], program.sm) == queue and order[at].control.write_sb < 6
    ]
    for first in members:
        own = order[first].control.write_sb
        users = [k for k in block if k > first and set(order[first].defs) & set(order[k].uses)]
        waiters = [k for k in block if k > first and own in order[k].control.waits]
        if not users or waiters[:1] != users[:1]:
            continue
        reader = users[0]
        for later in members:
            other = order[later].control.write_sb
            near = sum(i.control.stall for i in order[later:reader]) < 2
            clean = not order[later].is_guarded and not near
            boards = [order[k].control.write_sb for k in range(first + 1, reader)]
            if first < later < reader and other != own and clean and boards.count(other) == 1:
                yield Case(program, function, first, later, reader)


def _verdict(case: Case, *, guarded: bool) -> bool:
    """Whether the candidate is safe; ``guarded``: the later instruction has the guard P6."""
    data = bytearray(case.program.cubin.data)
    if guarded:
        at = case.function.text.file_offset + case.later * WORD_BYTES + GUARD_SHIFT // 8
        assert data[at] >> GUARD_SHIFT % 8 & 7 == ALWAYS
        data[at] ^= (ALWAYS ^ 6) << GUARD_SHIFT % 8
    original = Program.from_cubin(bytes(data))
    function = original.function(case.function.name)
    original = only(original, function)
    assert verify_program(original, original).safe
    order = list(function.instructions)
    own, other = (order[k].control.write_sb for k in (case.first, case.later))
    control = order[case.reader].control
    wait = control.wait & ~(1 << own) | 1 << other
    order[case.reader] = order[case.reader].with_control(control.with_(wait=wait))
    candidate = original.with_function(function.reordered(order)).to_cubin()
    verdict = verify_program(original, parse_known_words(original, candidate))
    assert verdict.safe or {f.kind for f in verdict.findings} <= {
        *("unwitnessed-order", "exit-weaker", "entry-weaker", "lost-order", "order-weaker")
    }
    return verdict.safe


@pytest.mark.parametrize("queue", ["bit-counts", "functions"])
def test_only_a_witnessed_queue_covers_behind_a_guard(queue: str) -> None:
    pair = OrderedPair(Claim.RESULT, queue, queue)
    assert pair in WITNESSED
    legal = next((c for c in cases(queue) if _verdict(c, guarded=False)), None)
    assert legal is not None
    assert _verdict(legal, guarded=True) == (pair in WITNESSED_GUARDED)


def test_what_compilers_let_a_guarded_instruction_prove() -> None:
    proven = {pair.earlier for pair in WITNESSED_GUARDED if pair.order is Claim.RESULT}
    assert proven == {"functions"}
    assert not proven & {"S2UR", "bit-counts", "double-conversions"}
