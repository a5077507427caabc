"""What the backend keeps: kernels, regions and choices, each a JSON file of the store.

A kernel is named by the sha256 of its record, so a name means the same in every process and on
every machine; regions and choices are named by what they are an answer to.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self, TypeVar

import msgspec
from msgspec import structs

import nostall.attach.torch_compile
import nostall.fusion
from nostall.attach.torch_compile.store.record import Record
from nostall.core.measurement import Comparison, Kind
from nostall.fusion.graph.dynamic_size import Extent, Total, resized, varies
from nostall.store.answers import keep_answer
from nostall.store.artefacts import Artefacts, name
from nostall.store.errors import BadStore
from nostall.store.folder import home

if TYPE_CHECKING:
    from nostall.fusion.codegen.emit.program import Program, Sized
    from nostall.fusion.graph.graph import Node

SOURCE, JSON = "py", "json"


class TensorRecord(Record, frozen=True):
    """What lies in memory: sizes and strides in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


class ExtentRecord(Record, frozen=True, tag="extent"):
    """A number that changes with the size that varies (:class:`nostall.fusion.graph.dynamic_size.Extent`)."""

    whole: Number
    step: int
    unit: int


class TotalRecord(Record, frozen=True, tag="total"):
    """A sum of such numbers."""

    extents: tuple[Number, ...]


Number = int | ExtentRecord | TotalRecord
"""A plain one, or one that changes."""


class LaunchRecord(Record, frozen=True):
    """One launch; ``arguments`` name tensors ``p0``, ``p1`` … (inputs, then outputs) and
    workspaces.  ``aligned``: tensors that begin at an odd place are copied first.  ``follows``: it
    may be launched before the kernel before it has ended."""

    name: str
    arguments: tuple[str, ...]
    counts: tuple[Number, ...]
    grid: tuple[Number, Number]
    num_warps: int
    aligned: bool = False
    follows: bool = False


class WorkspaceRecord(Record, frozen=True):
    name: str
    dtype: str
    elements: Number


class KernelRecord(Record, frozen=True, kw_only=True):
    """A stitched kernel without the graph that it came from; ``source`` names its file.

    ``varying`` stands for a size that is known at run time only (:mod:`nostall.fusion.graph.dynamic_size`).
    """

    schema_version: Literal[1] = 1
    source: str
    plan: str
    varying: int | None = None
    inputs: tuple[TensorRecord, ...]
    outputs: tuple[TensorRecord, ...]
    launches: tuple[LaunchRecord, ...]
    workspaces: tuple[WorkspaceRecord, ...]

    @classmethod
    def of(cls, program: Program) -> Self:
        """The record of a program; equal programs have equal records."""
        renamed = {name: f"p{at}" for at, name in enumerate(program.names)}
        varying = program.graph.varying
        return cls(
            source=program.key,
            plan=str(program.plan),
            varying=varying,
            inputs=tuple(_tensor(program.graph[i]) for i in program.inputs),
            outputs=tuple(_tensor(program.graph[i]) for i in program.outputs),
            launches=tuple(
                LaunchRecord(
                    name=launch.name,
                    arguments=tuple(renamed.get(a, a) for a in launch.arguments),
                    counts=tuple(_number(count, varying) for count in launch.counts),
                    grid=(_number(launch.grid[0], varying), _number(launch.grid[1], varying)),
                    num_warps=launch.num_warps,
                    aligned=launch.aligned,
                    follows=launch.follows,
                )
                for launch in program.launches
            ),
            workspaces=tuple(
                WorkspaceRecord(name=w.name, dtype=w.dtype, elements=_number(w.elements, varying))
                for w in program.workspaces
            ),
        )

    def size_of(self, inputs: Sequence[Sized]) -> int | None:
        """The size that varies, as tensors for the inputs have it; None where nothing does."""
        for record, tensor in zip(self.inputs, inputs, strict=False):
            for planned, size in zip(record.shape, tensor.shape, strict=False):
                if self.varying is not None and varies(planned, self.varying):
                    return size // (planned // self.varying)
        return None

    def at(self, size: int | None) -> KernelRecord:
        """The same where what varies is ``size``; all numbers are plain ones then."""
        if self.varying is None or size is None:
            return self

        def plain(number: Number) -> int:
            return resized(_told(number), self.varying, size)

        def tensor(one: TensorRecord) -> TensorRecord:
            return structs.replace(one, shape=tuple(map(plain, one.shape)))

        def launch(one: LaunchRecord) -> LaunchRecord:
            blocks, more = one.grid
            return structs.replace(
                one, counts=tuple(map(plain, one.counts)), grid=(plain(blocks), plain(more))
            )

        def space(one: WorkspaceRecord) -> WorkspaceRecord:
            return structs.replace(one, elements=plain(one.elements))

        return structs.replace(
            self,
            varying=None,
            inputs=tuple(map(tensor, self.inputs)),
            outputs=tuple(map(tensor, self.outputs)),
            launches=tuple(map(launch, self.launches)),
            workspaces=tuple(map(space, self.workspaces)),
        )


class StepRecord(Record, frozen=True):
    """One kernel of a region.  Numbers are nodes of the region's graph."""

    kernel: str
    reads: tuple[int, ...]
    gives: tuple[int, ...]
    operators: tuple[int, ...]
    reduces: bool


class RegionRecord(Record, frozen=True, kw_only=True):
    """How a region is stitched; ``refused`` counts why operators of it are not."""

    schema_version: Literal[1] = 1
    steps: tuple[StepRecord, ...]
    refused: dict[str, int]


class ComparisonRecord(Record, frozen=True):
    """Seconds of one run of the whole graph, taken in turns, and what they say (a ratio above 1:
    the stitched version is faster)."""

    kind: Kind
    clock: str
    inductor: tuple[float, ...]
    stitched: tuple[float, ...]
    null: tuple[float, ...]
    ratio: float
    low: float
    high: float
    null_low: float
    null_high: float
    difference: float

    def comparison(self) -> Comparison:
        return Comparison(self.ratio, self.low, self.high, self.null_low, self.null_high, self.kind)


Version = Literal["stitched", "inductor"]


class ChoiceRecord(Record, frozen=True, kw_only=True):
    """Which version of one graph runs, and why; ``kernels`` are all that the stitched one calls,
    ``left`` the parts (:class:`~nostall.attach.torch_compile.rewrite.matching.Part`) that it leaves to Inductor,
    ``regions`` (by name) those that were known when it was compiled."""

    schema_version: Literal[1] = 1
    version: Version
    reason: str
    kernels: tuple[str, ...]
    left: tuple[str, ...] = ()
    regions: dict[str, RegionRecord] = msgspec.field(default_factory=dict)
    compared: ComparisonRecord | None
    about: dict[str, str]
    created: str


class DuelRecord(Record, frozen=True, kw_only=True):
    """Seconds of what Inductor makes of some operators, of the ``kernels`` that compute them, and
    of the former again (the null), taken in turns."""

    schema_version: Literal[1] = 1
    kernels: tuple[str, ...]
    kind: Kind
    clock: str
    inductor: tuple[float, ...] = ()
    stitched: tuple[float, ...] = ()
    null: tuple[float, ...] = ()
    failure: str | None = None

    @property
    def lost(self) -> bool:
        """Whether the kernels were measured, and not faster by the rules of all comparisons."""
        return self.failure is None and self._verdict != "faster"

    @property
    def slower(self) -> bool:
        """Whether they were measured to be slower by those rules."""
        return self.failure is None and self._verdict == "slower"

    @property
    def _verdict(self) -> str:
        found = Comparison.of(self.inductor, self.stitched, self.null, kind=self.kind)
        return found.verdict


class BinaryRecord(Record, frozen=True):
    """A binary in Triton's cache: its ``name`` there, the ``file`` that says the rest, and of its
    source the type of each argument and the values of those that are constants."""

    name: str
    file: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[tuple[int, ...], bool | int | float | str | None], ...]


class BinariesRecord(Record, frozen=True, kw_only=True):
    """Those of a kernel's launches, for a GPU, a PyTorch and a Triton."""

    schema_version: Literal[1] = 1
    binaries: tuple[BinaryRecord, ...]


Answer = TypeVar("Answer", RegionRecord, ChoiceRecord, DuelRecord, BinariesRecord)
SORTS: dict[type[Record], str] = {
    RegionRecord: "regions",
    ChoiceRecord: "choices",
    DuelRecord: "duels",
    BinariesRecord: "binaries",
}
"""Folders of answers."""


class Kept:
    """The backend's part of the store, by default that of ``NOSTALL_HOME``."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder if folder is not None else home() / "fusion"
        self.artefacts = Artefacts(self.folder)

    @property
    def identity(self) -> str:
        """A name that this folder has as long as it is not emptied.

        Compiled graphs that others keep (PyTorch's caches) call kernels by name: they are worth
        nothing beside another folder.
        """
        path = self.folder / "identity"
        with suppress(OSError):
            return path.read_text()
        self.folder.mkdir(parents=True, exist_ok=True)
        mine = self.folder / f".identity.{os.getpid()}"
        mine.write_text(uuid.uuid4().hex)
        with suppress(FileExistsError):
            path.hardlink_to(mine)
        mine.unlink()
        return path.read_text()

    def put(self, program: Program) -> str:
        """Keep a program; the name of its record."""
        self.artefacts.put(program.source.encode(), SOURCE)
        return self.artefacts.put(KernelRecord.of(program).json, JSON)

    def kernel(self, kernel: str) -> tuple[KernelRecord, str]:
        """The record of this name and the source; :class:`BadStore` where one is missing or was
        changed."""
        try:
            record = KernelRecord.read(self.artefacts.get(kernel, JSON))
        except msgspec.DecodeError as error:
            raise BadStore(
                f"kernel {kernel[:12]} is of another version of nostall; empty the store, or set "
                "NOSTALL_HOME to another folder"
            ) from error
        return record, self.artefacts.get(record.source, SOURCE).decode()

    def written(self, kernel: str) -> tuple[str, str]:
        """The record of this name as it is written, and the source: for another store."""
        _, source = self.kernel(kernel)
        return self.artefacts.get(kernel, JSON).decode(), source

    def take(self, record: str, source: str) -> None:
        """What another store has :meth:`written`."""
        self.artefacts.put(source.encode(), SOURCE)
        self.artefacts.put(record.encode(), JSON)

    def answer(self, kind: type[Answer], key: str) -> Answer | None:
        """What is kept under a key; None where there is nothing that this version understands."""
        try:
            return kind.read(self._place(kind, key).read_bytes())
        except (OSError, msgspec.DecodeError):
            return None

    def keep(
        self, key: str, record: RegionRecord | ChoiceRecord | DuelRecord | BinariesRecord
    ) -> None:
        """Write an answer down; it appears whole or not at all."""
        keep_answer(self._place(type(record), key), msgspec.json.format(record.json, indent=1))

    def _place(self, kind: type[Record], key: str) -> Path:
        return self.folder / SORTS[kind] / f"{key}.json"


@cache
def code_version() -> str:
    """sha256 over the source of whatever decides what a region becomes."""
    found = hashlib.sha256()
    for folder in (*nostall.fusion.__path__, *nostall.attach.torch_compile.__path__):
        for file in sorted(Path(folder).rglob("*.py")):
            found.update(f"{file.relative_to(folder)} {name(file.read_bytes())}\n".encode())
    return found.hexdigest()


def _number(number: int, varying: int | None) -> Number:
    if varying is None:
        return int(number)
    if isinstance(number, Total):
        return TotalRecord(extents=tuple(_number(one, varying) for one in number.extents))
    if isinstance(number, Extent):
        whole = _number(number.length, varying)
        return ExtentRecord(whole=whole, step=number.step, unit=number.unit)
    return number


def _told(number: Number) -> int:
    """What :func:`_number` was given."""
    if isinstance(number, TotalRecord):
        return Total(map(_told, number.extents))
    if isinstance(number, ExtentRecord):
        return Extent(_told(number.whole), number.step, number.unit)
    return number


def _tensor(node: Node) -> TensorRecord:
    return TensorRecord(shape=node.shape, strides=node.strides, dtype=node.dtype)
