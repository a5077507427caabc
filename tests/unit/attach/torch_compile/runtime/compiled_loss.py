"""Compile variants of the loss's kernel for sm_90; print the sizes of their cubins."""

from __future__ import annotations

import itertools

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nostall.attach.torch_compile.runtime.loss_kernel import launch_shape, loss_rows

CLASSES = 128_000
TYPES = {"logits": "*bf16", "labels": "*i64", "row_stride": "i32", "inner": "fp32", "cap": "fp32"}
PASSES = ((True, True), (True, False), (False, True))
"""Whether statistics and gradients are computed."""


def size(cap: bool, entropy: bool, statistics: bool, gradient: bool) -> int:
    block, warps = launch_shape(CLASSES)
    constants = {
        "CLASSES": CLASSES, "CAP": cap, "STATISTICS": statistics, "SUM": True,
        "GRADIENT": gradient, "WEIGHTS": False, "BLOCK": block,
        "ENTROPY": entropy,
    }  # fmt: skip
    names = loss_rows.arg_names
    signature = {
        name: "constexpr" if name in constants else TYPES.get(name, "*fp32") for name in names
    }
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(loss_rows, signature, values)
    target = GPUTarget("cuda", 90, 32)
    return len(triton.compile(source, target=target, options={"num_warps": warps}).asm["cubin"])


if __name__ == "__main__":
    flags = itertools.product((False, True), (False, True), PASSES)
    print(*(size(cap, entropy, *each) for cap, entropy, each in flags))
