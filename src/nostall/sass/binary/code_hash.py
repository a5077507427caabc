"""Hash of what a GPU runs and the driver reads of a cubin, without its debugging information."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

from nostall.sass.binary.attributes import parse_attributes
from nostall.sass.binary.elf import SHT_CUDA_INFO, SHT_NOBITS, Elf, Section, Symbol

_SHF_ALLOC = 2
_REGISTERS_SHIFT = 24
"""The upper byte of ``sh_info`` of a text section holds the registers in the older ELF variant."""
_SYMBOL_ATTRIBUTES = frozenset((0x0A, 0x11, 0x12, 0x23, 0x2F))
"""Attributes whose payload begins with the number of a symbol: PARAM_CBANK, FRAME_SIZE,
MIN_STACK_SIZE, MAX_STACK_SIZE, REGCOUNT.  The numbers depend on debugging information."""


def code_sha256(data: bytes) -> str:
    """The sha256 of the loaded sections of a cubin and of its launch attributes.

    Two cubins with the same hash run the same instructions with the same registers and memory.
    Raises :class:`~nostall.core.errors.BadBinary` if ``data`` is not a cubin.
    """
    elf = Elf.parse(data)
    symbols = elf.symbols()
    digest = hashlib.sha256()
    for section in sorted(elf.sections, key=lambda s: (s.name, s.index)):
        is_info = section.type == SHT_CUDA_INFO
        if not is_info and not section.flags & _SHF_ALLOC:
            continue
        registers = section.info >> _REGISTERS_SHIFT if section.name.startswith(".text.") else 0
        digest.update(f"{section.name}\0{section.size}\0{registers}\0".encode())
        if is_info:
            _hash_attributes(digest, elf, section, symbols)
        elif section.type != SHT_NOBITS:
            digest.update(elf.content(section))
    return digest.hexdigest()


def _hash_attributes(
    digest: hashlib._Hash, elf: Elf, section: Section, symbols: Sequence[Symbol]
) -> None:
    """Add the attributes of a section, with names in place of the numbers of symbols."""
    for attribute in parse_attributes(elf, section):
        payload = attribute.payload
        if attribute.code in _SYMBOL_ATTRIBUTES and len(payload) >= 4:
            (number,) = struct.unpack_from("<I", payload)
            if number < len(symbols):
                payload = f"{symbols[number].name}\0".encode() + payload[4:]
        head = elf.data[attribute.file_offset - 4 : attribute.file_offset]
        digest.update(head + payload)
