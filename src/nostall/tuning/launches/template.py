"""First version of a launch file for a kernel: what its binary or its source says about it.

A cubin records the size of each parameter; PTX also tells pointers from numbers, and Triton's
source has names and compile-time constants.  What is not known gets a value that can be modelled,
and a comment that begins with ``TODO``.
"""

from __future__ import annotations

import ast
import inspect
import re
import shlex
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nostall.core.errors import BadInput, BadLaunch
from nostall.core.launch import Buffer, Constant, LaunchSpec, Opaque, Scalar
from nostall.core.text.suggest import listed
from nostall.ptx.program.module import parse
from nostall.sass.binary.attributes import parse_attributes
from nostall.sass.binary.cubin import Cubin, Parameter, kernel_parameters
from nostall.tuning.sources.kernel_file import find_jit_function, find_launch, import_file

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


ELEMENTS = 1 << 20
"""Elements of a buffer whose size is not known."""
NUMBER = 1024
"""Value of a scalar that is not known; a multiple of 16, as sizes usually are."""
CONSTANT = 128
"""Value of a compile-time constant that is not known."""
_BLOCKS = 256
_THREADS = 256
_MAX_THREADS, _REQUIRED_THREADS = 0x05, 0x10
"""Attributes MAX_THREADS and REQNTID: three u32, threads in x, y and z."""
_PTX_PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+\d+\s+)?\.(?P<type>\w+)\s+(?P<pointer>\.ptr(?:\s+\.\w+(?:\s+\d+)?)*\s+)?"
    r"(?P<name>[\w$%]+)(?:\[(?P<size>\d+)\])?"
)
_FLOAT_NAME = re.compile(r"eps|scale|alpha|beta|^p$", re.IGNORECASE)
_INTEGER_NAME = re.compile(
    r"stride|size|^[nmk](?:_|$)|num|len|rows|col|offset|seed|batch", re.IGNORECASE
)
"""Names that parameters of Triton kernels usually have if they are numbers."""
_PTX_SCALARS = {
    "f16": "f16",
    "f32": "f32",
    "f64": "f64",
    "s8": "i8",
    "s16": "i16",
    "s32": "i32",
    "s64": "i64",
    "u8": "u8",
    "u16": "i16",
    "u32": "i32",
    "u64": "u64",
    "b32": "i32",
    "b64": "u64",
}

Argument = Buffer | Scalar | Constant | Opaque


@dataclass(frozen=True)
class Template:
    """A launch, and a comment for each part of it that is a guess."""

    launch: LaunchSpec
    comments: dict[str, str]
    """Comment by top-level key or name of an argument."""
    keys: tuple[str, ...] = ("grid", "block")
    """Top-level keys to write even with their default."""

    @property
    def open_points(self) -> int:
        """Number of comments that begin with TODO."""
        return sum(comment.startswith("TODO") for comment in self.comments.values())


def template_of_cubin(data: bytes, kernel: str) -> Template:
    """A template from the parameter records of a cubin.

    Raises :class:`BadInput` if the cubin has no records of the kernel.
    """
    cubin = Cubin.parse(data)
    parameters = kernel_parameters(cubin, kernel)
    if parameters is None:
        raise BadInput(
            f"the cubin has no records of the parameters of {kernel!r} (its .nv.info section was "
            "removed); write the launch file by hand: docs/reference/launch-spec.md"
        )
    arguments: list[Argument] = []
    comments: dict[str, str] = {}
    for parameter in parameters:
        argument, comment = _from_size(parameter)
        arguments.append(argument)
        comments[argument.name] = comment
    return _template(arguments, comments, _threads(cubin, kernel))


def template_of_ptx(text: str, kernel: str, data: bytes) -> Template:
    """A template from the parameter list of a kernel's PTX; ``data`` is its assembled cubin."""
    head = parse(text).kernel(kernel).head
    declared = text[head.start : head.end]
    arguments: list[Argument] = []
    comments: dict[str, str] = {}
    for match in _PTX_PARAMETER.finditer(declared):
        name, size = match["name"], match["size"]
        if size is not None:
            arguments.append(Opaque(name=name, bytes=int(size)))
            comments[name] = _OPAQUE
        elif match["pointer"]:
            arguments.append(_buffer(name))
            comments[name] = _BUFFER
        else:
            arguments.append(_scalar(name, _PTX_SCALARS.get(match["type"], "u64")))
            comments[name] = _SCALAR
    sizes = kernel_parameters(Cubin.parse(data), kernel)
    if sizes is not None and len(sizes) != len(arguments):
        return template_of_cubin(data, kernel)
    return _template(arguments, comments, _threads(Cubin.parse(data), kernel))


def template_of_triton(triton: Any, path: Path, name: str) -> Template:
    """A template from the signature of a Triton kernel, or the launch that its file has already.

    Raises :class:`BadInput` if the file has no such kernel.
    """
    with import_file(path) as module:
        function = find_jit_function(triton, module, path, name.partition("@")[0])
        try:
            launch = find_launch(module, path, name)
        except BadLaunch:
            launch = None
        if launch is not None:
            return Template(launch, {}, ("grid", "num_warps", "num_stages"))
        numbers = _numbers(function)
        pairs = [_from_triton(p, is_number=p.name in numbers) for p in function.params]
    comments = {"grid": _GRID, **{argument.name: comment for argument, comment in pairs}}
    spec = LaunchSpec(grid=(_BLOCKS, 1, 1), args=tuple(argument for argument, _ in pairs))
    return Template(spec, comments, ("grid", "num_warps", "num_stages"))


_GRID = "TODO: blocks in x, y, z"
_BLOCK = "TODO: threads of a block in x, y, z"
_BUFFER = (
    "TODO: the element type, the shape, and the role: in, out, inout or scratch.\n"
    "Integers need `bound = N` for random values in [0, N)."
)
_SCALAR = "TODO: the value (and the type, if it is not this one)"
_EITHER = (
    "TODO: 8 bytes: a pointer to a buffer (as here: element type, shape, and role: in, out, inout\n"
    'or scratch), or a number: then dtype = "i64" or "f64" and value = N, without shape and role.'
)
_OPAQUE = "A struct, passed by value: it can be modelled, but not measured."


def _from_size(parameter: Parameter) -> tuple[Argument, str]:
    """An argument for a parameter of which only the size is known."""
    name = f"p{parameter.ordinal}"
    kinds = {1: "i8", 2: "i16", 4: "i32"}
    if parameter.size == POINTER_BYTES:
        return _buffer(name), _EITHER
    if parameter.size in kinds:
        floating = f' (floating point: dtype = "f{parameter.size * 8}")' * (parameter.size > 1)
        comment = f"TODO: {parameter.size} byte(s): the value{floating}"
        return _scalar(name, kinds[parameter.size]), comment
    return Opaque(name=name, bytes=parameter.size), _OPAQUE


def _numbers(function: Any) -> set[str]:
    """Names of which the body of a Triton function has a product, a quotient or a comparison.

    Pointers are only added to, and compared with None.  ``x = tl.load(x)`` gives the name of a
    pointer to a value.
    """
    found: set[str] = set()
    loaded: set[str] = set()
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function.fn)))):
        operands: list[ast.expr] = []
        if isinstance(node, ast.BinOp) and not isinstance(node.op, ast.Add | ast.Sub):
            operands = [node.left, node.right]
        elif isinstance(node, ast.Compare) and "None" not in map(ast.unparse, node.comparators):
            operands = [node.left, *node.comparators]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("range", "tl.cdiv"):
            operands = node.args
        elif isinstance(node, ast.Assign) and "load(" in ast.unparse(node.value):
            inside = {n.id for n in ast.walk(node.value) if isinstance(n, ast.Name)}
            loaded |= inside & {t.id for t in node.targets if isinstance(t, ast.Name)}
        found |= {operand.id for operand in operands if isinstance(operand, ast.Name)}
    return found - loaded


def _from_triton(parameter: Any, *, is_number: bool) -> tuple[Argument, str]:
    """An argument for a parameter of a Triton function."""
    name = str(parameter.name)
    if parameter.is_constexpr:
        value = parameter.default if parameter.has_default else None
        if isinstance(value, bool | int | float | str):
            return Constant(name=name, constant=value), "The default of the kernel."
        return Constant(name=name, constant=CONSTANT), "TODO: the compile-time constant"
    kind = str(parameter.annotation_type or "")
    if kind in ("fp32", "fp64", "fp16", "bf16"):
        return _scalar(name, kind.replace("fp", "f")), _SCALAR
    if kind in _PTX_SCALARS.values():
        return _scalar(name, kind), _SCALAR
    if "ptr" in name.lower() or name.endswith("_p"):
        return _buffer(name), _BUFFER
    is_named = bool(_FLOAT_NAME.search(name) or _INTEGER_NAME.search(name))
    if name.isupper() and len(name) <= 3 and not is_number:
        return _buffer(name), _BUFFER
    if is_number or is_named:
        return _scalar(name, "f32" if _FLOAT_NAME.search(name) else "i32"), _SCALAR
    return _buffer(name), _EITHER_TRITON


_EITHER_TRITON = (
    "TODO: a pointer to a buffer (as here: element type, shape, and role: in, out, inout or\n"
    'scratch), or a number: then dtype = "i32" or "f32" and value = N, without shape and role.'
)


def _buffer(name: str) -> Buffer:
    return Buffer(name=name, dtype="f32", shape=(ELEMENTS,), role="inout")


def _scalar(name: str, dtype: str) -> Scalar:
    value: float | int = 1.0 if dtype.startswith(("f", "b")) else NUMBER
    if dtype in ("i8", "u8"):
        value = 1
    return Scalar(name=name, dtype=dtype, value=value)  # type: ignore[arg-type]


def _template(
    arguments: Sequence[Argument],
    comments: dict[str, str],
    threads: tuple[tuple[int, int, int], str],
) -> Template:
    block, comment = threads
    launch = LaunchSpec(grid=(_BLOCKS, 1, 1), block=block, args=tuple(arguments))
    return Template(launch, {"grid": _GRID, "block": comment, **comments})


def _threads(cubin: Cubin, kernel: str) -> tuple[tuple[int, int, int], str]:
    """Threads of a block: those that the kernel requires, or at most as many as it allows."""
    section = next((s for s in cubin.elf.sections if s.name == f".nv.info.{kernel}"), None)
    limits: dict[int, tuple[int, int, int]] = {}
    for attribute in parse_attributes(cubin.elf, section) if section is not None else ():
        if attribute.code in (_MAX_THREADS, _REQUIRED_THREADS) and len(attribute.payload) >= 12:
            x, y, z = (int.from_bytes(attribute.payload[i : i + 4], "little") for i in (0, 4, 8))
            if 0 < x * y * z <= 1024:
                limits[attribute.code] = (x, y, z)
    if _REQUIRED_THREADS in limits:
        return limits[_REQUIRED_THREADS], "the kernel requires these threads"
    if _MAX_THREADS in limits:
        most = limits[_MAX_THREADS]
        return most, f"{_BLOCK}; the kernel allows at most {most[0] * most[1] * most[2]}"
    return (_THREADS, 1, 1), _BLOCK
