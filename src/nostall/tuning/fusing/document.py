"""``fusion.json``: a fusion plan and the kernels made of it, as a run directory keeps them.

What the command line prints and what the report draws is all in here.  Bytes are bytes, times are
seconds.  *Before* is every operator as a kernel of its own.
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
from nostall.fusion.graph.operations import Kind

FILE = "fusion.json"


class Counted(StrictModel):
    """A reason, how often it or its like was met, and the operator where there is one."""

    reason: str
    count: int
    what: str = ""


class Drawn(StrictModel):
    """A node of the captured graph; ``reads`` are nodes that it reads, views looked through;
    ``result``: the program returns it.  ``kind`` is that of :mod:`nostall.fusion.graph.operations`."""

    index: int
    name: str
    kind: Kind
    shape: tuple[int, ...]
    dtype: str
    reads: tuple[int, ...]
    bytes: int
    result: bool


class Binary(StrictModel):
    """One compiled kernel; ``failure`` says why there is none.

    ``findings`` counts where nostall's rules do not hold for the compiler's own order, and
    ``not_judged`` says why nobody asked: such a binary runs, and is not tuned.  ``measured`` is
    its median time on a GPU, where one was asked, ``not_measured`` why there is none.
    """

    name: str
    file: str | None = None
    failure: str = ""
    not_judged: str = ""
    instructions: int = 0
    findings: int = 0
    first_finding: str = ""
    measured: float | None = None
    not_measured: str = ""


class Other(StrictModel):
    """A schedule that was not chosen: its modelled time over that of the chosen one."""

    plan: str
    ratio: float


class Schedules(StrictModel):
    """What the chosen schedule was chosen from; ``refused`` counts those that do not fit."""

    legal: int
    next_best: tuple[Other, ...]
    refused: tuple[Counted, ...]


class FusedKernel(StrictModel):
    """One pattern of the plan and what was generated for it.

    ``operators`` are indices of drawn nodes; ``launches`` are the names of its GPU kernels;
    ``plan`` is the schedule.  Times are *modelled*.
    """

    name: str
    operators: tuple[int, ...]
    scheme: str
    plan: str
    launches: tuple[str, ...]
    source: str
    bytes_before: int
    bytes_after: int
    seconds_before: float
    seconds_after: float
    schedules: Schedules


class Pass(StrictModel):
    """A traced pass.  ``alone``: operators that run one by one in PyTorch; ``splits`` counts why
    kernels of the plan became smaller ones; ``refused`` what was no operator to fuse."""

    name: str
    nodes: tuple[Drawn, ...]
    kernels: tuple[FusedKernel, ...]
    alone: tuple[int, ...]
    taken: int
    refused: tuple[Counted, ...]
    splits: tuple[Counted, ...]
    no_kernel: tuple[Counted, ...]
    seconds_unfused: float
    seconds_alone: float
    greedy_kernels: int
    greedy_seconds: float
    notes: tuple[str, ...]

    @property
    def operators(self) -> int:
        """Operators, each of which would be a launch of its own."""
        return sum(node.kind not in ("input", "opaque") for node in self.nodes)

    @property
    def launches(self) -> int:
        """Launches of the kernels and of what runs beside them, opaque calls apart."""
        return sum(len(kernel.launches) for kernel in self.kernels) + len(self.alone)

    @property
    def seconds(self) -> float:
        """Modelled time of the kernels and of what runs beside them, opaque calls apart."""
        return sum(kernel.seconds_after for kernel in self.kernels) + self.seconds_alone

    @property
    def groups(self) -> tuple[tuple[FusedKernel, int], ...]:
        """Different kernels in the order in which they first come, and how often each runs."""
        counts = Counter(_same(kernel) for kernel in self.kernels)
        first: dict[object, FusedKernel] = {}
        for kernel in self.kernels:
            first.setdefault(_same(kernel), kernel)
        return tuple((kernel, counts[same]) for same, kernel in first.items())


class TunedBinary(StrictModel):
    """What the search over the instructions of one kernel found; modelled.  ``folder`` is its run
    directory inside this one, empty where it was not tuned for the reason that ``note`` tells."""

    name: str
    folder: str = ""
    ratio: float = 1.0
    improved: bool = False
    evaluations: int = 0
    note: str = ""


class Document(StrictModel):
    """The whole file."""

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
        """Seconds of all launches of a kernel, one after the other, where a GPU said them all."""
        known = {binary.name: binary.measured for binary in self.binaries}
        times = [known.get(name) for name in kernel.launches]
        return None if None in times else sum(time for time in times if time is not None)

    @property
    def unknown(self) -> tuple[Binary, ...]:
        """Binaries that hold something that nostall's rules do not know."""
        return tuple(binary for binary in self.binaries if binary.findings)

    @property
    def failed(self) -> tuple[Binary, ...]:
        """Kernels that were not compiled."""
        return tuple(binary for binary in self.binaries if binary.failure)


_NODE = re.compile(r"%\d+ = (\w+)\(.*?\) \w+ (?:scalar|[\dx]+)")
_NUMBER = re.compile(r"\d[\d,.]*")


def counted(reasons: Iterable[str]) -> tuple[Counted, ...]:
    """Reasons by how often they were met, most first.  Those that differ in numbers and nodes only
    are one, told as it was met first."""
    told: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for reason in reasons:
        general = _NUMBER.sub("", _NODE.sub(r"\1", reason))
        told.setdefault(general, reason)
        counts[general] += 1
    return tuple(Counted(reason=told[key], count=count) for key, count in counts.most_common())


def load_document(folder: Path) -> Document:
    """Read ``fusion.json`` of a run directory; :class:`BadRun` where it cannot be used."""
    path = folder / FILE
    try:
        return Document.model_validate_json(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise BadRun(f"{path} cannot be read: {error}; `nostall fuse` makes it") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise BadRun(f"{path}: {where}: {first['msg']}; run `nostall fuse` again") from error


def _same(kernel: FusedKernel) -> object:
    return kernel.source, kernel.bytes_before, kernel.bytes_after, len(kernel.operators)
