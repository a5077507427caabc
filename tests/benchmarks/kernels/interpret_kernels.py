"""Compares the kernels of ``benchmarks.kernels.user_code`` with PyTorch; a program of its own.

``TRITON_INTERPRET=1`` must be set before Triton is imported. Prints a line for each kernel.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from benchmarks.kernels.unseen import FOLDER

from nostall.core import Buffer, Constant, LaunchSpec
from nostall.tuning.sources.kernel_file import import_file

CASES: tuple[tuple[str, str, tuple[int, ...], dict[str, Any]], ...] = (
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


def check(file: str, kernel: str, problem: tuple[int, ...], options: dict[str, Any]) -> None:
    """Run a kernel; raises AssertionError if an output differs from the reference."""
    with import_file(FOLDER / f"{file}.py") as module:
        find = vars(module).get
        make = find(f"launch_{kernel}") or module.launch
        reference = find(f"reference_{kernel}") or module.reference
        launch = make(*problem, warps=4, **options)
        given = values(launch)
        expected = reference(torch, given)
        getattr(module, kernel)[launch.grid](**given)
    for name, value in expected.items():
        found = given[name].float()
        torch.testing.assert_close(found, value.float(), rtol=4e-3, atol=4e-3, msg=name)


def main() -> int:
    failed = 0
    for case in CASES:
        try:
            check(*case)
            print(f"{case[1]}: ok")
        except Exception as error:
            failed += 1
            print(f"{case[1]}: {type(error).__name__}: {error}"[:600])
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
