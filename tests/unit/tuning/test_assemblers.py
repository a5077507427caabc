"""Several assemblers as starting points, with the real ones that Triton brings."""

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
from nostall.sass import Program, validate
from nostall.tuning.assemblers import (
    ASSEMBLER,
    Assembler,
    Start,
    assembled,
    assemblers,
    best,
    by_device,
    by_model,
    chosen,
    starts,
)
from nostall.tuning.source import Source, compile_triton, load_cubin


@pytest.fixture(scope="module")
def source() -> Source:
    # Triton 3.9 takes its newest assembler for sm_90, and older ones refuse that one's PTX.
    return compile_triton(EXAMPLES / "rmsnorm.py", "rmsnorm", None, "sm_80")


@pytest.fixture(scope="module")
def tools() -> list[Assembler]:
    return assemblers()


@pytest.fixture(scope="module")
def other(source: Source, tools: list[Assembler]) -> Source:
    """The kernel by an assembler that the compiler did not use."""
    return assembled(source, another(source, tools))


def another(source: Source, tools: list[Assembler]) -> Assembler:
    return next(t for t in tools if t.version != source.provenance["ptxas"])


def test_each_version_is_found_once(source: Source, tools: list[Assembler]) -> None:
    versions = [tool.version for tool in tools]
    assert len(set(versions)) == len(versions) >= 2
    assert source.provenance["ptxas"] in versions


def test_another_assembler_makes_another_legal_start(source: Source, other: Source) -> None:
    assert other.cubin != source.cubin and validate(other.cubin).safe
    assert Program.from_cubin(other.cubin).kernel(source.kernel).instructions
    assert other.provenance[ASSEMBLER].startswith("ptxas ")
    assert other.launch == source.launch


def test_the_model_judges_all_and_the_provenance_lists_them(
    source: Source, tools: list[Assembler]
) -> None:
    broken = Assembler(Path("/bin/false"), "0.0.0")
    found = starts(source, by_model(source), [another(source, tools), broken])
    assert found[0].source is source and [s.kind for s in found] == [None, "modelled", None]
    assert found[1].ratio is not None and not found[1].failure
    assert found[2].ratio is None and found[2].version == "0.0.0" and found[2].failure
    picked = chosen(found)
    assert picked.cubin == best(found).source.cubin
    assert picked.provenance["starts"].count("; ") == 2


class Said:
    """A device that says how long the other binary takes."""

    info: Mapping[str, str] = MappingProxyType({})

    def __init__(self, factor: float | None) -> None:
        self.factor = factor

    def evaluate(self, cubin: bytes) -> Outcome:
        raise AssertionError("a start is compared in a fresh process")

    def compare(self, cubin: bytes, rounds: int, checks: int) -> Outcome:
        if self.factor is None:
            return Outcome("wrong", detail="3 words differ")
        one = (1e-5,) * rounds
        return Outcome("timed", Timing(one, (1e-5 * self.factor,) * rounds, one))


@pytest.mark.parametrize(("factor", "changes"), [(0.9, True), (1.0, False), (None, False)])
def test_a_measured_start_has_to_be_faster_and_right(
    factor: float | None, changes: bool, source: Source, tools: list[Assembler]
) -> None:
    found = starts(source, by_device(Said(factor)), [another(source, tools)])
    assert (chosen(found).cubin != source.cubin) == changes
    assert ("3 words differ" in found[1].failure) == (factor is None)


def test_the_fastest_start_wins() -> None:
    def start(ratio: float, faster: bool) -> Start:
        made = replace(load_cubin(EXAMPLES / "nvcc" / "transpose.sm_90.cubin"), cubin=b"x")
        return Start(made, str(ratio), ratio, faster)

    own = start(1.0, False)
    assert best([own, start(1.2, False), start(1.05, True), start(1.1, True)]).version == "1.1"
    assert best([own, start(0.9, False)]) is own


def test_a_cubin_has_nothing_to_assemble() -> None:
    cubin = load_cubin(EXAMPLES / "nvcc" / "transpose.sm_90.cubin")
    with pytest.raises(BadInput, match="no PTX"):
        starts(cubin, lambda _: (1.0, False, "modelled"), [])


def test_the_command_says_which_starts_it_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    target = f"{EXAMPLES / 'rmsnorm.py'}:rmsnorm"
    words = ["nostall", "tune", target, "--assemblers", "--arch", "sm_80"]
    monkeypatch.setattr(
        sys, "argv", [*words, "--evaluations", "3", "--quiet", "--out", str(tmp_path / "run")]
    )
    with pytest.raises(SystemExit) as end:
        main()
    shown = capfd.readouterr()
    assert end.value.code in (0, None), shown.err
    assert "starts:" in shown.out and "the compiler's" in shown.out
