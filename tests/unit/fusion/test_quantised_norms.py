"""Tests that a layer's residual, norm and quantisation are one kernel, and a right one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch

from nostall.fusion.codegen.emit.program import Program
from nostall.fusion.codegen.runtime.stitched_graph import StitchedGraph
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan
from nostall.fusion.fuse import StitchedModule
from tests.unit.fusion.codegen.interpreter_process import run_interpreted
from tests.unit.fusion.codegen.sm90_code import opcodes
from tests.unit.fusion.quantised_norms import (
    NORMS,
    QUANTISATIONS,
    Quantised,
    by_block,
    by_row,
    chain,
    rms_norm,
    static_chain,
    stitched,
    swiglu,
)

DTYPES = [torch.bfloat16, torch.float32]
BLOCKS = {2880: 64}
"""The block of hidden sizes that are no multiples of 128."""


def chain_inputs(rows: int, hidden: int, dtype: torch.dtype) -> list[torch.Tensor]:
    shapes = [(rows, hidden), (rows, hidden), (hidden,)]
    return [torch.empty(shape, dtype=dtype) for shape in shapes]


def kernel(module: StitchedModule) -> Program:
    """The only kernel of a module that has nothing else."""
    (step,) = module.steps
    assert isinstance(step.action, StitchedGraph)
    (kernel,) = step.action.steps
    assert not isinstance(kernel, int)
    return kernel.program


def block_chain(hidden: int) -> Callable[..., Quantised]:
    return chain(rms_norm, by_block(torch.float8_e4m3fn, BLOCKS.get(hidden, 128)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quantisation", QUANTISATIONS)
@pytest.mark.parametrize("norm", NORMS)
def test_residual_norm_and_quantisation_are_one_kernel(
    norm: str, quantisation: str, dtype: torch.dtype
) -> None:
    program = chain(NORMS[norm], QUANTISATIONS[quantisation])
    module = stitched(program, *chain_inputs(64, 4096, dtype))
    assert len(kernel(module).outputs) == 3
    assert not module.unfused


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_scale_that_is_known_before_needs_no_second_kernel(dtype: torch.dtype) -> None:
    module = stitched(static_chain, *chain_inputs(64, 4096, dtype), torch.empty(()))
    assert len(kernel(module).outputs) == 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gate_and_its_quantisation_are_one_kernel(dtype: torch.dtype) -> None:
    inputs = [torch.empty(64, 4096, dtype=dtype) for _ in range(2)]
    assert len(kernel(stitched(swiglu, *inputs)).outputs) == 2


@pytest.mark.parametrize("rows", [1, 64, 16384])
@pytest.mark.parametrize("hidden", [768, 1024, 2880, 4096, 5120, 8192])
def test_rows_are_read_once_or_in_long_iterations(hidden: int, rows: int) -> None:
    for dtype in DTYPES:
        plan = kernel(stitched(block_chain(hidden), *chain_inputs(rows, hidden, dtype))).plan
        assert isinstance(plan, KernelPlan)
        if plan.scheme in ("warp", "block"):
            assert plan.elements_per_thread <= 48, "two such tensors leave registers for addresses"
        else:
            assert plan.scheme in ("looped", "shared") and plan.chunks[0] >= 2048 and hidden > 5120
        assert all(width % BLOCKS.get(hidden, 128) == 0 for width in plan.chunks)


def test_blocks_of_other_lengths_than_powers_of_two_are_a_kernel_of_their_own() -> None:
    program = chain(rms_norm, by_block(torch.int8, 96))
    assert stitched(program, *chain_inputs(64, 4608, torch.bfloat16)).kernels == 2


def test_rows_and_blocks_of_several_sizes_are_one_kernel() -> None:
    """Scales of blocks of 32, and one for each row."""

    def quantise(y: torch.Tensor) -> Quantised:
        return *by_block(torch.int8, 32)(y), *by_row(torch.int8)(y)

    module = stitched(chain(rms_norm, quantise), *chain_inputs(64, 1024, torch.bfloat16))
    assert len(kernel(module).outputs) == 5


@pytest.mark.slow
@pytest.mark.parametrize("hidden", [768, 2880, 4096, 5120, 8192, 16384])
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_keep_rows_out_of_local_memory(
    hidden: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    program = kernel(stitched(block_chain(hidden), *chain_inputs(1024, hidden, dtype)))
    names = {name.partition(".")[0] for name in opcodes(program, tmp_path)}
    assert "SHFL" in names and not names & {"STL", "LDL"}


def test_rows_that_are_too_wide_for_registers_stay_in_shared_memory() -> None:
    plan = kernel(stitched(block_chain(16384), *chain_inputs(1024, 16384, torch.bfloat16))).plan
    assert isinstance(plan, KernelPlan) and plan.scheme == "shared"


@pytest.mark.slow
def test_kernels_compute_what_fp64_computes(tmp_path: Path) -> None:
    wrong = run_interpreted("tests.unit.fusion.quantised_norms", tmp_path)
    assert len(wrong) == len(NORMS) * len(QUANTISATIONS)
    assert {name: errors for name, errors in wrong.items() if errors} == {}
