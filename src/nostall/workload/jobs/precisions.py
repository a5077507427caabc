"""Names of number formats: one spelling for all that profilers, PyTorch and launch files use."""

from __future__ import annotations

import re

_SPELLINGS = {
    "fp64": ("f64", "float64", "double", "fp64tensor"),
    "fp32": ("f32", "float32", "float", "single"),
    "tf32": ("tensorfloat32",),
    "bf16": ("bfloat16", "bfloat"),
    "fp16": ("f16", "float16", "half"),
    "fp8": (
        *("f8", "float8", "e4m3", "e5m2", "fp8e4m3", "fp8e5m2", "f8e4m3", "f8e5m2", "f8e4m3fn"),
        *("fp8e4m3fn", "float8e4m3", "float8e5m2", "float8e4m3fn", "mxfp8"),
    ),
    "fp4": ("f4", "float4", "e2m1", "f4e2m1", "float4e2m1", "mxfp4", "nvfp4"),
    "int8": ("i8", "s8", "char"),
}
_CANONICAL = {spelling: name for name, others in _SPELLINGS.items() for spelling in (name, *others)}
_IGNORED = re.compile(r"^(?:torch|c10|jnp|np)(?:\.|::)|[\s_-]")


def canonical_precision(name: str) -> str:
    """The name of a precision in hardware files; an unknown one in lower case.

    ``bfloat16``, ``torch.bfloat16`` and ``BF16`` are ``bf16``.
    """
    lower = name.strip().lower()
    return _CANONICAL.get(_IGNORED.sub("", lower), lower)
