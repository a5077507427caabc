"""Compiles the attention and GEMM kernels for sm_90 without a GPU, and reads what they use."""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from dataclasses import dataclass
from typing import Any

from nostall.serving.attention.config import SCHEDULES, AttentionShape, KernelConfig
from nostall.serving.attention.gluon_launch import COMPUTE_REGISTERS, COPY_REGISTERS
from nostall.serving.gemm.config import GemmConfig

SM_REGISTERS, SM_SHARED = 65536, 228 * 1024
"""Registers and bytes of shared memory of an SM of an H100."""
BLOCK_RESERVED = 1024
"""Bytes of shared memory that each block takes besides its own."""


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel uses."""

    registers: int
    stack: int
    """Bytes of the stack of a thread: spilled registers."""
    shared: int
    wgmma: int
    """Warpgroup products in the PTX."""
    mma: int
    async_copies: int
    seconds: float

    def programs_per_sm(self, warps: int) -> int:
        """Programs that fit on one SM at the same time."""
        by_registers = SM_REGISTERS // (-(-self.registers // 8) * 8 * 32 * warps)
        return min(by_registers, SM_SHARED // (self.shared + BLOCK_RESERVED))


def attention_resources(
    shape: AttentionShape, config: KernelConfig, dtype: str = "bf16", cache_dtype: str = ""
) -> Resources:
    """The meta-attention kernel of a shape and configuration; dtypes are Triton's names."""
    from nostall.serving.attention.kernel import meta_attention

    constants = {
        "HEADS": shape.heads, "KV_HEADS": shape.kv_heads, "D": shape.head_dim,
        "DIMS": shape.padded_head_dim, "PAGE": shape.page_size, "TILES": config.compiled_tiles,
        "SCHEDULE": SCHEDULES[config.schedule], "SOFT_CAP": shape.soft_cap > 0,
        "WINDOW": shape.window > 0, "TREE": shape.has_trees, "PREFIX": shape.has_prefixes,
        "DEPENDENT": config.dependent,
    }  # fmt: skip
    cache = cache_dtype or dtype
    pointers = {
        "query": dtype, "keys": cache, "values": cache, "out": dtype, "block_table": "i32",
        "tasks": "i32", "program_offsets": "i32", "counts": "i32", "queue": "i64",
        "query_starts": "i32", "kv_lengths": "i32", "tree_offsets": "i32", "tree_words": "i64",
        "prefix_rows": "i32", "partial": "fp32", "partial_log_sums": "fp32",
    }  # fmt: skip
    scalars = dict.fromkeys(("scale", "value_scale", "soft_cap"), "fp32")
    options = {"num_warps": config.warps}
    if config.registers:
        options["maxnreg"] = config.registers
    return _compile(meta_attention, pointers, scalars, constants, options)


def gluon_resources(shape: AttentionShape, config: KernelConfig, dtype: str = "bf16") -> Resources:
    """The Gluon kernel of a shape and configuration."""
    from nostall.serving.attention.gluon_kernel import tall_attention

    (tile,) = config.tiles
    constants = {
        "HEADS": shape.heads, "KV_HEADS": shape.kv_heads, "D": shape.head_dim,
        "PAGE": shape.page_size, "N": tile.keys, "STAGES": tile.stages,
        "QUEUE": config.schedule == "queue", "COMPUTE_REGISTERS": COMPUTE_REGISTERS,
        "COPY_REGISTERS": COPY_REGISTERS,
    }  # fmt: skip
    pointers = {
        "query": dtype, "keys": dtype, "values": dtype, "out": dtype, "block_table": "i32",
        "tasks": "i32", "counts": "i32", "queue": "i64", "query_starts": "i32",
        "kv_lengths": "i32", "partial": "fp32", "partial_log_sums": "fp32",
    }  # fmt: skip
    scalars = dict.fromkeys(("scale", "value_scale"), "fp32")
    return _compile(tall_attention, pointers, scalars, constants, {"num_warps": 4}, is_gluon=True)


def gemm_resources(config: GemmConfig, dtype: str = "bf16", has_bias: bool = False) -> Resources:
    """The GEMM kernel of a configuration."""
    from nostall.serving.gemm.kernel import smooth_gemm

    constants = {
        "ROWS": config.rows, "COLUMNS": config.columns, "DEPTH": config.depth,
        "SPLIT": config.split, "GROUP": config.group, "SWAP": config.swap, "BIAS": has_bias,
    }  # fmt: skip
    pointers = {
        "x": dtype, "weight": dtype, "bias": dtype, "y": dtype, "partial": "fp32",
        "arrivals": "i32",
    }  # fmt: skip
    options = {"num_warps": config.warps, "num_stages": config.stages}
    return _compile(smooth_gemm, pointers, {}, constants, options)


def _compile(
    kernel: Any,
    pointers: dict[str, str],
    scalars: dict[str, str],
    constants: dict[str, Any],
    options: dict[str, Any],
    is_gluon: bool = False,
) -> Resources:
    """Compile a kernel as a launch with aligned tensors and strides does."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    signature, attributes, values = {}, {}, {}
    unaligned = {"front_programs", "window", "M"}  # the kernels do not specialize on these
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], values[(index,)] = "constexpr", constants[name]
            continue
        signature[name] = f"*{pointers[name]}" if name in pointers else scalars.get(name, "i32")
        if name not in scalars and name not in unaligned:
            attributes[(index,)] = [["tt.divisibility", 16]]
    options = {**options, "enable_fp_fusion": True}
    begin = time.monotonic()
    source = (GluonASTSource if is_gluon else ASTSource)(kernel, signature, values, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    seconds = time.monotonic() - begin
    registers, stack = _usage(compiled.asm["cubin"])
    ptx = compiled.asm["ptx"]
    return Resources(
        registers,
        stack,
        compiled.metadata.shared,
        ptx.count("wgmma.mma_async"),
        ptx.count("mma.sync"),
        ptx.count("cp.async.cg"),
        round(seconds, 1),
    )


def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack of the kernel in a cubin, by Triton's cuobjdump."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None, text
    return int(found[1]), int(found[2])
