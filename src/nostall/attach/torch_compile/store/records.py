"""What the backend keeps: kernels, regions and choices, each a JSON file of the store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Self

import msgspec
from msgspec import structs

from nostall.core.measurement import Comparison, Kind
from nostall.fusion.graph.dynamic_size import Extent, Total, resized, varies

if TYPE_CHECKING:
    from nostall.fusion.codegen.emit.program import Program, Sized
    from nostall.fusion.graph.graph import Node


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A record that is read as it was written, or not at all.

    Not pydantic's: to import that takes as long as all else that a program needs which runs an
    earlier choice.
    """

    @classmethod
    def read(cls, data: bytes) -> Self:
        """Raises :class:`msgspec.DecodeError`, also where it is not of this form."""
        return msgspec.json.decode(data, type=cls)

    @property
    def json(self) -> bytes:
        """As text; equal records are equal bytes."""
        return msgspec.json.encode(self, enc_hook=_plain)


def _plain(value: object) -> object:
    """PyTorch's version is a ``str`` of its own, a shape a ``tuple``, a median a ``float``."""
    kinds: tuple[type[Any], ...] = (str, int, float, tuple)
    for kind in kinds:
        if isinstance(value, kind):
            return kind(value)
    raise NotImplementedError(f"a record holds {value!r}; allowed are plain values and records")


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


def _number(number: int, varying: int | None) -> Number:
    if varying is None:
        return int(number)
    if isinstance(number, Total):
        return TotalRecord(extents=tuple(_number(one, varying) for one in number.extents))
    if isinstance(number, Extent):
        whole = _number(number.whole, varying)
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
