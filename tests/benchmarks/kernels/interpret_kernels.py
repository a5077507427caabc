"""Compares the kernels of ``user_code`` and ``new_projects`` with PyTorch; a program of its own.

``TRITON_INTERPRET=1`` must be set before Triton is imported. Prints a line for each kernel. The
interpreter multiplies matrices of bf16 wrongly, so f16 takes the place of bf16.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from benchmarks.kernels.new_projects import entries, references
from benchmarks.kernels.unseen import FOLDER

from nostall.core import Buffer, Constant, LaunchSpec
from nostall.tuning.sources.kernel_file import import_file

Case = tuple[str, str, tuple[int, ...], dict[str, Any]]

CASES: tuple[Case, ...] = (
    ("attention_backward", "attention_dkdv", (2, 64, 16), {"tile": (16, 32), "stages": 2}),
    ("attention_backward", "attention_dq", (2, 64, 16), {"tile": (32, 16), "stages": 2}),
    ("moe_gemm", "moe_gemm", (24, 64, 32, 64, 3), {"tile": (16, 16, 32), "stages": 3}),
    ("int4_gemm", "int4_gemm", (16, 32, 256), {"tile": (16, 32, 128), "stages": 3}),
    ("paged_attention", "paged_decode", (3, 2, 4, 16, 6, 1), {"tile": (32,), "stages": 3}),
    ("topk", "topk", (3, 64, 8), {}),
    ("selective_scan", "selective_scan", (1, 2, 64, 4), {"tile": (16,)}),
    ("cross_entropy", "cross_entropy", (3, 200), {"tile": (64,)}),
    ("fused_reduction", "fused_reduction", (5, 100), {"tile": (2, 64)}),
    ("norms", "layernorm_quantise", (4, 96), {}),
    ("norms", "rmsnorm_backward", (6, 96, 1), {}),
    ("gated", "geglu", (3, 200), {"tile": (128,)}),
    ("gated", "swiglu_backward", (3, 200), {"tile": (128,)}),
    ("rotary", "rotary", (5, 4, 2, 16), {}),
)
"""File, kernel, problem and options of a small launch."""
NEW: tuple[Case, ...] = (
    ("attention", "int8_attention", (2, 64, 32), {"tile": (32, 16), "stages": 2}),
    ("attention", "pair_bias_attention", (2, 64, 16), {"tile": (32, 16), "stages": 2}),
    ("attention", "silu_attention", (2, 64, 16), {"tile": (32, 16), "stages": 2}),
    ("attention", "selected_attention", (5, 64, 32, 16, 3), {"tile": (16,), "stages": 2}),
    ("attention", "token_attention", (3, 64, 32, 2), {"tile": (16,), "stages": 2}),
    ("attention", "retention", (2, 32, 64), {"tile": (16,), "stages": 2}),
    ("attention", "lightning_attention", (2, 64, 16, 32), {"tile": (16,), "stages": 2}),
    ("products", "scattered_experts", (64, 32, 32, 3, 2), {"tile": (16, 16, 16), "stages": 2}),
    ("products", "zero_point_gemm", (16, 32, 64, 32), {"tile": (16, 16, 16), "stages": 2}),
    ("products", "linear_lse", (32, 64, 32), {"tile": (16, 32, 16), "stages": 2}),
    ("products", "block_sparse_sdd", (5, 64, 32), {"tile": (16, 16), "stages": 2}),
    ("products", "linear_gelu", (48, 32, 32), {"tile": (16, 16, 16), "stages": 2}),
    ("products", "adapter_shrink", (32, 64, 16, 3, 2), {"tile": (16, 16), "stages": 2}),
    ("products", "packed_gemv", (32, 64, 2), {"tile": (16, 16), "stages": 2}),
    ("products", "ternary_gemm", (16, 32, 128), {"tile": (16, 16, 16), "stages": 2}),
    ("products", "codebook_gemv", (32, 64, 100), {"tile": (16, 4), "stages": 2}),
    ("rows", "geglu_backward", (4, 64), {"tile": (64,), "stages": 2}),
    ("rows", "group_norm", (2, 8, 16, 2), {"tile": (32,), "stages": 2}),
    ("rows", "causal_conv", (2, 16, 32), {"tile": (8, 16), "stages": 2}),
    ("rows", "wkv", (2, 8, 32), {"tile": (16,), "stages": 2}),
    ("rows", "lion_update", (256,), {"tile": (64,), "stages": 2}),
    ("rows", "volume_rendering", (16, 32), {"tile": (4,), "stages": 2}),
    ("rows", "merge_attention", (3, 32, 16), {"tile": (16,), "stages": 2}),
    ("rows", "layernorm_backward", (3, 4, 64), {}),
    ("rows", "mlstm_state", (2, 64, 32), {"tile": (16, 16), "stages": 2}),
)
"""The same for the kernels of new projects, whose references are in a module of their own."""

DTYPES = {
    "f16": torch.float16,
    "f32": torch.float32,
    "i32": torch.int32,
    "i8": torch.int8,
    "u8": torch.uint8,
}


def values(launch: LaunchSpec) -> dict[str, Any]:
    """Arguments of a launch: random tensors by the rules of its buffers, numbers, constants."""
    generator = torch.Generator().manual_seed(0)
    given: dict[str, Any] = {}
    for arg in launch.args:
        if isinstance(arg, Constant):
            given[arg.name] = arg.constant
        elif not isinstance(arg, Buffer):
            given[arg.name] = arg.value
        elif arg.role == "out":
            given[arg.name] = torch.full(arg.shape, 77, dtype=DTYPES[arg.dtype])
        elif arg.bound is not None:
            drawn = torch.randint(arg.bound, arg.shape, generator=generator)
            given[arg.name] = drawn.to(DTYPES[arg.dtype])
        else:
            drawn = torch.rand(arg.shape, generator=generator) * (arg.high - arg.low) + arg.low
            given[arg.name] = drawn.to(DTYPES[arg.dtype])
    return given


def check(folder: Path, file: str, kernel: str, problem: tuple[int, ...], options: Any) -> None:
    """Run a kernel; raises AssertionError if an output differs from the reference."""
    with import_file(folder / f"{file}.py") as module:
        find = vars(module).get
        make = find(f"launch_{kernel}") or module.launch
        own = find(f"reference_{kernel}") or find("reference")
        launch = make(*problem, warps=4, **options)
        given = values(launch)
        expected = (own or getattr(references, kernel))(torch, dict(given))
        getattr(module, kernel)[launch.grid](**given)
    for name, value in expected.items():
        found = given[name].float()
        torch.testing.assert_close(found, value.float(), rtol=4e-3, atol=4e-3, msg=name)


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        in_f16 = Path(name)
        for path in entries.FOLDER.glob("*.py"):
            text = path.read_text().replace("bfloat16", "float16").replace('"bf16"', '"f16"')
            (in_f16 / path.name).write_text(text)
        failed = sum(
            not is_right(folder, case)
            for folder, cases in ((FOLDER, CASES), (in_f16, NEW))
            for case in cases
        )
    return 1 if failed else 0


def is_right(folder: Path, case: Case) -> bool:
    """Check a kernel and print its line."""
    try:
        check(folder, *case)
        print(f"{case[1]}: ok", flush=True)
    except Exception as error:
        print(f"{case[1]}: {type(error).__name__}: {error}"[:600])
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
