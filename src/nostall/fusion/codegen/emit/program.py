"""Generated programs: the source text of kernels and the parameters of their launches."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Protocol

from nostall.fusion.codegen.expressions.helpers import used_helpers
from nostall.fusion.codegen.expressions.lines import Lines
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan, PackedPlan
from nostall.fusion.codegen.tiling.planned_kernel import PlannedKernel
from nostall.fusion.codegen.tiling.product_config import ProductConfig
from nostall.fusion.graph.dynamic_size import Size, SizeReader
from nostall.fusion.graph.graph import Graph, Node

HEAD = """# ruff: noqa
import triton
import triton.language as tl
"""


@dataclass(frozen=True)
class Language:
    """A language of generated files."""

    # The first lines of a file.
    head: str
    # Translates a file's Triton source.
    translate: Callable[[str], str]


TRITON = Language(HEAD, str)
LAUNCH_DEPENDENTS = "_release()"
"""The line after which the next kernel may start, in kernels that first load something.

Compilers do not move loads from above this line to below it.
"""


@dataclass(frozen=True)
class Workspace:
    """Global memory for partial results that one kernel of a program passes to the next."""

    name: str
    dtype: str
    elements: int


@dataclass(frozen=True)
class Launch:
    """One kernel of a program and the parameters of its launch."""

    # Of the kernel function.
    name: str
    # Tensors (``argument_names`` of the program) and workspaces.
    arguments: tuple[str, ...]
    # The int32 arguments behind the tensors, for the sizes in the graph.
    counts: tuple[int, ...]
    # Programs along both axes, for the sizes in the graph.
    grid: tuple[int, int]
    num_warps: int
    # Whether Triton compiles separate kernels for counts that are multiples of 16.
    specializes_counts: bool = False
    # The parameter names of ``counts``; there may be more names than counts.
    count_names: tuple[str, ...] = ("count", "span")
    # Whether tensors must begin at multiples of 16 bytes for the kernel to compile.
    aligned: bool = False
    # Whether the kernel itself waits for the previous kernel and may be launched before that kernel
    # has ended (programmatic dependent launch).
    follows: bool = False
    # Iterations of pipelined loops that are in flight; 0: Triton's default.
    num_stages: int = 0
    # Whether the kernel needs scratch memory, in which it writes tensor descriptors.
    needs_scratch: bool = False


@dataclass(frozen=True)
class Program:
    """The source and the launches of one stitched pattern."""

    graph: Graph = field(repr=False)
    plan: KernelPlan | PackedPlan | ProductConfig
    source: str = field(repr=False)
    # Graph nodes.
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    # Names of the inputs, then of the outputs, in the arguments of launches.
    argument_names: tuple[str, ...]
    # In the order of execution.
    launches: tuple[Launch, ...]
    workspaces: tuple[Workspace, ...] = ()
    # How many inputs the kernel overwrites.
    mutated: ClassVar[int] = 0

    @property
    def varying(self) -> int | None:
        """The product of the primes that stand for the graph's dynamic sizes."""
        return self.graph.varying

    @property
    def layouts(self) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
        """The nodes of the inputs and of the outputs, which have their shapes and strides."""
        return tuple(self.graph[i] for i in self.inputs), tuple(self.graph[i] for i in self.outputs)

    @property
    def nodes_by_argument(self) -> dict[str, int]:
        """The graph node of each argument name, inputs first."""
        return dict(zip(self.argument_names, (*self.inputs, *self.outputs), strict=True))

    @property
    def key(self) -> str:
        """sha256 of the source."""
        return hashlib.sha256(self.source.encode()).hexdigest()

    def dynamic_size(self, inputs: Sequence[Sized]) -> Size | None:
        """The graph's dynamic sizes in tensors for ``inputs``; None if it has none."""
        return find_dynamic_size(self.graph, self.inputs, inputs)


class Sized(Protocol):
    """Anything with a shape; a protocol because this module does not import PyTorch."""

    @property
    def shape(self) -> Sequence[int]: ...


def find_dynamic_size(graph: Graph, inputs: Sequence[int], tensors: Sequence[Sized]) -> Size | None:
    """The values of a graph's dynamic sizes, read from the shapes of ``tensors``.

    ``tensors`` are arguments for the nodes ``inputs``. None if the graph has no dynamic size or the
    tensors do not show all.
    """
    read = SizeReader(graph.varying, (graph[index].shape for index in inputs))
    return read([tensor.shape for tensor in tensors])


def kernel_name(kernel: PlannedKernel) -> str:
    """A kernel name for profiles: the first four nontrivial operators and the scheme."""
    mapping, plan = kernel.schedule.mapping, kernel.plan
    nodes = [mapping.graph[i] for i in mapping.operators]
    operators = [n.op for n in nodes if n.kind != "light"] or [n.op for n in nodes]
    return "_".join(["stitched", *list(dict.fromkeys(operators))[:4], plan.scheme])


def assemble_program(
    kernel: PlannedKernel,
    launches: Sequence[tuple[Lines | str, Launch]],
    workspaces: Sequence[Workspace] = (),
    language: Language = TRITON,
) -> Program:
    """Assemble the file of a planned kernel; ``launches`` has the body of each launch."""
    mapping, plan = kernel.schedule.mapping, kernel.plan
    numbers = NodeNumbering(mapping.inputs)
    source, final_launches = assemble_file(str(plan), launches, numbers, language=language)
    inputs, outputs = mapping.inputs, mapping.outputs
    return Program(
        mapping.graph,
        plan,
        source,
        inputs,
        outputs,
        numbers.tensor_arguments((*inputs, *outputs)),
        final_launches,
        tuple(replace(each, name=numbers.renumber(each.name)) for each in workspaces),
    )


class NodeNumbering:
    """Replaces graph node numbers in kernel source by consecutive numbers of the kernel.

    Equal patterns at different nodes of a graph then have equal source. The inputs come first,
    then all other nodes in the order of the text.
    """

    # Memory (p, w), loaded values (x), computed values (v, s, a, t), and nodes in comments (%).
    _NUMBERED = re.compile(r"(?<![\w.])([pwxvsat%])(\d+)")

    def __init__(self, inputs: Iterable[int]) -> None:
        self._numbers = {str(index): at for at, index in enumerate(inputs)}

    def renumber(self, text: str) -> str:
        """The text with each node in names such as ``v12_0``, ``x3at1`` and ``%7`` renumbered."""
        return self._NUMBERED.sub(self._renumber_match, text)

    def tensor_arguments(self, nodes: Iterable[int]) -> tuple[str, ...]:
        """The argument names of the tensors of graph nodes."""
        return tuple(self.renumber(f"p{index}") for index in nodes)

    def _renumber_match(self, match: re.Match[str]) -> str:
        kind, node = match.groups()
        return f"{kind}{self._numbers.setdefault(node, len(self._numbers))}"


def assemble_file(
    title: str,
    kernels: Sequence[tuple[Lines | str, Launch]],
    numbers: NodeNumbering,
    functions: str = "",
    language: Language = TRITON,
) -> tuple[str, tuple[Launch, ...]]:
    """The text of a file of kernels and their launches; ``functions`` are those they call.

    Kernel names end with a hash of the text. Equal patterns and plans give equal bytes, and
    different kernels have different names.
    """
    head = [language.head]
    functions = numbers.renumber(functions)
    texts = [_with_wait(numbers.renumber(str(lines))) for lines, _ in kernels]
    bodies = functions + "".join(texts)
    helpers = [f"\n\n{text}" for text in used_helpers(_helper_calls(bodies))]
    if "libdevice." in "".join([*helpers, bodies]):
        head.append("from triton.language.extra import libdevice\n")
    head.append(f"\n# {title}\n")
    head += helpers
    head.append(functions)
    digest = hashlib.sha256("".join([*head, *texts]).encode()).hexdigest()[:8]
    launches = []
    text = "".join(head)
    for body, (_, launch) in zip(texts, kernels, strict=True):
        name = f"{launch.name}_{digest}"
        arguments = tuple(map(numbers.renumber, launch.arguments))
        signature = ", ".join([*arguments, *_count_names(launch)])
        text += f"\n\n@triton.jit{_jit_options(launch, body)}\ndef {name}({signature}):\n{body}"
        launches.append(replace(launch, name=name, arguments=arguments, follows=True))
    return language.translate(text), tuple(launches)


def _with_wait(body: str) -> str:
    """A kernel body that first waits for the previous kernel, before any access to memory."""
    return f"    {'_behind' if LAUNCH_DEPENDENTS in body else '_follow'}()\n{body}"


def _helper_calls(bodies: str) -> str:
    """The bodies with calls of all helpers: ``tl.reduce`` only names its combine function."""
    return (
        bodies.replace(", _max,", ", _max(")
        .replace(", _min,", ", _min(")
        .replace(", _mul,", ", _mul(")
    )


def _count_names(launch: Launch) -> tuple[str, ...]:
    return launch.count_names[: len(launch.counts)]


def _jit_options(launch: Launch, body: str) -> str:
    # Without ``debug`` Triton leaves assertions out.
    options = ["debug=True"] if "device_assert(" in body else []
    # Without this Triton compiles separate kernels for a count of 1 and for multiples of 16.
    names = ", ".join(f'"{name}"' for name in _count_names(launch))
    if names and not launch.specializes_counts:
        options.append(f"do_not_specialize=[{names}]")
    return f"({', '.join(options)})" if options else ""
