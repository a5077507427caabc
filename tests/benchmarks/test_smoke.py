"""The smoke run covers all benchmarks that need a GPU, with options that their parsers accept."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.__main__ import make_parser
from benchmarks.registry import find
from benchmarks.smoke import FOLDERS, SLICES, gpu_benchmarks, run_slice


def test_slices_cover_all_gpu_benchmarks() -> None:
    assert set(gpu_benchmarks()) <= set(SLICES)
    assert set(FOLDERS) < set(SLICES)


@pytest.mark.parametrize("name", SLICES)
def test_options_of_a_slice_are_accepted(name: str) -> None:
    if name.startswith(("fusion", "torch_compile", "workload", "parallel", "kernels")):
        pytest.importorskip("torch")
        pytest.importorskip("triton")
    benchmark = find(name)
    parser = make_parser(benchmark)
    benchmark.load().add_options(parser)
    options = parser.parse_args(["--out", "folder", *SLICES[name]])
    assert options.out == Path("folder")


def test_a_failed_slice_reports_its_exit_code_and_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SLICES, "sass.mobility", ("--no-such-option",))  # type: ignore[misc]
    outcome = run_slice("sass.mobility", tmp_path, 60.0)
    assert outcome.exit_code == 2 and "--no-such-option" in outcome.output
