"""The verifier's own test is the field: it accepts everything compilers emit.

For every cubin: round trip byte-identical, ``validate`` and ``verify`` accept it, no opcode is
skipped silently.  ``make test`` takes every fifth cubin (NOSTALL_CORPUS_SLICE=5), more than 200
kernels; ``make test NOSTALL_CORPUS_SLICE=1`` takes all.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from nostall.sass import Program
from nostall.sass.binary.cubin import Cubin
from nostall.sass.safety import validate_program, verify_program
from tests.corpus.catalogue import corpus, every

CUBINS = corpus()


def name(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


@pytest.mark.parametrize("path", CUBINS, ids=name)
def test_compiler_output_is_accepted(path: Path) -> None:
    data = path.read_bytes()
    program = Program.from_cubin(data)
    assert program.to_cubin() == data
    unmodelled = {i.base for f in program.functions for i in f.instructions if not i.known}
    assert not unmodelled
    alone = validate_program(program)
    assert alone.safe, "\n".join(map(str, alone.findings[:5]))
    against_itself = verify_program(program, program)  # the bytes are equal: what is read is too
    assert against_itself.safe, "\n".join(map(str, against_itself.findings[:5]))
    assert alone.checked == against_itself.checked > 0


def test_the_slice_is_large_enough() -> None:
    kernels = sum(len(Cubin.parse(path.read_bytes()).texts) for path in CUBINS)
    assert kernels >= 200 or every() > 5
