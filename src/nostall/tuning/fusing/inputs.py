"""Parsers of the target and the inputs of ``nostall fuse``, as given on the command line.

A target is ``path.py:name``; inputs are ``4096x5000:f16,5000:f16,=0.1``.  The module does not
import PyTorch, so that errors in arguments are reported without delay.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from nostall.core.errors import BadInput
from nostall.core.text.suggest import unknown

DTYPES = {
    "f64": "float64",
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "e4m3": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
    "i64": "int64",
    "i32": "int32",
    "i16": "int16",
    "i8": "int8",
    "u8": "uint8",
    "bool": "bool",
    "c64": "complex64",
    "c128": "complex128",
}
"""Short names of PyTorch's dtypes; PyTorch's own names are accepted, too."""

CASTS = ("f64", "f32", "f16", "bf16")
"""Values of ``--dtype``: the floating-point dtypes that all operators support."""

_TENSOR = re.compile(r"(scalar|\d+(?:x\d+)*)(?::(\w+))?")
_MAX_ELEMENTS = 2**62


@dataclass(frozen=True, slots=True)
class TensorInput:
    """A tensor argument."""

    shape: tuple[int, ...]
    dtype: str
    """PyTorch's name of the dtype."""


@dataclass(frozen=True, slots=True)
class NumberInput:
    """A Python number or bool as an argument."""

    value: int | float | bool


def parse_target(target: str) -> tuple[str, str]:
    """Split ``path.py:name`` into the path and the name; raises :class:`BadInput`."""
    path, colon, name = target.rpartition(":")
    if not colon or not path.endswith(".py") or not name.isidentifier():
        raise BadInput(f"{target!r} names no function; write path.py:FUNCTION")
    if not Path(path).is_file():
        raise BadInput(f"there is no file {path}; give the Python file that contains {name}")
    return path, name


def parse_inputs(text: str) -> list[TensorInput | NumberInput]:
    """Parse inputs separated by commas, in the order of the function's arguments.

    ``SIZExSIZE:DTYPE`` is a tensor (fp32 without a dtype), ``scalar:DTYPE`` is a tensor without
    axes, and ``=VALUE`` is a number, True or False. Raises :class:`BadInput`.
    """
    return [_parse_input(part.strip()) for part in text.split(",")]


def torch_dtype(name: str) -> str:
    """PyTorch's name for a short or long dtype name; raises :class:`BadInput` if unknown."""
    if name in DTYPES:
        return DTYPES[name]
    if name in DTYPES.values():
        return name
    raise BadInput(unknown("dtype", name, DTYPES))


def _parse_input(part: str) -> TensorInput | NumberInput:
    if part.startswith("="):
        return NumberInput(_parse_number(part))
    match = _TENSOR.fullmatch(part)
    if match is None:
        raise BadInput(
            f"input {part!r} is invalid; write 4096x5000:f16 for a tensor, scalar:f32 for a tensor "
            "without axes, =0.1 for a number, and commas between inputs"
        )
    sizes, dtype = match.groups()
    shape = () if sizes == "scalar" else tuple(map(int, sizes.split("x")))
    elements = 1
    for size in shape:
        elements *= size
    if elements > _MAX_ELEMENTS:
        raise BadInput(f"input {part!r} has more than 2^62 elements; give smaller sizes")
    return TensorInput(shape, torch_dtype(dtype or "f32"))


def _parse_number(part: str) -> int | float | bool:
    text = part[1:].strip()
    if text in ("True", "False"):
        return text == "True"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    raise BadInput(f"input {part!r} is not a number; write =3, =0.1 or =True")
