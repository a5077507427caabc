"""Parameter records of cubins, against the signatures in the CUDA sources that nvcc compiled."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest

from nostall.core.errors import BadBinary
from nostall.sass.binary.attributes import parse_attributes
from nostall.sass.binary.cubin import Cubin, kernel_parameters

NVCC = Path(__file__).resolve().parents[3] / "corpus" / "nvcc"
SIGNATURE = re.compile(r"__global__\s+void\s+(?:__\w+__\([^)]*\)\s*)*(\w+)\s*\(([^)]*)\)")
SIZES = {
    "int": 4,
    "unsigned": 4,
    "float": 4,
    "double": 8,
    "cudaTextureObject_t": 8,
    "cudaSurfaceObject_t": 8,
    "CUtensorMap": 128,
    "Map": 128,
}


def declared_sizes(source: str) -> dict[str, list[int]]:
    """Sizes of the parameters of each kernel of a CUDA source."""
    text = re.sub(r"//.*", "", source)
    kernels = {}
    for name, parameters in SIGNATURE.findall(text):
        sizes = []
        for parameter in filter(None, map(str.strip, parameters.split(","))):
            words = parameter.replace("*", " * ").split()
            sizes.append(8 if "*" in words else next(SIZES[w] for w in words if w in SIZES))
        kernels[name] = sizes
    return kernels


_IN_MACROS = (
    *("carry_chains", "conversions", "division"),
    *("rare_distances", "register_operands", "wide_conversions"),
)
SOURCES = [p for p in sorted(NVCC.glob("*.cu")) if p.stem not in _IN_MACROS]
"""CUDA sources whose signatures stand in the text, not in macros."""


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_sizes_are_those_of_the_source(source: Path) -> None:
    declared = declared_sizes(source.read_text())
    checked = 0
    for path in NVCC.glob(f"{source.stem}.*.cubin"):
        if path.name.startswith("refused"):
            continue
        cubin = Cubin.parse(path.read_bytes())
        for text in cubin.texts:
            if text.is_kernel and text.name in declared:
                parameters = kernel_parameters(cubin, text.name)
                assert parameters is not None
                assert [p.size for p in parameters] == declared[text.name], (path.name, text.name)
                offsets = [p.offset for p in parameters]
                assert offsets == sorted(offsets)
                checked += 1
    assert checked or not list(NVCC.glob(f"{source.stem}.*.cubin"))


def test_a_kernel_without_records() -> None:
    cubin = Cubin.parse((NVCC / "memory.sm_80.cubin").read_bytes())
    assert kernel_parameters(cubin, "nothing") is None


def test_damaged_records_are_refused() -> None:
    data = bytearray((NVCC / "memory.sm_80.cubin").read_bytes())
    cubin = Cubin.parse(bytes(data))
    section = next(s for s in cubin.elf.sections if s.name == ".nv.info.local_array")
    record = next(a for a in parse_attributes(cubin.elf, section) if a.code == 0x17)
    struct.pack_into("<H", data, record.file_offset + 4, 7)  # the ordinal
    with pytest.raises(BadBinary, match="must be numbered from 0"):
        kernel_parameters(Cubin.parse(bytes(data)), "local_array")
