"""The committed PTX of the corpus, and the script that makes it from Triton and nvcc kernels.

    python -m tests.corpus.ptx_catalogue

needs Triton 3.9 and nvcc 13.0; the texts are committed, so that the tests need neither.  Folders
are cut from file names, and debugging sections that hold folders are dropped.
"""

from __future__ import annotations

import gzip
import re
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path

FOLDER = Path(__file__).parent / "ptx"
_ROOT = Path(__file__).resolve().parents[2]

TRITON = (
    "atomics.sm_80",
    "branches.sm_80",
    "cache_hints.sm_90",
    "cumulative_sum.sm_90",
    "descriptor_copy.sm_100",
    "descriptor_matmul.sm_90",
    "device_calls.sm_90",
    "fused_attention.sm_90",
    "fused_attention.sm_100",
    "gemm_leakyrelu.sm_80",
    "gemm_leakyrelu.sm_100",
    "gemm_leakyrelu-wgmma.sm_90",
    "inline_assembly.sm_90",
    "integer_division-long.sm_90",
    "lock_and_add.sm_90",
    "matmul-int8small.sm_80",
    "pipelined_copy.sm_80",
    "prints.sm_80",
    "rmsnorm-512x128.sm_90",
    "softmax-128x512.sm_90",
    "transpose-half.sm_90",
)
"""Names of entries of :mod:`tests.corpus.triton_kernels`."""
NVCC = {
    "arithmetic": "sm_80",
    "atomics": "sm_80",
    "calls": "sm_80",
    "memory": "sm_80",
    "tensor": "sm_80",
    "warps": "sm_80",
    "clusters": "sm_90a",
    "hopper": "sm_90a",
    "blackwell": "sm_100a",
    "block_scaled": "sm_120a",
    "multimem": "sm_90",
}
"""Source in ``tests/corpus/nvcc`` -> architecture."""


@lru_cache
def ptx_texts() -> dict[str, str]:
    """Name -> PTX text of each committed file, in alphabetical order."""
    paths = sorted(FOLDER.glob("*.ptx.gz"))
    return {
        path.name.removesuffix(".ptx.gz"): gzip.decompress(path.read_bytes()).decode()
        for path in paths
    }


def remove_folders(text: str) -> str:
    """The text without folders of the machine that compiled it."""
    text = re.sub(r'(\.file\s+\d+\s+)"(?:[^"/]*/)*([^"/]+)"', r'\1"\2"', text)
    return re.sub(r"\t\.section\t\.debug_(?!str)\w+\n\t\{.*?\n\t\}\n", "", text, flags=re.DOTALL)


def _write(name: str, text: str) -> None:
    (FOLDER / f"{name}.ptx.gz").write_bytes(
        gzip.compress(remove_folders(text).encode(), compresslevel=9, mtime=0)
    )


def _build() -> None:
    from nostall.tuning.sources.triton_source import compile_triton
    from tests.corpus.triton_kernels import ENTRIES

    for entry in ENTRIES:
        for capability in entry.capabilities:
            if (name := entry.name(capability)) in TRITON:
                path = _ROOT / entry.path
                source = compile_triton(
                    path, entry.launch, None, f"sm_{capability}", options=entry.options
                )
                _write(name, source.ptx)
    source = compile_triton(
        Path(__file__).parent / "gluon_matmul.py", "gluon_matmul", arch="sm_90a"
    )
    _write("gluon_matmul.sm_90a", source.ptx)
    for name, arch in NVCC.items():
        source_file = Path(__file__).parent / "nvcc" / f"{name}.cu"
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "out.ptx"
            command = ["nvcc", "-ptx", "-O3", f"-arch={arch}", "-o", str(out), str(source_file)]
            subprocess.run(command, check=True)
            _write(f"nvcc-{name}.{arch}", out.read_text())


if __name__ == "__main__":
    sys.exit(_build())
