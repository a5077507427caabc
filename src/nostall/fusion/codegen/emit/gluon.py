"""Triton's operators said in Gluon, which has the same ones, with layouts that the kernel names.

Gluon (``triton.experimental.gluon``) can name shared memory.  It has no random numbers and no
broadcast to a shape; layouts of tensors are said where they are made and followed from there.
"""

from __future__ import annotations

import re

from nostall.fusion.codegen.emit.program import Language
from nostall.fusion.codegen.loops.addresses import ZERO_TENSOR

LAYOUT = "row"
"""What kernels call the layout of their tensors."""

HEAD = """# ruff: noqa
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# What Triton 3.6 calls otherwise.
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
_memory = gl.shared_memory_descriptor
seen_as = getattr(_memory, "reinterpret", None) or _memory._reinterpret
"""

COPIES = """
from triton.experimental.gluon.language.nvidia.ampere import async_copy

copy_ahead = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
"""

_ONLY_IN_TRITON = ("PropagateNan", "target_info", "extra")
_NAME = re.compile(rf"\btl\.(?!(?:{'|'.join(_ONLY_IN_TRITON)})\b)")


def translate_to_gluon(text: str) -> str:
    """Lines of Triton as Gluon."""
    zero = f"{ZERO_TENSOR[:-1]}, {LAYOUT})"
    return _NAME.sub("gl.", text.replace(ZERO_TENSOR, zero)).replace("@triton.jit", "@gluon.jit")


GLUON = Language(HEAD, translate_to_gluon)
GLUON_WITH_COPIES = Language(HEAD + COPIES, translate_to_gluon)
