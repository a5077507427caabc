"""Rename a kernel inside a cubin, without moving a byte of the file."""

from __future__ import annotations

import struct

from nostall.core.errors import BadBinary
from nostall.sass.binary.elf import SHT_SYMTAB, Elf

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
