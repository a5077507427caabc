"""Answers of the verifier: undecodable candidates, wrong types, remarks, and what findings say."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.corpus.catalogue import NVCC

from nostall.core.errors import BadBinary, BadInput, UnsupportedArchitecture
from nostall.sass import Program, verify
from nostall.sass.binary.cubin import Cubin
from nostall.sass.safety import validate
from nostall.sass.safety.hazards.validator import HazardValidator
from nostall.sass.safety.verify import validate_program, verify_program

SMALL = NVCC / "shared_order.sm_80.cubin"
DATA = SMALL.read_bytes()


def with_flipped_bit(bit: int, seed: int) -> bytes:
    """The cubin with one bit of one instruction word flipped."""
    rng = random.Random(seed)
    text = rng.choice(Cubin.parse(DATA).texts)
    word = rng.randrange(text.size // 16)
    changed = bytearray(DATA)
    changed[text.file_offset + 16 * word + bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@pytest.mark.parametrize("bit", [*range(0, 105, 5), 106, 112, 115])
def test_a_candidate_with_an_illegal_encoding_is_refused(bit: int) -> None:
    candidate = with_flipped_bit(bit, seed=bit)
    if bit < 105:
        verdict = verify(DATA, candidate)
        assert not verdict.safe
        assert verdict.findings[0].kind == "not-a-permutation"
    else:
        verify(DATA, candidate)  # a control word may be legal; it must not raise


def test_a_candidate_that_is_no_cubin_is_refused() -> None:
    verdict = verify(DATA, b"not a cubin")
    assert [f.kind for f in verdict.findings] == ["undecodable"]
    assert "ELF" in verdict.findings[0].reason


def test_a_candidate_for_an_unsupported_architecture_is_refused() -> None:
    verdict = verify(DATA, (NVCC / "refused.sm_103.cubin").read_bytes())
    assert [f.kind for f in verdict.findings] == ["undecodable"]
    assert "sm_103" in verdict.findings[0].reason


def test_a_bad_original_raises() -> None:
    with pytest.raises(BadBinary, match="ELF"):
        verify(b"not a cubin", DATA)


@pytest.mark.parametrize("path", [SMALL, str(SMALL)])
def test_a_path_in_place_of_bytes_is_reported(path: Path | str) -> None:
    with pytest.raises(BadInput, match=r"the original is .*read_bytes"):
        verify(path, DATA)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match=r"the candidate is .*read_bytes"):
        verify(DATA, path)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="read the file first"):
        validate(path)  # type: ignore[arg-type]


def test_an_early_access_of_the_original_is_a_remark_and_not_a_finding() -> None:
    """As ptxas 12.9 may write it: a matrix operand is overwritten before the wait."""
    program = Program.from_cubin((NVCC / "warpgroup.sm_90a.cubin").read_bytes())
    function = program.function("operand_in_registers")
    order = list(function.instructions)
    wait = next(
        at
        for at, i in enumerate(order)
        if i.text == "WARPGROUP.DEPBAR.LE gsb0, 0x1" and order[at + 1].base == "LDSM"
    )
    order.insert(wait, order.pop(wait + 1))
    faulty = function.reordered(order)
    validator = HazardValidator(program.sm)
    assert not validator.remarks(function)
    assert {f.kind for f in validator.remarks(faulty)} == {"wgmma-register"}
    assert "matrix operand of HGMMA" in validator.remarks(faulty)[0].reason
    assert not [f for f in validator.check(faulty) if f.kind == "wgmma-register"]
    assert [f for f in validator.compare(function, faulty) if f.kind == "wgmma-register"]
    assert not [f for f in validator.compare(faulty, faulty) if f.kind == "wgmma-register"]


def test_measured_latencies_are_refused_where_none_were_measured() -> None:
    """Each entry point passes the option on; the cubin is for sm_75."""
    data = (NVCC / "arithmetic.sm_75.cubin").read_bytes()
    program = Program.from_cubin(data)
    for check in (
        lambda: validate(data, measured_latencies=True),
        lambda: validate_program(program, measured_latencies=True),
        lambda: verify(data, data, measured_latencies=True),
        lambda: verify_program(program, program, measured_latencies=True),
    ):
        with pytest.raises(UnsupportedArchitecture, match="sm_75"):
            check()
    assert validate(data).safe and verify(data, data).safe


def test_a_jump_table_whose_record_holds_only_zeros_is_refused_by_name() -> None:
    """ptxas 11.8 writes such records for sm_90."""
    data = bytearray((NVCC / "calls.sm_90.cubin").read_bytes())
    for record in Program.from_cubin(bytes(data)).function("jump_table").text.records:
        if record.is_branch_target:
            data[record.file_offset : record.file_offset + record.width] = bytes(record.width)
    findings = validate(bytes(data)).findings
    assert {(f.kind, f.function) for f in findings} == {("unread-targets", "jump_table")}
    assert len(findings) == 4, "one for each of its branches"
    assert all("jump targets cannot be read from this cubin" in f.reason for f in findings)
