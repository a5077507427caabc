"""A device without a GPU: the times of all candidates are given."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from nostall.core import LaunchSpec
from nostall.gpu import Outcome, Timing
from nostall.tuning.settings import Settings
from nostall.tuning.sources.source import Source, load_cubin

NVCC = Path(__file__).resolve().parents[3] / "examples" / "nvcc"
SETTINGS = Settings(evaluations=12, objective="gpu", rounds=8, checks=2)
ORIGINAL_S = 1e-5


class FakeDevice:
    """Every candidate takes ``search_factor`` of the original's time in the search.

    In the final comparison it takes ``final_factor`` of it; a negative factor means wrong outputs.
    Some candidates fault, always the same ones.
    """

    info: Mapping[str, str] = {"gpu": "none"}

    def __init__(self, search_factor: float, final_factor: float, original: bytes) -> None:
        self.search_factor, self.final_factor = search_factor, final_factor
        self.original = original

    def evaluate(self, cubin: bytes) -> Outcome:
        if cubin == self.original:
            return Outcome("timed", _timing(1.0, 3))
        if sum(cubin) % 4 == 0:
            return Outcome("fault", detail="CUDA_ERROR_ILLEGAL_ADDRESS")
        return Outcome("timed", _timing(self.search_factor, 3))

    def compare(self, cubin: bytes, rounds: int, checks: int) -> Outcome:
        if self.final_factor < 0:
            return Outcome("wrong", detail="3 words of the outputs differ")
        timing = _timing(self.final_factor, rounds)
        return Outcome("timed", Timing(timing.original, timing.candidate, timing.original))


def _timing(factor: float, samples: int) -> Timing:
    return Timing((ORIGINAL_S,) * samples, (ORIGINAL_S * factor,) * samples)


def load_example(kernel: str = "dot_product") -> Source:
    """An example cubin with its launch."""
    launch = LaunchSpec.from_toml(NVCC / f"{kernel}.toml")
    return load_cubin(NVCC / f"{kernel}.sm_90.cubin", None, launch)
