"""What a user writes on the command line: ``path.py:name``, and the inputs of that function in one
line (``4096x5000:f16,5000:f16,=0.1``).  Knows nothing of PyTorch, so mistakes are told at once."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from nostall.core.errors import BadInput

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
"""Short names of PyTorch's dtypes; the long ones are understood too."""

CASTS = ("f64", "f32", "f16", "bf16")
"""What ``--dtype`` may be: floating dtypes that every operator takes."""

_TENSOR = re.compile(r"(scalar|\d+(?:x\d+)*)(?::(\w+))?")
_LARGEST = 2**62


@dataclass(frozen=True, slots=True)
class TensorInput:
    """A tensor; ``dtype`` is PyTorch's name."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class NumberInput:
    """A Python number or bool."""

    value: int | float | bool


def named(target: str) -> tuple[str, str]:
    """The file and the name in it; :class:`BadInput` where there is no such file."""
    path, colon, name = target.rpartition(":")
    if not colon or not path.endswith(".py") or not name.isidentifier():
        raise BadInput(f"{target!r} names no function; write path.py:FUNCTION")
    if not Path(path).is_file():
        raise BadInput(f"there is no file {path}; give the Python file that holds {name}")
    return path, name


def parse_inputs(text: str) -> list[TensorInput | NumberInput]:
    """The inputs in the order of the function's arguments.

    ``SIZExSIZE:DTYPE`` is a tensor (fp32 where no dtype is said), ``scalar:DTYPE`` one without
    axes, ``=VALUE`` a number or True or False.  Raises :class:`BadInput`.
    """
    return [_parsed(part.strip()) for part in text.split(",")]


def torch_dtype(name: str) -> str:
    """PyTorch's name of a dtype in either form; :class:`BadInput` where there is none."""
    if name in DTYPES:
        return DTYPES[name]
    if name in DTYPES.values():
        return name
    raise BadInput(f"dtype {name!r} is unknown; allowed are {', '.join(DTYPES)}")


def _parsed(part: str) -> TensorInput | NumberInput:
    if part.startswith("="):
        return NumberInput(_number(part))
    found = _TENSOR.fullmatch(part)
    if found is None:
        raise BadInput(
            f"input {part!r} is not understood; write 4096x5000:f16 for a tensor, scalar:f32 for "
            "one without axes, =0.1 for a number, and commas between"
        )
    sizes, dtype = found.groups()
    shape = () if sizes == "scalar" else tuple(map(int, sizes.split("x")))
    elements = 1
    for size in shape:
        elements *= size
    if elements > _LARGEST:
        raise BadInput(f"input {part!r} has more elements than can be counted; give smaller sizes")
    return TensorInput(shape, torch_dtype(dtype or "f32"))


def _number(part: str) -> int | float | bool:
    text = part[1:].strip()
    if text in ("True", "False"):
        return text == "True"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    raise BadInput(f"input {part!r} is no number; write =3, =0.1 or =True")
