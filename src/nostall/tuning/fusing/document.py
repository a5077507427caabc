"""Schema of ``fusion.json``: the partition of a run of ``nostall fuse`` and its kernels.

The command line and the report get all their values from this file. Sizes are bytes; times are
seconds. *Before* means without fusion: one
kernel for each operator.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from nostall.core.errors import BadRun
from nostall.core.launch import StrictModel
from nostall.core.validation import first_problem, load_json
from nostall.fusion.graph.operations import Kind

FILE = "fusion.json"


class ReasonCount(StrictModel):
    """A reason and how often it occurred."""

    reason: str
    count: int
    what: str = ""
    """The ATen operator that the reason is about, if any."""
    bytes: int = 0
    """Bytes that fusing these calls would save: kernels write and read them at their borders."""
    change: str = ""
    """What would have to change for the calls to be fused."""


class GraphNode(StrictModel):
    """A node of the captured graph, except views and constants."""

    index: int
    name: str
    kind: Kind
    shape: tuple[int, ...]
    dtype: str
    reads: tuple[int, ...]
    """Nodes that it reads, directly or by a view."""
    bytes: int
    result: bool
    """Whether the traced function returns it."""


class Binary(StrictModel):
    """One GPU kernel after compilation."""

    name: str
    file: str | None = None
    """Path of the cubin in the run directory; None if compilation failed."""
    failure: str = ""
    """Why the kernel was not compiled."""
    not_judged: str = ""
    """Why the verifier could not check the kernel, which is then not tuned."""
    instructions: int = 0
    findings: int = 0
    """Places where the compiler's own order violates nostall's rules."""
    first_finding: str = ""
    measured: float | None = None
    """Median time on a GPU, measured; None if it was not measured."""
    not_measured: str = ""
    """Why the measurement failed."""


class AlternativeSchedule(StrictModel):
    """A schedule that was not selected."""

    plan: str
    ratio: float
    """Its modelled time / the modelled time of the selected schedule."""


class Schedules(StrictModel):
    """Summary of the schedules from which a kernel's schedule was selected."""

    legal: int
    last_choices: int = 0
    """Legal schedules that only a measurement selects, because the model is not exact enough."""
    next_best: tuple[AlternativeSchedule, ...]
    """Those with the lowest modelled times, without the last choices."""
    refused: tuple[ReasonCount, ...]
    """Why other schedules are illegal, counted."""


class FusedKernel(StrictModel):
    """One kernel of the partition and its generated program; times are modelled."""

    name: str
    operators: tuple[int, ...]
    """Indices of graph nodes."""
    scheme: str
    plan: str
    """The selected schedule."""
    launches: tuple[str, ...]
    """Names of its GPU kernels, in launch order."""
    source: str
    """Path of the source in the run directory."""
    bytes_before: int
    bytes_after: int
    seconds_before: float
    seconds_after: float
    schedules: Schedules


class Pass(StrictModel):
    """A traced pass: inference, forward or backward. Times are modelled."""

    name: str
    nodes: tuple[GraphNode, ...]
    kernels: tuple[FusedKernel, ...]
    alone: tuple[int, ...]
    """Operators that no kernel contains; PyTorch runs them one by one."""
    taken: int
    """ATen calls that can be fused."""
    regions: int = 0
    """Parts of the graph between calls that are not fused."""
    refused: tuple[ReasonCount, ...]
    """Why other ATen calls cannot be fused, counted."""
    splits: tuple[ReasonCount, ...]
    """Why kernels of the partition were split into smaller ones, counted."""
    no_kernel: tuple[ReasonCount, ...]
    """Why operators are in ``alone``, counted."""
    seconds_unfused: float
    seconds_alone: float
    greedy_kernels: int
    greedy_seconds: float
    notes: tuple[str, ...]

    @property
    def operators(self) -> int:
        """The number of operators, each of which is a launch without fusion."""
        return sum(node.kind not in ("input", "opaque") for node in self.nodes)

    @property
    def launches(self) -> int:
        """Launches of the kernels and of operators without a kernel; opaque calls not counted."""
        return sum(len(kernel.launches) for kernel in self.kernels) + len(self.alone)

    @property
    def seconds(self) -> float:
        """Modelled time of the kernels and of operators without a kernel, without opaque calls."""
        return sum(kernel.seconds_after for kernel in self.kernels) + self.seconds_alone

    @property
    def groups(self) -> tuple[tuple[FusedKernel, int], ...]:
        """Distinct kernels in the order of their first use, with the number of their uses."""
        counts = Counter(_identity(kernel) for kernel in self.kernels)
        first: dict[object, FusedKernel] = {}
        for kernel in self.kernels:
            first.setdefault(_identity(kernel), kernel)
        return tuple((kernel, counts[key]) for key, kernel in first.items())


class TunedBinary(StrictModel):
    """Result of the search over the instruction order of one kernel; modelled."""

    name: str
    folder: str = ""
    """Its run directory inside this one; empty if the kernel was not tuned."""
    ratio: float = 1.0
    improved: bool = False
    evaluations: int = 0
    note: str = ""
    """Why the kernel was not tuned."""


class Document(StrictModel):
    """Content of ``fusion.json``."""

    schema_version: Literal[1] = 1
    target: str
    inputs: tuple[str, ...]
    strategy: str
    arch: str
    hardware: str
    traced_on: str
    status: Literal["done", "interrupted"]
    versions: dict[str, str]
    passes: tuple[Pass, ...]
    binaries: tuple[Binary, ...] = ()
    tuned: tuple[TunedBinary, ...] = ()
    measured_on: str = ""

    def measured(self, kernel: FusedKernel) -> float | None:
        """Measured seconds of all launches of a kernel; None if one of them was not measured."""
        seconds = {binary.name: binary.measured for binary in self.binaries}
        times = [seconds.get(name) for name in kernel.launches]
        return None if None in times else sum(time for time in times if time is not None)

    @property
    def unknown(self) -> tuple[Binary, ...]:
        """Binaries with findings of the verifier."""
        return tuple(binary for binary in self.binaries if binary.findings)

    @property
    def failed(self) -> tuple[Binary, ...]:
        """Kernels that were not compiled."""
        return tuple(binary for binary in self.binaries if binary.failure)


_NODE = re.compile(r"%\d+ = (\w+)\(.*?\) \w+ (?:scalar|[\dx]+)")
_NUMBER = re.compile(r"\d[\d,.]*")


def count_reasons(reasons: Iterable[str]) -> tuple[ReasonCount, ...]:
    """Reasons with their counts, most frequent first.

    Reasons that differ only in numbers and graph nodes count as one; the first text is kept.
    """
    texts: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for reason in reasons:
        general = _NUMBER.sub("", _NODE.sub(r"\1", reason))
        texts.setdefault(general, reason)
        counts[general] += 1
    return tuple(ReasonCount(reason=texts[key], count=count) for key, count in counts.most_common())


def load_document(folder: Path) -> Document:
    """Read ``fusion.json`` of a run directory; raises :class:`BadRun` if it cannot be used."""
    path = folder / FILE
    try:
        return load_json(Document, path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise BadRun(f"{path} cannot be read: {error}; run `nostall fuse` to create it") from error
    except ValidationError as error:
        raise BadRun(f"{path}: {first_problem(error)}; run `nostall fuse` again") from error


def _identity(kernel: FusedKernel) -> object:
    return kernel.source, kernel.bytes_before, kernel.bytes_after, len(kernel.operators)
