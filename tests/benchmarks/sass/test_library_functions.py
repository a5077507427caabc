"""Functions of libraries as programs: what the machine code alone does not tell is in the cubin."""

from collections.abc import Sequence

import pytest
from benchmarks.sass.verifier.library_functions import programs
from tools.mining.functions import CodeFunction

from nostall.sass import Program
from nostall.sass.binary.cubin import Cubin
from nostall.sass.binary.subset import cut
from tests.corpus.catalogue import NVCC


def _functions(name: str, sm: int) -> Sequence[CodeFunction]:
    """All functions of a cubin of the corpus."""
    cubin = Cubin.parse((NVCC / f"{name}.sm_{sm}.cubin").read_bytes())
    flags = int.from_bytes(cubin.data[0x30:0x34], "little")
    return [
        CodeFunction(
            bytes([number]),
            sm,
            flags,
            "13.0",
            cubin.data[text.file_offset : text.file_offset + text.size],
            (),
            cut(cubin.elf, (text.name,)),
        )
        for number, text in enumerate(cubin.texts)
    ]


@pytest.mark.parametrize(
    "sm", [90, *(pytest.param(sm, marks=pytest.mark.slow) for sm in (75, 80, 100, 120))]
)
def test_functions_with_jump_tables_are_read(sm: int) -> None:
    functions = _functions("calls", sm)
    read = list(programs(functions))
    assert all(isinstance(program, Program) for program in read), read
    names = [program.functions[0].name for program in read if isinstance(program, Program)]
    assert "jump_table" in names
