"""Programs: cubin round trips, and the recorded offsets of instructions that move."""

from __future__ import annotations

import itertools
import struct
from pathlib import Path

import pytest
from tests.corpus import catalogue
from tests.unit.sass.binary.cubin_builder import (
    PROGBITS,
    SectionSpec,
    attribute,
    elf,
    info,
    relocations,
)

from nostall.core.errors import BadInput, MissingPart, UnsupportedArchitecture
from nostall.sass import Function, Program
from nostall.sass.binary.cubin import Cubin
from nostall.sass.binary.listing import Listing, Row, disassemble

NVCC = catalogue.NVCC


def load_program(name: str) -> Program:
    return Program.from_cubin((NVCC / f"{name}.cubin").read_bytes())


def fake_listings(cubin: Cubin) -> dict[str, Listing]:
    """A listing of NOPs for each section, for cubins that nvdisasm cannot read."""
    listings = {}
    for text in cubin.texts:
        code = cubin.data[text.file_offset : text.file_offset + text.size]
        words = [int.from_bytes(code[i : i + 16], "little") for i in range(0, len(code), 16)]
        rows = tuple(Row(16 * i, "NOP", word, (), ()) for i, word in enumerate(words))
        listings[text.name] = Listing(text.name, rows, {})
    return listings


def small_program(monkeypatch: pytest.MonkeyPatch, *sections: SectionSpec) -> Program:
    """A program with a function ``k`` of four different words, and these sections."""
    monkeypatch.setattr("nostall.sass.program.program.disassemble", fake_listings)
    code = b"".join((i << 64 | 0x7918).to_bytes(16, "little") for i in range(4))
    return Program.from_cubin(elf(SectionSpec(".text.k", PROGBITS, code), *sections))


def exchange(function: Function, at: int) -> Function:
    """Exchange the instructions at positions ``at`` and ``at + 1``."""
    order = list(function.instructions)
    order[at], order[at + 1] = order[at + 1], order[at]
    return function.reordered(order)


def round_trip_cubins() -> list[Path]:
    """Some cubins of nvcc and of both Triton versions."""
    triton = catalogue.triton_corpus()
    return [*catalogue.nvcc_corpus()[::9], *triton[:: max(1, len(triton) // 6)]]


def test_an_unchanged_program_gives_identical_bytes() -> None:
    variants = set()
    for path in round_trip_cubins():
        data = path.read_bytes()
        variants.add(data[7])
        assert Program.from_cubin(data).to_cubin() == data, path
    assert variants == {51, 65}


def test_exchanging_twice_restores_the_bytes() -> None:
    before = load_program("warps.sm_90")
    data = before.cubin.data
    for function in before.functions[:4]:
        once = exchange(function, 1)
        changed = before.with_function(once).to_cubin()
        assert changed != data
        assert before.with_function(exchange(once, 1)).to_cubin() == data


def test_an_exchange_changes_only_two_words() -> None:
    before = load_program("tensor.sm_75")
    function = before.kernel("transpose_8x8")
    data, changed = before.cubin.data, before.with_function(exchange(function, 1)).to_cubin()
    at = function.text.file_offset + 16
    assert changed[at : at + 32] == data[at + 16 : at + 32] + data[at : at + 16]
    assert changed[:at] + changed[at + 32 :] == data[:at] + data[at + 32 :]


def recorded_instructions(data: bytes, name: str) -> list[tuple[str, int]]:
    """(text of the instruction, file position of the record) of each recorded offset."""
    cubin = Cubin.parse(data)
    rows = {row.offset: row.text for row in disassemble(cubin)[name].rows}
    text = next(t for t in cubin.texts if t.name == name)
    return [(rows.get(r.offset, ""), r.file_offset) for r in text.records]


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
    before = load_program(file)
    function = before.kernel(kernel)
    record = next(
        r
        for r in function.text.records
        if r.source == source and function.instructions[r.offset // 16].base == mnemonic
    )
    at = record.offset // 16
    after = before.with_function(exchange(function, at - 1)).to_cubin()
    assert struct.unpack_from("<I", after, record.file_offset) == (record.offset - 16,)
    texts = {position: text for text, position in recorded_instructions(after, kernel)}
    assert mnemonic in texts[record.file_offset]
    assert [text for text, _ in recorded_instructions(after, kernel)] == [
        text for text, _ in recorded_instructions(before.cubin.data, kernel)
    ]
    reparsed = Program.from_cubin(after).function(kernel)
    expected = [i.text for i in exchange(function, at - 1).instructions]
    assert [i.text for i in reparsed.instructions] == expected


def test_targets_of_indirect_branches_do_not_move() -> None:
    before = load_program("calls.sm_90")
    function = before.kernel("jump_table")
    records = [r for r in function.text.records if r.source == "INDIRECT_BRANCH_TARGETS"]
    branches = [r for r in records if not r.is_branch_target]
    targets = [r for r in records if r.is_branch_target]
    assert branches and len(targets) > len(branches)
    assert {function.instructions[r.offset // 16].base for r in branches} == {"BRX"}
    at = targets[0].offset // 16
    after = before.with_function(exchange(function, at)).to_cubin()
    for record in targets:
        assert struct.unpack_from("<I", after, record.file_offset) == (record.offset,)


def test_relocations_move_with_their_instruction(monkeypatch: pytest.MonkeyPatch) -> None:
    """A relocation names a byte inside an instruction and moves by multiples of 16 bytes."""
    patches = relocations((0x14, 5), (0x28, 6), target=1)
    before = small_program(monkeypatch, info(attribute(0x1C, 0x10)), patches)
    function = before.function("k")
    order = [function.instructions[i] for i in (2, 0, 1, 3)]
    after = Cubin.parse(before.with_function(function.reordered(order)).to_cubin())
    assert {r.type: r.offset for r in after.elf.relocations()} == {5: 0x24, 6: 0x08}
    assert [r.offset for r in after.texts[0].records if r.width == 4] == [0x20]
    code = after.data[after.texts[0].file_offset : after.texts[0].file_offset + 64]
    assert [code[i + 8] for i in range(0, 64, 16)] == [2, 0, 1, 3]


def test_changed_control_words_are_written() -> None:
    before = load_program("tensor.sm_75")
    function = before.kernel("transpose_8x8")
    order = list(function.instructions)
    order[2] = order[2].with_control(order[2].control.with_(stall=9, wait=0b10))
    after = before.with_function(function.reordered(order)).to_cubin()
    changed = [i for i, (a, b) in enumerate(zip(before.cubin.data, after, strict=True)) if a != b]
    assert changed and all(
        function.text.file_offset + 32 <= i < function.text.file_offset + 48 for i in changed
    )
    control = Program.from_cubin(after).kernel("transpose_8x8").instructions[2].control
    assert (control.stall, control.wait) == (9, 0b10)


@pytest.mark.parametrize("change", ["lost", "twice", "empty"])
def test_an_order_must_be_a_permutation(change: str) -> None:
    function = load_program("tensor.sm_75").kernel("transpose_8x8")
    order = list(function.instructions)
    wrong = {"lost": order[1:], "twice": [*order[1:], order[1]], "empty": []}[change]
    with pytest.raises(BadInput, match="not a permutation of its 16 instructions"):
        function.reordered(wrong)


def test_kernels_and_functions_of_a_file() -> None:
    calls = load_program("calls.sm_90")
    names = [f.name for f in calls.kernels]
    assert len(names) == 6 and "recursion" in names
    assert calls.kernel("recursion") is calls.function("recursion")
    with pytest.raises(BadInput, match=r"no kernel was named; the cubin has: \w+"):
        calls.kernel()
    with pytest.raises(BadInput, match=r"no kernel 'horner'; the cubin has: \w+"):
        calls.kernel("horner")
    with pytest.raises(BadInput, match=r"no function 'horner'; the cubin has"):
        calls.function("horner")


def test_the_only_kernel_needs_no_name() -> None:
    assert load_program("block_scaled.sm_120a").kernel().name == "mma_block_scaled"


def test_a_function_that_is_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text section without an entry symbol is a device function."""
    program = small_program(monkeypatch)
    assert program.kernels == () and [f.name for f in program.functions] == ["k"]
    with pytest.raises(BadInput, match=r"the cubin has: \(none\)"):
        program.kernel()


def test_each_word_has_an_instruction_and_a_block() -> None:
    for function in load_program("warps.sm_90").functions:
        assert len(function.instructions) * 16 == function.text.size
        assert len(function.block_numbers) == len(function.instructions)
        assert [i.index for i in function.instructions] == list(range(len(function.block_numbers)))
        ends = [block.end for block in function.blocks]
        assert [block.start for block in function.blocks] == [0, *ends[:-1]]


def test_instructions_that_an_unknown_record_may_name_are_pinned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = small_program(monkeypatch, info(attribute(0x7E, 0x20, 0x30, 0x40)))
    assert program.function("k").pinned == {2, 3}


def test_padding_is_a_nop_without_registers() -> None:
    function = load_program("tensor.sm_75").kernel("transpose_8x8")
    for instruction in itertools.islice(function.instructions, 10, None):
        assert (instruction.base, instruction.defs, instruction.uses) == ("NOP", (), ())


def test_a_missing_nvdisasm_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOSTALL_NVDISASM", "/nonexistent")
    with pytest.raises(MissingPart) as caught:
        load_program("tensor.sm_75")
    assert caught.value.exit_code == 3


def test_an_unsupported_architecture_is_rejected() -> None:
    with pytest.raises(UnsupportedArchitecture) as caught:
        load_program("refused.sm_103")
    assert caught.value.exit_code == 2
