"""Kernels that the assembler search was not developed with: Triton code and CUDA C++.

Kernels of training (attention backward, cross-entropy, RMSNorm and SwiGLU backward, a fused
reduction as TorchInductor generates), of inference (paged attention, fp8 and int4 products,
a mixture of experts, top-k, quantisation), a scan, and PTX of nvcc.  Outputs are deterministic.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.kernels.suite import Entry, Tile

FOLDER = Path(__file__).with_name("user_code")
CUDA = ("sgemm", "stencil", "row_softmax")

Row = tuple[str, str, tuple[int, ...], tuple[Tile | None, ...], tuple[int, ...], tuple[int, ...]]

_TABLE: tuple[Row, ...] = (
    # Kernel, file, problem, tiles, warps, stages; 6 combinations at most.
    ("attention_dkdv", "attention_backward", (16, 1024, 64),
     ((32, 64), (64, 64), (64, 128)), (4,), (2, 3)),
    ("attention_dq", "attention_backward", (16, 1024, 64),
     ((64, 32), (64, 64), (128, 64)), (4,), (2, 3)),
    ("moe_gemm", "moe_gemm", (512, 1024, 1024, 1024, 8),
     ((32, 64, 64), (64, 64, 64), (64, 128, 64)), (4,), (3, 4)),
    ("int4_gemm", "int4_gemm", (16, 4096, 4096),
     ((16, 32, 128), (16, 64, 64), (16, 64, 128)), (4,), (3, 4)),
    ("fp8_gemm", "fp8_gemm", (512, 2048, 2048),
     ((64, 64), (64, 128), (128, 128)), (4,), (3, 4)),
    ("paged_decode", "paged_attention", (32, 8, 4, 128, 128, 4),
     ((32,), (64,), (128,)), (2, 4), (3,)),
    ("topk", "topk", (1024, 1024, 32), (None,), (1, 2, 4, 8), (3,)),
    ("selective_scan", "selective_scan", (2, 1024, 1024, 16),
     ((64,), (128,), (256,)), (2, 4), (3,)),
    ("cross_entropy", "cross_entropy", (512, 32000),
     ((1024,), (2048,), (4096,)), (4, 8), (3,)),
    ("fused_reduction", "fused_reduction", (4096, 1536),
     ((1, 2048), (2, 1024), (4, 512)), (4, 8), (3,)),
    ("layernorm_quantise", "norms", (4096, 2048), (None,), (2, 4, 8), (3,)),
    ("rmsnorm_backward", "norms", (2048, 2048, 264), (None,), (4, 8, 16), (3,)),
    ("geglu", "gated", (2048, 4096), ((512,), (1024,), (2048,)), (4, 8), (3,)),
    ("rotary", "rotary", (4096, 32, 8, 128), (None,), (1, 2, 4, 8), (3,)),
    ("swiglu_backward", "gated", (1024, 4096), ((512,), (1024,), (2048,)), (4, 8), (3,)),
)  # fmt: skip


def unseen_entries() -> tuple[Entry, ...]:
    """All kernels, the ones with most instructions and loops first."""
    triton = [
        Entry(kernel, FOLDER / f"{file}.py", problem, tiles=tiles, warps=warps, stages=stages)
        for kernel, file, problem, tiles, warps, stages in _TABLE
    ]
    nvcc = [Entry(name, FOLDER / "cuda" / f"{name}.ptx") for name in CUDA]
    return (*triton[:8], *nvcc, *triton[8:])
