"""How a kernel is launched: one format for the command line, the API and the GPU worker."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from nostall.core.errors import BadLaunch

ScalarType = Literal["f16", "bf16", "f32", "f64", "i8", "i16", "i32", "i64", "u8", "u32", "u64"]
DType = ScalarType | Literal["f8e4m3", "f8e5m2"]
"""What buffers hold.  ``f8e4m3`` is PyTorch's ``float8_e4m3fn``: no infinities, up to 448."""
Role = Literal["in", "out", "inout", "scratch"]


class Strict(BaseModel):
    """Base of every file format: unknown keys are errors, values are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Buffer(Strict):
    """A device buffer, filled with uniform random values in [low, high).

    ``bound`` limits integer values to [0, bound): without it a random index would fault a
    correct kernel.  ``role`` ``inout`` buffers are restored before each checked launch.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    role: Role = "in"
    low: float = -1.0
    high: float = 1.0
    bound: int | None = None

    @model_validator(mode="after")
    def _sensible(self) -> Buffer:
        if any(n <= 0 for n in self.shape) or not self.shape:
            raise ValueError(f"buffer {self.name!r} has shape {self.shape}; sizes must be > 0")
        if self.dtype.startswith(("i", "u")) and self.role in ("in", "inout") and not self.bound:
            raise ValueError(
                f"integer buffer {self.name!r} has no bound; give `bound = N` for values in [0, N)"
            )
        return self


class Scalar(Strict):
    """A value passed by copy."""

    name: str
    dtype: ScalarType
    value: float | int


class Constant(Strict):
    """A compile-time value of a Triton kernel (``tl.constexpr``); not passed at launch."""

    name: str
    constant: int | float | bool | str


class OtherShape(Strict):
    """Another launch of the same compiled kernel, on which it is checked too.

    Given is what differs: the grid, scalars by name, shapes of buffers by name.  Scalars have to
    keep what the compiler assumed of them (Triton: that a multiple of 16 is one).
    """

    grid: tuple[int, int, int] | None = None
    values: dict[str, float | int] = Field(default_factory=dict)
    buffers: dict[str, tuple[int, ...]] = Field(default_factory=dict)


class LaunchSpec(Strict):
    """Everything needed to compile (Triton), launch and judge a kernel.

    ``args`` stand in the kernel's own order; ``num_warps`` and ``num_stages`` are Triton's compile
    options (then ``block`` and ``shared`` follow from the compilation).

    ``grid``, ``block`` and ``cluster`` are in blocks, threads and blocks; ``shared`` is dynamic
    shared memory in bytes; ``flops`` is the floating-point work of one launch; ``trips`` gives
    loop trip counts by the loop's order in the kernel's text (others take the assumed default);
    ``shapes`` are further launches on which candidates are checked, but not timed.
    """

    grid: tuple[int, int, int] = (1, 1, 1)
    block: tuple[int, int, int] = (128, 1, 1)
    cluster: tuple[int, int, int] = (1, 1, 1)
    shared: int = Field(default=0, ge=0, le=256 * 1024)
    args: tuple[Buffer | Scalar | Constant, ...] = ()
    num_warps: int = Field(default=4, ge=1, le=32)
    num_stages: int = Field(default=3, ge=1)
    flops: float | None = Field(default=None, gt=0)
    trips: dict[int, int] = Field(default_factory=dict)
    shapes: tuple[OtherShape, ...] = ()

    @model_validator(mode="after")
    def _dimensions(self) -> LaunchSpec:
        for name in ("grid", "block", "cluster"):
            if any(n < 1 for n in getattr(self, name)):
                raise ValueError(f"{name} is {getattr(self, name)}; each dimension must be >= 1")
        if self.threads > 1024:
            raise ValueError(f"block {self.block} has {self.threads} threads; at most 1024")
        return self

    @model_validator(mode="after")
    def _others(self) -> LaunchSpec:
        scalars = {a.name for a in self.args if isinstance(a, Scalar)}
        buffers = {a.name for a in self.args if isinstance(a, Buffer)}
        for shape in self.shapes:
            for given, known, what in (
                (shape.values, scalars, "scalars"),
                (shape.buffers, buffers, "buffers"),
            ):
                if unknown := sorted(set(given) - known):
                    raise ValueError(
                        f"shapes name {unknown[0]!r}; {what} here are: "
                        f"{', '.join(sorted(known)) or '(none)'}"
                    )
            _ = self.at(shape)
        return self

    def at(self, shape: OtherShape) -> LaunchSpec:
        """This launch with what ``shape`` changes, and no further shapes."""
        args: list[Buffer | Scalar | Constant] = []
        for arg in self.args:
            update: dict[str, object] = {}
            if isinstance(arg, Scalar) and arg.name in shape.values:
                update = {"value": shape.values[arg.name]}
            elif isinstance(arg, Buffer) and arg.name in shape.buffers:
                update = {"shape": shape.buffers[arg.name]}
            args.append(type(arg).model_validate({**arg.model_dump(), **update}))
        changed = {**dict(self), "grid": shape.grid or self.grid, "args": tuple(args), "shapes": ()}
        return LaunchSpec.model_validate(changed)

    @property
    def threads(self) -> int:
        """Threads per block."""
        return self.block[0] * self.block[1] * self.block[2]

    @property
    def blocks(self) -> int:
        """Blocks per launch."""
        return self.grid[0] * self.grid[1] * self.grid[2]

    @classmethod
    def from_toml(cls, path: Path) -> LaunchSpec:
        """Read a ``spec.toml``; every problem is a :class:`BadLaunch` naming the field."""
        try:
            return cls.model_validate(tomllib.loads(path.read_text()))
        except OSError as error:
            raise BadLaunch(f"cannot read launch file {path}: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise BadLaunch(f"launch file {path} is not TOML: {error}") from error
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "launch"
            raise BadLaunch(f"launch file {path}: {where}: {first['msg']}") from error
