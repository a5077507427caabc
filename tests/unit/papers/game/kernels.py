"""Kernels of the game tests: committed cubins, so that no compiler is needed."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from nostall.core import LaunchSpec
from nostall.sass import Program
from nostall.sass.model import SmModel
from nostall.sass.schedule import ScheduleSpace

NVCC = Path(__file__).resolve().parents[4] / "examples" / "nvcc"
CORPUS = Path(__file__).resolve().parents[3] / "corpus" / "nvcc"


@lru_cache
def space(path: Path, kernel: str | None = None) -> ScheduleSpace:
    program = Program.from_cubin(path.read_bytes())
    return ScheduleSpace(program, program.kernel(kernel))


@lru_cache
def largest(path: Path) -> ScheduleSpace:
    """The space of the kernel with the most instructions."""
    program = Program.from_cubin(path.read_bytes())
    return ScheduleSpace(program, max(program.kernels, key=lambda f: len(f.instructions)))


def transpose() -> ScheduleSpace:
    return space(NVCC / "transpose.sm_90.cubin")


def dot_product() -> ScheduleSpace:
    return space(NVCC / "dot_product.sm_90.cubin")


@lru_cache
def launch(name: str = "transpose") -> LaunchSpec:
    return LaunchSpec.from_toml(NVCC / f"{name}.toml")


def model(schedules: ScheduleSpace, name: str = "transpose") -> SmModel:
    """The SM model with one simulated warp, which is fast."""
    return SmModel(schedules.program, schedules.function, launch(name), warps=1)
