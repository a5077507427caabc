"""Schemas of the backend's JSON records: kernels, regions, selections, comparisons, binaries.

Field names in the files differ from the attributes where ``msgspec.field(name=...)`` says so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Self

import msgspec
from msgspec import structs

from nostall.core.measurement import Comparison, Kind, Verdict
from nostall.fusion.graph.dynamic_size import (
    Extent,
    Size,
    SizeReader,
    Total,
    depends_on_size,
    resized,
    used_sizes,
)

if TYPE_CHECKING:
    from nostall.fusion.codegen.emit.program import Program, Sized
    from nostall.fusion.graph.graph import Node
    from nostall.fusion.lists.kernel import Layout, ListKernel


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of stored records.  Reading is strict: unknown or missing fields are errors.

    msgspec instead of pydantic, because importing pydantic takes as long as everything else that a
    process with a stored selection needs.
    """

    @classmethod
    def read(cls, data: bytes) -> Self:
        """Parse JSON.  Raises :class:`msgspec.DecodeError` if it does not match the schema."""
        return msgspec.json.decode(data, type=cls)

    @property
    def json(self) -> bytes:
        """The record as JSON; equal records give equal bytes."""
        return msgspec.json.encode(self, enc_hook=_plain_value)


def _plain_value(value: object) -> object:
    """Convert subclasses of plain types: ``torch.__version__``, ``torch.Size``, numpy floats."""
    types: tuple[type[Any], ...] = (str, int, float, tuple)
    for type_ in types:
        if isinstance(value, type_):
            return type_(value)
    raise NotImplementedError(f"a record holds {value!r}; allowed are plain values and records")


class TensorRecord(Record, frozen=True):
    """Layout of a tensor; sizes and strides are in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    # PyTorch's name, as in ``torch.float32``.
    dtype: str


class ExtentRecord(Record, frozen=True, tag="extent"):
    """A number that depends on the dynamic size by rounding up.

    The fields are those of :class:`nostall.fusion.graph.dynamic_size.Extent`.
    """

    whole: Number
    step: int
    unit: int


class TotalRecord(Record, frozen=True, tag="total"):
    """A sum of such numbers (:class:`nostall.fusion.graph.dynamic_size.Total`)."""

    extents: tuple[Number, ...]


Number = int | ExtentRecord | TotalRecord
"""A constant number, or one that depends on the dynamic size."""


class LaunchRecord(Record, frozen=True):
    """One launch of a Triton function."""

    # Name of the function in the kernel's source.
    name: str
    # Tensor arguments: ``p0``, ``p1`` … (inputs, then outputs) and names of workspaces.
    arguments: tuple[str, ...]
    # Integer arguments after the tensors.
    counts: tuple[Number, ...]
    # Blocks of the grid in x and y.
    grid: tuple[Number, Number]
    num_warps: int
    # Whether tensors at misaligned addresses have to be copied before the launch.
    aligned: bool = False
    # Whether the launch may start before the preceding kernel has ended (programmatic dependent
    # launch).
    follows: bool = False
    # Iterations of pipelined loops that are in flight; 0: Triton's default.
    num_stages: int = 0
    # Whether the kernel needs scratch memory, in which it writes tensor descriptors.
    needs_scratch: bool = False


class WorkspaceRecord(Record, frozen=True):
    """Temporary memory of a kernel, shared by its launches."""

    name: str
    dtype: str
    elements: Number


class KernelRecord(Record, frozen=True, kw_only=True):
    """A stitched kernel, independent of the graph that it was generated for."""

    schema_version: Literal[1] = 1
    # sha256 of the source file.
    source: str
    # The kernel plan as text.
    plan: str
    # Product of the primes that stand for the kernel's dynamic sizes
    # (:mod:`nostall.fusion.graph.dynamic_size`).
    varying: int | None = None
    inputs: tuple[TensorRecord, ...]
    outputs: tuple[TensorRecord, ...]
    launches: tuple[LaunchRecord, ...]
    workspaces: tuple[WorkspaceRecord, ...]
    # How many of the inputs, from the first one on, the kernel overwrites.
    mutated: int = 0

    @classmethod
    def from_program(cls, program: Program | ListKernel) -> Self:
        """The record of a generated program; equal programs have equal records."""
        new_names = {name: f"p{index}" for index, name in enumerate(program.argument_names)}
        inputs, outputs = program.layouts
        numbers = [n for each in (*inputs, *outputs) for n in (*each.shape, *each.strides)]
        numbers += [n for launch in program.launches for n in (*launch.counts, *launch.grid)]
        numbers += [workspace.elements for workspace in program.workspaces]
        varying = used_sizes(numbers, program.varying)
        return cls(
            source=hashlib.sha256(program.source.encode()).hexdigest(),
            plan=str(program.plan),
            varying=varying,
            inputs=tuple(map(_tensor_record, inputs)),
            outputs=tuple(map(_tensor_record, outputs)),
            launches=tuple(
                LaunchRecord(
                    name=launch.name,
                    arguments=tuple(new_names.get(a, a) for a in launch.arguments),
                    counts=tuple(_encode(count, varying) for count in launch.counts),
                    grid=(_encode(launch.grid[0], varying), _encode(launch.grid[1], varying)),
                    num_warps=launch.num_warps,
                    aligned=launch.aligned,
                    follows=launch.follows,
                    num_stages=launch.num_stages,
                    needs_scratch=launch.needs_scratch,
                )
                for launch in program.launches
            ),
            workspaces=tuple(
                WorkspaceRecord(name=w.name, dtype=w.dtype, elements=_encode(w.elements, varying))
                for w in program.workspaces
            ),
            mutated=program.mutated,
        )

    @property
    def size_reader(self) -> SizeReader:
        """Reads the dynamic sizes from the kernel's input tensors."""
        return SizeReader(self.varying, [tensor.shape for tensor in self.inputs])

    def dynamic_size(self, inputs: Sequence[Sized]) -> Size | None:
        """The dynamic sizes that these input tensors have; None for a kernel of static sizes."""
        return self.size_reader([tensor.shape for tensor in inputs])

    def with_size(self, size: Size | None) -> KernelRecord:
        """The record with ``size`` as its dynamic sizes, so that all numbers are constants."""
        if self.varying is None or size is None:
            return self

        def number(value: Number) -> int:
            return resized(_decode(value), self.varying, size)

        def tensor(record: TensorRecord) -> TensorRecord:
            shape, strides = tuple(map(number, record.shape)), tuple(map(number, record.strides))
            return structs.replace(record, shape=shape, strides=strides)

        def launch(record: LaunchRecord) -> LaunchRecord:
            x, y = record.grid
            return structs.replace(
                record, counts=tuple(map(number, record.counts)), grid=(number(x), number(y))
            )

        def workspace(record: WorkspaceRecord) -> WorkspaceRecord:
            return structs.replace(record, elements=number(record.elements))

        return structs.replace(
            self,
            varying=None,
            inputs=tuple(map(tensor, self.inputs)),
            outputs=tuple(map(tensor, self.outputs)),
            launches=tuple(map(launch, self.launches)),
            workspaces=tuple(map(workspace, self.workspaces)),
        )


class StepRecord(Record, frozen=True):
    """One kernel of a region.  Integers are nodes of the region's graph."""

    # Name of the kernel's record.
    kernel: str
    inputs: tuple[int, ...] = msgspec.field(name="reads")
    outputs: tuple[int, ...] = msgspec.field(name="gives")
    # The operators that the kernel computes.
    operators: tuple[int, ...]
    # Whether it has a reduction, or a matrix product with other operators.
    reduces: bool


class RegionRecord(Record, frozen=True, kw_only=True):
    """The kernels of a region, in the order of their launches."""

    schema_version: Literal[1] = 1
    steps: tuple[StepRecord, ...]
    # Operators without a kernel, counted by reason.
    not_fused: dict[str, int] = msgspec.field(name="refused")


class ReplayRecord(Record, frozen=True):
    """The same comparison by replays of CUDA graphs: the GPU's time without the host's."""

    clock: str
    # Median seconds of Inductor's version and of the candidate.
    inductor_s: float
    stitched_s: float
    # Median ratio and the bounds of its 95 % interval, then those of the null.
    ratio: float
    low: float
    high: float
    null_low: float
    null_high: float

    def comparison(self, kind: Kind) -> Comparison:
        return Comparison(self.ratio, self.low, self.high, self.null_low, self.null_high, kind)


LEAST_GAIN = 1.01
"""Product of the ratios of both clocks at least, for a candidate to be faster: a noisy loop cannot
show a loss, and a smaller gain by CUDA graphs alone is no reason for that risk."""


class ComparisonRecord(Record, frozen=True):
    """A measured comparison of both versions of a whole graph, forward and backward.

    ``ratio`` is Inductor's time / the candidate's time, so above 1 the candidate is faster.
    """

    kind: Kind
    clock: str
    # Interleaved samples in seconds: Inductor's version, the candidate, Inductor's version again.
    inductor: tuple[float, ...]
    stitched: tuple[float, ...]
    null: tuple[float, ...]
    # Median ratio and the bounds of its 95 % interval, then those of the null.
    ratio: float
    low: float
    high: float
    null_low: float
    null_high: float
    # Largest relative difference of a result or gradient.
    difference: float
    # Peak memory of a step above what was allocated before it, in bytes: Inductor's version, the
    # candidate.  None if it was not measured: on a CPU, and of steps in CUDA graphs.
    inductor_bytes: int | None = None
    stitched_bytes: int | None = None
    # By CUDA graphs; None if no clock replays them, or if the loop shows a slower candidate.
    replayed: ReplayRecord | None = None
    # Memory of the graph's inputs, parameters among them, which a step has beside its peak memory.
    input_bytes: int = 0
    # Whether the candidate was compared with Inductor's version with measured block sizes.
    is_over_tuned: bool = False

    @property
    def verdict(self) -> Verdict:
        """``slower`` if either clock says so; ``faster`` if either does, and if what it gains is
        more than the other clock may lose and :data:`LEAST_GAIN`; else ``same``."""
        verdicts = self._verdicts
        if "slower" in verdicts:
            return "slower"
        other = self.replayed
        is_gain = other is None or self.ratio * other.ratio >= LEAST_GAIN
        return "faster" if "faster" in verdicts and is_gain else "same"

    @property
    def _verdicts(self) -> tuple[Verdict, ...]:
        loop = self.comparison().verdict
        other = self.replayed
        return (loop,) if other is None else (loop, other.comparison(self.kind).verdict)

    @property
    def deciding_clock(self) -> str:
        """The clock by which the candidate is slower or faster; both if none or both show it."""
        names = (self.clock, "" if self.replayed is None else self.replayed.clock)
        verdicts, verdict = self._verdicts, self.verdict
        if verdict == "same" or verdicts.count(verdict) == len(verdicts):
            return " and ".join(filter(None, names))
        return names[verdicts.index(verdict)]

    @property
    def memory(self) -> str:
        """Peak memory as text; empty if it was not measured."""
        if not self.inductor_bytes or self.stitched_bytes is None:
            return ""
        peak, other = (1e-9 * each for each in (self.stitched_bytes, self.inductor_bytes))
        text = f"peak memory of a step: candidate {peak:.3f} GB, Inductor's version {other:.3f} GB"
        return f"{text}, beside inputs of {1e-9 * self.input_bytes:.3f} GB"

    def __str__(self) -> str:
        """The ratio and its interval; by both clocks if both measured."""
        text = f"{self.ratio:.3f}x ({self.low:.3f} to {self.high:.3f})"
        if (other := self.replayed) is not None:
            text += f" in a loop, {other.ratio:.3f}x ({other.low:.3f} to {other.high:.3f}) in CUDA "
            text += f"graphs; decided by {self.deciding_clock}"
        return f"{text}, over Inductor's kernels with tuned blocks" if self.is_over_tuned else text

    def comparison(self) -> Comparison:
        return Comparison(self.ratio, self.low, self.high, self.null_low, self.null_high, self.kind)


class EarlierComparison(Record, frozen=True):
    """The comparison of a candidate that was not faster than Inductor's version."""

    # Which kernels the candidate had.
    candidate: str
    comparison: ComparisonRecord = msgspec.field(name="compared")


Version = Literal["stitched", "inductor", "tuned"]
"""Which version of a graph runs; ``tuned``: Inductor's, with measured block sizes."""


class SelectionRecord(Record, frozen=True, kw_only=True):
    """The selected version of one graph."""

    schema_version: Literal[1] = 1
    version: Version
    # Why it was selected.
    reason: str
    # Kernels that the candidate calls.
    kernels: tuple[str, ...]
    # Keys of kernel matches that the candidate leaves to Inductor.
    kept_in_inductor: tuple[str, ...] = msgspec.field(name="left", default=())
    # Kernels of each region when the candidate was compiled, by region key.
    regions: dict[str, RegionRecord] = msgspec.field(default_factory=dict)
    # The measurement that decided, if there was one.
    comparison: ComparisonRecord | None = msgspec.field(name="compared")
    # GPU, PyTorch version and Inductor's mode, for readers.
    about: dict[str, str]
    # UTC time in ISO format.
    created: str
    # Whether all kernels but those of matrix products stay with Inductor.
    products_only: bool = False
    # Measurements of other candidates before the one that decided.
    earlier: tuple[EarlierComparison, ...] = ()
    # Whether losses keep their logits.
    whole_logits: bool = False
    # Whether losses without logits have fewer chunks.
    fewer_chunks: bool = False
    # Whether Inductor's own kernels have measured block sizes.
    tuned: bool = False
    # The comparison of Inductor's version with such block sizes and without; None if there is none.
    blocks: ComparisonRecord | None = None


class KernelComparisonRecord(Record, frozen=True, kw_only=True):
    """A measured comparison of kernels with Inductor's code for the same operators."""

    schema_version: Literal[1] = 1
    # Kernels that were timed together.
    kernels: tuple[str, ...]
    kind: Kind
    clock: str
    # Interleaved samples in seconds: Inductor's code, the kernels, Inductor's code again.
    inductor: tuple[float, ...] = ()
    stitched: tuple[float, ...] = ()
    null: tuple[float, ...] = ()
    # Why nothing was measured, if nothing was.
    failure: str | None = None

    @property
    def is_not_faster(self) -> bool:
        """Whether the kernels were measured and are not significantly faster."""
        return self.failure is None and self._verdict != "faster"

    @property
    def is_faster(self) -> bool:
        """Whether the kernels were measured and are significantly faster."""
        return self.failure is None and self._verdict == "faster"

    @property
    def is_slower(self) -> bool:
        """Whether the kernels were measured and are significantly slower."""
        return self.failure is None and self._verdict == "slower"

    @property
    def comparison(self) -> Comparison:
        """The comparison of the samples; there are none after a failure."""
        return Comparison.from_samples(self.inductor, self.stitched, self.null, kind=self.kind)

    @property
    def _verdict(self) -> str:
        return self.comparison.verdict


class BinaryRecord(Record, frozen=True):
    """A compiled binary in Triton's cache, and what its launch needs to know of its source."""

    # Key of the binary's group in Triton's cache.
    name: str
    # Name of the metadata file in that group.
    file: str
    # Type of each argument.
    signature: tuple[tuple[str, str], ...]
    # Values of constant arguments, by their path in the signature.
    constants: tuple[tuple[tuple[int, ...], bool | int | float | str | None], ...]


class BinariesRecord(Record, frozen=True, kw_only=True):
    """Binaries of a kernel's launches, for one GPU, PyTorch version and Triton version."""

    schema_version: Literal[1] = 1
    binaries: tuple[BinaryRecord, ...]


def _encode(number: int, varying: int | None) -> Number:
    """A number of a program as it is stored."""
    if varying is None:
        return int(number)
    if not depends_on_size(number, varying):
        return int(number)  # a call of the kernel may have no tensor that shows the size
    if isinstance(number, Total):
        return TotalRecord(extents=tuple(_encode(extent, varying) for extent in number.extents))
    if isinstance(number, Extent):
        length = _encode(number.length, varying)
        return ExtentRecord(whole=length, step=number.step, unit=number.unit)
    return number


def _decode(number: Number) -> int:
    """Inverse of :func:`_encode`."""
    if isinstance(number, TotalRecord):
        return Total(map(_decode, number.extents))
    if isinstance(number, ExtentRecord):
        return Extent(_decode(number.whole), number.step, number.unit)
    return number


def _tensor_record(tensor: Node | Layout) -> TensorRecord:
    return TensorRecord(shape=tensor.shape, strides=tensor.strides, dtype=tensor.dtype)
