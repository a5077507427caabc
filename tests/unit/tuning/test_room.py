"""What may be gained is said from committed measurements and from the model, apart."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest
from benchmarks.sass.pages.gains import GAINS, gains

from nostall.core import LaunchSpec
from nostall.sass import Program
from nostall.tuning.room import KINDS, SEARCHES, describe_bound, kind_of, load_gains, modelled_bound

ROOT = Path(__file__).resolve().parents[3]
NVCC = ROOT / "examples" / "nvcc"


def test_the_package_ships_the_gains_of_the_committed_results() -> None:
    assert load_gains() == gains()
    assert GAINS.read_text() == gains().model_dump_json(indent=1) + "\n"


@pytest.mark.parametrize("kind", KINDS)
def test_a_sentence_has_the_median_and_the_largest_gain(kind: str) -> None:
    for search in SEARCHES:
        values = list(load_gains().best[search][kind].values())  # type: ignore[index]
        text = load_gains().sentence(search, kind)  # type: ignore[arg-type]
        assert f"{median(values):.3f}x in the median and {max(values):.3f}x at most" in text
        assert f"on {len(values)} kernels with" in text and "measured, NVIDIA H" in text


def test_the_kind_of_a_kernel() -> None:
    corpus = ROOT / "tests" / "corpus" / "nvcc"
    for file, kind in (
        ("hopper.sm_90a", "wgmma"), ("tensor.sm_80", "mma"),
        ("memory.sm_80", "no matrix instructions"),
    ):  # fmt: skip
        program = Program.from_cubin((corpus / f"{file}.cubin").read_bytes())
        assert kind in {kind_of(function) for function in program.kernels}


def test_the_modelled_bound_divides_all_cycles() -> None:
    launch = LaunchSpec.from_toml(NVCC / "transpose.toml")
    program = Program.from_cubin((NVCC / "transpose.sm_90.cubin").read_bytes())
    bound = modelled_bound(program, program.kernel(), launch)
    assert sum(bound.values()) == pytest.approx(1.0, abs=1e-3) and min(bound.values()) >= 0
    assert list(bound.values()) == sorted(bound.values(), reverse=True)
    text = describe_bound(bound)
    assert text.startswith(f"bound by {next(iter(bound))}: ") and "modelled" in text
