"""Translation of Triton lines to Gluon, for kernels that use shared memory.

Gluon (``triton.experimental.gluon``) has the operators of Triton under the same names, except
random numbers and broadcasts to a shape, and it can name shared memory. A tensor gets its layout
where it is created; results of operators inherit the layout.
"""

from __future__ import annotations

import re

from nostall.fusion.codegen.emit.program import Language
from nostall.fusion.codegen.expressions.templates import TRITON_DTYPES
from nostall.fusion.codegen.loops.addresses import ZERO_TENSOR

LAYOUT = "row"
"""The name of the register layout in the kernels."""

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
    """The source of a Triton file as Gluon."""
    zero = f"{ZERO_TENSOR[:-1]}, {LAYOUT})"
    return _NAME.sub("gl.", text.replace(ZERO_TENSOR, zero)).replace("@triton.jit", "@gluon.jit")


def widened_blocks(name: str, blocks: str, width: int, dtype: str) -> str:
    """A value of each block of columns, of shape (1, blocks, 1), as a tensor of all columns.

    ``blocks``: the shape (1, blocks, columns of a block) as text.  The sum with zero gives the
    value its columns, and -0.0 leaves all floats as they are.  A reshaped tensor has a layout of
    another name, of which the elements lie where those of :data:`LAYOUT` do.
    """
    zero = "-0.0" if dtype == "float32" else "0"
    zeros = f"tl.full((1, {width}), {zero}, {TRITON_DTYPES[dtype]}, {LAYOUT})"
    wide = f"tl.reshape({name} + tl.reshape({zeros}, {blocks}), (1, {width}))"
    return f"tl.convert_layout({wide}, {LAYOUT})"


GLUON = Language(HEAD, translate_to_gluon)
GLUON_WITH_COPIES = Language(HEAD + COPIES, translate_to_gluon)
