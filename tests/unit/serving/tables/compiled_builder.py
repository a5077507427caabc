"""Compile device builders for sm_90; print Triton's version and the sizes of their cubins."""

from __future__ import annotations

import json

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nostall.serving.tables.device_kernel import SNAKE, build_kernel

POINTERS = (
    "query_starts", "kv_lengths", "members", "member_starts", "shared_tokens", "places", "tasks",
    "program_offsets", "reductions", "counts", "prefix_rows",
)  # fmt: skip
CONSTANTS = {
    "PROGRAMS": 264,
    "TILE_TOKENS": (4, 16, 32),
    "LIMITS": (16, 64, 128),
    "START_COSTS": (256_000, 256_000, 256_000),
    "KEY_COSTS": (5160, 5160, 5160),
    "GROUP": 4,
    "KV_HEADS": 8,
    "WINDOW": 0,
    "SPLIT": 4096,
    "LEAST_SPLIT": 512,
    "PARTS": 1056,
    "KV_ALIGN": 64,
    "LEAST_PREFIX": 256,
    "LEAST_SAVED": 264 * 1_024_000,
    "CLASSES": 64,
    "DEAL": SNAKE.value,
    "WORKERS": 4,
    "BLOCK_S": 256,
    "BLOCK_T": 256,
    "BLOCK_U": 256,
}
VARIANTS: dict[str, dict[str, int]] = {
    "prefix groups": {},
    "window": {"WINDOW": 4096, "LEAST_PREFIX": 0},
}
"""Constants of each builder, as settings give them: a window has no prefix groups."""


def size(changed: dict[str, int]) -> int:
    """Bytes of the cubin of a builder."""
    constants = CONSTANTS | changed
    signature = {
        name: "constexpr" if name in constants else "*i32" if name in POINTERS else "i32"
        for name in build_kernel.arg_names
    }
    source = ASTSource(build_kernel, signature, constants, {})
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    return len(kernel.asm["cubin"])


def main() -> None:
    sizes = {name: size(changed) for name, changed in VARIANTS.items()}
    print(json.dumps([triton.__version__, sizes]))


if __name__ == "__main__":
    main()
