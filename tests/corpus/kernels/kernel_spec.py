"""Short constructors of launch specifications, for the kernel files in this folder."""

from __future__ import annotations

from nostall.core import Buffer, Constant, LaunchSpec, Scalar
from nostall.core.launch import DType

Argument = Buffer | Scalar | Constant


def src(name: str, dtype: DType, *shape: int) -> Buffer:
    """A buffer that the kernel reads."""
    return Buffer(name=name, dtype=dtype, shape=shape, bound=None if dtype[0] in "fb" else 100)


def index(name: str, dtype: DType, bound: int, *shape: int) -> Buffer:
    """A buffer that the kernel reads, with indices in [0, bound)."""
    return Buffer(name=name, dtype=dtype, shape=shape, bound=bound)


def dst(name: str, dtype: DType, *shape: int) -> Buffer:
    """A buffer that the kernel writes."""
    return Buffer(name=name, dtype=dtype, shape=shape, role="out")


def inout(name: str, dtype: DType, *shape: int) -> Buffer:
    """A buffer that the kernel reads and writes."""
    bound = None if dtype[0] in "fb" else 100
    return Buffer(name=name, dtype=dtype, shape=shape, role="inout", bound=bound)


def integers(**values: int) -> list[Argument]:
    """Scalar 32-bit integer arguments."""
    return [Scalar(name=name, dtype="i32", value=value) for name, value in values.items()]


def floats(**values: float) -> list[Argument]:
    """Scalar 32-bit float arguments."""
    return [Scalar(name=name, dtype="f32", value=value) for name, value in values.items()]


def constants(**values: int | float | bool | str) -> list[Argument]:
    """Compile-time constants."""
    return [Constant(name=name, constant=value) for name, value in values.items()]


def spec(
    *args: Argument | list[Argument],
    grid: tuple[int, ...] = (1,),
    warps: int = 4,
    stages: int = 3,
) -> LaunchSpec:
    """A launch with these arguments; nested lists are flattened."""
    flat = [item for arg in args for item in (arg if isinstance(arg, list) else [arg])]
    x, y, z = (*grid, 1, 1)[:3]
    return LaunchSpec(args=tuple(flat), grid=(x, y, z), num_warps=warps, num_stages=stages)
