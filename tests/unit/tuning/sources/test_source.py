"""Loading of cubin files, and errors for other files."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from nostall.core import BadBinary, BadInput, LaunchSpec, UnsupportedArchitecture
from nostall.tuning.sources.source import load_cubin

ROOT = Path(__file__).resolve().parents[4]
EXAMPLES = ROOT / "examples"
NVCC = ROOT / "tests" / "corpus" / "nvcc"


def test_a_cubin_file_is_read() -> None:
    path = EXAMPLES / "nvcc" / "transpose.sm_90.cubin"
    launch = LaunchSpec.from_toml(EXAMPLES / "nvcc" / "transpose.toml")
    source = load_cubin(path, launch=launch)
    assert source.kernel == "transpose"
    assert source.cubin == path.read_bytes()
    assert source.launch is launch


def test_a_cubin_with_several_kernels_needs_a_name() -> None:
    path = NVCC / "calls.sm_90.cubin"
    with pytest.raises(BadInput, match=r"holds 6 kernels; name one of: .*recursion"):
        load_cubin(path)
    assert load_cubin(path, "recursion").kernel == "recursion"
    with pytest.raises(BadInput, match=r"no kernel 'horner'; it holds: .*jump_table"):
        load_cubin(path, "horner")


def test_files_that_are_not_cubins(tmp_path: Path) -> None:
    path = tmp_path / "file.cubin"
    with pytest.raises(BadInput, match="cannot read cubin"):
        load_cubin(path)
    good = (NVCC / "calls.sm_90.cubin").read_bytes()
    for data in (b"", b"text", good[:60], good[:100], good[: len(good) // 2]):
        path.write_bytes(data)
        with pytest.raises(BadBinary):
            load_cubin(path)
    path.write_bytes((NVCC / "atomics.fatbin").read_bytes())
    with pytest.raises(BadInput, match=r"2 images.*sm_80, sm_90"):
        load_cubin(path)
    with pytest.raises(BadBinary, match="machine"):
        load_cubin(Path(sys.executable))
    for unsupported in ("refused.sm_103.cubin", "refused.sm_121.cubin"):
        with pytest.raises(UnsupportedArchitecture, match=r"sm_1[02][13].*supported"):
            load_cubin(NVCC / unsupported)
