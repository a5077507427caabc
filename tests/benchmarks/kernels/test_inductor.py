"""Extraction of a kernel of torch.compile: Inductor is faked, Triton's compiler is real."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from benchmarks.kernels.examples import EXAMPLES
from benchmarks.kernels.inductor import RecordedCompilation, RecordedLaunch, extract_kernel

from nostall.core import BadInput
from nostall.core.launch import Buffer, Constant
from nostall.sass import Program
from nostall.tuning.sources.kernel_file import find_jit_function, import_file

CONSTANTS = {"BLOCK": 512}


def config(**changes: Any) -> Any:
    defaults = {"kwargs": CONSTANTS, "num_warps": 4, "num_stages": 1}
    return SimpleNamespace(**{**defaults, **changes})


def launched(grid: str = "Grid1D") -> RecordedLaunch:
    signature = {
        "in_ptr0": "*fp16",
        "in_out_ptr0": "*fp16",
        "out_ptr0": "*fp16",
        "xnumel": "i32",
        "stride": "i32",
        "eps": "fp32",
        "BLOCK": "constexpr",
    }
    tuner = SimpleNamespace(
        triton_meta={"signature": signature, "constants": {}},
        inductor_meta={"grid_type": grid},
        launchers=[SimpleNamespace(config=config())],
    )
    x, w = np.zeros((64, 512), np.float16), np.zeros(512, np.float16)
    return RecordedLaunch(tuner, (x, x, w, 64, 512, 1e-6))


@pytest.fixture(scope="module")
def compiled() -> RecordedCompilation:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    path = EXAMPLES / "rmsnorm.py"
    options = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": True}
    with import_file(path) as module:
        function = find_jit_function(triton, module, path, "rmsnorm")
        kinds = ("*fp16", "*fp16", "*fp16", "i32", "i32", "fp32", "constexpr")
        signature = dict(zip(function.arg_names, kinds, strict=True))
        source = ASTSource(function, signature, CONSTANTS)
        kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return RecordedCompilation(source, options, kernel)


def test_a_launch_becomes_a_cubin_and_its_launch(compiled: RecordedCompilation) -> None:
    other = replace(compiled, options={"num_warps": 8, "num_stages": 1}, kernel=None)
    cubin, launch = extract_kernel(launched(), [other, compiled], 1.0)
    assert Program.from_cubin(cubin).kernel("rmsnorm").instructions
    assert (launch.grid, launch.block) == ((64, 1, 1), (128, 1, 1))
    roles = [a.role for a in launch.args if isinstance(a, Buffer)]
    assert roles == ["in", "inout", "out"]
    assert [a.name for a in launch.args if isinstance(a, Constant)] == ["BLOCK"]
    assert [a.name for a in launch.args][-2:] == ["global_scratch", "profile_scratch"]


def test_unsupported_launches_are_rejected(compiled: RecordedCompilation) -> None:
    with pytest.raises(BadInput, match="Grid1D"):
        extract_kernel(launched("Grid2D"), [compiled], 1.0)
    with pytest.raises(BadInput, match="none of 1 compilations"):
        extract_kernel(launched(), [replace(compiled, options={"num_warps": 8})], 1.0)
    with pytest.raises(BadInput, match="passed 5 arguments"):
        extract_kernel(replace(launched(), args=launched().args[1:]), [compiled], 1.0)


def test_inductor_still_has_the_names_that_are_read() -> None:
    torch = find_spec("torch")
    if torch is None or torch.origin is None:
        pytest.skip("torch is not installed")
    inductor = Path(torch.origin).parent / "_inductor"
    text = (inductor / "runtime" / "triton_heuristics.py").read_text()
    tuner = text[text.index("\nclass CachingAutotuner(") :]
    for name in ("self.triton_meta", "self.inductor_meta", "self.launchers", "def run("):
        assert name in tuner
    assert "triton.compile(*compile_args, **compile_kwargs)" in tuner
    assert "Grid1D" in text and "grid_type" in text
    assert "use_static_cuda_launcher" in (inductor / "config.py").read_text()
