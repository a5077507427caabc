"""The verifier accepts all compiler output of the corpus.

For each cubin the round trip is byte-identical, ``validate`` and ``verify`` accept it, and the
opcode table has all its opcodes.  ``make test`` takes every 48th cubin
(NOSTALL_CORPUS_SLICE=48), ``make test-slow`` every twelfth;
``make test NOSTALL_CORPUS_SLICE=1`` takes all.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from nostall.sass import Program
from nostall.sass.binary.cubin import Cubin
from nostall.sass.safety import validate_program, verify_program
from tests.corpus.catalogue import corpus, slice_step

CUBINS = corpus()


def cubin_name(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


@pytest.mark.parametrize("path", CUBINS, ids=cubin_name)
def test_compiler_output_is_accepted(path: Path) -> None:
    data = path.read_bytes()
    program = Program.from_cubin(data)
    assert program.to_cubin() == data
    unmodelled = {
        i.base for f in program.functions for i in f.instructions if not i.is_known_opcode
    }
    assert not unmodelled
    alone = validate_program(program)
    assert alone.safe, "\n".join(map(str, alone.findings[:5]))
    # The round trip gives equal bytes, so parsing them again would give an equal program.
    against_itself = verify_program(program, program)
    assert against_itself.safe, "\n".join(map(str, against_itself.findings[:5]))
    assert alone.checked == against_itself.checked > 0


def test_the_default_slice_has_200_kernels() -> None:
    kernels = sum(len(Cubin.parse(path.read_bytes()).texts) for path in CUBINS)
    assert kernels >= 200 or slice_step() > 5
