"""Describe the launch of a running Triton call as a :class:`LaunchSpec`, so it can be tuned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nostall.core.errors import BadLaunch
from nostall.core.launch import Buffer, LaunchSpec, Scalar
from nostall.tuning.sources.compiled_launch import compiled_launch
from nostall.tuning.sources.source import Source
from nostall.tuning.sources.triton_source import INTEGERS, TRITON_TYPES

_DTYPES = {name: dtype for dtype, name in TRITON_TYPES.items()}
_BOOL = "i1"


def capture_source(
    function: Any,
    compiled: Any,
    args: tuple[Any, ...],
    options: Mapping[str, Any],
    bounds: Mapping[str, int],
) -> Source:
    """The cubin, its PTX and the launch of a call ``function[grid](*args, **options)``.

    ``compiled`` is the kernel that the call ran.  ``bounds``: N by name of an integer tensor, for
    random values in [0, N).

    Each tensor becomes a buffer with the size of its storage from its first element on.  All have
    the role ``inout``, because a call does not say which of its tensors are outputs.

    Raises :class:`BadLaunch` if random data cannot replace an argument.
    """
    origin = f"{function.module}.{function.fn.__qualname__}"
    signature: Mapping[str, Any] = compiled.src.signature
    values = _bind_arguments(function, compiled, args, options)
    arguments: dict[str, Buffer | Scalar] = {}
    for name, kind in signature.items():
        if kind != "constexpr":
            arguments[name] = _argument(origin, name, kind, values.get(name), bounds)
    launch = LaunchSpec(
        grid=_grid(options["grid"], values),
        args=tuple(arguments.values()),
        num_warps=compiled.metadata.num_warps,
    )
    target, ptx = compiled.metadata.target, compiled.asm.get("ptx")
    compile_options = {
        name: getattr(compiled.metadata, name, None) for name in ("enable_fp_fusion", "ptx_options")
    }
    return Source(
        cubin=compiled.asm["cubin"],
        kernel=str(compiled.metadata.name),
        launch=compiled_launch(launch, arguments, {}, compiled.metadata),
        origin=origin,
        provenance={
            "compiler": f"triton {compiled.metadata.triton_version}",
            "arch": f"sm_{target.arch}",
            "options": ", ".join(
                f"{name}={value}" for name, value in compile_options.items() if value is not None
            ),
        },
        ptx=str(ptx) if ptx is not None else None,
    )


def _bind_arguments(
    function: Any, compiled: Any, args: tuple[Any, ...], options: Mapping[str, Any]
) -> dict[str, Any]:
    """All arguments by name, including compile-time constants that an autotuner chose."""
    names = set(function.signature.parameters)
    keywords = {name: value for name, value in options.items() if name in names}
    bound = function.signature.bind_partial(*args, **keywords)
    bound.apply_defaults()
    values = dict(bound.arguments)
    for path, value in compiled.src.constants.items():
        if len(path) == 1:
            values[function.arg_names[path[0]]] = value
    return values


def _argument(
    origin: str, name: str, kind: Any, value: Any, bounds: Mapping[str, int]
) -> Buffer | Scalar:
    """Describe one argument; ``kind`` is its type in Triton's signature."""
    if isinstance(kind, str) and kind.startswith("*"):
        return _buffer(origin, name, kind.lstrip("*k"), value, bounds)
    if isinstance(kind, str) and kind in _DTYPES and isinstance(value, int | float):
        return Scalar(name=name, dtype=_DTYPES[kind], value=value)  # type: ignore[arg-type]
    raise BadLaunch(
        f"{origin}: argument {name!r} is a {type(value).__name__} of Triton type {kind!r}, which "
        "cannot be filled with random data; tune it with `nostall tune` and a launch specification"
    )


def _buffer(origin: str, name: str, kind: str, value: Any, bounds: Mapping[str, int]) -> Buffer:
    """Describe a tensor; ``kind`` is Triton's name of its element type."""
    dtype = "u8" if kind == _BOOL else _DTYPES.get(kind)
    if dtype is None or not hasattr(value, "untyped_storage"):
        raise BadLaunch(
            f"{origin}: argument {name!r} is a {type(value).__name__} of element type {kind!r}; "
            f"torch tensors of {', '.join(_DTYPES)} or bool can be tuned on the first call"
        )
    bound = 2 if kind == _BOOL else bounds.get(name)
    if dtype in INTEGERS and not bound:
        raise BadLaunch(
            f"{origin}: tensor {name!r} holds integers, and random ones could be used as indices "
            f"outside of a buffer; give optimize(bounds={{{name!r}: N}}) for values in [0, N)"
        )
    size = value.element_size()
    count = value.untyped_storage().nbytes() // size - value.storage_offset()
    return Buffer(name=name, dtype=dtype, shape=(count,), role="inout", bound=bound)  # type: ignore[arg-type]


def _grid(grid: Any, values: Mapping[str, Any]) -> tuple[int, int, int]:
    sizes = grid(dict(values)) if callable(grid) else grid
    x, y, z = (*map(int, sizes), 1, 1)[:3]
    return x, y, z
