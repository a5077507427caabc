"""PTX for the tests: modules around hand-written statements, and the files of the corpus."""

from __future__ import annotations

from functools import lru_cache

from nostall.ptx.program.module import Module, parse
from tests.corpus.ptx_catalogue import ptx_texts

NAMES = tuple(ptx_texts())
"""All files of the corpus of PTX."""
FEW = (
    "branches.sm_80",
    "device_calls.sm_90",
    "fused_attention.sm_90",
    "gemm_leakyrelu.sm_100",
    "inline_assembly.sm_90",
    "nvcc-blackwell.sm_100a",
    "nvcc-calls.sm_80",
    "nvcc-hopper.sm_90a",
    "prints.sm_80",
    "rmsnorm-512x128.sm_90",
)
"""Files for checks that take longer: each kind of instruction and of control flow."""

REGISTERS = """
	.reg .pred %p<10>;
	.reg .b16 %h<10>;
	.reg .b32 %r<100>;
	.reg .f32 %f<10>;
	.reg .b64 %rd<100>;
"""


def ptx(body: str, target: str = "sm_90a", outer: str = "") -> str:
    """A module with one kernel ``k``, whose body has the registers above and ``body``."""
    return (
        f".version 8.6\n.target {target}\n.address_size 64\n{outer}\n"
        f".visible .entry k(.param .u64 a, .param .u64 b)\n{{{REGISTERS}\n{body}\n\tret;\n}}\n"
    )


def module(body: str, target: str = "sm_90a", outer: str = "") -> Module:
    return parse(ptx(body, target, outer))


def corpus(name: str) -> str:
    """The text of a file of the corpus."""
    return ptx_texts()[name]


@lru_cache
def corpus_module(name: str) -> Module:
    """The module of a file of the corpus."""
    return parse(corpus(name))
