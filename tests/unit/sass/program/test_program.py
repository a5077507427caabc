"""Programs: bytes in, the same bytes out; what moves takes its records along."""

from __future__ import annotations

import itertools
import struct
from pathlib import Path

import pytest
from tests.corpus import catalogue
from tests.unit.sass.binary.cubin_builder import PROGBITS, Part, attribute, elf, info, relocations

from nostall.core.errors import BadInput, MissingPart, UnsupportedArchitecture
from nostall.sass import Function, Program
from nostall.sass.binary.cubin import Cubin
from nostall.sass.binary.listing import Listing, Row, disassemble

NVCC = catalogue.NVCC


def program(name: str) -> Program:
    return Program.from_cubin((NVCC / f"{name}.cubin").read_bytes())


def listed(cubin: Cubin) -> dict[str, Listing]:
    """A listing of words that are not looked at, for files that the vendor's tool skips."""
    found = {}
    for text in cubin.texts:
        code = cubin.data[text.at : text.at + text.size]
        words = [int.from_bytes(code[i : i + 16], "little") for i in range(0, len(code), 16)]
        rows = tuple(Row(16 * i, "NOP", word, (), ()) for i, word in enumerate(words))
        found[text.name] = Listing(text.name, rows, {})
    return found


def small(monkeypatch: pytest.MonkeyPatch, *parts: Part) -> Program:
    """A function ``k`` of four words that differ, with these parts."""
    monkeypatch.setattr("nostall.sass.program.program.disassemble", listed)
    code = b"".join((i << 64 | 0x7918).to_bytes(16, "little") for i in range(4))
    return Program.from_cubin(elf(Part(".text.k", PROGBITS, code), *parts))


def exchanged(function: Function, at: int) -> Function:
    """The function with the instructions at ``at`` and ``at + 1`` exchanged."""
    order = list(function.instructions)
    order[at], order[at + 1] = order[at + 1], order[at]
    return function.reordered(order)


def round_trip_slice() -> list[Path]:
    triton = catalogue.triton_corpus()
    return [*catalogue.nvcc_corpus()[::6], *triton[:: max(1, len(triton) // 10)]]


def test_what_is_not_changed_stays_identical() -> None:
    variants = set()
    for path in round_trip_slice():
        data = path.read_bytes()
        variants.add(data[7])
        assert Program.from_cubin(data).to_cubin() == data, path
    assert variants == {51, 65}


def test_exchanging_twice_gives_the_same_bytes() -> None:
    before = program("warps.sm_90")
    data = before.cubin.data
    for function in before.functions[:4]:
        there = exchanged(function, 1)
        changed = before.with_function(there).to_cubin()
        assert changed != data
        assert before.with_function(exchanged(there, 1)).to_cubin() == data


def test_an_exchange_changes_two_words_only() -> None:
    before = program("tensor.sm_75")
    function = before.kernel("transpose_8x8")
    data, changed = before.cubin.data, before.with_function(exchanged(function, 1)).to_cubin()
    at = function.text.at + 16
    assert changed[at : at + 32] == data[at + 16 : at + 32] + data[at : at + 16]
    assert changed[:at] + changed[at + 32 :] == data[:at] + data[at + 32 :]


def recorded(data: bytes, name: str) -> list[tuple[str, int]]:
    """What the tool prints at each recorded offset of a function."""
    cubin = Cubin.parse(data)
    rows = {row.offset: row.text for row in disassemble(cubin)[name].rows}
    text = next(t for t in cubin.texts if t.name == name)
    return [(rows.get(r.offset, ""), r.at) for r in text.records]


@pytest.mark.parametrize(
    ("file", "kernel", "mnemonic", "source"),
    [
        ("warps.sm_90", "shuffles", "SHFL", "COOP_GROUP_INSTR_OFFSETS"),
        ("clusters.sm_90", "barrier_pipeline", "SYNCS", "MBARRIER_INSTR_OFFSETS"),
        ("warps.sm_90", "grid_sync", "EXIT", "EXIT_INSTR_OFFSETS"),
    ],
)
def test_records_move_with_their_instruction(
    file: str, kernel: str, mnemonic: str, source: str
) -> None:
    before = program(file)
    function = before.kernel(kernel)
    record = next(
        r
        for r in function.text.records
        if r.source == source and function.instructions[r.offset // 16].base == mnemonic
    )
    at = record.offset // 16
    after = before.with_function(exchanged(function, at - 1)).to_cubin()
    assert struct.unpack_from("<I", after, record.at) == (record.offset - 16,)
    told = {place: text for text, place in recorded(after, kernel)}
    assert mnemonic in told[record.at]
    assert [text for text, _ in recorded(after, kernel)] == [
        text for text, _ in recorded(before.cubin.data, kernel)
    ]
    again = Program.from_cubin(after).function(kernel)
    expected = [i.text for i in exchanged(function, at - 1).instructions]
    assert [i.text for i in again.instructions] == expected


def test_targets_of_indirect_branches_stay() -> None:
    before = program("calls.sm_90")
    function = before.kernel("jump_table")
    records = [r for r in function.text.records if r.source == "INDIRECT_BRANCH_TARGETS"]
    branches = [r for r in records if not r.fixed]
    targets = [r for r in records if r.fixed]
    assert branches and len(targets) > len(branches)
    assert {function.instructions[r.offset // 16].base for r in branches} == {"BRX"}
    at = targets[0].offset // 16
    after = before.with_function(exchanged(function, at)).to_cubin()
    for record in targets:
        assert struct.unpack_from("<I", after, record.at) == (record.offset,)


def test_relocations_move_with_their_instruction(monkeypatch: pytest.MonkeyPatch) -> None:
    """A relocation patches bytes inside an instruction: they move by whole words."""
    patches = relocations((0x14, 5), (0x28, 6), target=1)
    before = small(monkeypatch, info(attribute(0x1C, 0x10)), patches)
    function = before.function("k")
    order = [function.instructions[i] for i in (2, 0, 1, 3)]
    after = Cubin.parse(before.with_function(function.reordered(order)).to_cubin())
    assert {r.type: r.offset for r in after.elf.relocations()} == {5: 0x24, 6: 0x08}
    assert [r.offset for r in after.texts[0].records if r.width == 4] == [0x20]
    code = after.data[after.texts[0].at : after.texts[0].at + 64]
    assert [code[i + 8] for i in range(0, 64, 16)] == [2, 0, 1, 3]


def test_control_words_are_written() -> None:
    before = program("tensor.sm_75")
    function = before.kernel("transpose_8x8")
    order = list(function.instructions)
    order[2] = order[2].with_control(order[2].control.with_(stall=9, wait=0b10))
    after = before.with_function(function.reordered(order)).to_cubin()
    changed = [i for i, (a, b) in enumerate(zip(before.cubin.data, after, strict=True)) if a != b]
    assert changed and all(function.text.at + 32 <= i < function.text.at + 48 for i in changed)
    control = Program.from_cubin(after).kernel("transpose_8x8").instructions[2].control
    assert (control.stall, control.wait) == (9, 0b10)


@pytest.mark.parametrize("change", ["lost", "twice", "empty"])
def test_an_order_must_be_a_permutation(change: str) -> None:
    function = program("tensor.sm_75").kernel("transpose_8x8")
    order = list(function.instructions)
    wrong = {"lost": order[1:], "twice": [*order[1:], order[1]], "empty": []}[change]
    with pytest.raises(BadInput, match="not a permutation of its 16 instructions"):
        function.reordered(wrong)


def test_kernels_and_functions_of_a_file() -> None:
    found = program("calls.sm_90")
    names = [f.name for f in found.kernels]
    assert len(names) == 6 and "recursion" in names
    assert found.kernel("recursion") is found.function("recursion")
    with pytest.raises(BadInput, match=r"no kernel was named; choose one of \[.*--kernel NAME"):
        found.kernel()
    with pytest.raises(BadInput, match=r"no kernel 'horner'; choose one of"):
        found.kernel("horner")
    with pytest.raises(BadInput, match=r"no function 'horner'; there are"):
        found.function("horner")


def test_the_only_kernel_needs_no_name() -> None:
    assert program("block_scaled.sm_120a").kernel().name == "mma_block_scaled"


def test_a_function_that_is_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not every text section is an entry point."""
    found = small(monkeypatch)
    assert found.kernels == () and [f.name for f in found.functions] == ["k"]
    with pytest.raises(BadInput, match=r"choose one of \[\]"):
        found.kernel()


def test_every_word_has_an_instruction_and_a_block() -> None:
    for function in program("warps.sm_90").functions:
        assert len(function.instructions) * 16 == function.text.size
        assert len(function.block_of) == len(function.instructions)
        assert [i.index for i in function.instructions] == list(range(len(function.block_of)))
        ends = [block.end for block in function.blocks]
        assert [block.start for block in function.blocks] == [0, *ends[:-1]]


def test_positions_that_an_unreadable_record_names_are_pinned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = small(monkeypatch, info(attribute(0x7E, 0x20, 0x30, 0x40)))
    assert found.function("k").pinned == {2, 3}


def test_padding_is_an_instruction_that_does_nothing() -> None:
    function = program("tensor.sm_75").kernel("transpose_8x8")
    for instruction in itertools.islice(function.instructions, 10, None):
        assert (instruction.base, instruction.defs, instruction.uses) == ("NOP", (), ())


def test_a_missing_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOSTALL_NVDISASM", "/nonexistent")
    with pytest.raises(MissingPart) as caught:
        program("tensor.sm_75")
    assert caught.value.exit_code == 3


def test_an_unsupported_architecture() -> None:
    with pytest.raises(UnsupportedArchitecture) as caught:
        program("refused.sm_103")
    assert caught.value.exit_code == 2
