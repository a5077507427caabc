"""The verifier accepts edits that are safe by construction."""

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
from tests.mutations.edits import Edit, apply_edit
from tests.mutations.kernels import all_functions, cubin_paths, read_program, smallest_cubins
from tests.mutations.legal_edits import LEGAL
from tests.mutations.mutants import only, parse_known_words

COUNT = 16 if catalogue.slice_step() <= 12 else 4
"""Number of edits of each kind that are checked."""


def _edited_cubins(kind: str) -> Iterator[tuple[str, Program, Function, bytes]]:
    """(name, original program, edited function, edited cubin) of one kind, from fixed seeds."""
    for cubin, program, function in all_functions():
        rng = random.Random(zlib.crc32(f"{kind} {cubin} {function.name}".encode()))
        edited = {LEGAL[kind](program, function, rng) for _ in range(4)} - {None}
        for data in sorted(d for d in edited if d is not None)[:2]:
            yield f"{cubin} {function.name}", program, function, data


@pytest.mark.parametrize("kind", LEGAL)
def test_every_legal_edit_is_accepted(kind: str) -> None:
    cubins = list(islice(_edited_cubins(kind), COUNT))
    assert len(cubins) >= (COUNT if catalogue.slice_step() == 1 else 1)
    _, first, _, edited = cubins[0]
    assert verify_program(first, Program.from_cubin(edited)).safe
    for name, program, function, data in cubins:
        assert kind == "no change" or data != program.cubin.data
        original = only(program, function)  # the edit leaves the other functions as they are
        verdict = verify_program(original, parse_known_words(original, data))
        assert verdict.safe, (name, [str(finding) for finding in verdict.findings[:3]])


def test_undoing_a_swap_restores_the_original_bytes() -> None:
    for path in smallest_cubins(6 if catalogue.slice_step() <= 12 else 3):
        original = read_program(path)
        for function in original.functions:
            middle = next(b.start for b in function.blocks if len(b) > 2)
            swapped = apply_edit(original, function, Edit(move=(middle, middle + 1)))
            program = Program.from_cubin(swapped)
            undo = Edit(move=(middle, middle + 1))
            restored = apply_edit(program, program.function(function.name), undo)
            assert swapped != original.cubin.data
            assert restored == original.cubin.data


def test_a_cubin_verifies_against_itself() -> None:
    data = cubin_paths()[0].read_bytes()
    verdict = verify(data, data)
    assert verdict.safe
    assert verdict.checked > 0


def test_a_wait_for_an_asynchronous_operation_may_move_earlier() -> None:
    """An earlier wait ends the operation, so the original waiter finds it done."""
    program = read_program(catalogue.NVCC / "hopper.sm_90a.cubin")
    function = program.function("specialised_gemm")
    arrive, early, late = (function.instructions[at] for at in (0x1C8, 0x1DE, 0x18B))
    assert arrive.control.read_sb == 2 and arrive.base == "SYNCS"
    assert 2 in late.control.waits and 2 not in early.control.waits
    control = early.control.with_(wait=early.control.wait | 1 << 2)
    data = apply_edit(program, function, Edit({early.index: control}))
    assert verify_program(program, parse_known_words(program, data)).safe
