"""What code generation hands over: source text and how its kernels are launched, one by one."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from nostall.fusion.codegen.expressions.helpers import used_helpers
from nostall.fusion.codegen.expressions.lines import Lines
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan, PackedPlan
from nostall.fusion.codegen.tiling.planned_kernel import PlannedKernel
from nostall.fusion.graph.dynamic_size import varies
from nostall.fusion.graph.graph import Graph

HEAD = """# ruff: noqa
import triton
import triton.language as tl
"""


@dataclass(frozen=True)
class Language:
    """What a file of kernels begins with, and how a line of Triton is written in it."""

    head: str
    translate: Callable[[str], str]


TRITON = Language(HEAD, str)
LAUNCH_DEPENDENTS = "_release()"
"""The line from which on the next kernel may begin, in kernels that do not begin with it.  No
compiler moves what is read above it below."""


@dataclass(frozen=True)
class Workspace:
    """Memory for partial results between the kernels of one program."""

    name: str
    dtype: str
    elements: int


@dataclass(frozen=True)
class Launch:
    """One kernel.  ``arguments`` name tensors (``argument_names`` of the program, or workspaces), ``counts``
    are the 32-bit integers that follow them; counts and grid are those of the graph's own sizes.
    ``specializes_counts``: Triton compiles again for counts that are multiples of 16.  ``aligned``:
    tensors begin at multiples of 16 bytes, or it cannot be compiled.  ``follows``: it waits for the
    kernel before by itself, and may be launched before that one has ended (programmatic dependent
    launch)."""

    name: str
    arguments: tuple[str, ...]
    counts: tuple[int, ...]
    grid: tuple[int, int]
    num_warps: int
    specializes_counts: bool = False
    count_names: tuple[str, ...] = ("count", "span")
    aligned: bool = False
    follows: bool = False


@dataclass(frozen=True)
class Program:
    """Source and launches of one stitched pattern; ``inputs`` and ``outputs`` are graph nodes,
    ``argument_names`` what kernels call those, inputs first."""

    graph: Graph = field(repr=False)
    plan: KernelPlan | PackedPlan
    source: str = field(repr=False)
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    argument_names: tuple[str, ...]
    launches: tuple[Launch, ...]
    workspaces: tuple[Workspace, ...] = ()

    @property
    def nodes_by_argument(self) -> dict[str, int]:
        """The nodes by the names of the kernels' arguments, inputs first."""
        return dict(zip(self.argument_names, (*self.inputs, *self.outputs), strict=True))

    @property
    def key(self) -> str:
        """sha256 of the source."""
        return hashlib.sha256(self.source.encode()).hexdigest()

    def dynamic_size(self, inputs: Sequence[Sized]) -> int | None:
        """The varying size that tensors for ``inputs`` have; None where nothing varies."""
        return find_dynamic_size(self.graph, self.inputs, inputs)


class Sized(Protocol):
    """A tensor, as far as code without PyTorch has to know it."""

    @property
    def shape(self) -> Sequence[int]: ...


def find_dynamic_size(graph: Graph, inputs: Sequence[int], tensors: Sequence[Sized]) -> int | None:
    """The varying size of a graph, as the first of ``tensor_arguments`` that has it says (they are given for
    the nodes ``inputs``); None where nothing varies or no tensor has it."""
    for index, tensor in zip(inputs, tensors, strict=False):
        for planned, size in zip(graph[index].shape, tensor.shape, strict=False):
            if graph.varying and varies(planned, graph.varying):
                return size // (planned // graph.varying)
    return None


def kernel_name(kernel: PlannedKernel) -> str:
    """A name for profiles: the first operators that are not trivial, and the scheme."""
    mapping, plan = kernel.schedule.mapping, kernel.plan
    ops = [mapping.graph[i] for i in mapping.operators]
    telling = [n.op for n in ops if n.kind != "light"] or [n.op for n in ops]
    return "_".join(["stitched", *list(dict.fromkeys(telling))[:4], plan.scheme])


def assemble_program(
    kernel: PlannedKernel,
    launches: Sequence[tuple[Lines, Launch]],
    workspaces: Sequence[Workspace] = (),
    language: Language = TRITON,
) -> Program:
    """Assemble the file of a planned kernel; ``launches`` has the body of each launch."""
    mapping, plan = kernel.schedule.mapping, kernel.plan
    names = NodeNumbering(mapping.inputs)
    source, named = assemble_file(str(plan), launches, names, language=language)
    spaces = tuple(replace(space, name=names.renumber(space.name)) for space in workspaces)
    inputs, outputs = mapping.inputs, mapping.outputs
    called = names.tensor_arguments((*inputs, *outputs))
    return Program(mapping.graph, plan, source, inputs, outputs, called, named, spaces)


class NodeNumbering:
    """Numbers of a kernel's own in place of those of a graph's nodes, so that equal patterns of
    one graph are one kernel: its inputs, then what else it names, in the order of the text."""

    # Memory (p, w), what is loaded (x) and computed (v, s, a, t), and nodes in comments.
    _NUMBERED = re.compile(r"(?<![\w.])([pwxvsat%])(\d+)")

    def __init__(self, inputs: Iterable[int]) -> None:
        self._numbers = {str(index): at for at, index in enumerate(inputs)}

    def renumber(self, text: str) -> str:
        """The text with each node in names such as ``v12_0``, ``x3at1`` and ``%7`` renumbered."""
        return self._NUMBERED.sub(self._renumber_match, text)

    def tensor_arguments(self, nodes: Iterable[int]) -> tuple[str, ...]:
        """What kernels call the memory of these nodes."""
        return tuple(self.renumber(f"p{index}") for index in nodes)

    def _renumber_match(self, found: re.Match[str]) -> str:
        kind, node = found.groups()
        return f"{kind}{self._numbers.setdefault(node, len(self._numbers))}"


def assemble_file(
    title: str,
    kernels: Sequence[tuple[Lines, Launch]],
    names: NodeNumbering,
    parts: str = "",
    language: Language = TRITON,
) -> tuple[str, tuple[Launch, ...]]:
    """The text of a file of kernels, behind ``parts`` that they call, and how they are launched.

    The names carry a hash of the text, so equal patterns and plans give equal bytes and different
    ones never share a name.
    """
    head = [language.head]
    parts = names.renumber(parts)
    texts = [_with_wait(names.renumber(str(lines))) for lines, _ in kernels]
    bodies = parts + "".join(texts)
    helpers = [f"\n\n{text}" for text in used_helpers(_helper_calls(bodies))]
    if "libdevice." in "".join([*helpers, bodies]):
        head.append("from triton.language.extra import libdevice\n")
    head.append(f"\n# {title}\n")
    head += helpers
    head.append(parts)
    digest = hashlib.sha256("".join([*head, *texts]).encode()).hexdigest()[:8]
    launches = []
    text = "".join(head)
    for body, (_, launch) in zip(texts, kernels, strict=True):
        name = f"{launch.name}_{digest}"
        arguments = tuple(map(names.renumber, launch.arguments))
        signature = ", ".join([*arguments, *_count_names(launch)])
        text += f"\n\n@triton.jit{_jit_options(launch)}\ndef {name}({signature}):\n{body}"
        launches.append(replace(launch, name=name, arguments=arguments, follows=True))
    return language.translate(text), tuple(launches)


def _with_wait(body: str) -> str:
    """A body behind the wait for the kernel before: ahead of it no memory may be touched."""
    return f"    {'_behind' if LAUNCH_DEPENDENTS in body else '_follow'}()\n{body}"


def _helper_calls(bodies: str) -> str:
    # tl.reduce names its function without calling it.
    return (
        bodies.replace(", _max,", ", _max(")
        .replace(", _min,", ", _min(")
        .replace(", _mul,", ", _mul(")
    )


def _count_names(launch: Launch) -> tuple[str, ...]:
    return launch.count_names[: len(launch.counts)]


def _jit_options(launch: Launch) -> str:
    # Otherwise Triton compiles again for a batch of 1 and for multiples of 16.
    if launch.specializes_counts:
        return ""
    names = ", ".join(f'"{name}"' for name in _count_names(launch))
    return f"(do_not_specialize=[{names}])" if names else ""
