"""Hand-written PTX for the tests of the validator."""

from __future__ import annotations

from nostall.ptx.safety.validate import validate
from nostall.ptx.safety.verdict import Verdict

_DECLARATIONS = """
	.reg .pred %p<8>;
	.reg .b16 %h<8>;
	.reg .b32 %r<64>, named;
	.reg .v4 .b32 %v;
	.reg .f32 %f<8>;
	.reg .b64 %rd<16>, %SP, %SPL;
	.local .align 16 .b8 stack[64];
	.shared .align 16 .b8 buffer[1024];
"""


def kernel(body: str, outer: str = "", header: str = ".reqntid 128") -> str:
    """A module with one kernel ``k`` around ``body``."""
    return (
        f".version 8.6\n.target sm_100a\n.address_size 64\n{outer}\n"
        f".visible .entry k(.param .u64 a, .param .b32 n)\n{header}\n"
        f"{{{_DECLARATIONS}\n{body}\n\tret;\n}}\n"
    )


def compare(
    original: str, candidate: str, outer: str = "", *, dependents_wait: bool = False
) -> Verdict:
    """The verdict about two bodies of the kernel."""
    texts = kernel(original, outer), kernel(candidate, outer)
    return validate(*texts, dependents_wait=dependents_wait)


def kinds(verdict: Verdict) -> set[str]:
    """The kinds of a verdict's findings."""
    return {finding.kind for finding in verdict.findings}
