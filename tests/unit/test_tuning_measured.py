"""The main job on a device: what is kept, and what is not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from nostall.core import LaunchSpec
from nostall.gpu import Outcome, Timing
from nostall.search import Anneal
from nostall.tuning.job import Settings, Tuned, tune
from nostall.tuning.source import load_cubin

NVCC = Path(__file__).resolve().parents[2] / "examples" / "nvcc"
SETTINGS = Settings(evaluations=12, objective="gpu", rounds=8, checks=2)


class Pretended:
    """Every candidate takes ``during`` of the original's time in the search, ``after`` of it in the
    end; some fault, always the same ones."""

    about: Mapping[str, str] = {"gpu": "none"}

    def __init__(self, during: float, after: float, original: bytes) -> None:
        self.during, self.after, self.original = during, after, original

    def evaluate(self, cubin: bytes) -> Outcome:
        if cubin == self.original:
            return Outcome("timed", Timing((1e-5,) * 3, (1e-5,) * 3))
        if sum(cubin) % 4 == 0:
            return Outcome("fault", detail="CUDA_ERROR_ILLEGAL_ADDRESS")
        return Outcome("timed", Timing((1e-5,) * 3, (1e-5 * self.during,) * 3))

    def compare(self, cubin: bytes, rounds: int, checks: int) -> Outcome:
        if self.after < 0:
            return Outcome("wrong", detail="3 words of the outputs differ")
        one = (1e-5,) * rounds
        return Outcome("timed", Timing(one, (1e-5 * self.after,) * rounds, one))


def _tuned(during: float, after: float) -> tuple[Tuned, bytes]:
    launch = LaunchSpec.from_toml(NVCC / "dot_product.toml")
    source = load_cubin(NVCC / "dot_product.sm_90.cubin", None, launch)
    device = Pretended(during, after, source.cubin)
    return tune(source, Anneal(), SETTINGS, device=device), source.cubin


def test_a_gain_that_a_fresh_process_confirms_is_kept() -> None:
    tuned, original = _tuned(during=0.9, after=0.8)
    assert tuned.improved
    assert tuned.cubin != original
    assert tuned.ratio == pytest.approx(1.25)
    assert tuned.search.best_measurement.kind == "measured"


@pytest.mark.parametrize("after", [1.0, 1.2, -1.0])
def test_a_gain_that_does_not_last_leaves_the_original(after: float) -> None:
    tuned, original = _tuned(during=0.9, after=after)
    assert not tuned.improved
    assert tuned.cubin == original
    assert tuned.ratio == 1.0


def test_the_original_is_no_gain_over_itself() -> None:
    tuned, original = _tuned(during=1.1, after=0.8)
    assert not tuned.improved or tuned.cubin != original
