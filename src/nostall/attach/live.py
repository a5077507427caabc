"""A launch as it happens, as a :class:`LaunchSpec`: shapes and values of a live Triton call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nostall.core.errors import BadLaunch
from nostall.core.launch import Buffer, LaunchSpec, Scalar
from nostall.tuning.source import INTEGERS, TRITON_TYPES, Source, resolved

_DTYPES = {name: dtype for dtype, name in TRITON_TYPES.items()}
_BOOL = "i1"


def source(
    function: Any,
    compiled: Any,
    args: tuple[Any, ...],
    options: Mapping[str, Any],
    bounds: Mapping[str, int],
) -> Source:
    """What a call ``function[grid](*args, **options)`` ran, ready to be tuned.

    Every tensor becomes a buffer as large as what its storage holds from its first element on, that
    is restored before and compared after each checked launch: a call does not say which of its
    tensors are outputs.  Raises :class:`BadLaunch` for arguments that random data cannot stand in
    for.
    """
    what = f"{function.module}.{function.fn.__qualname__}"
    signature: Mapping[str, Any] = compiled.src.signature
    values = _bound(function, compiled, args, options)
    found: dict[str, Buffer | Scalar] = {}
    for name, kind in signature.items():
        if kind != "constexpr":
            found[name] = _argument(what, name, kind, values.get(name), bounds)
    launch = LaunchSpec(
        grid=_grid(options["grid"], values),
        args=tuple(found.values()),
        num_warps=compiled.metadata.num_warps,
    )
    target = compiled.metadata.target
    return Source(
        cubin=compiled.asm["cubin"],
        kernel=str(compiled.metadata.name),
        launch=resolved(launch, found, {}, compiled.metadata),
        origin=what,
        provenance={
            "compiler": f"triton {compiled.metadata.triton_version}",
            "arch": f"sm_{target.arch}",
        },
    )


def _bound(
    function: Any, compiled: Any, args: tuple[Any, ...], options: Mapping[str, Any]
) -> dict[str, Any]:
    """All arguments by name, with the compile-time values that a tuner may have chosen."""
    names = set(function.signature.parameters)
    given = {name: value for name, value in options.items() if name in names}
    bound = function.signature.bind_partial(*args, **given)
    bound.apply_defaults()
    values = dict(bound.arguments)
    for path, value in compiled.src.constants.items():
        if len(path) == 1:
            values[function.arg_names[path[0]]] = value
    return values


def _argument(
    what: str, name: str, kind: Any, value: Any, bounds: Mapping[str, int]
) -> Buffer | Scalar:
    if isinstance(kind, str) and kind.startswith("*"):
        return _buffer(what, name, kind.lstrip("*k"), value, bounds)
    if isinstance(kind, str) and kind in _DTYPES and isinstance(value, int | float):
        return Scalar(name=name, dtype=_DTYPES[kind], value=value)  # type: ignore[arg-type]
    raise BadLaunch(
        f"{what}: argument {name!r} is a {type(value).__name__} of Triton type {kind!r}, which "
        "cannot be filled with random data; tune it with `nostall tune` and a launch specification"
    )


def _buffer(what: str, name: str, kind: str, value: Any, bounds: Mapping[str, int]) -> Buffer:
    dtype = "u8" if kind == _BOOL else _DTYPES.get(kind)
    if dtype is None or not hasattr(value, "untyped_storage"):
        raise BadLaunch(
            f"{what}: argument {name!r} is a {type(value).__name__} of element type {kind!r}; "
            f"torch tensors of {', '.join(_DTYPES)} or bool can be tuned on the first call"
        )
    bound = 2 if kind == _BOOL else bounds.get(name)
    if dtype in INTEGERS and not bound:
        raise BadLaunch(
            f"{what}: tensor {name!r} holds integers, and random ones may lead outside of memory; "
            f"give optimize(bounds={{{name!r}: N}}) for values in [0, N)"
        )
    size = value.element_size()
    count = value.untyped_storage().nbytes() // size - value.storage_offset()
    return Buffer(name=name, dtype=dtype, shape=(count,), role="inout", bound=bound)  # type: ignore[arg-type]


def _grid(grid: Any, values: Mapping[str, Any]) -> tuple[int, int, int]:
    chosen = grid(dict(values)) if callable(grid) else grid
    x, y, z = (*map(int, chosen), 1, 1)[:3]
    return x, y, z
