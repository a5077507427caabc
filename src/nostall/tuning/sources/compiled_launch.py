"""Launch of a kernel that Triton compiled, from the launch of its source."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from nostall.core.errors import BadLaunch
from nostall.core.launch import Buffer, Constant, LaunchSpec, LaunchVariant, Opaque, Scalar

Argument = Buffer | Scalar | Constant | Opaque


def compiled_launch(
    launch: LaunchSpec,
    args: Mapping[str, Argument],
    constants: Mapping[str, object],
    metadata: Any,
) -> LaunchSpec:
    """The launch of a compiled kernel, as described at :attr:`Source.launch`.

    ``launch`` and ``args`` are those of the source, ``constants`` the values that are compiled in,
    and ``metadata`` is Triton's metadata of the compiled kernel.
    """
    cluster_size = int(getattr(metadata, "num_ctas", 1))
    passed: list[Argument] = [
        Constant(name=arg.name, constant=1)
        if isinstance(arg, Scalar) and arg.name in constants
        else arg
        for arg in args.values()
    ]
    shapes = tuple(
        _compiled_variant(variant, launch, args, constants.keys(), cluster_size)
        for variant in launch.shapes
    )
    blocks = max([launch.blocks, *(launch.with_variant(shape).blocks for shape in launch.shapes)])
    for kind in ("global", "profile"):
        size = int(getattr(metadata, f"{kind}_scratch_size", 0) or 0)
        name = f"{kind}_scratch"
        if size:
            count = blocks * cluster_size * size
            passed.append(Buffer(name=name, dtype="u8", shape=(count,), role="scratch"))
        else:
            passed.append(Scalar(name=name, dtype="u64", value=0))
    x, y, z = launch.grid
    return launch.model_copy(
        update={
            "args": tuple(passed),
            "grid": (x * cluster_size, y, z),
            "block": (32 * int(metadata.num_warps), 1, 1),
            "cluster": (cluster_size, 1, 1),
            "shared": int(metadata.shared),
            "shapes": shapes,
        }
    )


def _compiled_variant(
    variant: LaunchVariant,
    launch: LaunchSpec,
    args: Mapping[str, Argument],
    constants: Set[str],
    cluster_size: int,
) -> LaunchVariant:
    """A launch variant of the compiled kernel.

    Raises :class:`BadLaunch` for a value that the compiled code does not allow: Triton specializes
    on 1 and on multiples of 16.
    """
    for name, value in variant.values.items():
        arg = args[name]
        if not isinstance(arg, Scalar) or arg.dtype.startswith("f"):
            continue
        compiled = arg.value
        if (compiled == 1) != (value == 1) or (compiled % 16 == 0 and value % 16 != 0):
            raise BadLaunch(
                f"shapes give {name} = {value}, but the kernel is compiled for {name} = {compiled} "
                "(1 and multiples of 16 are compiled in); give a value of the same kind"
            )
    x, y, z = variant.grid or launch.grid
    passed = {name: value for name, value in variant.values.items() if name not in constants}
    return variant.model_copy(update={"grid": (x * cluster_size, y, z), "values": passed})
