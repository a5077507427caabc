"""Tests of the source of product kernels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from nostall.fusion.codegen.tiling.product_config import (
    ProductConfig,
    ProductShape,
    configs,
)
from nostall.fusion.errors import BadFusion
from nostall.fusion.graph.builder import Builder
from nostall.fusion.hardware import H200
from nostall.fusion.products.emit import emit_products
from nostall.fusion.products.product_graph import ProductGraph
from tests.unit.fusion.codegen import oldest_triton
from tests.unit.fusion.codegen.interpreter_process import run_interpreted
from tests.unit.fusion.codegen.sm90_code import cubin_opcodes, opcodes

LARGE = ProductShape(4096, 4096, 1024, "bfloat16", 1, descriptors=True)


def gelu_of_product(rows: int, columns: int, depth: int, pair: bool = False) -> ProductGraph:
    build = Builder()
    left = build.input((rows, depth), "bfloat16")
    values = []
    for _ in range(1 + pair):
        right = build.input((depth, columns), "bfloat16", (1, depth))
        dot = build("dot", left, right, dtype="float32")
        values.append(build("cast", dot, dtype="bfloat16"))
    half = build("mul", values[0], build("erf", values[0]))
    return ProductGraph(build.graph(build("mul", half, values[-1])))


def test_equal_products_have_equal_sources() -> None:
    config = ProductConfig(128, 128, 64, 8, 4)
    first, second = (emit_products(gelu_of_product(256, 256, 64), config) for _ in range(2))
    assert first.source == second.source


def test_a_loop_needs_no_masks_if_tiles_divide_the_product() -> None:
    config = ProductConfig(64, 64, 32, 4, 3)
    assert "mask" not in emit_products(gelu_of_product(128, 128, 64), config).source
    assert "mask" in emit_products(gelu_of_product(100, 128, 64), config).source


def test_operators_of_other_elements_have_no_kernel() -> None:
    build = Builder()
    left, right = build.input((8, 16)), build.input((16, 8))
    value = build("copy", build("dot", left, right))
    transposed = build("permute", value, shape=(8, 8), dims=(1, 0))
    product = ProductGraph(build.graph(build("add", value, transposed)))
    with pytest.raises(BadFusion):
        emit_products(product, ProductConfig(16, 16, 16, 4, 2))


@pytest.mark.parametrize("count", [1, 2])
def test_large_products_have_at_least_eight_configurations(count: int) -> None:
    found = [*configs(ProductShape(8192, 4096, 1024, "bfloat16", count, descriptors=True))]
    assert len(found) >= 8
    assert any(config.persistent for config in found)


def test_persistent_programs_are_as_many_as_the_gpu_holds() -> None:
    config = ProductConfig(128, 128, 64, 8, 3, persistent=True, per_sm=2)
    product, small = gelu_of_product(4096, 4096, 1024), replace(H200, sms=46)
    for hardware, programs in ((H200, 264), (small, 92)):
        program = emit_products(product, config, hardware)
        assert program.launches[0].grid == (programs, 1)
        assert f"tl.range(tl.program_id(0), 1024, {programs}, flatten=True)" in program.source


def smallest_tile(rows: int, sms: int) -> int:
    """Elements of the smallest tile that a product with so many rows is measured with."""
    shape = ProductShape(rows, 8192, 1024, "bfloat16", descriptors=True)
    return min(each.rows * each.columns for each in configs(shape, replace(H200, sms=sms)))


def test_small_tiles_are_left_out_earlier_if_there_are_fewer_sms() -> None:
    assert smallest_tile(4096, 132) < smallest_tile(4096, 46)


def test_the_largest_tiles_remain_however_many_an_sm_has() -> None:
    assert smallest_tile(1 << 17, 132) == smallest_tile(1 << 17, 1) == 128 * 256


def test_configurations_fit_shared_memory_and_registers() -> None:
    for config in configs(LARGE):
        assert config.shared_bytes(LARGE) <= 227 * 1024
        assert config.rows * config.columns <= 128 * 32 * config.warps


def test_descriptors_need_aligned_strides() -> None:
    build = Builder()
    left = build.input((64, 60), "bfloat16", (61, 1))
    dot = build("dot", left, build.input((60, 64), "bfloat16"), dtype="float32")
    result = build("tanh", build("cast", dot, dtype="bfloat16"))
    shape = ProductGraph(build.graph(result)).shape
    assert not shape.descriptors
    assert not any(config.descriptors for config in configs(shape))


@pytest.mark.slow
def test_kernels_compute_what_fp64_computes(tmp_path: Path) -> None:
    found = run_interpreted("tests.unit.fusion.products.interpreted", tmp_path, 16)
    assert found["wrong"] == []
    assert len(found["damaged"]) == 2, "a part of the depth that is left out or repeated is noticed"
    assert min(found["seen"].values()) > 2


@pytest.mark.slow
@pytest.mark.parametrize("descriptors", [False, True])
def test_kernels_use_tensor_cores_and_no_local_memory(tmp_path: Path, descriptors: bool) -> None:
    """A pair by descriptors, with the oldest Triton, and a product by addresses with this one."""
    config = ProductConfig(128, 128, 64, 8, 4, descriptors=descriptors, persistent=descriptors)
    program = emit_products(gelu_of_product(4096, 4096, 1024, pair=descriptors), config)
    if descriptors and oldest_triton.INSTALLATION.is_dir():
        ((cubin, _),) = oldest_triton.compile_program(program, tmp_path)
        found = cubin_opcodes(cubin)
    else:
        found = opcodes(program, tmp_path)
    names = {name.partition(".")[0] for name in found}
    assert "HGMMA" in names and not names & {"STL", "LDL"}
    assert ("UTMALDG" in names) is descriptors
