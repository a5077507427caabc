"""Compile the PTX files of this folder, which are committed: the tests need no CUDA compiler.

    python tests/corpus/ptx/build.py

It needs nvcc 13.0 and Triton 3.9. Triton writes the paths of source files into its PTX: kernel files
are copied to a folder that is the same everywhere, and Triton's own folder is replaced.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))
SOURCES = Path("/tmp/nostall")
FOLDER = Path(__file__).parent

TRITON: tuple[tuple[str, str, str], ...] = (
    ("examples/fused_attention.py", "fused_attention@wgmma", "sm_90"),
    ("examples/gemm_leakyrelu.py", "gemm_leakyrelu@mma32", "sm_80"),
    ("examples/gemm_leakyrelu.py", "gemm_leakyrelu", "sm_100"),
    ("examples/rmsnorm.py", "rmsnorm_loop", "sm_80"),
    ("tests/corpus/kernels/control.py", "prints", "sm_90"),
    ("tests/corpus/kernels/elementwise.py", "inline_assembly", "sm_90"),
)
"""Kernel file, launch, architecture."""
NVCC: tuple[tuple[str, str], ...] = (
    ("arithmetic", "80"),
    ("calls", "90"),
    ("hopper", "90a"),
    ("blackwell", "100a"),
    ("warps", "80"),
)
"""Source in tests/corpus/nvcc, architecture."""


def main() -> None:
    """Write all files."""
    import triton

    from nostall.tuning.source import compile_triton

    installed = str(Path(triton.__file__).parent)
    SOURCES.mkdir(exist_ok=True)
    shutil.copy(ROOT / "tests/corpus/kernels/kernel_spec.py", SOURCES)
    for path, launch, arch in TRITON:
        copy = SOURCES / Path(path).name
        shutil.copy(ROOT / path, copy)
        ptx = compile_triton(copy, launch, None, arch).ptx
        assert ptx is not None
        (FOLDER / f"{launch.replace('@', '-')}.{arch}.ptx").write_text(
            ptx.replace(installed, "/triton")
        )
    for source, arch in NVCC:
        output = FOLDER / f"{source}.sm_{arch}.ptx"
        command = ["nvcc", "-ptx", "-O3", f"-arch=sm_{arch}", "-o", str(output)]
        subprocess.run([*command, str(ROOT / f"tests/corpus/nvcc/{source}.cu")], check=True)
    shutil.rmtree(SOURCES)


if __name__ == "__main__":
    main()
