"""Parameters of a kernel, as the cubin records them: position, offset and size of each.

Layouts (seen in cubins of nvcc and Triton, checked against their sources in the tests):

- ``KPARAM_INFO``: u32 index, u16 ordinal, u16 offset, u32 flags with the size in bits 18 to 31
- ``KPARAM_INFO_V2``, for parameters of 16 KB and more: u32, u16 ordinal, u16 offset, u32 size
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from nostall.core.errors import BadBinary
from nostall.sass.binary.attributes import parse_attributes
from nostall.sass.binary.cubin import Cubin

_KPARAM_INFO, _KPARAM_INFO_V2 = 0x17, 0x45
_RECORD = struct.Struct("<IHHI")
_SIZE_SHIFT = 18


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a kernel."""

    ordinal: int
    """Position in the kernel's parameter list, from 0."""
    offset: int
    """Bytes from the first parameter."""
    size: int
    """Bytes; 8 for a pointer."""


def kernel_parameters(cubin: Cubin, kernel: str) -> tuple[Parameter, ...] | None:
    """The parameters of a kernel in order; None if the cubin has no records of the kernel.

    Raises :class:`BadBinary` if the records are damaged.
    """
    section = next((s for s in cubin.elf.sections if s.name == f".nv.info.{kernel}"), None)
    if section is None:
        return None
    found: list[Parameter] = []
    for attribute in parse_attributes(cubin.elf, section):
        if attribute.code not in (_KPARAM_INFO, _KPARAM_INFO_V2):
            continue
        if len(attribute.payload) != _RECORD.size:
            raise BadBinary(
                f"kernel {kernel!r} has a parameter record of {len(attribute.payload)} bytes; "
                f"records have {_RECORD.size}"
            )
        _, ordinal, offset, last = _RECORD.unpack(attribute.payload)
        size = last if attribute.code == _KPARAM_INFO_V2 else last >> _SIZE_SHIFT
        found.append(Parameter(ordinal, offset, size))
    found.sort(key=lambda parameter: parameter.ordinal)
    if [parameter.ordinal for parameter in found] != list(range(len(found))):
        raise BadBinary(
            f"kernel {kernel!r} has records of the parameters "
            f"{[parameter.ordinal for parameter in found][:20]}; they must be numbered from 0"
        )
    return tuple(found)
