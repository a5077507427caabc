"""Edits that are safe by construction are accepted: the verifier does not just say no."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from itertools import islice

import pytest

from nostall.sass import Program, verify
from nostall.sass.program import Function
from nostall.sass.safety.verify import verify_program
from tests.corpus import catalogue
from tests.mutations.edits import Edit, perform
from tests.mutations.judging import reread
from tests.mutations.kernels import functions, paths, read, smallest
from tests.mutations.legal import LEGAL

COUNT = 16


def _edited(kind: str) -> Iterator[tuple[str, Program, bytes]]:
    for cubin, program, function in functions():
        rng = random.Random(zlib.crc32(f"{kind} {cubin} {function.name}".encode()))
        found = {LEGAL[kind](program, function, rng) for _ in range(4)} - {None}
        for data in sorted(d for d in found if d is not None)[:2]:
            yield f"{cubin} {function.name}", program, data


@pytest.mark.parametrize("kind", LEGAL)
def test_every_legal_edit_is_accepted(kind: str) -> None:
    made = list(islice(_edited(kind), COUNT))
    assert len(made) >= (COUNT if catalogue.every() == 1 else 1)
    assert verify_program(made[0][1], Program.from_cubin(made[0][2])).safe
    for name, program, data in made:
        assert kind == "no change" or data != program.cubin.data
        verdict = verify_program(program, reread(program, data))
        assert verdict.safe, (name, [str(finding) for finding in verdict.findings[:3]])


def test_a_swap_undone_gives_the_original_bytes() -> None:
    for path in smallest(6):
        original = read(path)
        for function in original.functions:
            middle = next(b.start for b in function.blocks if len(b) > 2)
            swapped = perform(original, function, Edit(move=(middle, middle + 1)))
            again = Program.from_cubin(swapped)
            back = perform(again, _named(again, function), Edit(move=(middle, middle + 1)))
            assert swapped != original.cubin.data
            assert back == original.cubin.data


def _named(program: Program, function: Function) -> Function:
    return program.function(function.name)


def test_bytes_verify_against_themselves() -> None:
    data = paths()[0].read_bytes()
    verdict = verify(data, data)
    assert verdict.safe
    assert verdict.checked > 0


def test_a_wait_for_an_asynchronous_operation_may_come_earlier() -> None:
    """Who waited for it before then finds it done."""
    program = read(catalogue.NVCC / "hopper.sm_90a.cubin")
    function = program.function("specialised_gemm")
    arrive, early, late = (function.instructions[at] for at in (0x1C8, 0x1DE, 0x18B))
    assert arrive.control.read_sb == 2 and arrive.base == "SYNCS"
    assert 2 in late.control.waits and 2 not in early.control.waits
    control = early.control.with_(wait=early.control.wait | 1 << 2)
    data = perform(program, function, Edit({early.index: control}))
    assert verify_program(program, reread(program, data)).safe
