"""Check of a launch against the kernel that it launches: number and sizes of the arguments."""

from __future__ import annotations

import shlex

from nostall.core.errors import BadLaunch
from nostall.core.launch import Buffer, Constant, LaunchSpec, Opaque, Scalar
from nostall.core.text.suggest import listed
from nostall.sass.binary.cubin import Cubin
from nostall.sass.binary.parameters import Parameter, kernel_parameters

SCALAR_BYTES = {
    "f16": 2,
    "bf16": 2,
    "f32": 4,
    "f64": 8,
    "i8": 1,
    "i16": 2,
    "i32": 4,
    "i64": 8,
    "u8": 1,
    "u32": 4,
    "u64": 8,
}
POINTER_BYTES = 8


def check_launch(cubin: Cubin, kernel: str, launch: LaunchSpec, origin: str) -> None:
    """Raise :class:`BadLaunch` if the arguments cannot be those of the kernel.

    ``origin`` names the kernel's file.  A cubin without records of its parameters is not checked.
    """
    parameters = kernel_parameters(cubin, kernel)
    if parameters is None:
        return
    arguments = [arg for arg in launch.args if not isinstance(arg, Constant)]
    command = shlex.join(["nostall", "init", origin, "--kernel", kernel])
    remedy = f"`{command}` writes a launch file with all of them"
    if len(arguments) != len(parameters):
        raise BadLaunch(
            f"the launch has {len(arguments)} arguments, and kernel {kernel!r} of {origin} takes "
            f"{len(parameters)} ({describe(parameters)}); give one [[args]] table for each, in the "
            f"kernel's order: {remedy}"
        )
    for argument, parameter in zip(arguments, parameters, strict=True):
        size = argument_bytes(argument)
        if size != parameter.size:
            raise BadLaunch(
                f"argument {argument.name!r} of the launch has {size} bytes ({_kind(argument)}), "
                f"and parameter {parameter.ordinal + 1} of kernel {kernel!r} of {origin} has "
                f"{parameter.size}; is the launch that of another kernel? {remedy}"
            )


def argument_bytes(argument: Buffer | Scalar | Opaque) -> int:
    """Size of an argument in the kernel's parameter list."""
    if isinstance(argument, Buffer):
        return POINTER_BYTES
    return argument.bytes if isinstance(argument, Opaque) else SCALAR_BYTES[argument.dtype]


def describe(parameters: tuple[Parameter, ...]) -> str:
    """The sizes of parameters, such as ``8, 8, 4 and more``."""
    sizes = listed(str(parameter.size) for parameter in parameters)
    return f"{sizes} bytes" if parameters else "none"


def _kind(argument: Buffer | Scalar | Opaque) -> str:
    if isinstance(argument, Buffer):
        return "a pointer to a buffer"
    return "bytes" if isinstance(argument, Opaque) else f"a scalar of type {argument.dtype}"
