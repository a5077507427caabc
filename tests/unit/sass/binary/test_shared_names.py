"""Linked files may have local functions of one name; each is a function of its own."""

import struct

import pytest
from tests.corpus.catalogue import NVCC

from nostall.core.errors import BadBinary
from nostall.sass import Program, verify
from nostall.sass.binary.cubin import Cubin
from nostall.sass.binary.elf import ELF_SYMBOL
from nostall.sass.program import Function
from nostall.sass.schedule import ScheduleSpace

DATA = (NVCC / "linked.sm_80.cubin").read_bytes()
DIVISION = "__cuda_sm20_div_u64"


def _moved(program: Program, function: Function) -> bytes:
    """The cubin after the first legal move of a function."""
    space = ScheduleSpace(program, function)
    state = space.start()
    return space.impose(space.apply(state, next(iter(space.moves(state))))).to_cubin()


def test_both_functions_are_read() -> None:
    program = Program.from_cubin(DATA)
    names = [function.name for function in program.functions]
    assert names == [DIVISION, "first", f"{DIVISION}#2", "second"]
    assert program.to_cubin() == DATA
    assert verify(DATA, DATA).safe


@pytest.mark.parametrize("name", ["first", "second"])
def test_a_kernel_beside_them_moves_alone(name: str) -> None:
    program = Program.from_cubin(DATA)
    candidate = _moved(program, program.kernel(name))
    assert candidate != DATA
    assert verify(DATA, candidate).safe
    (one,) = Program.of_kernel(DATA, name).functions
    both = zip(one.instructions, program.kernel(name).instructions, strict=True)
    assert all(a.payload == b.payload and a.defs == b.defs for a, b in both)


def test_each_has_its_own_code() -> None:
    """A word of the second one is changed: the finding names it."""
    second = Program.from_cubin(DATA).function(f"{DIVISION}#2")
    broken = bytearray(DATA)
    broken[second.text.file_offset + 2] ^= 1
    verdict = verify(DATA, bytes(broken))
    assert not verdict.safe
    assert {finding.function for finding in verdict.findings} == {f"{DIVISION}#2"}


def test_functions_that_the_whole_file_knows_share_no_name() -> None:
    """With global symbols the file is damaged."""
    damaged = bytearray(DATA)
    for section in Cubin.parse(DATA).elf.sections:
        if section.name == ".symtab":
            for at in range(section.offset, section.offset + section.size, ELF_SYMBOL.size):
                (kind,) = struct.unpack_from("<B", damaged, at + 4)
                if kind & 15 == 2:
                    damaged[at + 4] = kind | 16
    with pytest.raises(BadBinary, match="appears twice, but only local functions"):
        Cubin.parse(bytes(damaged))
