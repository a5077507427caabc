"""Launch specification of a kernel: grid, block, arguments and compile options.

The command line, the API and the GPU worker all use this format.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    model_validator,
)

from nostall.core.errors import BadLaunch
from nostall.core.validation import explain, parse_toml, register_tag

ScalarType = Literal["f16", "bf16", "f32", "f64", "i8", "i16", "i32", "i64", "u8", "u32", "u64"]
DType = Literal[ScalarType, "f8e4m3", "f8e5m2"]
"""Element types of buffers.  ``f8e4m3`` is PyTorch's ``float8_e4m3fn``: no infinities, max 448."""
Role = Literal["in", "out", "inout", "scratch"]


class StrictModel(BaseModel):
    """Base class of nostall's file formats: unknown keys are errors, instances are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Buffer(StrictModel):
    """A device buffer argument, and the random values that fill it."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    role: Role = "in"
    """Use by the kernel.  ``inout`` buffers are restored before each checked launch."""
    low: float = -1.0
    """Floating-point values are uniform in [low, high)."""
    high: float = 1.0
    bound: int | None = None
    """Integer values are uniform in [0, bound).  Random indices without a bound could make a
    correct kernel access memory outside its buffers."""

    @model_validator(mode="after")
    def _validate_values(self) -> Buffer:
        if any(n <= 0 for n in self.shape) or not self.shape:
            raise ValueError(f"buffer {self.name!r} has shape {self.shape}; sizes must be > 0")
        if self.dtype.startswith(("i", "u")) and self.role in ("in", "inout") and not self.bound:
            raise ValueError(
                f"integer buffer {self.name!r} has no bound; give `bound = N` for values in [0, N)"
            )
        return self


class Scalar(StrictModel):
    """A scalar argument, passed by value."""

    name: str
    dtype: ScalarType
    value: float | int


class Constant(StrictModel):
    """A compile-time constant of a Triton kernel (``tl.constexpr``); not passed at launch."""

    name: str
    constant: int | float | bool | str


class Opaque(StrictModel):
    """An argument of another type, such as a struct, passed by value; its content is unknown.

    A launch with such an argument can be modelled, but not measured.
    """

    name: str
    bytes: int = Field(ge=1, le=32764)
    """Its size."""


def _argument_kind(value: Any) -> str:
    """The tag of the kind of argument that a table describes, by its keys."""
    if isinstance(value, BaseModel):
        return f"<{type(value).__name__.lower()}>"
    keys = value if isinstance(value, dict) else {}
    for key, kind in (("constant", "<constant>"), ("bytes", "<opaque>")):
        if key in keys:
            return kind
    return "<scalar>" if "value" in keys else "<buffer>"


Argument = Annotated[
    Annotated[Buffer, Tag(register_tag("<buffer>", Buffer))]
    | Annotated[Scalar, Tag(register_tag("<scalar>", Scalar))]
    | Annotated[Constant, Tag(register_tag("<constant>", Constant))]
    | Annotated[Opaque, Tag(register_tag("<opaque>", Opaque))],
    Discriminator(_argument_kind),
]


class LaunchVariant(StrictModel):
    """Changes to a launch of the same compiled kernel; candidates are checked on it, too.

    Scalars must keep the properties that the compiler specialised on (Triton: divisible by 16).
    """

    grid: tuple[int, int, int] | None = None
    """Another grid; None keeps the launch's own."""
    values: dict[str, float | int] = Field(default_factory=dict)
    """New values of scalars, by name."""
    buffers: dict[str, tuple[int, ...]] = Field(default_factory=dict)
    """New shapes of buffers, by name."""


class LaunchSpec(StrictModel):
    """Everything that is needed to compile (Triton), launch and check a kernel."""

    grid: tuple[int, int, int] = (1, 1, 1)
    """Blocks."""
    block: tuple[int, int, int] = (128, 1, 1)
    """Threads.  For Triton kernels the compilation sets ``block`` and ``shared``."""
    cluster: tuple[int, int, int] = (1, 1, 1)
    """Blocks of a thread block cluster."""
    shared: int = Field(default=0, ge=0, le=256 * 1024)
    """Dynamic shared memory in bytes."""
    args: tuple[Argument, ...] = ()
    """Arguments in the order of the kernel's parameters."""
    num_warps: int = Field(default=4, ge=1, le=32)
    """Triton's compile option."""
    num_stages: int = Field(default=3, ge=1)
    """Triton's compile option."""
    flops: float | None = Field(default=None, gt=0)
    """Floating-point operations of one launch."""
    trips: dict[int, int] = Field(default_factory=dict)
    """Trip counts of loops, by the loop's position in the kernel's text.  Loops that are not
    listed have the default trip count of the SM model."""
    shapes: tuple[LaunchVariant, ...] = ()
    """Further launches on which candidates are checked, but not timed."""

    @model_validator(mode="after")
    def _validate_dimensions(self) -> LaunchSpec:
        for name in ("grid", "block", "cluster"):
            if any(n < 1 for n in getattr(self, name)):
                raise ValueError(f"{name} is {getattr(self, name)}; each dimension must be >= 1")
        if self.threads > 1024:
            raise ValueError(f"block {self.block} has {self.threads} threads; at most 1024")
        return self

    @model_validator(mode="after")
    def _validate_variants(self) -> LaunchSpec:
        scalars = {a.name for a in self.args if isinstance(a, Scalar)}
        buffers = {a.name for a in self.args if isinstance(a, Buffer)}
        for variant in self.shapes:
            for changes, names, kind in (
                (variant.values, scalars, "scalars"),
                (variant.buffers, buffers, "buffers"),
            ):
                if unknown := sorted(set(changes) - names):
                    raise ValueError(
                        f"shapes name {unknown[0]!r}, which is not among the {kind} of this "
                        f"launch: {', '.join(sorted(names)) or '(none)'}"
                    )
            _ = self.with_variant(variant)
        return self

    def with_variant(self, variant: LaunchVariant) -> LaunchSpec:
        """A copy of this launch with the variant's changes and without ``shapes``."""
        args: list[Buffer | Scalar | Constant | Opaque] = []
        for arg in self.args:
            update: dict[str, object] = {}
            if isinstance(arg, Scalar) and arg.name in variant.values:
                update = {"value": variant.values[arg.name]}
            elif isinstance(arg, Buffer) and arg.name in variant.buffers:
                update = {"shape": variant.buffers[arg.name]}
            args.append(type(arg).model_validate({**arg.model_dump(), **update}))
        fields = {
            **dict(self),
            "grid": variant.grid or self.grid,
            "args": tuple(args),
            "shapes": (),
        }
        return LaunchSpec.model_validate(fields)

    @property
    def threads(self) -> int:
        """Threads per block."""
        return self.block[0] * self.block[1] * self.block[2]

    @property
    def blocks(self) -> int:
        """Blocks per launch."""
        return self.grid[0] * self.grid[1] * self.grid[2]

    @classmethod
    def from_toml(cls, path: str | Path) -> LaunchSpec:
        """Read a launch file (``spec.toml``).

        Raises :class:`BadLaunch`, which names the field, if the file is missing or invalid.
        """
        try:
            return cls.parse(parse_toml(Path(path).read_text("utf-8")), f"launch file {path}")
        except OSError as error:
            raise BadLaunch(
                f"cannot read launch file {path}: {error.strerror}; `nostall init` writes one"
            ) from error
        except ValueError as error:
            raise BadLaunch(
                f"launch file {path} is not TOML: {error}; see `nostall init --help`"
            ) from error

    @classmethod
    def parse(cls, values: Any, label: str) -> LaunchSpec:
        """The launch that a table describes; ``label`` names it in messages.

        Raises :class:`BadLaunch`, which names the field, if it is invalid.
        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise BadLaunch(f"{label}: {explain(error, cls)}") from error
