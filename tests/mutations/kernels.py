"""The corpus kernels that mutations are applied to: small ones of all architectures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path

from nostall.sass import Program
from nostall.sass.program import Function
from tests.corpus import catalogue

TRITON = (
    "rmsnorm.sm_100",
    "atomics.sm_80",
    "softmax.sm_120",
    "rmsnorm.sm_86",
    "pipelined_copy.sm_80",
    "lock_and_add.sm_120",
    "histogram.sm_75",
    "rmsnorm_loop.sm_89",
    "cumulative_sum.sm_90",
    "float_atomics.sm_89",
    "softmax-128x512.sm_75",
    "matmul_fp8.sm_120",
    "matmul-int8small.sm_80",
    "matmul-single.sm_90",
    "gemm_leakyrelu.sm_86",
    "descriptor_matmul.sm_100",
    "layernorm.sm_80",
    "transpose-half.sm_100",
)
NVCC = ("atomics.sm_90", "memory.sm_120", "memory.sm_80", "hopper.sm_90a")
LARGE_TRITON = ("batched_gemm-wgmma.sm_90", "flash_attention-short.sm_86")
"""Large kernels with rare constructs.  They come last, for kinds that have no place elsewhere."""
SPECIAL = (
    "memory_order.sm_80",
    "memory_order.sm_90",
    "shared_order.sm_90",
    "shared_order.sm_120",
    "warpgroup.sm_90a",
    "hopper.sm_90a",
    "clusters.sm_90",
    "clusters.sm_100",
    "memory.sm_80",
    "calls.sm_80",
    "arithmetic.sm_80",
    "atomics.sm_90",
)
"""Cubins of nvcc with fences, asynchronous operations, calls and mixed units."""


def cubin_paths() -> list[Path]:
    """The cubins that exist: all of ``TRITON`` and the others unless the corpus is sliced."""
    catalogue.corpus()
    folder = catalogue.folder(catalogue.versions()[1])
    paths = [folder / f"{name}.cubin" for name in TRITON]
    paths += [catalogue.NVCC / f"{name}.cubin" for name in NVCC]
    paths += [folder / f"{name}.cubin" for name in LARGE_TRITON]
    return [path for path in paths if path.is_file()]


def smallest_cubins(count: int) -> list[Path]:
    """The smallest cubins, for tests that take all functions of a cubin."""
    return sorted(cubin_paths(), key=lambda path: (path.stat().st_size, path))[:count]


@lru_cache
def read_program(path: Path) -> Program:
    """Parse a cubin; returns the same object for the same path."""
    return Program.from_cubin(path.read_bytes())


def all_functions() -> Iterator[tuple[str, Program, Function]]:
    """(cubin name, program, function) of each function of all cubins."""
    return _functions(cubin_paths())


def special_functions() -> Iterator[tuple[str, Program, Function]]:
    """(cubin name, program, function) of each function of the cubins ``SPECIAL``."""
    return _functions([catalogue.NVCC / f"{name}.cubin" for name in SPECIAL])


def _functions(paths: Iterable[Path]) -> Iterator[tuple[str, Program, Function]]:
    for path in paths:
        program = read_program(path)
        for function in program.functions:
            yield path.stem, program, function
