"""The Triton kernels of the corpus, and the architectures that each is compiled for.

This module does not import Triton.  ``SKIPPED`` lists the cubins that a Triton version cannot
compile, with the reason.  Any other failure stops the build.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

ALL = (75, 80, 86, 89, 90, 100, 120)
"""Supported compute capabilities; 90 stands for 9.0."""
TENSOR = ALL[1:]
"""All compute capabilities except 7.5."""


@dataclass(frozen=True)
class Entry:
    """One launch of one kernel, compiled for several architectures."""

    path: str
    """Path of the kernel file, relative to the repository."""
    launch: str
    """Name in ``LAUNCHES`` of the file."""
    capabilities: tuple[int, ...]
    options: Mapping[str, object] = field(default_factory=dict)
    """Compile options of Triton."""
    suffix: str = ""
    """Part of the file name that distinguishes compile options."""

    def name(self, capability: int) -> str:
        """File name of the cubin without its extension."""
        return f"{self.launch.replace('@', '-')}{self.suffix}.sm_{capability}"


_EXAMPLE_LAUNCHES = {
    "gemm_leakyrelu": TENSOR,
    "gemm_leakyrelu@mma": (80, 90, 120),
    "gemm_leakyrelu@mma32": (75, 80, 90),
    "gemm_leakyrelu@ragged": (80, 90),
    "gemm_leakyrelu@wgmma": (90, 100),
    "gemm_leakyrelu@full": (80, 90, 100),
    "batched_gemm": (80, 90, 100, 120),
    "batched_gemm@mma": (89, 90),
    "batched_gemm@wgmma": (90,),
    "batched_gemm@full": (89, 90),
    "fused_feedforward": (80, 86, 90, 100, 120),
    "fused_feedforward@mma": (80, 90),
    "fused_feedforward@wgmma": (90,),
    "fused_feedforward@full": (90,),
    "fused_attention": TENSOR,
    "fused_attention@d32": (75, 90),
    "fused_attention@d128": (80, 90),
    "fused_attention@mma": (80, 90, 120),
    "fused_attention@wgmma": (90, 100),
    "fused_attention@full": (89, 90),
    "flash_attention": (80, 89, 90, 100, 120),
    "flash_attention@d128": (80, 90),
    "flash_attention@mma": (80, 90),
    "flash_attention@short": (86, 90),
    "softmax": ALL,
    "softmax@512x32000": (90,),
    "softmax@64x2048": (80, 90),
    "softmax@128x512": (75, 90),
    "rmsnorm": ALL,
    "rmsnorm@512x128": (75, 80, 90),
    "rmsnorm@512x8192": (90, 120),
    "rmsnorm@64x4096": (80, 90),
    "rmsnorm_loop": ALL,
}
"""Launch of an example -> compute capabilities."""

_CORPUS_LAUNCHES = {
    "elementwise": {
        "vector_add": ALL,
        "vector_add@odd": (75, 90),
        "special_functions": (75, 80, 89, 90, 120),
        "library_functions": (80, 90),
        "gelu_bias": (80, 90, 100),
        "double_precision": (75, 80, 90, 100, 120),
        "integer_division": (75, 80, 90, 120),
        "integer_division@long": (80, 90),
        "bit_tricks": (75, 86, 90),
        "narrow_types": (80, 90, 120),
        "eight_bit_floats": (89, 90, 100, 120),
        "dropout": (75, 90, 100),
        "normal_noise": (86, 90),
        "polynomial": (75, 80, 90),
        "inline_assembly": (75, 90),
        "adamw": (80, 90, 120),
        "rotary": (75, 90),
    },
    "reductions": {
        "layernorm": (75, 80, 90, 100, 120),
        "layernorm@wide": (80, 90),
        "layernorm_backward": (80, 90, 120),
        "cross_entropy": (80, 90),
        "softmax_backward": (75, 90),
        "sum_columns": (75, 90),
        "extremes": (75, 80, 90, 120),
        "welford": (80, 90),
        "cumulative_sum": (75, 80, 90, 100),
        "linear_recurrence": (80, 90),
        "sort_rows": (75, 90),
        "sort_rows@short": (86, 90),
        "top_k": (80, 90),
        "histogram": (75, 80, 90, 120),
        "gather_in_block": (80, 90),
        "flip_join_split": (75, 80, 90),
        "quantise_rows": (80, 90),
    },
    "memory": {
        "atomics": ALL,
        "float_atomics": ALL,
        "lock_and_add": (75, 80, 90, 120),
        "transpose": (75, 80, 90),
        "transpose@half": (86, 90, 100),
        "embedding": (75, 90),
        "embedding_backward": (80, 90),
        "sparse_rows": (75, 80, 90),
        "cache_hints": (75, 80, 90, 100, 120),
        "pipelined_copy": (80, 90, 120),
        "scattered_bytes": (80, 90),
        "strided_3d": (75, 90),
        "im2col": (80, 90),
        "descriptor_copy": (80, 90, 100, 120),
        "descriptor_reduce": (90, 100),
    },
    "control": {
        "collatz": (75, 80, 90),
        "branches": (75, 80, 90, 120),
        "scalar_branch": (80, 90, 100),
        "nested_loops": (75, 80, 90),
        "device_calls": ALL,
        "prints": (75, 80, 90, 100, 120),
        "asserts": (75, 80, 90),
        "unrolled": (80, 90),
        "unroll_factor": (75, 90),
        "many_arguments": (75, 90),
        "many_registers": (75, 80, 90, 100, 120),
        "many_registers@spill": (80, 90, 120),
        "mandelbrot": (75, 90),
    },
    "tensor_cores": {
        "matmul@bf16": (80, 90, 120),
        "matmul@tf32": (80, 89, 90, 100),
        "matmul@tf32x3": (80, 90),
        "matmul@ieee": (75, 90),
        "matmul@int8": (80, 90, 120),
        "matmul@int8small": (80, 90),
        "matmul@fp64": (80, 90, 100),
        "matmul@bigtile": (80, 90, 100),
        "matmul@spill": (80, 86, 90, 120),
        "matmul@huge": (80, 90, 100),
        "matmul@deep": (80, 86, 90),
        "matmul@single": (80, 90),
        "matmul@nopipe": (80, 90, 100),
        "matmul_fp8": (89, 90, 100, 120),
        "matmul_fp8@big": (90, 100),
        "matmul_int4": (80, 90),
        "split_k": (80, 90),
        "persistent_matmul": (80, 90, 100),
        "descriptor_matmul": (80, 90, 100, 120),
        "descriptor_matmul@specialised": (90, 100),
        "descriptor_persistent": (90, 100, 120),
        "descriptor_persistent@specialised": (90, 100),
        "descriptor_persistent@wide": (90, 100),
        "scaled_matmul": (90, 100, 120),
        "convolution": (80, 90, 100),
        "attention_backward": (80, 90, 100),
        "batched_dot": (80, 90),
        "gemv": (75, 80, 90),
    },
}
"""File of ``tests/corpus/kernels`` -> launch -> compute capabilities."""


def _examples() -> Iterator[Entry]:
    """Kernels of ``examples``."""
    for launch, capabilities in _EXAMPLE_LAUNCHES.items():
        stem = launch.partition("@")[0].removesuffix("_loop")
        yield Entry(f"examples/{stem}.py", launch, capabilities)


def _corpus_kernels() -> Iterator[Entry]:
    """Kernels of ``tests/corpus/kernels``."""
    for stem, launches in _CORPUS_LAUNCHES.items():
        for launch, capabilities in launches.items():
            yield Entry(f"tests/corpus/kernels/{stem}.py", launch, capabilities)


def _other_options() -> Iterator[Entry]:
    """Some of the kernels with other compile options."""
    path = "tests/corpus/kernels/tensor_cores.py"
    yield Entry(path, "descriptor_matmul", (90, 100), {"num_ctas": 2}, ".cluster2")
    yield Entry(path, "matmul@bf16", (80, 120), {"maxnreg": 64}, ".maxnreg64")
    yield Entry(
        "examples/gemm_leakyrelu.py", "gemm_leakyrelu@mma", (86, 90), {"maxnreg": 80}, ".r80"
    )
    yield Entry("examples/softmax.py", "softmax", (90,), {"enable_fp_fusion": False}, ".nofma")


ENTRIES: tuple[Entry, ...] = (*_examples(), *_corpus_kernels(), *_other_options())

_BARRIER_PLACEMENT = (
    "its warp specialisation cannot place barriers around a loop over tiles on sm_100"
)
SKIPPED: dict[tuple[str, str], str] = {
    ("3.6", "descriptor_persistent-specialised.sm_100"): _BARRIER_PLACEMENT,
    ("3.6", "descriptor_persistent-wide.sm_100"): _BARRIER_PLACEMENT,
}
