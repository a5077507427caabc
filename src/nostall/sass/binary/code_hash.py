"""Names and hashes of the kernels of a cubin: its code's hash, and a kernel under another name."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

from nostall.core.errors import BadBinary
from nostall.sass.binary.attributes import parse_attributes
from nostall.sass.binary.elf import SHT_CUDA_INFO, SHT_NOBITS, SHT_SYMTAB, Elf, Section, Symbol

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


_SECTION_BYTES, _SYMBOL_BYTES = 64, 24
_SECTION_TABLE_AT = 0x28
"""Position of ``e_shoff`` in the ELF header; ``e_shnum`` and ``e_shstrndx`` follow at 0x3C."""


def rename_kernel(data: bytes, name: str, new_name: str) -> bytes:
    """Rename the kernel ``name``: its symbol, and the sections that have its name at their end.

    Names in debugging sections stay.  ``new_name`` must not be longer than ``name``, because names
    are overwritten in place.  Raises :class:`BadBinary` if it is longer, if the file has no such
    kernel, or if another name shares the bytes.
    """
    if name == new_name:
        return data
    if len(new_name) > len(name):
        raise BadBinary(
            f"kernel {name!r} cannot get the longer name {new_name!r} in place; choose a name of "
            f"at most {len(name)} characters"
        )
    elf = Elf.parse(data)
    offsets = _name_offsets(elf)
    patched = bytearray(data)
    found = 0
    for at in sorted(offsets):
        text = data[at : data.index(b"\0", at)].decode("utf-8", "replace")
        renamed = _renamed(text, name, new_name)
        if renamed is None:
            continue
        found += 1
        if any(at < other <= at + len(text) for other in offsets):
            raise BadBinary(
                f"the name {text!r} shares bytes with another name, so it cannot be changed in "
                "place; keep the kernel's name"
            )
        patched[at : at + len(text)] = renamed.encode().ljust(len(text), b"\0")
    if not found:
        raise BadBinary(f"the cubin has no kernel {name!r}; its symbols and sections differ")
    return bytes(patched)


def _renamed(text: str, name: str, new_name: str) -> str | None:
    """The new text of a symbol or section name; None if it does not end with the kernel's name."""
    if text == name:
        return new_name
    if text.startswith(".") and text.endswith(f".{name}"):
        return text.removesuffix(name) + new_name
    return None


def _name_offsets(elf: Elf) -> set[int]:
    """File positions of all names of sections and symbols."""
    data = elf.data
    (table,) = struct.unpack_from("<Q", data, _SECTION_TABLE_AT)
    count, names_index = struct.unpack_from("<HH", data, 0x3C)
    names = elf.sections[names_index]
    offsets = {
        names.offset + struct.unpack_from("<I", data, table + n * _SECTION_BYTES)[0]
        for n in range(count)
    }
    for section in elf.sections:
        if section.type != SHT_SYMTAB:
            continue
        strings = elf.sections[section.link]
        for n in range(section.size // _SYMBOL_BYTES):
            (name,) = struct.unpack_from("<I", data, section.offset + n * _SYMBOL_BYTES)
            offsets.add(strings.offset + name)
    return offsets
