"""PTX for the tests: modules around hand-written statements, and the files of the corpus."""

from __future__ import annotations

from pathlib import Path

from nostall.ptx.program.module import Module, parse

CORPUS = Path(__file__).resolve().parents[2] / "corpus" / "ptx"
FILES = sorted(CORPUS.glob("*.ptx"))
assert len(FILES) >= 11

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
    return (CORPUS / f"{name}.ptx").read_text()
