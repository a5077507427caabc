"""Short ways to write launches; the kernels of this folder import it from beside them."""

from __future__ import annotations

from nostall.core import Buffer, Constant, LaunchSpec, Scalar
from nostall.core.launch import DType

Argument = Buffer | Scalar | Constant


def src(name: str, dtype: DType, *shape: int) -> Buffer:
    """A buffer that is read."""
    return Buffer(name=name, dtype=dtype, shape=shape, bound=None if dtype[0] in "fb" else 100)


def index(name: str, dtype: DType, bound: int, *shape: int) -> Buffer:
    """A buffer of indices in [0, bound)."""
    return Buffer(name=name, dtype=dtype, shape=shape, bound=bound)


def dst(name: str, dtype: DType, *shape: int) -> Buffer:
    """A buffer that is written."""
    return Buffer(name=name, dtype=dtype, shape=shape, role="out")


def both(name: str, dtype: DType, *shape: int) -> Buffer:
    """A buffer that is read and written."""
    bound = None if dtype[0] in "fb" else 100
    return Buffer(name=name, dtype=dtype, shape=shape, role="inout", bound=bound)


def integers(**values: int) -> list[Argument]:
    """32-bit integers."""
    return [Scalar(name=name, dtype="i32", value=value) for name, value in values.items()]


def floats(**values: float) -> list[Argument]:
    """32-bit floats."""
    return [Scalar(name=name, dtype="f32", value=value) for name, value in values.items()]


def constants(**values: int | float | bool | str) -> list[Argument]:
    """Compile-time values."""
    return [Constant(name=name, constant=value) for name, value in values.items()]


def spec(
    *args: Argument | list[Argument],
    grid: tuple[int, ...] = (1,),
    warps: int = 4,
    stages: int = 3,
) -> LaunchSpec:
    """A launch of these arguments."""
    flat = [item for arg in args for item in (arg if isinstance(arg, list) else [arg])]
    x, y, z = (*grid, 1, 1)[:3]
    return LaunchSpec(args=tuple(flat), grid=(x, y, z), num_warps=warps, num_stages=stages)
