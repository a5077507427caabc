"""Wrong machine code that versions of ptxas are reported to make, and the PTX that it concerns.

A pattern is wider than the report where the report does not say what exactly is needed: a version
that is refused too often costs time, one that is accepted wrongly costs results.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from nostall.ptx.assemble.versions import version_numbers
from nostall.ptx.program.instruction import Instruction
from nostall.ptx.program.module import Module

_Version = tuple[int, ...]


@dataclass(frozen=True)
class Fault:
    """Wrong code of some versions of ptxas."""

    summary: str
    source: str
    """Address of the report."""
    targets: str
    """Regular expression of the architectures."""
    since: _Version
    """First version with the fault; () if every older one may have it."""
    until: _Version
    """First version of which the report says that it is right, or that no report names."""
    concerns: Callable[[Instruction], bool] = field(repr=False)
    """Whether an instruction of the PTX may be assembled wrongly."""

    def __str__(self) -> str:
        return f"{self.summary} ({self.source})"


def _reads_registers_in_wgmma(instruction: Instruction) -> bool:
    if not instruction.opcode.startswith("wgmma.mma_async") or len(instruction.operands) < 2:
        return False
    return instruction.operands[1].tokens[0].text == "{"


def _multiplies_matrices(instruction: Instruction) -> bool:
    return instruction.base in ("mma", "wmma", "wgmma", "tcgen05")


def _repeats_an_accumulator(instruction: Instruction) -> bool:
    """Whether a warp's product of 8-bit floats reads an accumulator register twice."""
    if instruction.base != "mma" or not {"e4m3", "e5m2"} & set(instruction.qualifiers):
        return False
    read = [token.text for token in instruction.operands[3].tokens if token.text.startswith("%")]
    return len(set(read)) < len(read)


FAULTS: tuple[Fault, ...] = (
    Fault(
        "registers that a wgmma in flight still reads are written before it has read them",
        "https://github.com/triton-lang/triton/pull/11781",
        r"sm_90a",
        (),
        (13, 3),
        _reads_registers_in_wgmma,
    ),
    Fault(
        "wrong addresses of shared memory in Hopper kernels with matrix instructions",
        "https://github.com/fla-org/flash-linear-attention/pull/1262",
        r"sm_90a?",
        (),
        (13, 1),
        _multiplies_matrices,
    ),
    Fault(
        "results of Blackwell kernels with matrix instructions that differ from run to run",
        "https://github.com/pytorch/pytorch/issues/181248",
        r"sm_1[0-2]\d[af]?",
        (13, 0),
        (13, 2),
        _multiplies_matrices,
    ),
    Fault(
        "illegal instructions for packed f32 arithmetic",
        "https://github.com/glfs-book/glfs/issues/360",
        r"sm_1[0-2]\d[af]?",
        (13, 0),
        (13, 1, 115),
        lambda instruction: "f32x2" in instruction.qualifiers,
    ),
    Fault(
        "sums of 8-bit floating-point products whose accumulator is one register twice",
        "https://github.com/inclusionAI/humming/pull/87",
        r"sm_10\d[af]?",
        (),
        (13, 5),
        _repeats_an_accumulator,
    ),
)


def known_faults(module: Module, version: str, target: str | None = None) -> tuple[Fault, ...]:
    """Faults that ptxas ``version`` may have for a function of ``module``.

    ``target``: architecture to assemble for (None: that of the PTX).
    """
    numbers = version_numbers(version)
    instructions = [i for function in module.functions for i in function.instructions]
    return tuple(
        fault
        for fault in FAULTS
        if fault.since <= numbers < fault.until
        and re.fullmatch(fault.targets, target or module.target)
        and any(map(fault.concerns, instructions))
    )


def describe_faults(faults: Iterable[Fault]) -> str:
    """All faults in one line."""
    return "; ".join(map(str, faults))
