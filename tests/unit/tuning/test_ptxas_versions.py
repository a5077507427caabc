"""Assembly with several versions of ptxas: those that are installed with Triton."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
from benchmarks.kernels.examples import EXAMPLES

from nostall.cli import main
from nostall.core import BadInput
from nostall.gpu import Outcome, Timing
from nostall.ptx.assemble.versions import Assembler, find_assemblers
from nostall.sass import Program, validate
from nostall.tuning.ptxas_versions import (
    StartBinary,
    assemble,
    assemble_all,
    compare_on_device,
    compare_on_model,
    fastest,
    select_start,
)
from nostall.tuning.sources.source import ASSEMBLER_KEY, Source, load_cubin
from nostall.tuning.sources.triton_source import compile_triton


@pytest.fixture(scope="module")
def source() -> Source:
    # For sm_90 Triton 3.9 uses its newest assembler, whose PTX older ones reject.
    return compile_triton(EXAMPLES / "rmsnorm.py", "rmsnorm", None, "sm_80")


@pytest.fixture(scope="module")
def installed() -> list[Assembler]:
    return find_assemblers()


@pytest.fixture(scope="module")
def reassembled(source: Source, installed: list[Assembler]) -> Source:
    """The kernel, assembled with a version that the compiler did not use."""
    return assemble(source, other_assembler(source, installed))


def other_assembler(source: Source, installed: list[Assembler]) -> Assembler:
    """An assembler that the compiler did not use."""
    return next(a for a in installed if a.version != source.provenance["ptxas"])


def test_each_version_is_found_once(source: Source, installed: list[Assembler]) -> None:
    versions = [assembler.version for assembler in installed]
    assert len(set(versions)) == len(versions) >= 2
    assert source.provenance["ptxas"] in versions


def test_another_assembler_makes_another_safe_cubin(source: Source, reassembled: Source) -> None:
    assert reassembled.cubin != source.cubin and validate(reassembled.cubin).safe
    assert Program.from_cubin(reassembled.cubin).kernel(source.kernel).instructions
    assert reassembled.provenance[ASSEMBLER_KEY].startswith("ptxas ")
    assert reassembled.launch == source.launch


def test_the_provenance_lists_all_compared_binaries(
    source: Source, installed: list[Assembler]
) -> None:
    broken = Assembler(Path("/bin/false"), "0.0.0")
    assemblers = [other_assembler(source, installed), broken]
    binaries = assemble_all(source, compare_on_model(source), assemblers)
    assert binaries[0].source is source
    assert [binary.kind for binary in binaries] == [None, "modelled", None]
    assert binaries[1].ratio is not None and not binaries[1].failure
    assert binaries[2].ratio is None and binaries[2].version == "0.0.0" and binaries[2].failure
    start = select_start(binaries)
    assert start.cubin == fastest(binaries).source.cubin
    assert start.provenance["starts"].count("; ") == 2


class FakeDevice:
    """A device on which a candidate takes ``factor`` of the original's time; None: it is wrong."""

    info: Mapping[str, str] = MappingProxyType({})

    def __init__(self, factor: float | None) -> None:
        self.factor = factor

    def evaluate(self, cubin: bytes) -> Outcome:
        raise AssertionError("binaries are compared in a fresh process")

    def compare(self, cubin: bytes, rounds: int, checks: int) -> Outcome:
        if self.factor is None:
            return Outcome("wrong", detail="3 words differ")
        original = (1e-5,) * rounds
        candidate = (1e-5 * self.factor,) * rounds
        return Outcome("timed", Timing(original, candidate, original))


@pytest.mark.parametrize(("factor", "is_selected"), [(0.9, True), (1.0, False), (None, False)])
def test_a_measured_binary_must_be_faster_and_correct(
    factor: float | None, is_selected: bool, source: Source, installed: list[Assembler]
) -> None:
    compare = compare_on_device(FakeDevice(factor))
    binaries = assemble_all(source, compare, [other_assembler(source, installed)])
    assert (select_start(binaries).cubin != source.cubin) == is_selected
    assert ("3 words differ" in binaries[1].failure) == (factor is None)


def test_the_fastest_binary_is_selected() -> None:
    def binary(ratio: float, faster: bool) -> StartBinary:
        source = replace(load_cubin(EXAMPLES / "nvcc" / "transpose.sm_90.cubin"), cubin=b"x")
        return StartBinary(source, str(ratio), ratio, faster)

    own = binary(1.0, False)
    binaries = [own, binary(1.2, False), binary(1.05, True), binary(1.1, True)]
    assert fastest(binaries).version == "1.1"
    assert fastest([own, binary(0.9, False)]) is own


def test_a_cubin_file_cannot_be_assembled() -> None:
    cubin = load_cubin(EXAMPLES / "nvcc" / "transpose.sm_90.cubin")
    with pytest.raises(BadInput, match="no PTX"):
        assemble_all(cubin, lambda _: (1.0, False, "modelled"), [])


def test_the_command_prints_the_compared_binaries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    target = f"{EXAMPLES / 'rmsnorm.py'}:rmsnorm"
    command = ["nostall", "tune", target, "--assemblers", "--arch", "sm_80"]
    monkeypatch.setattr(
        sys, "argv", [*command, "--evaluations", "3", "--quiet", "--out", str(tmp_path / "run")]
    )
    with pytest.raises(SystemExit) as end:
        main()
    output = capfd.readouterr()
    assert end.value.code in (0, None), output.err
    assert "start:    " in output.out and "(compared: ptxas " in output.out
    assert "the compiler's" in output.out
