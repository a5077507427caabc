"""The kernels of this folder: project, problem size, and its configurations."""

from __future__ import annotations

from pathlib import Path

from benchmarks.kernels.suite import Entry, Tile

FOLDER = Path(__file__).parent

Row = tuple[
    str, str, str, tuple[int, ...], tuple[Tile | None, ...], tuple[int, ...], tuple[int, ...]
]
TABLE: tuple[Row, ...] = (
    # Project, file, kernel, problem, tiles, warps, stages.
    ("SageAttention", "attention", "int8_attention", (16, 2048, 64),
     ((64, 64), (128, 64)), (4, 8), (2, 3)),
    ("OpenFold", "attention", "pair_bias_attention", (64, 512, 32),
     ((32, 32), (64, 64), (128, 64)), (4,), (2, 3)),
    ("Generative Recommenders", "attention", "silu_attention", (16, 2048, 64),
     ((64, 32), (64, 64), (128, 64)), (4,), (2, 3)),
    ("native-sparse-attention", "attention", "selected_attention", (1024, 4096, 128, 16, 16),
     ((32,), (64,)), (1, 2, 4), (2,)),
    ("LightLLM", "attention", "token_attention", (32, 2048, 128, 8),
     ((16,), (32,), (64,)), (2, 4), (2,)),
    ("RetNet", "attention", "retention", (64, 2048, 128), ((32,), (64,)), (4, 8), (1, 2)),
    ("ScatterMoE", "products", "scattered_experts", (1024, 1024, 1024, 8, 2),
     ((64, 64, 32), (64, 128, 32), (128, 128, 32)), (4,), (3, 4)),
    ("GPTQ-triton", "products", "zero_point_gemm", (16, 4096, 4096, 128),
     ((16, 32, 128), (16, 64, 64), (16, 128, 32)), (4,), (2, 4)),
    ("cut-cross-entropy", "products", "linear_lse", (512, 16384, 1024),
     ((64, 128, 32), (128, 128, 32), (128, 128, 64)), (4, 8), (3,)),
    ("MegaBlocks", "products", "block_sparse_sdd", (256, 2048, 1024),
     ((64, 32), (128, 32), (128, 64)), (4,), (3, 4)),
    ("Kernl", "products", "linear_gelu", (512, 2048, 768),
     ((32, 64, 64), (64, 64, 64), (64, 128, 32)), (4,), (3, 4)),
    ("Punica", "products", "adapter_shrink", (512, 4096, 16, 8, 8),
     ((16, 64), (16, 128), (16, 256)), (2, 4), (3,)),
    ("GemLite", "products", "packed_gemv", (4096, 4096, 8),
     ((32, 64), (64, 32), (64, 64)), (2, 4), (2,)),
    ("Unsloth", "rows", "geglu_backward", (1024, 8192), ((512,), (1024,), (2048,)), (4, 8), (3,)),
    ("FlagGems", "rows", "group_norm", (8, 320, 1024, 32),
     ((512,), (1024,), (2048,)), (4, 8), (3,)),
    ("causal-conv1d", "rows", "causal_conv", (2, 2048, 2048),
     ((8, 256), (16, 128), (32, 256)), (2, 4), (3,)),
    ("RWKV", "rows", "wkv", (8, 512, 2048), ((32,), (64,), (128,)), (1, 2), (3,)),
    ("lion-pytorch", "rows", "lion_update", (8388608,), ((128,), (1024,), (2048,)), (4, 8), (3,)),
    ("nerfacc", "rows", "volume_rendering", (16384, 128), ((4,), (8,), (16,)), (4, 8), (3,)),
    ("ring-flash-attention", "rows", "merge_attention", (8, 16384, 64),
     ((16,), (32,), (64,)), (4, 8), (3,)),
    ("attorch", "rows", "layernorm_backward", (264, 16, 2048), (None,), (4, 8, 16), (3,)),
    ("xLSTM", "rows", "mlstm_state", (16, 2048, 128),
     ((64, 64), (64, 32), (128, 64)), (4, 8), (2,)),
    ("MiniMax", "attention", "lightning_attention", (32, 4096, 128, 256),
     ((32,), (64,)), (4, 8), (2, 3)),
    ("BitNet", "products", "ternary_gemm", (64, 4096, 4096),
     ((16, 64, 128), (64, 32, 128), (64, 64, 128)), (4,), (3, 4)),
    ("AQLM", "products", "codebook_gemv", (4096, 4096, 65536),
     ((8, 64), (16, 32), (8, 128)), (2, 4), (2,)),
)  # fmt: skip
PROJECTS = {kernel: project for project, _, kernel, *_ in TABLE}
"""Project in whose style a kernel was written."""


def new_project_entries() -> tuple[Entry, ...]:
    """All kernels, in the order of the table."""
    return tuple(
        Entry(kernel, FOLDER / f"{file}.py", problem, tiles=tiles, warps=warps, stages=stages)
        for _, file, kernel, problem, tiles, warps, stages in TABLE
    )
