"""Compile device builders for sm_90; print Triton's version and the sizes of their cubins."""

from __future__ import annotations

import json
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nostall.serving.tables.device_kernel import SNAKE, build_kernel
from nostall.serving.tables.prefix.device_leaders import arrange_forest, find_leaders

NUMBERS = (
    "sequences", "columns", "stride", "capacity_tiles", "capacity_units", "capacity_reductions",
    "capacity_rows", "capacity_programs", "capacity_prefix_rows", "capacity_prefix_tiles",
)  # fmt: skip
"""Arguments that are 32-bit numbers; all others are addresses."""
WIDE = ("branch_costs", "state")
"""Addresses of 64-bit numbers."""
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
    "PAGE": 16,
    "BLOCK_P": 512,
}
VARIANTS: dict[str, tuple[Any, dict[str, int]]] = {
    "prefix groups": (build_kernel, {}),
    "window": (build_kernel, {"WINDOW": 4096, "LEAST_PREFIX": 0}),
    "leaders": (find_leaders, {}),
    "forest": (arrange_forest, {}),
}
"""Kernels, and the constants in which they differ from :data:`CONSTANTS`."""


def size(kernel: Any, changed: dict[str, int]) -> int:
    """Bytes of the cubin of a kernel."""
    constants = {k: v for k, v in (CONSTANTS | changed).items() if k in kernel.arg_names}
    types = dict.fromkeys(NUMBERS, "i32") | dict.fromkeys(WIDE, "*i64")
    signature = {
        name: "constexpr" if name in constants else types.get(name, "*i32")
        for name in kernel.arg_names
    }
    source = ASTSource(kernel, signature, constants, {})
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    return len(compiled.asm["cubin"])


def main() -> None:
    sizes = {name: size(*variant) for name, variant in VARIANTS.items()}
    print(json.dumps([triton.__version__, sizes]))


if __name__ == "__main__":
    main()
