"""Short constructors of launch arguments for the kernels of this folder."""

from __future__ import annotations

from typing import Any

from nostall.core import Buffer, Constant, LaunchSpec


def given(name: str, dtype: str, *shape: int, **more: Any) -> Buffer:
    """An input buffer."""
    return Buffer.model_validate({"name": name, "dtype": dtype, "shape": shape, **more})


def out(name: str, dtype: str, *shape: int) -> Buffer:
    """An output buffer."""
    return given(name, dtype, *shape, role="out")


def launch(
    grid: tuple[int, ...], buffers: tuple[Buffer, ...], warps: int, stages: int, **constants: Any
) -> LaunchSpec:
    """A launch whose compile-time constants come after its buffers."""
    return LaunchSpec.model_validate(
        {
            "grid": (*grid, 1, 1)[:3],
            "args": (
                *buffers,
                *(Constant(name=name, constant=value) for name, value in constants.items()),
            ),
            "num_warps": warps,
            "num_stages": stages,
        }
    )


def require(condition: bool, text: str) -> None:
    """Raise ValueError with ``text`` if a tile does not fit the problem."""
    if not condition:
        raise ValueError(text)
