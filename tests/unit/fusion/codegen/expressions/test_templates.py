"""Templates of functions of libdevice and of shifts compile for a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from nostall.fusion import Builder
from nostall.fusion.codegen.expressions.templates import _LIBDEVICE_FUNCTIONS
from nostall.fusion.codegen.generate import generate
from tests.unit.fusion.codegen.sm90_code import opcodes


def test_functions_of_libdevice_compile(tmp_path: Path) -> None:
    build = Builder()
    x, y = build.input((64, 256), "float16"), build.input((64, 256))
    values = [build(name, x, dtype="float32") for name in _LIBDEVICE_FUNCTIONS]
    values += [build(name, values[0], y) for name in ("atan2", "hypot", "copysign")]
    total = values[0]
    for value in values[1:]:
        total = build("add", total, value)
    graph = build.graph(total)
    assert "MUFU.LG2" in opcodes(generate(graph, graph.operators), tmp_path)


@pytest.mark.parametrize("dtype", ["int64", "int8", "uint8"])
def test_shifts_compile(dtype: str, tmp_path: Path) -> None:
    build = Builder()
    x, count = build.input((64, 256), dtype), build.input((64, 256), dtype)
    left = build("bitwise_left_shift", x, count)
    graph = build.graph(build("bitwise_right_shift", left, count))
    names = opcodes(generate(graph, graph.operators), tmp_path)
    assert any(name.startswith(("SHF", "USHF")) for name in names)
