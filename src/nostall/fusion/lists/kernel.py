"""A kernel over lists: its source, its launches, and the tensors that it takes and returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from nostall.fusion.codegen.emit.program import Launch, NodeNumbering, Workspace, assemble_file
from nostall.fusion.codegen.expressions.lines import Lines
from nostall.fusion.codegen.expressions.templates import compute_dtype
from nostall.fusion.hardware import H200, Hardware

NORM_PROGRAMS_PER_SM = 32
"""Programs that read the tensors of a list of norms, for each SM; measured as part of a plan."""


@dataclass(frozen=True)
class Layout:
    """Layout of one tensor; sizes and strides in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class ListPlan:
    """Elements of a block and warps of a program of pointwise kernels, and of norms.

    The defaults are the fastest rows of ``fusion.list_plans`` on an H200, each by itself.
    """

    block: int = 1024
    num_warps: int = 8
    norm_block: int = 4096
    norm_warps: int = 8
    norm_programs: int = NORM_PROGRAMS_PER_SM * H200.sms
    """Programs that read the tensors of a list of norms."""

    def __str__(self) -> str:
        return f"lists of blocks of {self.block}, {self.num_warps} warps"


DEFAULT_PLAN = ListPlan()


def plan_for(hardware: Hardware) -> ListPlan:
    """The default plan with as many programs as a GPU of so many SMs needs."""
    return replace(DEFAULT_PLAN, norm_programs=NORM_PROGRAMS_PER_SM * hardware.sms)


@dataclass(frozen=True)
class ListKernel:
    """Source and launches of one kernel; arguments are named ``p0``, ``p1`` …, inputs first."""

    source: str = field(repr=False)
    plan: str
    inputs: tuple[Layout, ...]
    """Those that the kernel overwrites come first."""
    mutated: int
    """How many inputs the kernel overwrites."""
    outputs: tuple[Layout, ...]
    launches: tuple[Launch, ...]
    workspaces: tuple[Workspace, ...] = ()
    argument_names: ClassVar[tuple[str, ...]] = ()
    """Names of arguments that differ from those of stored kernels: none."""
    varying: ClassVar[None] = None
    """Lists have no dynamic size."""

    @property
    def layouts(self) -> tuple[tuple[Layout, ...], tuple[Layout, ...]]:
        """Layouts of the inputs and of the outputs."""
        return self.inputs, self.outputs


def assemble(
    title: str, kernels: Sequence[tuple[Lines, Launch]], tensors: int
) -> tuple[str, tuple[Launch, ...]]:
    """The file of the kernels, in which ``tensors`` names of arguments stay as they are."""
    highest = tensors + max(str(lines).count("\n") for lines, _ in kernels)
    return assemble_file(title, kernels, NodeNumbering(range(highest)))


def loaded(pointer: str, offsets: str, dtype: str, mask: str = "") -> str:
    """A load in the dtype that kernels compute in."""
    text = f"tl.load({pointer} + {offsets}{f', mask={mask}' if mask else ''})"
    if dtype == "bool":
        return f"{text} != 0"
    return text if compute_dtype(dtype) == dtype else f"{text}.to(tl.float32)"
